"""ms-swift's configuration (``swift sft`` and ``swift pt``) as the Trainer's arguments, which it is a dialect of.

Keys and defaults of ``swift/arguments`` and ``swift/trainers/arguments.py`` of ms-swift 4 (August 2026), and what
releases 2 and 3 called the same. ``Seq2SeqTrainer`` has the model's own loss (``trainers/seq2seq_trainer.py``),
adapters are peft's, in fp32 (``tuners/peft.py``), checkpoints reentrant but under DDP (``trainers/mixin.py``,
``_fix_gradient_checkpointing``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ...families import family
from ...families.base import ROUTER_LOSS
from ...plan.errors import Node, Value, wrong_at
from ...plan.read import ReadPlan
from ...values import replace
from ..elsewhere_commands import OF_MEGATRON
from ..in_flags import in_flags

MARKS = ("tuner_type", "train_type", "sft_type")
"""Keys of which each of its files has one: what releases 4, 3 and 2 call what is trained."""

_RENAMED = MappingProxyType(
    {
        "model": "model_name_or_path",
        "model_id_or_path": "model_name_or_path",
        "torch_dtype": "dtype",
        "batch_size": "per_device_train_batch_size",
        "lora_rank": "lora_r",
        "modules_to_save": "lora_modules_to_save",
        "experts_impl": "experts_implementation",
        "target_parameters": "lora_target_parameters",
    }
)
_BINARY = frozenset({"default", "last_round", "all", "base", "ignore_empty_think", "ignore_think_prefix"})
"""Parts of ``loss_scale`` that leave tokens out; others weigh them, as ``react`` (``loss_scale/mapping.py``)."""
_WITHOUT_EFFECT = frozenset(
    """
    dataset val_dataset cached_dataset cached_val_dataset split_dataset_ratio dataset_shuffle val_dataset_shuffle
    interleave_prob stopping_strategy shuffle_buffer_size download_mode columns strict disable_auto_column_mapping
    model_name model_author custom_dataset_info load_from_cache_file template system truncation_strategy agent_template
    norm_bbox use_chat_template padding_side loss_scale is_binary_loss_scale template_backend response_prefix
    enable_thinking preserve_thinking add_non_thinking_prefix disable_ignore_empty_think max_pixels model_type
    model_kwargs external_plugins custom_register_path load_args load_data_args packing_num_proc packing_strategy
    lazy_tokenize use_hf enable_npu_model_patch ignore_args_error max_new_tokens temperature top_k top_p
    repetition_penalty num_beams stream stop_words add_version create_checkpoint_symlink check_model acc_strategy
    train_dataloader_shuffle max_epochs eval_metric metric callbacks early_stop_interval ds3_gather_for_generation
    resume_only_model use_logits_to_keep freeze_vit freeze_aligner freeze_llm vit_lr aligner_lr
    vit_gradient_checkpointing attn_impl init_weights lorap_lr_ratio local_repo_path rope_scaling max_model_len
    safe_serialization max_shard_size use_flash_ckpt dataset_num_proc swanlab_project swanlab_exp_name swanlab_token
    swanlab_workspace swanlab_mode swanlab_notification_method swanlab_webhook_url swanlab_secret enable_channel_loss
    verbose merge_lora log_interval cache_files max_memory
    """.split()  # noqa: SIM905 - as a list it would be a line a word
)
_OWN = frozenset(
    """
    tuner_type train_type sft_type target_modules lora_target_modules lora_dropout quant_method quant_bits
    quantization_bit bnb_4bit_quant_type bnb_4bit_use_double_quant packing padding_free packing_length deepspeed fsdp
    gradient_checkpointing gradient_checkpointing_kwargs eval_strategy gradient_accumulation_steps bf16 fp16
    per_device_eval_batch_size router_aux_loss_coef
    """.split()  # noqa: SIM905
)
"""Keys that are looked at below."""
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "tuner_backend": ((None, "peft"), "Unsloth's own layers are not modelled"),
        "use_swift_lora": ((None, False), "adapters of ms-swift's own are not modelled; peft's are"),
        "lora_dtype": ((None, "float32"), "adapters are trained in fp32, as peft makes them"),
        "sequence_parallel_size": ((None, 1), "its sequence parallelism is not modelled"),
        "task_type": ((None, "causal_lm"), "heads other than a language model's are not modelled here"),
        "device_map": ((None,), "layers on several GPUs are --framework device-map"),
        "use_galore": ((None, False), "GaLore is not modelled"),
        "lisa_activated_layers": ((None, 0), "LISA is not modelled"),
        "optimizer": ((None,), "optimizers of ms-swift's plugins are not modelled; optim is"),
        "loss_type": ((None,), "losses of ms-swift's plugins are not modelled"),
        "enable_dft_loss": ((None, False), "its loss by token is not modelled"),
        "target_regex": ((None,), "targets by pattern are not modelled; target_modules are"),
        "freeze_parameters": ((None, [], ""), "parameters chosen by name are not modelled; --freeze-layers N is"),
        **dict.fromkeys(
            ("freeze_parameters_regex", "trainable_parameters", "trainable_parameters_regex"),
            ((None, [], ""), "parameters chosen by name are not modelled; --freeze-layers N is"),
        ),
        "adapters": (
            (None, []),
            "adapters that are loaded are as large as their adapter_config.json says: give its rank",
        ),
        "new_special_tokens": ((None, []), "new tokens resize the embedding: say the resized vocabulary as --vocab"),
        "freeze_parameters_ratio": ((None, 0, 0.0), "parameters chosen by a ratio are not modelled"),
        "deepspeed_autotp_size": ((None, 1), "AutoTP is not modelled"),
        "zero_hpz_partition_size": ((None, 1), "ZeRO++ is not modelled"),
        "rlhf_type": (
            (None,),
            "losses of swift rlhf are of all logits, its reward model has a head of its own, and neither is modelled; "
            "trl's, which take less, are --trainer dpo, kto, orpo, cpo, grpo or reward on a file of trl's arguments",
        ),
    }
)
"""Keys that change the estimate: values that do nothing, and why another value is refused."""
_OF_MEGATRON = ("micro_batch_size", "tensor_model_parallel_size", "expert_model_parallel_size")
"""Keys of ``megatron sft``, which trains by Megatron-Core."""
_SHARED: Mapping[str, Value] = MappingProxyType({"contiguous_gradients": True, "overlap_comm": False})
_STAGES: Mapping[str, Mapping[str, Value]] = MappingProxyType(
    {
        "0": {"stage": 0, **_SHARED, "allgather_bucket_size": 200_000_000, "reduce_bucket_size": 200_000_000},
        "1": {"stage": 1, **_SHARED, "allgather_bucket_size": 200_000_000, "reduce_bucket_size": 200_000_000},
        "2": {"stage": 2, **_SHARED, "allgather_bucket_size": 200_000_000, "reduce_bucket_size": 200_000_000},
        "3": {
            "stage": 3,
            **_SHARED,
            "sub_group_size": 1_000_000_000,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
        },
    }
)
"""``zero_optimization`` of ``swift/config/zero*.json``."""
_TO_HOST = ("offload_optimizer", "offload_param")
KEYS = frozenset({*_OWN, *_RENAMED, *_WITHOUT_EFFECT, *_REFUSED})
"""Every key of it that is known."""


def translated(written: Node, *, is_whole: bool, processes: int) -> Node:
    """The arguments that ``written`` comes to; ``is_whole`` where nothing beside them shards the model, over
    ``processes``."""
    if not written.mapping.keys().isdisjoint(_OF_MEGATRON):
        what = "is of ms-swift's Megatron, whose configuration is not read"
        raise wrong_at(written.origin.source, in_flags(OF_MEGATRON, written, what))
    for key, (harmless, why) in _REFUSED.items():
        node = written.mapping.get(key)
        if node is not None and node.plain() not in harmless:
            raise node.wrong(key, f"must be left out: {why}")
    items = {key: node for key, node in written.mapping.items() if key not in KEYS}
    items |= {_RENAMED[key]: node for key, node in written.mapping.items() if key in _RENAMED}
    items.setdefault("per_device_train_batch_size", Node(1, written.origin))
    items.setdefault("dtype", Node("bfloat16", written.origin))
    batch = items["per_device_train_batch_size"].value
    for key, value, node in (
        *_method(written),
        *_precision(written, items["dtype"]),
        *_sharding(written),
        *_steps(written, batch, processes, is_whole=is_whole),
    ):
        items[key] = Node(value, node.origin)
    return Node(items, written.origin)


_Found = Iterator[tuple[str, Value, Node]]
"""Keys, values, and what they follow from."""


def _of(written: Node, key: str, default: Value = None) -> Node:
    found = written.mapping.get(key)
    return found if found is not None and found.value is not None else Node(default, written.origin)


def _method(written: Node) -> _Found:
    """What is trained, and over which weights."""
    kind = next((written.mapping[key] for key in MARKS if key in written.mapping), _of(written, MARKS[0], "lora"))
    if kind.value not in ("lora", "full"):
        raise kind.wrong(MARKS[0], "must be lora or full: others are not modelled")
    if kind.value == "lora":
        yield "use_peft", True, kind
        if "lora_rank" not in written.mapping:
            yield "lora_r", 8, kind
        yield "lora_dropout", _of(written, "lora_dropout", 0.05).value, _of(written, "lora_dropout", 0.05)
        target = next(
            (written.mapping[key] for key in ("target_modules", "lora_target_modules") if key in written.mapping),
            Node("all-linear", written.origin),
        )
        names = target.value if isinstance(target.value, list) else [target]
        linear = any(str(one.value) in ("all-linear", "all", "ALL", "auto", "DEFAULT") for one in names)
        yield "lora_target_modules", "all-linear" if linear else list(names), target
    yield from _quantised(written)
    yield from _loss(written)
    kernel = _of(written, "attn_impl")
    if kernel.value is not None:
        yield "attn_implementation", "flash_attention_2" if kernel.value == "flash_attn" else kernel.value, kernel
    packs = next((written.mapping[key] for key in ("packing", "padding_free") if _is_on(written, key)), None)
    if packs is not None:
        yield "padding_free", True, packs
    longer = _of(written, "packing_length")
    if longer.value and _is_on(written, "packing"):  # samples are cut to max_length, rows filled to packing_length
        yield "max_length", longer.value, longer


def _loss(written: Node) -> _Found:
    """One that weighs tokens, or is told by channel, is made of all logits outside of the model, whatever Liger's would
    be (``compute_loss`` of ``trainers/seq2seq_trainer.py``)."""
    scale, binary = _of(written, "loss_scale", "default"), _of(written, "is_binary_loss_scale")
    weighs = not (set(str(scale.value).split("+")) <= _BINARY if binary.value is None else binary.value)
    if _is_on(written, "use_liger_kernel") and (weighs or _is_on(written, "enable_channel_loss")):
        yield "liger_kernel_config", {"fused_linear_cross_entropy": Node(False, scale.origin)}, scale


def _quantised(written: Node) -> _Found:
    """``get_quantization_config`` of ``arguments/base_args/quant_args.py``; in release 2 bits alone were bnb's."""
    older, bits, by = (_of(written, key) for key in ("quantization_bit", "quant_bits", "quant_method"))
    if by.value not in (None, "bnb"):
        raise by.wrong("quant_method", "must be bnb, or left out: other quantised weights are not modelled")
    if bits.value and by.value is None:
        raise bits.wrong("quant_bits", "needs quant_method: bnb, without which ms-swift quantises nothing")
    bits = bits if bits.value else older
    if not bits.value:
        return
    if bits.value not in (4, 8):
        raise bits.wrong("quant_bits", "must be 4 or 8: bnb has no others")
    yield f"load_in_{bits.value}bit", True, bits
    if bits.value == 4:
        yield "bnb_4bit_quant_type", _of(written, "bnb_4bit_quant_type", "nf4").value, bits
        yield "use_bnb_nested_quant", _of(written, "bnb_4bit_use_double_quant", True).value, bits


def _is_on(written: Node, key: str) -> bool:
    return _of(written, key).value not in (None, False, "false")


def _precision(written: Node, dtype: Node) -> _Found:
    """``_init_mixed_precision``: autocast to the dtype of the weights, and fp16 over fp32."""
    half = str(dtype.value).removeprefix("torch.") in ("float16", "float32")
    for key, default in (("fp16", half), ("bf16", not half)):
        node = _of(written, key, default)
        yield key, node.value, node


def _sharding(written: Node) -> _Found:
    """``zero3`` and ``fsdp2`` stand for files that it ships with; others are files."""
    engine, sharded = _of(written, "deepspeed"), _of(written, "fsdp")
    if engine.value:
        name = str(engine.value).removeprefix("default-")
        stage, _, host = name.removeprefix("zero").partition("_")
        known = name.startswith("zero") and stage in _STAGES and host in ("", "offload")
        yield "deepspeed", _ds_config(stage, engine, on_host=bool(host)) if known else engine.value, engine
    if sharded.value == "fsdp2":
        yield "fsdp", "full_shard auto_wrap", sharded
        config = {"fsdp_version": 2, "reshard_after_forward": True, "activation_checkpointing": True}
        yield "fsdp_config", {key: Node(value, sharded.origin) for key, value in config.items()}, sharded
    elif str(sharded.value).endswith(".json"):
        raise sharded.wrong("fsdp", "names a file of FSDP's settings, which is not read: must be fsdp2, or left out")
    elif sharded.value:
        yield "fsdp", sharded.value, sharded


def _ds_config(stage: str, node: Node, *, on_host: bool) -> dict[str, Node]:
    def all_of(values: Mapping[str, Value]) -> Node:
        return Node({key: Node(value, node.origin) for key, value in values.items()}, node.origin)

    zero = all_of(_STAGES[stage])
    if on_host:
        moved = _TO_HOST if stage == "3" else _TO_HOST[:1]
        zero = zero.with_items({key: all_of({"device": "cpu", "pin_memory": True}) for key in moved})
    sizes = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
    half = all_of({"enabled": "auto"})
    whole = {"fp16": half, "bf16": half, "zero_optimization": zero}
    return {**whole, **{name: Node("auto", node.origin) for name in sizes}}


def _steps(written: Node, batch: Value, processes: int, *, is_whole: bool) -> _Found:
    """What is kept between forward and backward, how many micro-batches make a step (sixteen sequences, unless said),
    and whether anything is evaluated."""
    sharded = not is_whole or any(_is_on(written, key) for key in ("deepspeed", "fsdp"))
    checkpoints = _of(written, "gradient_checkpointing", True)
    by_engine = _of(written, "fsdp").value == "fsdp2"  # checkpoints layers itself
    yield "gradient_checkpointing", bool(checkpoints.value) and not by_engine, checkpoints
    kwargs = _of(written, "gradient_checkpointing_kwargs")
    if checkpoints.value and isinstance(kwargs.value, dict):
        yield "gradient_checkpointing_kwargs", kwargs.value, kwargs
    elif checkpoints.value and not by_engine and (sharded or processes == 1):
        yield "gradient_checkpointing_kwargs", {"use_reentrant": Node(True, written.origin)}, checkpoints
    steps = _of(written, "gradient_accumulation_steps")
    if steps.value is not None or (type(batch) is int and batch > 0):
        filled = -(-16 // (batch * processes)) if type(batch) is int and batch > 0 else None
        yield "gradient_accumulation_steps", steps.value or filled, steps
    evaluates = any(_is_on(written, key) and _of(written, key).value != 0 for key in ("val_dataset", "eval_dataset"))
    evaluates = evaluates or _of(written, "split_dataset_ratio", 0).value not in (0, 0.0)
    strategy = _of(written, "eval_strategy", "steps" if evaluates else "no")
    yield "eval_strategy", strategy.value if evaluates else "no", strategy
    if evaluates:
        yield "per_device_eval_batch_size", _of(written, "per_device_eval_batch_size", 1).value, strategy


def check(written: Node, read: ReadPlan) -> ReadPlan:
    """``read``, the plan of ``written``, whose model hands out routers' logits for their loss where its class can and
    has any (``swift/trainers/trainers.py``, ``_prepare_inputs``); what runs such a model refuses it."""
    node, model = written.mapping.get(_ROUTERS), read.plan.model
    if node is None or node.value in (None, 0):
        return read
    if not model.has_sizes:
        raise node.wrong(_ROUTERS, "must be left out of a model without a recipe, which may have experts")
    config = family(model.family).config
    if not model.experts or config is None or not config.keys.keys() >= ROUTER_LOSS.keys():
        return read
    plan = read.plan.model_copy(update={"model": model.model_copy(update=dict.fromkeys(ROUTER_LOSS, True))})
    origins = {**read.origins, **{f"model.{name}": node.origin for name in ROUTER_LOSS if node.origin is not None}}
    return replace(read, plan=plan, origins=origins)


_ROUTERS = "router_aux_loss_coef"
TOLD = (
    (
        "all-tokens-labelled",
        "ms-swift makes logits only of tokens with a label (use_logits_to_keep): memplan assumes that every token has "
        "one",
    ),
    (
        "dtype-of-config",
        "without torch_dtype ms-swift takes the dtype of the model's config.json: bf16 is taken for it",
    ),
)
"""What it does that depends on the data and on the checkpoint."""

__all__ = ["KEYS", "MARKS", "TOLD", "check", "translated"]
