"""Megatron-LM's arguments that the fields of Megatron-Bridge's configuration say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...plan.errors import Node, Origin, PlanError, guessed, is_slip
from ...plan.notes import Note
from ..launch import left_out
from ..megatron.hybrid import SPEC
from ..settings import Argument, arguments_of, nearest_argument
from . import table

FRAMEWORK = "megatron"
MASK = "skip_getting_attention_mask_from_dataset"
"""A field of ``dataset``, true by default: no mask of attention is moved to the GPU (``gpt_step.py``:
``get_batch_from_iterator``)."""


def arguments(root: Node, strict: bool, *, by_hand: bool = False) -> tuple[dict[str, Node], tuple[Note, ...]]:
    """Megatron-LM's arguments, and what is left out; a field of those written ``by_hand`` may be misspelt."""
    sections = {name: _section(root, name) for name in table.SECTIONS}
    precision = _precision(root)
    overlap = _section(root, "comm_overlap")
    known = {**arguments_of(FRAMEWORK), **table.WITHOUT_ARGUMENT}
    given: dict[str, Node] = {}
    notes: list[Note] = []
    known_otherwise = table.BY_ITSELF | table.IGNORED | table.LOW_PRECISION.keys()
    for section, fields in sections.items():
        for field, node in {
            **fields,
            **{k: v for k, v in precision.items() if k in fields or section == "model"},
        }.items():
            if field.startswith("_") or field in known_otherwise:
                continue
            value = _value(node)
            if (problem := _put(given, field, value, known)) is None:
                continue
            path = f"{'mixed_precision' if node is precision.get(field) else section}.{field}"
            if by_hand and (meant := _slip_of(field)) is not None:
                raise node.lacks(path, guessed("is no field of Megatron-Bridge's", meant))
            if section != "train":
                notes.append(left_out("argument-unknown", path, value.plain(), problem, node.origin, strict=strict))
    for field, node in overlap.items():
        if node.value is not None and not node.mapping:
            _put(given, field, _value(node), known)
        if node.value is False:  # over what model and ddp say (``CommOverlapConfig.setup``)
            given.pop(f"--{field.replace('_', '-')}", None)
    for path in table.DISTILLATION:
        if (said := said_at(root, path)) is not None:
            raise said.lacks(path, known[table.TEACHER].why)
    if LAYOUT in given:
        given[LAYOUT] = _layout(given[LAYOUT], _section(root, "model")["pipeline_model_parallel_layout"])
        given.pop("--num-virtual-stages-per-pipeline-rank", None)  # follows from the layout, and both may be said
    if given.keys() & {"--fp8-format", "--fp4-format"}:
        stored = "--fp8-param-gather" in given
        notes += _check_low_precision(sections["model"], precision, strict, stored=stored)
    given.update(_model(root, {**sections.get("model", {})}, precision))
    if GATHER in given and not given.keys() & {"--overlap-grad-reduce", "--use-megatron-fsdp"}:
        origin = given.pop(GATHER).origin
        given.pop(f"{GATHER}-with-optimizer-step", None)
        told = f"overlap_param_gather ({origin}) without overlap_grad_reduce, which Megatron-LM's own parser refuses,"
        notes.append(Note("argument-not-modelled", f"{told} changes no memory, and is timed as if it were false"))
    return given, tuple(notes)


GATHER = "--overlap-param-gather"
"""It says which bucket of parameters is waited for when, and without buckets of gradients there is one
(``DistributedDataParallel.__init__``)."""


LAYOUT = "--pipeline-model-parallel-layout"
LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def _layout(given: Node, written: Node) -> Node:
    """Stages as lists of layers' names, as the letters of an argument (``PipelineParallelLayerLayout``)."""
    stages = _value(written).value
    if not isinstance(stages, list):
        return given
    names = [[str(one.value) for one in stage.value] if isinstance(stage.value, list) else [] for stage in stages]
    for one in (one for stage in names for one in stage):
        if one not in LETTERS:
            problem = f"must be {', '.join(LETTERS)}"
            raise PlanError("model.pipeline_model_parallel_layout", one, problem, origin=written.origin)
    return Node("|".join("".join(LETTERS[one] for one in stage) for stage in names), written.origin)


def of_data(root: Node) -> dict[str, Node]:
    """What ``dataset`` says and Megatron-LM's own YAML, whose sections are read with these, says otherwise."""
    skips = _section(root, "dataset").get(MASK)
    if skips is not None and skips.value is False:
        return {}
    return {"--no-create-attention-mask-in-dataloader": Node(True, skips.origin if skips is not None else root.origin)}


def _check_low_precision(
    model: Mapping[str, Node], precision: Mapping[str, Node], strict: bool, *, stored: bool
) -> Iterator[Note]:
    """Refuses what is not modelled, and tells which of the model's fields ``mixed_precision`` overwrites
    (``update_config_with_precision_overrides``). Of parameters that are ``stored`` in 8 bits there are no copies."""
    for field, value in table.LOW_DEFAULTS.items():
        own, told = model.get(field), precision.get(field)
        if own is not None and told is not None and own.value is (not value) and told.value is value:
            problem = "is overwritten by mixed_precision: say it there"
            yield left_out("argument-unknown", f"model.{field}", own.value, problem, own.origin, strict=strict)
    for field, (value, reason) in table.LOW_PRECISION.items():
        section = "mixed_precision" if field in precision else "model"
        node = precision.get(field) or model.get(field)
        if node is not None and node.value is value and not stored:
            raise PlanError(f"{section}.{field}", value, f"is not modelled yet: {reason}", origin=node.origin)


def _section(root: Node, name: str) -> Mapping[str, Node]:
    found = root.mapping.get(name)
    return found.mapping if found is not None else {}


def check_field(section: str, field: str, node: Node) -> None:
    """Refuses a field that somebody wrote by hand and that is surely another's name, misspelt."""
    known = {**arguments_of(FRAMEWORK), **table.WITHOUT_ARGUMENT}
    otherwise = table.BY_ITSELF | table.IGNORED | table.LOW_PRECISION.keys() | table.TURNED_OFF.keys()
    if section not in table.SECTIONS or field.startswith("_") or field in otherwise:
        return
    if table.RENAMED.get(field, f"--{field.replace('_', '-')}") in known:
        return
    if (meant := _slip_of(field)) is not None:
        raise node.lacks(f"{section}.{field}", guessed("is no field of Megatron-Bridge's", meant))


def _slip_of(field: str) -> str | None:
    """The field that ``field`` surely is, misspelt: with it no run starts (OmegaConf's structures are closed)."""
    meant = nearest_argument(f"--{field.replace('_', '-')}", FRAMEWORK)
    name = meant.removeprefix("--").replace("-", "_") if meant is not None else field
    return name if name != field and is_slip(field, name) else None


def _put(given: dict[str, Node], field: str, value: Node, known: Mapping[str, Argument]) -> str | None:
    """Adds the argument that ``field`` is, unless it says nothing; else why it is left out."""
    if field in table.TURNED_OFF:
        if value.value is False:
            given.update({name: Node(True, value.origin) for name in table.TURNED_OFF[field] if name in known})
        return None
    if value.value is None or value.value is False:
        return None
    name = table.RENAMED.get(field, f"--{field.replace('_', '-')}")
    argument = known.get(name)
    if argument is None:
        return "has no argument of Megatron-LM, and is not read" if value.value else None
    if isinstance(value.value, dict):
        return "is an object, and is not read"
    if value.value in ("", []) or value.value == table.SAYS_NOTHING.get(field):
        return None
    given[name] = (
        Node(str(value.plain()), value.origin) if isinstance(value.value, list) and not argument.count else value
    )
    return None


_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "uint8": "fp8"}


def _value(node: Node) -> Node:
    """``node``, or what an object that was written by its name says: a dtype, an enumeration's member, a tuple."""
    if isinstance(node.value, list):
        return Node([_value(one) for one in node.value], node.origin)
    target = node.mapping.get("_target_")
    if target is None:
        return node
    path = str(target.value)
    if path.startswith("torch.") and path.removeprefix("torch.") in _DTYPES:
        return Node(_DTYPES[path.removeprefix("torch.")], node.origin)
    if "_name_" in node.mapping:
        return Node(str(node.mapping["_name_"].value), node.origin)
    return node


def _precision(root: Node) -> Mapping[str, Node]:
    """``mixed_precision`` as fields, which the model's, the optimizer's and DDP's follow (``MixedPrecisionConfig``)."""
    node = root.mapping.get("mixed_precision")
    if node is None or node.value is None:
        return {}
    if node.mapping:
        return {**_nodes(table.UNSAID, node.origin), **{k: v for k, v in node.mapping.items() if not k.startswith("_")}}
    fields = table.PRECISIONS.get(str(node.value).replace("-", "_"))
    if fields is None:
        raise node.wrong("mixed_precision", f"must be one of {', '.join(table.PRECISIONS)}")
    return _nodes({**table.UNSAID, **fields}, node.origin)


def _nodes(fields: Mapping[str, object], origin: Origin) -> dict[str, Node]:
    return {field: Node(value, origin) for field, value in fields.items() if isinstance(value, (bool, int, str))}


def _model(root: Node, model: Mapping[str, Node], precision: Mapping[str, Node]) -> Iterator[tuple[str, Node]]:
    """Arguments that several fields say together."""
    yield from _dtype(root, model, precision)
    yield from _activation(model)
    groups, heads = model.get("num_query_groups"), model.get("num_attention_heads")
    if groups is not None and groups.value is not None and (heads is None or groups.value != heads.value):
        yield "--group-query-attention", Node(True, groups.origin)
        yield "--num-query-groups", groups
    if (length := _length(root)) is not None:
        yield "--seq-length", length
        yield "--max-position-embeddings", length
    yield from _vocabulary(model)
    yield from _hybrid(model)
    offloads, layers = model.get("cpu_offloading"), model.get("cpu_offloading_num_layers")
    if offloads is not None and offloads.value is True and layers is not None and layers.value:
        yield "--cpu-offloading-num-layers", layers
    spec = model.get("transformer_layer_spec")
    target = spec.mapping.get("_target_") if spec is not None else None
    if spec is not None and target is not None and "local" in str(target.value).rpartition(".")[2]:
        yield "--transformer-impl", Node("local", spec.origin)


def _length(root: Node) -> Node | None:
    """Tokens of a sequence, which the model and the data must say alike (``training/config.py``:
    ``ConfigContainer.validate`` asserts ``model.seq_length == data_seq_length``)."""
    said = {path: node for path in table.LENGTHS if (node := said_at(root, path)) is not None}
    of_model = said.pop(table.LENGTHS[-1], None)
    path, of_data = next(iter(said.items()), ("", None))
    if of_model is not None and of_data is not None and of_model.value != of_data.value:
        raise of_data.wrong(
            path,
            f"must be {table.LENGTHS[-1]}, {of_model.plain()} ({of_model.origin}): "
            "Megatron-Bridge asserts that they match",
        )
    return of_data or of_model


def said_at(root: Node, path: str) -> Node | None:
    """What ``path`` (``section.field``) has, unless it is null."""
    section, _, field = path.partition(".")
    node = _section(root, section).get(field)
    return node if node is not None and node.value is not None else None


def _hybrid(model: Mapping[str, Node]) -> Iterator[tuple[str, Node]]:
    """A hybrid has the specification of layers that its provider makes, of Transformer Engine's."""
    pattern = table.pattern_of(model)
    if pattern is None:
        return
    yield "--spec", Node([Node(word, pattern.origin) for word in SPEC], pattern.origin)


def _dtype(root: Node, model: Mapping[str, Node], precision: Mapping[str, Node]) -> Iterator[tuple[str, Node]]:
    for name in ("bf16", "fp16"):
        node = precision.get(name) or model.get(name)
        if node is not None and node.value is True:
            yield f"--{name}", node
            reduced = precision.get("grad_reduce_in_fp32") or _section(root, "ddp").get("grad_reduce_in_fp32")
            if reduced is not None and reduced.value is True:
                yield "--accumulate-allreduce-grads-in-fp32", reduced
            elif name == "bf16":
                yield "--grad-reduce-in-bf16", Node(True, reduced.origin if reduced is not None else node.origin)
            return


def _activation(model: Mapping[str, Node]) -> Iterator[tuple[str, Node]]:
    node, gate = model.get("activation_func"), model.get("gated_linear_unit")
    target = node.mapping.get("_target_") if node is not None else None
    name = str(target.value).rpartition(".")[2] if target is not None else "gelu"
    gated = gate is not None and gate.value is True
    where = next((one.origin for one in (node, gate) if one is not None), Origin(""))
    names = table.ACTIVATIONS.get((name, gated))
    if names is None:
        shown = f"{name}{', gated' if gated else ''}"
        known = "silu, gated; quick_gelu, gated; gelu; squared_relu"
        raise PlanError("model.activation_func", shown, f"is not modelled yet; these are: {known}", origin=where)
    for one in names:
        yield one, Node(True, where)


def _vocabulary(model: Mapping[str, Node]) -> Iterator[tuple[str, Node]]:
    """``vocab_size`` as it is, or padded (``calculate_padded_vocab_size``)."""
    size = model.get("vocab_size")
    if size is None or not isinstance(size.value, int):
        return
    multiple = model.get("make_vocab_size_divisible_by")
    pads = model.get("should_pad_vocab")
    if pads is None or pads.value is not True:
        yield "--padded-vocab-size", size
        return
    yield "--tokenizer-type", Node("NullTokenizer", size.origin)
    yield "--vocab-size", size
    if multiple is not None:
        yield "--make-vocab-size-divisible-by", multiple
