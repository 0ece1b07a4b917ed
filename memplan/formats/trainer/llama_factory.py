"""LLaMA-Factory's configuration as the Trainer's arguments and trl's, which it is a dialect of.

Keys and defaults of ``src/llamafactory/hparams`` (``model_args.py``, ``finetuning_args.py``, ``data_args.py``) as of
August 2026. Its ``SFTTrainer`` is the Trainer with the model's own loss (``train/sft/trainer.py``); its DPO has a loss
of its own (``train/dpo/trainer.py``), beside Liger's layers without their loss (``apply_liger_kernel``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ...plan.errors import ABSENT, Node, PlanError, Value, together, wrong_at
from ..elsewhere_commands import OF_FACTORY
from ..in_flags import in_flags

_OF_NO_TRAINING = ("infer_backend", "export_dir")
"""Keys of files for its commands ``chat`` and ``export``,"""
_OF_TRAINING = ("stage", "do_train", "dataset", "cutoff_len", "per_device_train_batch_size")
"""and of those for ``train``; ``finetuning_type`` is in both."""
MARKS = ("finetuning_type", "cutoff_len", *_OF_NO_TRAINING)
"""Keys that only its files have."""
_RENAMED = MappingProxyType(
    {
        "cutoff_len": "max_length",
        "lora_rank": "lora_r",
        "additional_target": "lora_modules_to_save",
        "enable_liger_kernel": "use_liger_kernel",
        "neat_packing": "padding_free",
    }
)
_OWN = frozenset(
    """
    stage finetuning_type lora_target lora_rank lora_alpha lora_dropout quantization_bit quantization_type
    quantization_method double_quantization flash_attn disable_gradient_checkpointing use_reentrant_gc pure_bf16
    gradient_checkpointing packing pref_loss
    """.split()  # noqa: SIM905 - as a list it would be a line a word
)
"""Keys that are looked at below; ``packing`` has no strategy here: samples are cut together, under one mask."""
_WITHOUT_EFFECT = frozenset(
    """
    template dataset eval_dataset dataset_dir media_dir train_on_prompt mask_history buffer_size mix_strategy val_size
    interleave_probs preprocessing_batch_size max_samples ignore_pad_token_for_loss tool_format default_system
    enable_thinking tokenized_path data_shared_file_system plot_loss adapter_folder split_special_tokens
    low_cpu_mem_usage infer_backend infer_dtype offload_folder use_kv_cache hf_hub_token ms_hub_token eval_num_beams
    print_param_status create_new_adapter pissa_convert loraplus_lr_ratio loraplus_lr_embedding use_swanlab
    predict_with_generate ray_run_name ray_storage_path ray_num_workers placement_strategy resources_per_worker
    image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen freeze_vision_tower
    freeze_multi_modal_projector freeze_language_model pissa_init pissa_iter asft_alpha
    do_sample temperature top_p top_k num_beams max_new_tokens repetition_penalty length_penalty skip_special_tokens
    early_stopping_steps include_effective_tokens_per_second eval_on_each_dataset compute_accuracy disable_shuffling
    rope_scaling preserve_thinking init_special_tokens use_audio_in_video crop_to_patches image_do_pan_and_scan
    audio_sampling_rate enable_torch_profiler ray_init_kwargs om_hub_token export_size vllm_maxlen vllm_gpu_util
    vllm_enforce_eager vllm_max_lora_rank vllm_config module_dropout hyper_parallel_args hyper_parallel_cp_size
    swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir
    swanlab_lark_webhook_url swanlab_lark_secret
    pref_beta pref_ftx pref_bco_weight dpo_label_smoothing ld_alpha simpo_gamma kto_chosen_weight kto_rejected_weight
    """.split()  # noqa: SIM905
)
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "use_unsloth": "Unsloth's own layers are not modelled",
        "use_unsloth_gc": "checkpoints that are kept on the host are not modelled",
        "use_kt": "KTransformers' experts on the host are not modelled",
        "use_galore": "GaLore is not modelled",
        "use_apollo": "APOLLO is not modelled",
        "use_badam": "BAdam is not modelled",
        "use_adam_mini": "Adam-mini is not modelled",
        "use_muon": "Muon is not modelled here",
        "use_llama_pro": "further blocks are not modelled",
        "adapter_name_or_path": "adapters that are loaded are as large as adapter_config.json says: give its rank "
        "and targets as lora_rank and lora_target",
        "shift_attn": "shifted short attention is not modelled",
        "mixture_of_depths": "mixtures of depths are not modelled",
        "ref_model": "a reference that is another model is not modelled",
        "ref_model_adapters": "a reference that is another model is not modelled",
        "ref_model_quantization_bit": "a reference that is another model is not modelled",
        "upcast_layernorm": "norms in fp32 are not modelled; without it they stay as they were loaded",
        "upcast_lmhead_output": "logits that a hook casts to fp32 are not modelled",
        **dict.fromkeys(
            ("add_tokens", "add_special_tokens", "new_special_tokens_config"),
            "new tokens resize the embedding: say the resized vocabulary as --vocab, and leave this out",
        ),
        "train_from_scratch": "a model that its configuration makes is in fp32, which is not modelled here",
        "use_hyper_parallel": "its engine is not modelled",
        "quantization_device_map": "layers on several GPUs are --framework device-map",
        "resize_vocab": "say the resized vocabulary as --vocab, and leave this out",
        "moe_aux_loss_coef": "the routers' loss is the model's own",
        "fp8": "torchao's float8 is not modelled here",
        "use_v1_kernels": "kernels of LLaMA-Factory's own are not modelled",
        **dict.fromkeys(("use_dft_loss", "use_asft_loss", "use_eaft_loss"), "a loss weighed by token is not modelled"),
    }
)
"""Switches that change the estimate, and why one that is on is refused."""
_OF_MEGATRON = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "use_mca", "use_megatron_bridge")
"""Keys of its training by Megatron-Core (``hparams/megatron_bridge_args.py``, and mcore_adapter's)."""
_STAGES: Mapping[str, str] = MappingProxyType(
    {
        "rm": "its value head stands beside a head of words whose logits are made, too, and is not modelled; trl's "
        "reward model, which takes less, is --trainer reward on a file of trl's arguments",
        "kto": "its KTO, whose loss is of all logits, is not modelled; trl's, which takes less, is --trainer kto on a "
        "file of trl's arguments",
        "ppo": "PPO, which trains a value head and keeps a reward model, is not modelled",
    }
)
"""Why a stage is refused (``train/rm/trainer.py``, ``train/kto``, ``train/ppo``)."""
_WITH_REFERENCE = ("sigmoid", "hinge", "ipo", "kto_pair")
"""Values of ``pref_loss`` that have one (``use_ref_model`` in ``finetuning_args.py``)."""
_UNSAID = (
    "must be true, or fp16 or pure_bf16: without, LLaMA-Factory loads the model in 16 bits anyway, and trains "
    "without autocast, which is modelled of whole models alone, whose parameters it casts to fp32"
)
"""``infer_optim_dtype`` of ``extras/misc.py``, ``init_adapter`` of ``model/adapter.py``."""
_MASKS = "needs flash_attn: fa2: without, a mask of each row's tokens by its tokens is made, which is not modelled"
"""``SFTDataCollatorWith4DAttentionMask`` of ``data/collator.py``."""
_KERNELS = MappingProxyType(
    {"disabled": "eager", "fa2": "flash_attention_2", "fa3": "flash_attention_3", "sdpa": "sdpa", "auto": None}
)
KEYS = frozenset({*_OWN, *_RENAMED, *_WITHOUT_EFFECT, *_REFUSED, *_OF_MEGATRON})
"""Every key of it that is known."""


def starts(written: Node) -> str:
    """The name of its loop, where that is not the Trainer's."""
    stage = written.mapping.get("stage")
    return "llama-factory-dpo" if stage is not None and stage.value == "dpo" else ""


def translated(written: Node, *, is_whole: bool, processes: int) -> Node:
    """The arguments that ``written`` comes to; ``is_whole`` where nothing beside them shards the model."""
    of_another = next((key for key in _OF_NO_TRAINING if key in written.mapping), None)
    if of_another is not None and {*_OF_TRAINING}.isdisjoint(written.mapping):
        problem = f"{of_another} is of LLaMA-Factory's chat or export, which trains nothing"
        raise wrong_at(written.mapping[of_another].origin, problem)
    trains, predicts = (written.mapping.get(key, Node(False, written.origin)) for key in ("do_train", "do_predict"))
    if predicts.value is True and trains.value is not True:  # ``train/sft/workflow.py``
        raise wrong_at(predicts.origin, "do_predict is without do_train: LLaMA-Factory trains nothing")
    for key in _OF_MEGATRON:
        node = written.mapping.get(key)
        if node is not None and node.value not in (None, False, "false", "False"):
            problem = f"{key} = {node.plain()} is of LLaMA-Factory's training by Megatron, which is not read"
            raise wrong_at(node.origin, in_flags(OF_FACTORY, written, problem))
    on = [(key, why, written.mapping[key]) for key, why in _REFUSED.items() if key in written.mapping]
    wrong = [
        PlanError(key, ABSENT, f"must be left out: {why}", origin=node.origin)
        for key, why, node in on
        if node.value not in (None, False)
    ]
    if wrong:
        raise together(wrong)
    items = {key: node for key, node in written.mapping.items() if key not in KEYS}
    items |= {_RENAMED[key]: node for key, node in written.mapping.items() if key in _RENAMED}
    items.setdefault("max_length", Node(2048, written.origin))
    for key, value, node in _method(written, is_whole=is_whole):
        items[key] = Node(value, node.origin)
    return Node(items, written.origin)


def _method(written: Node, *, is_whole: bool) -> Iterator[tuple[str, Value, Node]]:
    """What is trained, in which dtypes, and what is recomputed: keys, values, and what they follow from."""
    own = written.mapping

    def of(key: str, default: Value, *allowed: object) -> Node:
        node = own.get(key, Node(default, written.origin))
        if allowed and node.value not in allowed:
            raise node.wrong(key, f"must be {' or '.join(map(str, allowed))}: others are not modelled")
        return node

    stage = of("stage", "sft")
    if stage.value not in ("sft", "pt", "dpo"):
        problem = f"must be sft, pt or dpo: {_STAGES.get(str(stage.value), 'others are not modelled')}"
        raise stage.wrong("stage", problem)
    if stage.value == "dpo":
        _check_pairs(own)
    of("quantization_method", "bnb", "bnb", "bitsandbytes")
    kind, bits = of("finetuning_type", "lora", "lora", "full"), of("quantization_bit", None, None, 4, 8)
    if kind.value == "lora":
        yield "use_peft", True, kind
        yield "lora_r", of("lora_rank", 8).value, of("lora_rank", 8)
        yield "lora_dropout", of("lora_dropout", 0.0).value, of("lora_dropout", 0.0)
        target = of("lora_target", "all")
        yield "lora_target_modules", _targets(target), target
        if "lora_alpha" in own:
            yield "lora_alpha", own["lora_alpha"].value, own["lora_alpha"]
    if bits.value == 8:
        yield "load_in_8bit", True, bits
    pure = of("pure_bf16", False, False, True)
    half = "bfloat16" if pure.value or own.get("bf16", pure).value is True else ""
    if not half and own.get("fp16", pure).value is True:
        half = "float16"
    if not half and not (kind.value == "full" and is_whole and own.get("deepspeed") is None):
        raise own.get("bf16", Node(None, written.origin)).lacks("bf16", _UNSAID)
    if bits.value == 4:  # ``model/model_utils/quantization.py``
        yield "bnb_4bit_quant_storage", half, bits
        yield "bnb_4bit_compute_dtype", half, bits
        yield "load_in_4bit", True, bits
        yield "bnb_4bit_quant_type", of("quantization_type", "nf4").value, bits
        yield "use_bnb_nested_quant", of("double_quantization", True).value, bits
    kernel, packs = of("flash_attn", "auto", *_KERNELS), of("neat_packing", False)
    if packs.value and kernel.value != "fa2":
        raise packs.wrong("neat_packing", _MASKS)
    if kernel.value != "auto":
        yield "attn_implementation", _KERNELS[str(kernel.value)], kernel
    if half:
        # whole models are trained in fp32 under autocast (``adapter.py``, ``init_adapter``), unless ZeRO-3 casts them
        whole = kind.value == "full" and not pure.value and own.get("deepspeed") is None
        yield "dtype", "float32" if whole else half, kind
    off = of("disable_gradient_checkpointing", False, False, True)
    yield "gradient_checkpointing", not off.value, off
    reentrant = of("use_reentrant_gc", True, False, True)
    if not off.value:
        yield "gradient_checkpointing_kwargs", {"use_reentrant": reentrant}, reentrant


def _check_pairs(own: Mapping[str, Node]) -> None:
    """Refuses what is not modelled with ``stage: dpo``."""
    loss, packs = own.get("pref_loss"), own.get("neat_packing")
    if loss is not None and loss.value not in (None, *_WITH_REFERENCE):
        problem = f"must be {', '.join(_WITH_REFERENCE[:-1])} or {_WITH_REFERENCE[-1]}: losses without a reference"
        raise loss.wrong("pref_loss", f"{problem} are not modelled")
    if packs is not None and packs.value:
        raise packs.wrong("neat_packing", "must be left out with stage dpo, whose collator pads both of a pair")
    kind, pure = own.get("finetuning_type"), own.get("pure_bf16")
    if kind is not None and kind.value == "full" and not (pure is not None and pure.value):
        problem = (
            "must be lora with stage dpo, or have pure_bf16: true beside it: the policy is trained in fp32 otherwise, "
            "beside a reference in the dtype of its checkpoint, and both together are not modelled"
        )
        raise kind.wrong("finetuning_type", problem)


def _targets(node: Node) -> Value:
    """peft's ``target_modules``."""
    if node.value == "all":
        return "all-linear"
    names = node.value if isinstance(node.value, list) else str(node.value).split(",")
    return [one if isinstance(one, Node) else Node(one.strip(), node.origin) for one in names]


__all__ = ["KEYS", "MARKS", "starts", "translated"]
