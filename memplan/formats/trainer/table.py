"""The arguments of Hugging Face's Trainer, one a row, and what those become that are more than a value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...optimizers import algorithm, trainer_names
from ...plan.errors import ABSENT, Node, PlanError
from ...plan.models import complete_model
from ...plan.near_misses import OTHER_EXPERTS
from ...plan.read import SAVED, TAKEN
from ..exported import of_trainer
from ..settings import Building, Reader, Row, elsewhere
from .arguments import Arguments
from .keys import K_BIT, RESIZED


def plain(node: Node) -> object:
    """The value of ``node`` as errors repeat it."""
    return ABSENT if isinstance(node.value, (dict, list)) else node.plain()


def _given_by(*flags: str) -> Callable[[Reader], str]:
    """A row that one of ``flags`` replaces."""
    return lambda reader: next((f"--{flag} instead" for flag in flags if flag in reader.context), "")


def _labels(reader: Reader) -> None:
    """Of the classifier that a script makes, unless a flag says them."""
    node, building = reader.settings.node("num_labels"), reader.building
    if node is None or "labels" in reader.context:
        return
    if not _counts(node):
        raise node.wrong("num_labels", "must be at least 1")
    of_model(building, "labels", node, "num_labels")


def _counts(node: Node) -> bool:
    """Whether ``node`` is a number of something that there is; not a switch, which Python takes for one."""
    return not isinstance(node.value, (int, bool)) or (type(node.value) is int and node.value > 0)


def of_model(building: Building, name: str, node: Node, key: str) -> None:
    """A field of the model beside its name."""
    if "model" in building.items:
        building.items["model.base"] = building.items.pop("model")
    building.put(f"model.{name}", node, key)


def _resized(reader: Reader) -> None:
    """Rows of the embedding and the head, where the script says how many."""
    node = reader.settings.node(RESIZED)
    if node is None:
        return
    if not _counts(node):
        raise node.wrong(RESIZED, "must be at least 1")
    if isinstance(node.value, int):
        of_model(reader.building, "vocab", node, RESIZED)
        return
    reader.building.note(
        "embedding-resized",
        f"the script gives embedding and head {node.value} rows, which only its tokenizer knows; the model's own "
        "number is taken: a few more tokens take little, another vocabulary is vocab in a plan's model",
    )


_DTYPES = {"float32": "fp32", "fp32": "fp32", "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}


def autocast(arguments: Arguments) -> Node | None:
    """The dtype of ``bf16`` or ``fp16``; nothing where neither is on."""
    bf16, fp16 = arguments.on("bf16"), arguments.on("fp16")
    if bf16 is not None and fp16 is not None:
        raise fp16.wrong("fp16", "must be false with bf16: there is one autocast")
    on = bf16 or fp16
    return None if on is None else Node("bf16" if bf16 is not None else "fp16", on.origin)


def loaded_in(arguments: Arguments) -> Node | None:
    """The dtype in which the model is loaded; nothing where nobody says."""
    found = arguments.first("dtype", "torch_dtype")
    if found is None or (loaded := found[1]).value in (SAVED, "auto"):
        return None if found is None else Node(SAVED, found[1].origin)
    name = str(loaded.value).removeprefix("torch.")
    if name not in _DTYPES:
        raise loaded.wrong("dtype", "must be float32, bfloat16, float16 or auto")
    return Node(_DTYPES[name], loaded.origin)


def _precision(reader: Reader) -> None:
    """``bf16`` and ``fp16`` are autocast, over the dtype in which the model was loaded: fp32 if nobody says."""
    put = reader.building.put
    dtype, loaded = autocast(reader.settings), loaded_in(reader.settings)
    if dtype is None:
        put("precision.dtype", loaded or "fp32", "dtype")
        return
    put("precision.dtype", dtype, "bf16", "fp16")
    put("precision.autocast", Node(True, dtype.origin), "bf16", "fp16")
    if loaded is not None:
        put("precision.parameters", loaded, "dtype")
        return
    reader.building.note("loaded-dtype", TAKEN)


def _optimizer(reader: Reader) -> None:
    node = reader.settings.node("optim") or Node("adamw_torch_fused", reader.settings.origin)
    known = trainer_names()
    found: Mapping[str, Any] | None = known.get(str(node.value))
    if found is None:
        raise node.wrong("optim", f"is not modelled; {', '.join(known)} are")
    for name, value in found.items():
        reader.building.put(f"optimizer.{name}", Node(value, node.origin), "optim")
    if algorithm(found["name"]).has_momentum:
        _momentum(reader)


def _momentum(reader: Reader) -> None:
    """Of ``optim_args``, ``momentum=0.9,nesterov=true`` (``_get_sgd`` of ``trainer_optimizer.py``), or a mapping, of
    which Axolotl makes that. Weight decay is that of each group of parameters, whatever they say."""
    node = reader.settings.node("optim_args")
    if node is None or node.value is None:
        return
    given = node.plain()
    words = (one.partition("=") for one in str(given).replace(" ", "").split(","))
    said = given if isinstance(given, dict) else {name: value for name, _, value in words}
    if str(said.get("nesterov", "")).lower() in ("true", "1", "yes"):
        raise PlanError(
            "optim_args", plain(node), "must be without nesterov, which is not modelled", origin=node.origin
        )
    if "momentum" in said:
        try:
            momentum = float(said["momentum"])
        except (TypeError, ValueError):
            raise node.lacks("optim_args", "must have a number as momentum: momentum=0.9") from None
        reader.building.put("optimizer.momentum", Node(momentum, node.origin), "optim_args")


def _recompute(reader: Reader) -> None:
    """``activation_checkpointing`` of every layer; ``gradient_checkpointing`` is its name before 5.0."""
    names = ("activation_checkpointing", "gradient_checkpointing")
    node = reader.settings.on(*names)
    if node is None:
        return
    settings = reader.settings.first(*(f"{name}_kwargs" for name in names))
    details = settings[1].mapping if settings is not None else {}
    for key, allowed in (("every_n_layers", (1,)), ("offload", (False,))):
        value = details.get(key)
        if value is not None and value.plain() not in allowed:
            problem = f"must be {str(allowed[0]).lower()}: other recompute is not modelled"
            raise PlanError(key, plain(value), problem, origin=value.origin)
    if (reentrant := details.get("use_reentrant")) is not None and reentrant.value is not None:
        reader.building.put("recompute.reentrant", reentrant, "use_reentrant")
    reader.building.put("recompute.mode", Node("full", node.origin), *names)


def _compiled(reader: Reader) -> None:
    """By the arguments, or by what Accelerate's launcher says; a flag stands before both."""
    if "torch-compile" in reader.context:
        return
    found = of_trainer(reader.settings.given)
    if found is not None:
        found.put(reader.building, "torch_compile")


LIGER_PIECES = {"rms_norm": "kernels.norm", "rope": "kernels.rope", "swiglu": "kernels.mlp", "geglu": "kernels.mlp"}
"""Of ``liger_kernel_config``, by the field that each is; all are on unless it says otherwise."""
_GATES = ("swiglu", "geglu")
"""Of these a family's function takes the one that its activation is called (``transformers/monkey_patch.py``)."""
_OF_OTHERS = ("layer_norm",)
"""Pieces that no modelled language model has: Liger's are of vision towers."""


def as_taken(written: Node, named: object) -> Node:
    """``written`` without the pieces that Liger's function for the model does not take, which ``_apply_liger_kernel``
    passes over: Gemma's is called geglu, all others' swiglu. ``named``: the model of a flag, before that of a file."""
    config, models = written.mapping.get("liger_kernel_config"), ("model_name_or_path", "config_name")
    given = config.mapping if config is not None and isinstance(config.value, dict) else {}
    name = named or next((node.value for key in models if (node := written.mapping.get(key)) is not None), None)
    if config is None or not given.keys() & {*_GATES} or not isinstance(name, str):
        return written
    model = Node({"base": Node(name, config.origin)}, config.origin)
    try:
        activation = complete_model(model, Path()).spec.at("activation")
    except PlanError:  # told where the plan is read
        return written
    other = {*_GATES} - {activation.value if activation is not None else None}
    taken = {key: node for key, node in given.items() if key not in other}
    return written.with_items({"liger_kernel_config": Node(taken, config.origin)})


def _liger(reader: Reader) -> None:
    """``apply_liger_kernel``: Liger's set, less what ``liger_kernel_config`` turns off, and its choice of a loss."""
    arguments: Arguments = reader.settings
    node, put = arguments.on("use_liger_kernel"), reader.building.put
    if node is None:
        return
    config = arguments.node("liger_kernel_config") or Node({}, node.origin)
    chosen = {key: value for key, value in config.mapping.items() if value.value is not None}
    for key, value in chosen.items():
        if key not in (*LIGER_PIECES, *_OF_OTHERS, "fused_linear_cross_entropy", "cross_entropy"):
            if value.value is not False:
                problem = f"is not modelled: {', '.join(LIGER_PIECES)}, cross_entropy, fused_linear_cross_entropy are"
                raise PlanError(key, plain(value), problem, origin=value.origin)
        elif not isinstance(value.value, bool):
            raise PlanError(key, plain(value), "must be true or false", origin=value.origin)
    put("kernels.set", Node("liger", node.origin), "use_liger_kernel")
    off = [key for key, value in chosen.items() if value.value is False]
    for key in off:
        if key in LIGER_PIECES:
            put(LIGER_PIECES[key], Node("eager", chosen[key].origin), key)
    alone = chosen.get("cross_entropy", Node(False, config.origin))
    if alone.value and "fused_linear_cross_entropy" not in off:
        raise alone.wrong(
            "cross_entropy", "must be false unless fused_linear_cross_entropy is: Liger takes one of them"
        )
    if "fused_linear_cross_entropy" in off:
        kind = "liger-cross-entropy" if alone.value else "plain"
        put("loss.kind", Node(kind, config.origin), "fused_linear_cross_entropy")


def _cut(reader: Reader) -> None:
    """Axolotl's own: Apple's loss in the place of the model's, or of what Liger's set comes with."""
    if (node := reader.settings.on("cut_cross_entropy")) is not None:
        reader.building.put("loss.kind", Node("cut", node.origin), "cut_cross_entropy")


_VARLEN = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


def check_split(arguments: Arguments) -> None:
    """Refuses to split a batch over several GPUs: ``per_device_train_batch_size`` is that of all processes then
    (``training_args.py``)."""
    config = arguments.node("accelerator_config")
    split = config.mapping.get("split_batches") if config is not None and isinstance(config.value, dict) else None
    if split is not None and split.value is True:
        problem = (
            "must be false: batches are split over all GPUs then; give a GPU's part as per_device_train_batch_size"
        )
        raise split.wrong("split_batches", problem)


def _packed(reader: Reader) -> None:
    """trl's packing fills rows up to ``max_length``.

    By the strategy ``bfd``, its default, or with ``padding_free``, the rows of a batch are one of all their tokens
    (``SFTTrainer.__init__`` of trl 1.16), for which transformers calls ``flash_attn_varlen_func`` on reshaped queries,
    keys and values, without copies (``_flash_attention_forward``).
    """
    arguments: Arguments = reader.settings
    packed, strategy = arguments.on("packing"), arguments.node("packing_strategy")
    flat = arguments.on("padding_free")
    if packed is not None and (strategy is None or str(strategy.value).startswith("bfd")):
        flat = packed
    if packed is not None:
        reader.building.note("packed-rows", "packing fills rows up to the sequence length: each is assumed to be full")
    if flat is None:
        return
    kernel = arguments.node("attn_implementation")
    if kernel is not None and kernel.value not in _VARLEN and "flash-attn" not in str(kernel.value):
        raise kernel.wrong(
            "attn_implementation",
            f"must be {' or '.join(_VARLEN)} with padding_free or packing by bfd: others mask the whole row",
        )
    if kernel is None and "attention" not in reader.context:
        reader.building.put("attention", Node(_VARLEN[0], flat.origin), "padding_free", "packing")
    reader.building.note(
        "padding-free",
        "a batch's rows are one of all their tokens, taken to be full: it takes what the rows take, but for the angles "
        "of its positions and 128 rows of dq_accum for each document, which are not counted",
    )


def _experts(reader: Reader) -> None:
    """transformers' own choice for stacked experts (``get_correct_experts_implementation``)."""
    node = reader.settings.node("experts_implementation")
    if node is not None and node.value not in (None, "grouped_mm"):
        raise node.wrong("experts_implementation", f"must be grouped_mm, or left out: {OTHER_EXPERTS}")


LORA_FIELDS = {
    "lora_target_modules": "targets",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "lora_alpha": "alpha",
}


def _adapters(reader: Reader) -> None:
    """trl's ``ModelConfig`` (``trainer/model_config.py``, ``trainer/utils.py``, ``get_peft_config``,
    ``get_quantization_config``): adapters and 4-bit weights, with its defaults."""
    arguments, building = reader.settings, reader.building
    used = arguments.on("use_peft")
    if used is not None:
        building.put("lora.rank", arguments.node("lora_r") or Node(16, used.origin), "lora_r")
        building.put("lora.dropout", arguments.node("lora_dropout") or Node(0.05, used.origin), "lora_dropout")
        for name, field in LORA_FIELDS.items():
            building.put_said(f"lora.{field}", arguments.node(name), name)
        for name in ("dora", "rslora"):
            building.put_said(f"lora.{name}", arguments.on(f"use_{name}"), f"use_{name}")
    if (eight := arguments.on("load_in_8bit")) is not None:
        building.put("quantisation.kind", Node("int8", eight.origin), "load_in_8bit")
    quantised = arguments.on("load_in_4bit")
    if eight is not None and quantised is not None:
        raise eight.wrong("load_in_8bit", "must be left out with load_in_4bit: weights are loaded in 4 bits or in 8")
    if quantised is None:
        return
    building.put(
        "quantisation.kind", arguments.node("bnb_4bit_quant_type") or Node("nf4", quantised.origin), "load_in_4bit"
    )
    building.put_said("quantisation.double", arguments.on("use_bnb_nested_quant"), "use_bnb_nested_quant")
    building.put_said("quantisation.storage", arguments.node("bnb_4bit_quant_storage"), "bnb_4bit_quant_storage")
    if (computed := arguments.node("bnb_4bit_compute_dtype")) is not None and str(computed.value) in _DTYPES:
        building.put("quantisation.compute", _DTYPES[str(computed.value)], "bnb_4bit_compute_dtype")


ROWS = (
    Row("use_peft", "lora.rank", read=_adapters),
    Row(K_BIT, "quantisation.prepared", kind="switch", without_effect=_given_by("kbit-preparation")),
    Row("per_device_train_batch_size", "batch.mbs", kind="any", default=8),
    Row(
        "gradient_accumulation_steps",
        "batch.accumulation",
        kind="any",
        default=1,
        without_effect=_given_by("gbs", "accumulation"),
    ),
    Row("weight_decay", "optimizer.weight_decay", kind="any", default=0.0),
    Row("block_size", "batch.seq", kind="any", older=("max_seq_length", "max_length", "model_max_length")),
    Row("model_name_or_path", "model", kind="any", older=("config_name",), without_effect=_given_by("model")),
    Row("num_labels", "model.labels", read=_labels),
    Row(RESIZED, "model.vocab", read=_resized),
    Row("attn_implementation", "attention", kind="any"),
    Row("use_flash_attention_2", "attention", kind="switch", words={True: "flash_attention_2", False: "sdpa"}),
    Row("experts_implementation", "", read=_experts),
    Row("accelerator_config", "", read=elsewhere),
    Row("packing", "attention", read=_packed),
    Row("activation_checkpointing", "recompute.mode", read=_recompute),
    Row("torch_compile", "compile", read=_compiled),
    Row("use_liger_kernel", "kernels.set", read=_liger),
    Row("cut_cross_entropy", "loss.kind", read=_cut),
)
"""With the defaults of ``TrainingArguments``; lengths are keys of scripts, of TRL, and of FastChat."""
PRECISION = (Row("bf16", "precision.dtype", read=_precision),)
OPTIMIZER = (Row("optim", "optimizer.name", read=_optimizer, without_effect=_given_by("optimizer")),)
