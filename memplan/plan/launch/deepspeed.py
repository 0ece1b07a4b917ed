"""Arguments of BigScience's Megatron-DeepSpeed, and the DeepSpeed configuration that they name, as a plan.

``megatron/arguments.py`` and ``megatron/model/gpt_model.py`` of bigscience-workshop/Megatron-DeepSpeed; what
gradients are accumulated in is DeepSpeed's ``get_data_types`` (``runtime/engine.py``): fp32 for bf16
without ZeRO, else the parameters' dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..errors import ABSENT, Origin, PlanError
from ..node import Node
from ..text import read_text
from ..yaml_nodes import parse_yaml
from .building import Building
from .megatron_model import Context, dropouts, needs, positive, sizes
from .settings import Settings
from .values import Ledger, Value, origin_of, text
from .vocabulary import tokens_of

_POSITIONS = {"absolute": "learned", "rotary": "rotary", "alibi": "alibi"}
_PADDING = 128
"""What the estimate pads a vocabulary to a multiple of (times the tensor-parallel size)."""
SGD_MOMENTUM = 0.9
"""Of ``--sgd-momentum`` where nobody says."""
_DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}


def deepspeed_plan(settings: Settings, context: Context, files: Mapping[str, Value]) -> Building:
    """The plan of a training that ``settings`` start; ``files`` are those that the script writes."""
    if context.family != "gpt":
        problem = "is not modelled yet under megatron-deepspeed; pretrain_gpt.py is"
        raise PlanError("", ABSENT, f"{context.name}.py {problem}", origin=settings.origin)
    building = Building(settings.origin)
    building.put("framework", Node("megatron-deepspeed", settings.origin))
    _model(building, settings, context)
    _layout(building, settings, context)
    _batch(building, settings)
    _precision(building, settings, _configuration(settings, context.folder, files))
    _optimizer(building, settings)
    return building


def _model(building: Building, settings: Settings, context: Context) -> None:
    put = building.put
    put("model.name", Node(context.name, settings.origin))
    put("model.family", Node("gpt", settings.origin))
    put("model.layers", needs(settings, "--num-layers"), "--num-layers")
    sizes(building, settings)
    put("model.norm", Node("layernorm", settings.origin))
    name = "--position-embedding-type"
    kind = settings.word(name) or Node("absolute", settings.origin)
    put("model.positions", Node(_POSITIONS[str(kind.value)], kind.origin), name)
    longest = "--max-position-embeddings" if settings.has("--max-position-embeddings") else "--seq-length"
    put("model.positions_max", needs(settings, longest), longest)
    glu = settings.word("--glu-activation")
    if glu is not None and glu.value != "swiglu":
        raise PlanError("--glu-activation", glu.value, "is not modelled yet; swiglu is", origin=glu.origin)
    put("model.activation", glu or Node("gelu", settings.origin), "--glu-activation")
    put("model.embedding_norm", settings.switch("--embed-layernorm"), "--embed-layernorm")
    _vocabulary(building, settings, context)
    dropouts(building, settings)


def _vocabulary(building: Building, settings: Settings, context: Context) -> None:
    padded = settings.integer("--pad-vocab-size-to")
    if context.vocabulary is not None:
        building.put("model.vocab", context.vocabulary)
        return
    if padded is not None:
        building.put("model.vocab", padded, "--pad-vocab-size-to")
        return
    node, names = tokens_of(settings, context.folder, "GPT2BPETokenizer")
    name = "--make-vocab-size-divisible-by"
    multiple = settings.integer(name)
    if multiple is not None and multiple.value != _PADDING:
        tp = positive(
            "--tensor-model-parallel-size", settings.integer("--tensor-model-parallel-size") or Node(1, settings.origin)
        )
        step = positive(name, multiple) * tp
        size = -(-positive("--vocab-size", node) // step) * step
        if size % (_PADDING * tp):
            building.note("argument-not-modelled", f"{name} {multiple.value} is not modelled yet: {_PADDING} is taken")
        node = Node(size, multiple.origin)
        names = (*names, name)
    building.put("model.vocab", node, *names)


def _layout(building: Building, settings: Settings, context: Context) -> None:
    for path, name in (
        ("layout.tp", "--tensor-model-parallel-size"),
        ("layout.pp", "--pipeline-model-parallel-size"),
    ):
        node = settings.integer(name) or Node(1, settings.origin)
        positive(name, node)
        building.put(path, node, name)
    method = settings.word("--pp-partition-method")
    if method is not None:
        building.put("pipeline.partition", method, "--pp-partition-method")
    if context.gpus is not None:
        building.put("hardware.gpus", context.gpus)
    if context.gpus_per_node is not None:
        building.put("hardware.gpus_per_node", context.gpus_per_node)


def _batch(building: Building, settings: Settings) -> None:
    building.put("batch.mbs", needs(settings, "--micro-batch-size"), "--micro-batch-size")
    gbs = settings.integer("--global-batch-size")
    if gbs is not None:
        building.put("batch.gbs", gbs, "--global-batch-size")
    name = "--seq-length" if settings.has("--seq-length") else "--encoder-seq-length"
    building.put("batch.seq", needs(settings, "--seq-length", "--encoder-seq-length"), name)


def _precision(building: Building, settings: Settings, configuration: Node | None) -> None:
    """Dtypes and ZeRO's stage; the stage is DeepSpeed's to say, the argument only repeats it."""
    fp16, bf16 = settings.has("--fp16"), settings.has("--bf16")
    dtype = "fp16" if fp16 else "bf16" if bf16 else "fp32"
    building.put("precision.dtype", Node(dtype, settings.where("--fp16", "--bf16")), "--fp16", "--bf16")
    stage, name = settings.integer("--zero-stage"), "--zero-stage"
    if configuration is not None:
        found = _at(configuration, "zero_optimization", "stage")
        stage, name = found or Node(0, configuration.origin), "--deepspeed_config"
        building.because("--zero-stage", "the DeepSpeed configuration decides")
    stage = stage or Node(1, settings.origin)
    building.put("layout.zero", stage, name)
    gradients = Node("fp32" if dtype == "bf16" and stage.value == 0 else dtype, stage.origin)
    if configuration is not None:
        accumulated = _at(configuration, "data_types", "grad_accum_dtype")
        if accumulated is not None and accumulated.value is not None:
            if accumulated.value not in _DTYPES:
                raise PlanError(
                    "data_types.grad_accum_dtype",
                    accumulated.plain(),
                    "must be fp32, fp16 or bf16",
                    origin=accumulated.origin,
                )
            gradients = accumulated
    building.put("precision.gradients", gradients)


def _optimizer(building: Building, settings: Settings) -> None:
    kind = settings.word("--optimizer") or Node("adam", settings.origin)
    if settings.has("--use-bnb-optimizer"):
        building.put("optimizer.name", Node("adam8bit", settings.where("--use-bnb-optimizer")), "--use-bnb-optimizer")
        whole = building.items["layout.zero"].value == 0
        building.put("optimizer.embeddings_32bit", Node(whole, settings.where("--use-bnb-optimizer")))
        building.because("--optimizer", "bitsandbytes' instead (--use-bnb-optimizer)")
    else:
        building.put("optimizer.name", kind, "--optimizer")
        if kind.value == "sgd":
            momentum = settings.number("--sgd-momentum") or Node(SGD_MOMENTUM, kind.origin)
            building.put("optimizer.momentum", momentum, "--sgd-momentum")
    if not settings.has("--checkpoint-activations"):
        building.because("--checkpoint-num-layers", "no effect without --checkpoint-activations")
        return
    origin = settings.where("--checkpoint-activations")
    building.put("recompute.mode", Node("full", origin), "--checkpoint-activations")
    layers = settings.integer("--checkpoint-num-layers") or Node(1, origin)
    building.put("recompute.layers", layers, "--checkpoint-num-layers")


def _configuration(settings: Settings, folder: Path, files: Mapping[str, Value]) -> Node | None:
    """The DeepSpeed configuration: a here-document of the script, or a file beside it."""
    name = "--deepspeed_config"
    raw = settings.raw(name)
    if raw is None:
        return None
    if text(raw) in files:
        return _here(files[text(raw)], settings.ledger, origin_of(raw, settings.origin))
    path = settings.word(name)
    assert path is not None
    file = folder / str(path.value)
    try:
        content = read_text(file, name)
    except PlanError as error:
        raise PlanError(name, path.plain(), error.problem, origin=path.origin) from None
    return parse_yaml(content, str(file))


def _here(content: Value, ledger: Ledger, origin: Origin) -> Node:
    """A configuration that the script itself writes, with the script's lines."""
    lines = [origin]
    for piece in content:
        lines[-1] = piece.origin if lines[-1] is origin else lines[-1]
        lines.extend([origin] * piece.text.count("\n"))
    return _relocated(parse_yaml(text(content), "configuration.json"), lines, ledger)


def _relocated(node: Node, lines: list[Origin], ledger: Ledger) -> Node:
    line = node.origin.line or 1
    origin = lines[min(line, len(lines)) - 1]
    if isinstance(node.value, dict):
        return Node({key: _relocated(item, lines, ledger) for key, item in node.value.items()}, origin)
    if isinstance(node.value, list):
        return Node([_relocated(item, lines, ledger) for item in node.value], origin)
    return Node(node.value, origin, node.text)


def _at(configuration: Node, section: str, name: str) -> Node | None:
    node = configuration.mapping.get(section)
    found = node.mapping.get(name) if node is not None else None
    if found is not None and isinstance(found.value, str) and any(ord(c) >= 0xF0000 for c in found.value):
        raise PlanError(f"{section}.{name}", ABSENT, "is not known from the script", origin=found.origin)
    return found
