"""Axolotl's configuration as the Trainer's arguments and trl's, which it is a dialect of.

Keys and defaults of ``src/axolotl/utils/schemas`` as of July 2026; ``loaders/model.py`` says what is loaded in which
dtype (``_configure_embedding_dtypes``: norms, embeddings and head go to fp32, and back under adapters and under
attention other than sdpa and eager), ``utils/config/__init__.py`` the rest (``resolve_dtype``; ``normalize_config``:
checkpoints are reentrant).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ...plan.errors import ABSENT, Node, PlanError, Value, guessed, together
from .axolotl_keys import CUT_PLUGIN, HARMLESS_PLUGINS, NOTED, OF_LOOPS, PLUGINS, REFUSED, WITHOUT_EFFECT
from .keys import READ

MARKS = ("base_model", "sequence_len", "sample_packing")
"""Keys of which each of its files has one."""

_SAME = frozenset(
    """
    gradient_accumulation_steps weight_decay torch_compile neftune_noise_alpha deepspeed lora_r lora_alpha
    lora_modules_to_save lora_target_modules lora_target_parameters gradient_checkpointing_kwargs optim_args
    accelerator_config
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
_ALONE = (
    "tensor_parallel_size",
    "context_parallel_size",
    "sequence_parallel_degree",
    "expert_parallel_size",
    "dp_replicate_size",
)
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
        "liger_cross_entropy": "cross_entropy",
        "liger_fused_linear_cross_entropy": "fused_linear_cross_entropy",
    }
)
_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
_MASKING = ("sdpa", "eager")
"""Kernels that keep the documents of a packed row apart by a mask of the row's tokens by its tokens
(``attn_decontaminates_packing``), unless ``sdpa_varlen`` takes their place."""
_NOT_OF_PAIRS = MappingProxyType(
    {
        "sample_packing": "its collator pads both of a pair, and Axolotl refuses packing there",
        "dpo_padding_free": "batches without padding are not modelled in DPO",
        "dpo_use_weighting": "the trl that it pins, 1.9, takes sums over all logits once more then",
        "dpo_use_liger_kernel": "Liger's loss of pairs is not modelled",
        "reward_model": "a model of scores has no log-probabilities of labels",
        "rl_adapter_ref_model": "a reference that is a second model beside adapters is not modelled",
    }
)
_OWN = frozenset(
    """
    plugins adapter lora_target_linear load_in_4bit load_in_8bit fp16 float16 bf16 bfloat16 sample_packing
    multipack_real_batches gradient_checkpointing fsdp fsdp_config fsdp_version dp_shard_size eval_batch_size
    batch_size attn_implementation cut_cross_entropy model_type type_of_model rl reward_model num_labels
    rl_adapter_ref_model
    """.split()  # noqa: SIM905
)
"""Keys that are looked at below."""
KEYS = frozenset(
    {*_SAME, *_RENAMED, *_OWN, *_ALONE, *_ATTENTION, *_LIGER, *_KERNELS, *REFUSED, *NOTED, *WITHOUT_EFFECT}
)
"""Every key of it that is known."""
_MEANT = MappingProxyType(
    {
        **{theirs: own for own, theirs in _RENAMED.items()},
        **dict.fromkeys(("max_seq_length", "model_max_length", "block_size"), "sequence_len"),
        **dict.fromkeys(("dtype", "torch_dtype"), "bf16"),
        "use_peft": "adapter",
        "padding_free": "sample_packing",
        "use_flash_attention_2": "attn_implementation",
    }
)
"""Arguments of the Trainer and of trl that Axolotl does not take, and its own key."""


def starts(written: Node) -> str:
    """The script of trl's that does as much: its RewardTrainer (``core/builders/causal.py``), whose loss is that of
    trl 1.16 in 1.9, which Axolotl pins; or its own loop around trl's DPOTrainer (``core/builders/rl.py``)."""
    if _prefers(written.mapping):
        return "axolotl-dpo"
    return "reward" if _scores(written.mapping) else ""


def _prefers(own: Mapping[str, Node]) -> bool:
    return "rl" in own and own["rl"].value in ("dpo", "ipo")


def _scores(own: Mapping[str, Node]) -> bool:
    return "reward_model" in own and own["reward_model"].value not in (None, False)


def translated(written: Node, *, is_whole: bool, processes: int) -> Node:
    """The arguments that ``written`` comes to; ``is_whole`` where nothing beside them shards the model."""
    own = written.mapping
    if wrong := [*_refused(own, processes)]:
        raise together(wrong)
    items = {key: node for key, node in own.items() if key in _SAME and node.value is not None}
    items |= {_RENAMED[key]: node for key, node in own.items() if key in _RENAMED and node.value is not None}
    items |= {key: node for key, node in _kept(own) if node.value is not None}
    for key, value in _DEFAULTS.items():
        items.setdefault(key, Node(value, written.origin))
    whole = is_whole and not own.keys() & {"deepspeed", "fsdp", "fsdp_config"}
    for key, given, node in _method(written, is_whole=whole):
        items[key] = Node(given, node.origin)
    return Node(items, written.origin)


def _kept(own: Mapping[str, Node]) -> Iterator[tuple[str, Node]]:
    """What the reader of the Trainer's arguments looks at: what is told, and what is no key of Axolotl's own."""
    for key, node in own.items():
        if key not in KEYS or (key in NOTED and key not in _OWN):
            yield key, node
    if others := [one for one in _plugins(own) if _class(one) not in {*PLUGINS, *HARMLESS_PLUGINS}]:
        yield "plugins", others[0]
    size, trained = own.get("eval_batch_size"), own.get("micro_batch_size")
    most = trained.value if trained is not None and isinstance(trained.value, int) else 1
    if size is not None and isinstance(size.value, int) and size.value > most:
        yield "eval_batch_size", size
    whole = own.get("batch_size")  # normalize_config
    if whole is not None and isinstance(whole.value, int) and own.get("gradient_accumulation_steps") is None:
        yield "gradient_accumulation_steps", Node(max(1, whole.value // max(1, most)), whole.origin)


def _plugins(own: Mapping[str, Node]) -> list[Node]:
    listed = own["plugins"].value if "plugins" in own else None
    return listed if isinstance(listed, list) else []


def _class(plugin: Node) -> str:
    return str(plugin.value).rpartition(".")[2]


def _refused(own: Mapping[str, Node], processes: int) -> Iterator[PlanError]:
    for key in own.keys() & READ - KEYS:
        yield own[key].lacks(key, guessed("is no key of Axolotl", _MEANT.get(key)))
    for key, why in REFUSED.items():
        if key in own and own[key].value not in (None, False, []):
            yield own[key].lacks(key, f"must be left out: {why}")
    for key in _ALONE:
        if key in own and own[key].value not in (None, 1):
            yield own[key].wrong(key, "must be 1: it is not modelled here")
    shards = own.get("dp_shard_size")
    if shards is not None and shards.value not in (None, processes):
        yield shards.wrong(
            "dp_shard_size",
            f"must be the number of GPUs, {processes} (--gpus N): replicas of shards are --fsdp-replicas",
        )
    for node in _plugins(own):
        if (name := _class(node)) in PLUGINS:
            yield PlanError("plugins", name, f"must be left out: {PLUGINS[name]}", origin=node.origin)
    yield from _refused_cut(own)
    yield from _refused_heads(own)
    yield from _refused_bits(own)


def _cuts(own: Mapping[str, Node]) -> Node | None:
    """What turns cut cross entropy on: its plugin, unless its key is off (``CutCrossEntropyArgs``)."""
    plugin, key = next((one for one in _plugins(own) if _class(one) == CUT_PLUGIN), None), own.get("cut_cross_entropy")
    if plugin is None or key is None:
        return plugin
    return key if key.value not in (None, False) else None


def _refused_cut(own: Mapping[str, Node]) -> Iterator[PlanError]:
    """Cut cross entropy where Axolotl stops, or does not run it (``integrations/cut_cross_entropy/args.py``,
    ``check_cross_entropy_conflicts`` of ``utils/schemas/validation.py``)."""
    key, cut = own.get("cut_cross_entropy"), _cuts(own)
    if key is not None and key.value not in (None, False) and cut is None:
        plugin = f"axolotl.integrations.cut_cross_entropy.{CUT_PLUGIN}"
        yield key.wrong("cut_cross_entropy", f"needs {plugin} among plugins, without which Axolotl does not know it")
    if cut is None:
        return
    bf16, fp16 = (own.get(name, Node(None, cut.origin)).value for name in ("bf16", "fp16"))
    if not (bf16 or fp16) and (cut is key or bf16 is not None):
        yield PlanError("plugins", CUT_PLUGIN, "needs bf16 or fp16, without which Axolotl stops", origin=cut.origin)
    for name in ("liger_cross_entropy", "liger_fused_linear_cross_entropy"):
        if name in own and own[name].value:
            yield own[name].wrong(name, f"must be false with {CUT_PLUGIN}: both are in the place of one loss")
    if _prefers(own) or _scores(own):
        problem = "must be left out with rl and reward_model, whose losses it is not in the place of"
        yield PlanError("plugins", CUT_PLUGIN, problem, origin=cut.origin)


def _refused_bits(own: Mapping[str, Node]) -> Iterator[PlanError]:
    """Quantised weights without the adapter that trains over them (``validate_qlora`` of ``utils/schemas/peft.py``,
    ``_set_quantization_config`` of ``loaders/model.py``)."""
    on = {key: node for key in ("load_in_4bit", "load_in_8bit") if (node := own.get(key)) is not None and node.value}
    adapter = own.get("adapter")
    kind = adapter.value if adapter is not None else None
    if adapter is not None and kind == "qlora":
        if "load_in_4bit" not in on:
            yield adapter.wrong("adapter", "needs load_in_4bit: true, without which Axolotl stops")
        if "load_in_8bit" in on:
            yield on["load_in_8bit"].wrong("load_in_8bit", "must be left out with adapter qlora: Axolotl stops")
    elif "load_in_4bit" in on and kind in (None, "lora"):
        problem = "must be left out, or the adapter be qlora: with lora the model is loaded in 16 bits anyway"
        yield on["load_in_4bit"].wrong("load_in_4bit", problem)


def _refused_heads(own: Mapping[str, Node]) -> Iterator[PlanError]:
    """Losses and heads other than a language model's, and a reward model's with what it does not go with."""
    rewards, loss = _scores(own), own.get("rl")
    if loss is not None and loss.value and not _prefers(own):
        yield loss.wrong("rl", f"must be left out: {OF_LOOPS.get(str(loss.value), 'its loss is not modelled')}")
    kind = own.get("model_type", own.get("type_of_model"))
    others = ("ImageTextToText", "ConditionalGeneration", *(() if rewards else ("Classification",)))
    if kind is not None and str(kind.value).endswith(others):
        problem = "must be AutoModelForCausalLM: heads other than a language model's are not modelled here"
        yield kind.wrong("model_type", problem)
    if kind is not None and rewards and str(kind.value).endswith(("CausalLM", "TokenClassification")):
        problem = "must be AutoModelForSequenceClassification, or left out, with reward_model, which scores sequences"
        yield kind.wrong("model_type", problem)
    labels = own.get("num_labels")
    if labels is not None and labels.value not in ((None, 1) if rewards else (None, False)):
        problem = "must be 1 with reward_model" if rewards else "heads other than a language model's are not modelled"
        yield labels.wrong("num_labels", problem if rewards else f"must be left out: {problem} here")
    packs = own.get("sample_packing")
    for key, why in _NOT_OF_PAIRS.items() if _prefers(own) else ():
        if key in own and own[key].value not in (None, False):
            yield own[key].wrong(key, f"must be left out with rl {own['rl'].value}: {why}")
    kinds = own.get("dpo_loss_type")
    if _prefers(own) and kinds is not None and "sft" in str(kinds.plain()):
        yield kinds.wrong("dpo_loss_type", "must be without sft: a cross entropy of the chosen logits is not modelled")
    kernel = _attention(own)
    if kernel is not None and kernel.value in _MASKING and packs is not None and packs.value:
        problem = "must be flash_attention_2, flash_attention_3 or flex_attention with sample_packing: "
        yield kernel.wrong("attn_implementation", f"{problem}the mask that keeps documents apart is not modelled")
    if rewards and packs is not None and packs.value:
        yield packs.wrong("sample_packing", "must be false with reward_model, whose collator pads both of a pair")


def _method(written: Node, *, is_whole: bool) -> Iterator[tuple[str, Value, Node]]:
    """What is trained, in which dtypes, by which kernels, and what is recomputed: keys, values, and what they follow
    from. trl's configuration turns on what nothing turns off (``_BaseConfig``)."""
    own = written.mapping
    rewards, prefers = _scores(own), _prefers(own)

    def of(key: str) -> Node:
        return own.get(key, Node(None, written.origin))

    def on(key: str) -> bool:
        return of(key).value not in (None, False, "false")

    adapter, attention = of("adapter"), _attention(own)
    if adapter.value not in (None, "", "lora", "qlora"):
        raise adapter.wrong("adapter", "must be lora or qlora, or left out: others are not modelled")
    kernel = attention.value if attention is not None else None
    if adapter.value:
        yield "use_peft", True, adapter
        yield "lora_dropout", of("lora_dropout").value or 0.0, adapter
        if rewards:  # _get_peft_task_type
            yield "lora_task_type", "SEQ_CLS", adapter
        if on("lora_target_linear"):
            yield "lora_target_modules", "all-linear", of("lora_target_linear")
        for name in _KERNELS:
            if of(name).value is not False and (on(name) or not prefers):  # check_auto_enable_lora_kernels
                yield name, True, of(name)
    elif is_whole and kernel in (None, "sdpa", "eager") and _cuts(own) is None:
        problem = (
            "must be flash_attention_2 or flash_attention_3 where all parameters are trained: without, and without cut "
            "cross entropy, Axolotl keeps norms, embeddings and head in fp32, which is not modelled"
        )
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
    said = of("bf16")
    if said.value not in (None, True, False, "auto", "true", "false"):
        problem = "must be true, false or auto: full, of earlier releases, has no autocast, which is not modelled here"
        raise said.wrong("bf16", problem)
    half = on("fp16") or on("float16")
    found = not on("fp16") if said.value in (None, "auto") else on("bf16")  # resolve_dtype
    brain = found or on("bfloat16")
    of_dtype = of("bf16" if brain else "fp16")
    yield "dtype", "bfloat16" if brain else "float16" if half else "float32", of_dtype
    if brain or half:
        yield "bf16" if brain else "fp16", True, of_dtype
    elif rewards or prefers:
        yield "bf16", False, of_dtype
    if attention is not None:
        yield "attn_implementation", kernel, attention
        packs = on("sample_packing") and str(kernel).startswith("flash_attention") and not on("multipack_real_batches")
        if packs:
            yield "padding_free", True, of("sample_packing")
    pieces = {piece: of(key) for key, piece in _LIGER.items() if on(key)}
    if pieces:
        first = next(iter(pieces.values()))
        all_pieces = {**{piece: Node(False, first.origin) for piece in _LIGER.values()}, **pieces}
        yield "use_liger_kernel", True, first
        yield "liger_kernel_config", {**all_pieces, "geglu": all_pieces["swiglu"]}, first  # whichever the model has
    if (cut := _cuts(own)) is not None:
        yield "cut_cross_entropy", True, cut
    checkpoints = of("gradient_checkpointing")
    if checkpoints.value not in (None, False, True):
        raise checkpoints.wrong(
            "gradient_checkpointing", "must be true or false: checkpoints that are kept elsewhere are not modelled"
        )
    if checkpoints.value:
        yield "gradient_checkpointing", True, checkpoints
        if not (prefers or on("gradient_checkpointing_kwargs")):  # normalize_config
            yield "gradient_checkpointing_kwargs", {"use_reentrant": Node(True, checkpoints.origin)}, checkpoints
    elif (rewards or prefers) and checkpoints.value is False:
        yield "gradient_checkpointing", False, checkpoints
    if prefers and on("precompute_ref_log_probs"):
        yield "precompute_ref_log_probs", True, of("precompute_ref_log_probs")
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
        yield "fsdp_config", {**config.mapping, "fsdp_version": _version(own)}, config


def _version(own: Mapping[str, Node]) -> Node:
    """Of FSDP: the file's, or 1, whatever transformers takes (``check_fsdp_version_in_fsdp_config`` of
    ``utils/schemas/validation.py``)."""
    config = own["fsdp_config"]
    said = (own.get("fsdp_version"), *map(config.mapping.get, ("version", "fsdp_version")))
    return next((node for node in said if node is not None and node.value), Node(1, config.origin))


def _attention(own: Mapping[str, Node]) -> Node | None:
    named = own.get("attn_implementation")
    if named is not None and named.value is not None:
        return named
    return next(
        (Node(name, own[key].origin) for key, name in _ATTENTION.items() if key in own and own[key].value), None
    )


__all__ = ["KEYS", "MARKS", "NOTED", "starts", "translated"]
