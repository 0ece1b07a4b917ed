"""Axolotl's configuration as the Trainer's arguments and trl's, which it is a dialect of.

Keys and defaults of ``src/axolotl/utils/schemas`` as of July 2026; ``loaders/model.py`` says what is loaded in which
dtype (``_configure_embedding_dtypes``: norms, embeddings and head go to fp32, and back under adapters and under
attention other than sdpa and eager), ``utils/config/__init__.py`` the rest (``resolve_dtype``; ``normalize_config``:
checkpoints are reentrant).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ...plan.errors import ABSENT, Node, PlanError, Value, together

MARKS = ("base_model", "sequence_len", "sample_packing")
"""Keys of which each of its files has one."""

_SAME = frozenset(
    """
    gradient_accumulation_steps weight_decay torch_compile neftune_noise_alpha deepspeed lora_r lora_alpha
    lora_modules_to_save lora_target_modules lora_target_parameters gradient_checkpointing_kwargs
    """.split()  # noqa: SIM905 - as a list it would be a line a word
)
_RENAMED = MappingProxyType(
    {
        "base_model": "model_name_or_path",
        "micro_batch_size": "per_device_train_batch_size",
        "sequence_len": "max_length",
        "optimizer": "optim",
        "lora_dropout": "lora_dropout",
        "peft_use_dora": "use_dora",
        "peft_use_rslora": "use_rslora",
    }
)
_DEFAULTS: Mapping[str, Value] = MappingProxyType(
    {"max_length": 512, "per_device_train_batch_size": 1, "optim": "adamw_torch_fused"}
)
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "rl": "preference and reinforcement learning of Axolotl are not read: say the job in trl's arguments",
        "cut_cross_entropy": "Apple's cut cross entropy is not modelled",
        "chunked_cross_entropy": "a loss in chunks of Axolotl's own is not modelled",
        "tiled_mlp": "an MLP that runs in tiles is not modelled",
        "activation_offloading": "activations that are kept on the host are not modelled",
        "layer_offloading": "layers that are kept on the host are not modelled",
        "lora_on_cpu": "adapters that are loaded on the host are not modelled",
        "quantize_moe_experts": "experts in 4 bits are not modelled",
        "relora": "ReLoRA is not modelled",
        "unfrozen_parameters": "parameters chosen by pattern are not modelled; --freeze-layers N is",
        "qat": "training for a quantised model is not modelled",
        "fp8": "torchao's float8 is not modelled here",
        "unsloth_cross_entropy_loss": "Unsloth's own functions are not modelled",
        "unsloth_lora_mlp": "Unsloth's own functions are not modelled",
        "unsloth_lora_qkv": "Unsloth's own functions are not modelled",
        "processor_type": "models of more than text are not modelled",
        "reward_model": "reward models are not modelled",
        "process_reward_model": "heads that score steps are not modelled",
        "num_labels": "heads other than a language model's are not modelled here",
        "lisa_n_layers": "LISA, which trains other layers by turns, is not modelled",
        "peft_layers_to_transform": "adapters of some layers alone are not modelled",
        "gptq": "weights that are quantised already are not read here; --quantisation gptq over a plan is",
        "use_eaft": "a loss weighed by entropy is not modelled",
        "fused_attn_kernel": "Axolotl's own kernels of attention are not modelled",
        **dict.fromkeys(
            ("use_scattermoe", "use_sonicmoe", "llama4_linearized_experts"),
            "Axolotl's own kernels of experts are not modelled",
        ),
        "use_onebitllms": "layers of one bit are not modelled",
    }
)
"""Keys that change the estimate, and why one that is set is refused."""
_PLUGINS: Mapping[str, str] = MappingProxyType(
    {
        "CutCrossEntropyPlugin": _REFUSED["cut_cross_entropy"],
        "GrokfastPlugin": "a moving average of gradients is not modelled",
        "SpectrumPlugin": "parameters chosen by pattern are not modelled; --freeze-layers N is",
        "KDPlugin": "a teacher's logits are not modelled",
        "LLMCompressorPlugin": "sparse weights are not modelled",
        "DenseMixerPlugin": "its own routing of experts is not modelled",
        "DiffusionPlugin": "a loss of diffusion is not modelled",
        "ExpertParallelPlugin": "its experts on several GPUs are not modelled",
        "MoraPlugin": "MoRA is not modelled",
    }
)
"""Of ``integrations``, by class: those that change the estimate, and why; the first may be turned off by its key."""
_ALONE = ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size", "dp_replicate_size")
_ATTENTION = MappingProxyType(
    {
        "flash_attention": "flash_attention_2",
        "sdp_attention": "sdpa",
        "eager_attention": "eager",
        "flex_attention": "flex_attention",
        "xformers_attention": "xformers",
        "sage_attention": "sage",
    }
)
"""Switches of before ``attn_implementation``."""
_LIGER = MappingProxyType(
    {
        "liger_rope": "rope",
        "liger_rms_norm": "rms_norm",
        "liger_swiglu": "swiglu",
        "liger_glu_activation": "swiglu",
        "liger_layer_norm": "layer_norm",
        "liger_cross_entropy": "cross_entropy",
        "liger_fused_linear_cross_entropy": "fused_linear_cross_entropy",
    }
)
_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")


def is_it(written: Node) -> bool:
    """Whether ``written`` is a file of Axolotl."""
    return not {*MARKS}.isdisjoint(written.mapping)


def translated(written: Node, *, is_whole: bool, processes: int) -> Node:
    """The arguments that ``written`` comes to; ``is_whole`` where nothing beside them shards the model. Reentrant
    checkpoints, its default, are not modelled of sharded models, and are taken to be what they are without."""
    own = written.mapping
    if wrong := [*_refused(own, processes)]:
        raise together(wrong)
    items = {key: node for key, node in own.items() if key in _SAME and node.value is not None}
    items |= {_RENAMED[key]: node for key, node in own.items() if key in _RENAMED and node.value is not None}
    for key, value in _DEFAULTS.items():
        items.setdefault(key, Node(value, written.origin))
    whole = is_whole and not own.keys() & {"deepspeed", "fsdp", "fsdp_config"}
    for key, given, node in _method(written, is_whole=whole):
        items[key] = Node(given, node.origin)
    return Node(items, written.origin)


def _refused(own: Mapping[str, Node], processes: int) -> Iterator[PlanError]:
    for key, why in _REFUSED.items():
        if key in own and own[key].value not in (None, False, []):
            yield PlanError(key, ABSENT, f"must be left out: {why}", origin=own[key].origin)
    for key in _ALONE:
        if key in own and own[key].value not in (None, 1):
            yield PlanError(key, own[key].plain(), "must be 1: it is not modelled here", origin=own[key].origin)
    shards = own.get("dp_shard_size")
    if shards is not None and shards.value not in (None, processes):
        problem = f"must be the number of GPUs, {processes} (--gpus N): replicas of shards are --fsdp-replicas"
        yield PlanError("dp_shard_size", shards.plain(), problem, origin=shards.origin)
    listed = own["plugins"].value if "plugins" in own else None
    for node in listed if isinstance(listed, list) else ():
        name = str(node.value).rpartition(".")[2]
        off = name == "CutCrossEntropyPlugin" and own.get("cut_cross_entropy", node).value is False
        if name in _PLUGINS and not off:
            yield PlanError("plugins", name, f"must be left out: {_PLUGINS[name]}", origin=node.origin)
    kind = own.get("model_type")
    if kind is not None and str(kind.value).endswith(("Classification", "ImageTextToText", "ConditionalGeneration")):
        problem = "must be AutoModelForCausalLM: heads other than a language model's are not modelled here"
        yield PlanError("model_type", kind.plain(), problem, origin=kind.origin)


def _method(written: Node, *, is_whole: bool) -> Iterator[tuple[str, Value, Node]]:
    """What is trained, in which dtypes, by which kernels, and what is recomputed: keys, values, and what they follow
    from."""
    own = written.mapping

    def of(key: str) -> Node:
        return own.get(key, Node(None, written.origin))

    def on(key: str) -> bool:
        return of(key).value not in (None, False, "false")

    adapter, attention = of("adapter"), _attention(own)
    if adapter.value not in (None, "", "lora", "qlora"):
        problem = "must be lora or qlora, or left out: others are not modelled"
        raise PlanError("adapter", adapter.plain(), problem, origin=adapter.origin)
    kernel = attention.value if attention is not None else None
    if adapter.value:
        yield "use_peft", True, adapter
        yield "lora_dropout", of("lora_dropout").value or 0.0, adapter
        if on("lora_target_linear"):
            yield "lora_target_modules", "all-linear", of("lora_target_linear")
        for name in _KERNELS:
            if of(name).value is not False:
                yield name, True, of(name)
    elif is_whole and kernel in (None, "sdpa", "eager"):
        problem = "must be flash_attention_2 or flash_attention_3 where all parameters are trained: without, Axolotl "
        problem += "keeps norms, embeddings and head in fp32, which is not modelled"
        raise PlanError("attn_implementation", kernel or ABSENT, problem, origin=(attention or written).origin)
    if on("load_in_8bit"):
        yield "load_in_8bit", True, of("load_in_8bit")
    elif adapter.value == "qlora":
        for key, value in (
            ("load_in_4bit", True),
            ("bnb_4bit_quant_type", "nf4"),
            ("use_bnb_nested_quant", True),
            ("bnb_4bit_quant_storage", "bfloat16"),
        ):
            yield key, value, adapter
    half = on("fp16") or on("float16")
    brain = on("bf16") or on("bfloat16") or (of("bf16").value is None and not half)
    of_dtype = of("bf16" if brain else "fp16")
    yield "dtype", "bfloat16" if brain else "float16" if half else "float32", of_dtype
    if brain or half:
        yield "bf16" if brain else "fp16", True, of_dtype
    if attention is not None:
        yield "attn_implementation", kernel, attention
        packs = on("sample_packing") and str(kernel).startswith("flash_attention") and not on("multipack_real_batches")
        if packs:
            yield "padding_free", True, of("sample_packing")
    pieces = {piece: of(key) for key, piece in _LIGER.items() if on(key)}
    if pieces:
        first = next(iter(pieces.values()))
        off = {piece: Node(False, first.origin) for piece in _LIGER.values() if piece != "layer_norm"}
        yield "use_liger_kernel", True, first
        yield "liger_kernel_config", {**off, **pieces}, first
    checkpoints = of("gradient_checkpointing")
    if checkpoints.value not in (None, False, True):
        problem = "must be true or false: checkpoints that are kept elsewhere are not modelled"
        raise PlanError("gradient_checkpointing", checkpoints.plain(), problem, origin=checkpoints.origin)
    if checkpoints.value:
        yield "gradient_checkpointing", True, checkpoints
        if is_whole and not on("gradient_checkpointing_kwargs"):
            yield "gradient_checkpointing_kwargs", {"use_reentrant": Node(True, checkpoints.origin)}, checkpoints
    yield from _sharding(own)


def _sharding(own: Mapping[str, Node]) -> Iterator[tuple[str, Value, Node]]:
    """``fsdp``, a list of words, and ``fsdp_config``, whose version may stand beside it."""
    words, config = own.get("fsdp"), own.get("fsdp_config")
    if words is not None and words.value:
        listed = words.value if isinstance(words.value, list) else [words]
        yield "fsdp", " ".join(str(one.value) for one in listed), words
    elif config is not None and config.value:
        yield "fsdp", "full_shard", config
    if config is not None and config.value:
        version = own.get("fsdp_version")
        beside = {"fsdp_version": version} if version is not None and version.value is not None else {}
        yield "fsdp_config", {**beside, **config.mapping}, config


def _attention(own: Mapping[str, Node]) -> Node | None:
    named = own.get("attn_implementation")
    if named is not None and named.value is not None:
        return named
    return next(
        (Node(name, own[key].origin) for key, name in _ATTENTION.items() if key in own and own[key].value), None
    )


__all__ = ["MARKS", "is_it", "translated"]
