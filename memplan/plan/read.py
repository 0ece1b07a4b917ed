"""Reading a plan: a file, a built-in example, standard input or nothing, flags over it, and a record that one names.

The record says where tokens went in a run: the tokens of every expert, layer by layer (``--experts-imbalance FILE``).

A JSON file is a list with a list for each layer that has experts, or a mapping of such layers' numbers, from 0, to
lists. A CSV file has a line for each of them, with a number for each expert, and may have a heading. Counts may be of
any number of steps: only their shares matter.

Parameters of dtype ``saved``: in which the checkpoint of the model was saved (transformers' ``modeling_utils.py``,
``_get_dtype``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..frameworks import REPLICATING, ROOMS, SHARDING, framework
from ..values import dataclass, pattern, replace
from .assumed_releases import notes_of_releases
from .checks import check_layers, listed
from .errors import ABSENT, Node, Origin, PlanError, scalar, together, wrong_at
from .fields import MODEL, Kind, PlanField, by_flag
from .hub import check_no_address, is_repository, twin, without_address
from .implied import has_recipe, nested, with_counted_gpus, with_implied, with_packed_weights
from .library import examples, learned_models, model_specs
from .models import HOLDS_WEIGHTS, WEIGHTS, complete_model, saved_dtype
from .normalise import field_value, normalised
from .notes import FRAMEWORK_CHOSEN, Note, head_assumed, notes_of, passed_over, says_choice, text_part
from .plan import Plan
from .spellings import gpus_called, gpus_named, with_optimizer
from .spoken import Spoken
from .text import STANDARD_INPUT, folder_of, is_there, parse_yaml, path_of, read_bytes, read_standard_input, read_text
from .traced_spec import NO_LENGTH, STAND_IN, TracedSpec, known_from_traces, traced_spec
from .validation import validated_plan

SAVED = "saved"
_PATHS = ("precision.dtype", "precision.parameters", "fsdp.parameters", "fsdp.reduce")
"""Fields of a plan that may say so."""
TAKEN = (
    "parameters are assumed to be fp32; transformers 5 loads a checkpoint in the dtype that it was saved in: if "
    "the model was loaded so, give --autocast-parameters bf16"
)
"""Where no dtype of the checkpoint is known, under autocast."""


def with_saved_dtype(plan: Node, folder: Path) -> tuple[Node, tuple[Note, ...]]:
    """``plan`` with a dtype in place of ``saved``: the checkpoint's, or fp32 where nobody knows that, or where
    GradScaler would stop at gradients of that dtype."""
    asked = {path: node for path in _PATHS if (node := plan.at(path)) is not None and node.value == SAVED}
    if not asked:
        return plan, ()
    quantised, autocast, adapters = map(plan.at, ("quantisation.kind", "precision.autocast", "lora.rank"))
    is_mixed, model = autocast is not None and autocast.value is True, plan.mapping.get("model")
    known = saved_dtype(model, folder) if model is not None else None
    dtype, note = "fp32", TAKEN if is_mixed else TAKEN.replace("--autocast-parameters", "--dtype")
    if quantised is not None and quantised.value not in (None, "none"):
        note = ""
    elif known is not None:
        dtype, source = known
        mixed = plan.at("precision.dtype")
        scaled = is_mixed and mixed is not None and mixed.value == "fp16" and dtype != "fp32"
        flag = "--autocast-parameters" if is_mixed else "--dtype"
        note = f"parameters are {dtype}, as the checkpoint was saved ({source}), which is how transformers 5 loads a "
        note += f"model where nobody names a dtype; {flag} says another"
        if scaled and not (dtype == "fp16" and adapters is not None and adapters.value):
            note = (
                f"parameters are assumed to be fp32: the checkpoint was saved in {dtype} ({source}), and transformers "
            )
            note += f"5 loads it so where nobody names a dtype, but GradScaler stops at gradients in {dtype}"
            dtype = "fp32"
    for path, node in asked.items():
        without = path == "precision.parameters" and (known is None or not note or not is_mixed)
        plan = plan.put(path, Node(None if without else dtype, node.origin))
    return plan, (Note("loaded-dtype", note),) if note else ()


# -- read ----------------------------------------------------------------------------------------------


FIELD = "experts.imbalance"
LARGEST = 16 << 20
"""Bytes of the largest record: some hundred layers of a thousand experts."""

Counts = Sequence[Sequence[float]]
"""By layer that has experts, then by expert."""


def with_routing(plan: Plan, folder: Path) -> Plan:
    """``plan`` with the record that its imbalance names, if it does, as a factor of each layer: the tokens of one
    expert-parallel rank against the mean over ranks. It is the rank that has most tokens in all layers together."""
    name, model, ep = plan.experts.imbalance, plan.model, plan.layout.ep
    if not name.endswith((".csv", ".json")) or not model.experts or model.experts % ep:
        return plan
    path = path_of(name, folder)
    numbers = [layer for layer in range(model.layers) if model.has_experts(layer)]
    counts = _checked(_read(path, numbers), len(numbers), model.experts, path)
    each = model.experts // ep
    shares = [[ep * sum(layer[at : at + each]) / sum(layer) for at in range(0, len(layer), each)] for layer in counts]
    most = max(range(ep), key=lambda rank: sum(layer[rank] for layer in shares))
    factors = ",".join(f"{max(layer[most], 0.01):.2f}" for layer in shares)
    return plan.model_copy(update={"experts": plan.experts.model_copy(update={"imbalance": factors})})


def _read(path: Path, numbers: Sequence[int]) -> object:
    text = read_bytes(path, FIELD, largest=LARGEST, what="a routing record").decode("utf-8", "replace")
    if path.suffix == ".csv":
        lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
        return [[_number(cell) for cell in line] for line in lines if any(_number(cell) is not None for cell in line)]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise _wrong(path, "is not JSON") from None
    if isinstance(found, dict):
        missing = [layer for layer in numbers if str(layer) not in found]
        if missing:
            raise _wrong(path, f"has no layer {missing[0]}, which has experts")
        return [found[str(layer)] for layer in numbers]
    return found


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _checked(found: object, layers: int, experts: int, path: Path) -> Counts:
    if not isinstance(found, list) or len(found) != layers:
        rows = f"{len(found)} rows" if isinstance(found, list) else "no rows"
        raise _wrong(path, f"has {rows}; one for each of the {layers} layers with experts is wanted")
    for at, row in enumerate(found):
        if not isinstance(row, list) or len(row) != experts or not all(map(_is_count, row)) or not 0 < sum(row) < 1e18:
            raise _wrong(path, f"row {at}: must have {experts} numbers of at least 0, one for each expert, not all 0")
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


def _wrong(path: Path, problem: str) -> PlanError:
    return PlanError(FIELD, path.name, problem, origin=Origin(str(path)))


# -- read ----------------------------------------------------------------------------------------------


COMMAND_LINE = Origin("command line")
MOST_EXTENDED = 8
"""Plans that extend one another in a chain."""

_OF_ONE_VALUE = (Kind.INTEGER, Kind.SIZE, Kind.CHOICE, Kind.SWITCH)
_THOUSANDS = pattern(r"[0-9]{1,3}(?:,[0-9]{3})+")

Flags = Mapping[str, "str | tuple[str, ...]"]
"""Values of flags by name without hyphens: ``{"tp": "4", "env": ("NAME=VALUE",)}``."""


@dataclass(frozen=True, slots=True)
class Source:
    """A plan as written, before flags: a mapping of sections. ``folder`` is where its relative paths start."""

    plan: Node
    folder: Path
    notes: tuple[Note, ...] = ()

    @property
    def only_model(self) -> Node | None:
        """Its model, where it says nothing else."""
        base = self.plan.at("model.base")
        alone = self.plan.mapping.keys() == {"model"} and self.plan.mapping["model"].mapping.keys() == {"base"}
        return base if alone else None


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """A plan, where each of its fields came from, and what its reader should be told."""

    plan: Plan
    origins: Mapping[str, Origin]
    warnings: tuple[Note, ...] = ()
    assumptions: tuple[str, ...] = ()
    """Of how it was read, beside those of the estimate."""
    spoken: Spoken | None = None
    """What the file that it was read from calls its fields."""

    @property
    def chosen_framework(self) -> str | None:
        """Why the plan has its framework, where nobody named one."""
        return next((note.message for note in self.warnings if says_choice(note.code)), None)

    @property
    def names_framework(self) -> bool:
        """Somebody named it, or left no doubt about it."""
        return not self.chosen_framework

    def choosing(self, name: str, why: str) -> ReadPlan:
        """The plan with framework ``name``, which nobody named either, and ``why`` in place of the reason so far."""
        said = Note(FRAMEWORK_CHOSEN, why)
        notes = (said, *self.warnings) if self.names_framework else self.warnings
        notes = tuple(said if says_choice(note.code) else note for note in notes)
        return replace(self, plan=self.plan.model_copy(update={"framework": name}), warnings=notes)

    def located(self, error: PlanError) -> PlanError:
        """``error``, raised for the plan, with where its field came from, and why the plan has its framework where
        nobody named one."""
        error = error.located(self.origins)
        error = self.spoken.of(error) if self.spoken is not None else error
        if self.names_framework or error.field == "model.family":  # which says where there is a recipe
            return error
        if error.field != "framework" and _is_possible(self.plan):  # and lacks something else, as a speed of its GPU
            return error
        others = self._others()
        hint = f"; {listed(others)} takes it with --framework" if others else ""
        return error.but(problem=f"{error.problem} ({self.chosen_framework}{hint})")

    def _others(self) -> list[str]:
        """Frameworks that would not refuse the plan."""
        others = [name for name in ROOMS if name != self.plan.framework and has_recipe(self.plan.model.family, name)]
        return [name for name in others if _is_possible(self.plan.model_copy(update={"framework": name}))]


def _is_possible(plan: Plan) -> bool:
    """Whether nothing is wrong with ``plan`` by itself."""
    from .resolve import resolve

    with suppress(PlanError):
        resolved = resolve(plan)
        if isinstance(resolved.model, TracedSpec):
            framework(resolved.framework).running.check_learnt(resolved)
        return True
    return False


def read_plan(source: str | None, flags: Flags | None = None, *, traced: bool = False) -> ReadPlan:
    """The plan in ``source`` (a path, a built-in example's name, ``-`` or nothing) with ``flags`` over it. ``traced``:
    its model may be a configuration without a recipe (``TracedSpec``)."""
    return build_plan(load_source(source), flags or {}, traced=traced)


def load_source(source: str | None) -> Source:
    """The plan in ``source`` as written, and in the plans that it extends. A model's name, configuration or folder is a
    plan that says no more."""
    if source is None:
        return Source(Node({}, COMMAND_LINE), Path())
    source = without_address(source)
    check_no_address(source, Node(source, COMMAND_LINE))
    if source == "-":
        text, name, folder = read_standard_input(), STANDARD_INPUT, Path()
    elif _is_model(source):
        return _of_model(source)
    else:
        path = _path_of(source)
        text, name, folder = read_text(path), _name_of(path), folder_of(path)
    written = parse_yaml(text, name)
    if _is_device_map(written):
        file = "FILE, in which you saved it," if source == "-" else source
        given = f"--framework device-map --device-map {file}"
        raise wrong_at(name, f"is a device_map, which places a model's modules: {given}, with --model NAME")
    if written.mapping and written.mapping.keys() & {"model_type", "family"} and "model" not in written.mapping:
        return _of_model(source)
    return _extended(_written(written, folder), 1)


def _written(plan: Node, folder: Path) -> Source:
    """What stands in a file, with flat keys in their sections."""
    notes: tuple[Note, ...] = ()
    if isinstance(plan.value, dict):
        plan, notes = nested(plan)
        plan = with_counted_gpus(plan)
    return Source(normalised(plan), folder, notes)


def build_plan(source: Source, flags: Flags, variant: Flags | None = None, *, traced: bool = False) -> ReadPlan:
    """``source`` with ``flags`` over it, and over both the ``variant`` of a comparison."""
    here = Path() if "model" in flags or "model" in (variant or {}) else source.folder
    over = passed_over(source.only_model, flags.get("model"))
    wrong: list[PlanError] = []
    node = _with_flags(source.plan, flags, "--", wrong)
    node = _with_flags(node, variant or {}, "--vary ", wrong)
    written, packed = with_packed_weights(with_optimizer(node))
    written, loaded = with_saved_dtype(written, here)
    warnings: tuple[Note, ...] = ()
    model = written.mapping.get("model")
    named = model if model is not None and isinstance(model.value, dict) else None
    if named is not None:
        try:
            spec, warnings = complete_model(named, here)
        except PlanError as error:
            try:
                if not traced:
                    raise known_from_traces(error, named) from None
                only_traced = traced_spec(named, here, error)
            except PlanError as refused:
                raise together([refused, *wrong, *_wrong_in(written.without("model"))]) from None
            return _without_recipe(written, only_traced, (*over, *loaded))
        node = written.with_items({"model": spec})
    if wrong:
        raise together([*wrong, *_wrong_in(node)])
    node, chosen = with_implied(node if named is not None else written)
    said = {*flags, *(variant or {})}
    plan = with_routing(validated_plan(node), Path() if "experts-imbalance" in said else source.folder)
    if "fp8-format" in said and plan.precision.low is None and plan.precision.fp8_format == "hybrid":
        # The default, which nothing tells from one that was not said once the plan is read; another is refused there.
        raise wrong_at("--fp8-format", "needs --fp8, how operands are scaled: delayed is Megatron-LM's own default")
    origins = dict(node.origins())
    if traced and named is not None:
        try:
            check_layers(plan)
        except PlanError as error:
            known = None
            with suppress(PlanError):
                known = traced_spec(named, here, error.located(origins))
            if known is not None:
                return _without_recipe(written, known, (*over, *loaded))
    notes = (*over, *source.notes, *packed, *loaded, *chosen, *warnings, *notes_of(plan), *notes_of_releases(plan))
    return ReadPlan(plan, origins, notes)


def _wrong_in(plan: Node) -> Iterator[PlanError]:
    """What else is wrong in ``plan``, of which something is left out already."""
    try:
        validated_plan(with_implied(plan)[0])
    except PlanError as error:
        yield from (one for one in error.errors if one.value is not ABSENT)


def _without_recipe(written: Node, spec: TracedSpec, notes: tuple[Note, ...]) -> ReadPlan:
    """The plan of an architecture that only traces know, with ``notes`` on how its model was named and loaded."""
    stand_in = complete_model(Node({"base": Node(STAND_IN, COMMAND_LINE)}, COMMAND_LINE), Path()).spec
    node, chosen = with_implied(written.with_items({"model": stand_in}))
    plan = validated_plan(node)
    if plan.batch.seq is None and spec.positions_max == NO_LENGTH:
        missing = "is missing, and the model's configuration names no maximum sequence length (--seq N)"
        problem = f"{missing}; there is no recipe of it: {spec.reason.partition('; known are')[0]}"
        raise PlanError("batch.seq", ABSENT, problem, origin=Origin(spec.source))
    if plan.batch.seq not in (None, spec.patches) and spec.patches is not None:
        problem = f"must be {spec.patches}: patches of an image that {spec.name} reads, and the token before them"
        raise PlanError("batch.seq", plan.batch.seq, problem, origin=dict(node.origins()).get("batch.seq"))
    plan = plan.model_copy(update={"model": spec})
    told = (text_part(spec.name),) if spec.is_text_part else ()
    if spec.small_head:
        told = (*told, head_assumed(spec.source, spec.small_head))
    origins = {path: origin for path, origin in node.origins() if path.partition(".")[0] != "model"}
    origins |= {path: origin for path, origin in written.origins() if path.partition(".")[0] == "model"}
    base = written.mapping["model"].mapping.get("base")
    if base is not None and base.origin is not None:
        origins["model"] = base.origin
    read = ReadPlan(plan, origins, (*chosen, *notes, *told, *notes_of(plan), *notes_of_releases(plan)))
    return _shardable(read)


def _shardable(read: ReadPlan) -> ReadPlan:
    """``read``, under ``REPLICATING`` where nobody named a framework and what was learnt of its model is not known
    under ``SHARDING``."""
    named = read.names_framework or any(path.startswith(f"{SHARDING}.") for path in read.origins)
    if named or read.plan.framework != SHARDING:
        return read
    from .resolve import resolve

    try:
        framework(SHARDING).running.check_served(resolve(read.plan))
        return read
    except PlanError as error:
        if error.field != "framework" or not _is_possible(read.plan.model_copy(update={"framework": REPLICATING})):
            return read
        why = error.problem.partition(": ")[2] or error.problem
    said = str(read.chosen_framework).replace(SHARDING, REPLICATING, 1)
    return read.choosing(REPLICATING, f"{said}; not {SHARDING}: {why}")


def _of_model(source: str) -> Source:
    return Source(Node({"model": Node({"base": Node(source, COMMAND_LINE)}, COMMAND_LINE)}, COMMAND_LINE), Path())


def _is_model(source: str) -> bool:
    """Whether ``source`` names a model, and neither a built-in example nor a file: a built-in one, one of the Hub's
    cache, or a folder with a configuration."""
    path = path_of(source)
    if source in examples() or is_there(path):
        return is_there(path / "config.json")
    node = Node(source, COMMAND_LINE)
    return source in model_specs() or is_repository(source) or twin(source, node) is not None


def _path_of(source: str) -> Path:
    if source in examples():
        return examples()[source]
    path = path_of(source)
    if path.suffix == ".py" and is_there(path):
        raise wrong_at(
            source,
            "is Python, which is not run: give what TrainingArguments.to_json_string() writes, or the job in flags, as "
            "--model llama-3-8b --mbs 1 --seq 4096",
        )
    if path.suffix.lower() in WEIGHTS and is_there(path):
        raise wrong_at(source, HOLDS_WEIGHTS)
    if "/" in source or path.suffix or is_there(path):
        return path
    built_in = ", ".join(examples())
    problem = f"is neither a file nor a built-in example ({built_in})"
    if gpus_called(source) or gpus_named(source):
        problem = f"is neither a file nor a built-in example; a GPU is --gpu {source}"
    elif _PART_OF_GPU.fullmatch(source):
        problem = 'is neither a file nor a built-in example; names with spaces need quotes: --gpu "A100 80GB"'
    raise PlanError("plan", source, problem, origin=COMMAND_LINE, known=examples())


_PART_OF_GPU = pattern(r"(?i)[0-9]+\s?gi?b?|sxm[0-9]?|pcie|nvl|hbm[0-9]e?|super|ti|ada")
"""Second words of names of GPUs."""


def _name_of(path: Path) -> str:
    """What errors call the file: a built-in example by its name."""
    return f"example {path.stem}" if examples().get(path.stem) == path else str(path)


def _is_device_map(written: Node) -> bool:
    """Whether ``written`` names modules, and the device of each, as Accelerate's ``device_map`` does."""
    devices = [node.value for node in written.mapping.values()]
    layers = any(re.search(r"\.[0-9]+$", name) for name in written.mapping)
    return layers and all(type(one) is int or _DEVICE.fullmatch(str(one)) is not None for one in devices)


_DEVICE = pattern(r"cpu|disk|mps|cuda(?::[0-9]+)?")


def _extended(source: Source, depth: int) -> Source:
    extends = source.plan.mapping.get("extends")
    if extends is None:
        return source
    if depth > MOST_EXTENDED:
        raise extends.wrong("extends", f"makes a chain of more than {MOST_EXTENDED} plans; does a plan extend itself?")
    if not isinstance(extends.value, str) or not extends.value or extends.value == "-":
        raise extends.wrong("extends", "must be a path to a plan or the name of a built-in example", known=examples())
    name = extends.value
    path = examples().get(name, path_of(name, source.folder))
    try:
        text = read_text(path)
    except PlanError as error:
        raise PlanError("extends", name, error.problem, origin=extends.origin, known=examples()) from None
    base = _extended(_written(parse_yaml(text, _name_of(path)), folder_of(path)), depth + 1)
    below = _with_model_from(base.plan, base.folder)
    return Source(_over(below, source.plan.without("extends")), source.folder, (*base.notes, *source.notes))


def _with_model_from(plan: Node, folder: Path) -> Node:
    """``plan`` with a relative path to its model made to start from its own ``folder``."""
    base = plan.at("model.base")
    if base is None or not isinstance(base.value, str):
        return plan
    if base.value in model_specs() or base.value in learned_models():
        return plan
    place = folder.resolve() / base.value
    if not is_there(place) and twin(base.value, base) is not None:
        return plan
    return plan.put("model.base", Node(str(place), base.origin))


def _over(below: Node, above: Node) -> Node:
    """``above`` laid over ``below``: sections are merged field by field, other values replaced."""
    items = dict(below.mapping)
    for name, node in above.mapping.items():
        old = items.get(name)
        replaced = old is None or not isinstance(node.value, dict) or (name == "model" and "base" in node.mapping)
        if old is None or replaced or name == "device_map":
            items[name] = _still_classifies(node, old) if name == "model" else node
        else:
            items[name] = Node({**old.mapping, **node.mapping}, node.origin)
    return Node(items, above.origin)


def _still_classifies(model: Node, old: Node | None) -> Node:
    """``model`` in the place of ``old``, with as many labels: they are no size of either."""
    labels = old.mapping.get("labels") if old is not None and isinstance(old.value, dict) else None
    if labels is None or not isinstance(model.value, dict) or "labels" in model.mapping:
        return model
    return model.with_items({"labels": labels})


def _with_flags(plan: Node, flags: Flags, prefix: str, wrong: list[PlanError]) -> Node:
    """``plan`` with ``flags`` over it, but for values that cannot be, which go to ``wrong``."""
    for name, value in sorted(flags.items(), key=lambda flag: flag[0] != "model"):
        field = by_flag().get(name)
        if field is None:
            problem = f"is not a field that can vary; the fields are {', '.join(by_flag())}"
            raise PlanError("", ABSENT, f"{name} {problem}", origin=Origin(prefix.strip()), known=())
        try:
            plan = _over(plan, _placed(field, _flag_value(field, value, Origin(prefix + name)), plan.origin))
        except PlanError as error:
            wrong.append(error)
    return plan


def _placed(field: PlanField, value: Node, root: Origin) -> Node:
    """``value`` as a plan that holds it in its place and nothing else."""
    if field is MODEL:
        return Node({"model": Node({"base": value}, value.origin)}, root)
    if field.section:
        value = Node({field.name: value}, value.origin)
    return Node({field.section or field.name: value}, root)


def _flag_value(field: PlanField, value: str | tuple[str, ...], origin: Origin) -> Node:
    if field.kind is Kind.VARIABLES:
        pairs = (value,) if isinstance(value, str) else value
        if field.path == "versions":
            pairs = tuple(part.strip() for pair in pairs for part in pair.split(",") if part.strip())
        return Node(dict(_variable(field, pair, origin) for pair in pairs), origin)
    text = value if isinstance(value, str) else ",".join(value)
    one = field.kind in _OF_ONE_VALUE or field.path in ("hardware.gpu", "framework", "optimizer.name")
    if one and "," in text and "(" not in text and not _THOUSANDS.fullmatch(text):
        name = origin.source.rpartition("-")[2] if origin.source.startswith("--vary") else origin.source[2:]
        problem = f"takes one value; several side by side are --vary {name}={text.replace(' ', '')}"
        raise PlanError(field.path, text, problem, origin=origin)
    if field.kind is Kind.MODEL:
        return Node(text, origin)
    if field.kind is Kind.DEVICE_MAP:
        return _device_map(field, text, origin)
    return field_value(field, scalar(text, origin))


def _variable(field: PlanField, pair: str, origin: Origin) -> tuple[str, Node]:
    name, equals, value = pair.partition("=")
    if not equals or not name:
        raise PlanError(field.path, pair, "must be NAME=VALUE", origin=origin)
    return name, Node(value, origin)


def _device_map(field: PlanField, text: str, origin: Origin) -> Node:
    """A device map written out, ``{0: 0-11, 1: 12-23}``, or in the file of that name."""
    if text in ("auto", "balanced", "balanced_low_0", "sequential"):
        problem = (
            "is computed by Accelerate as it loads the model: write it out, as {0: 0-15, 1: 16-31}; --framework "
            "device-map alone takes equal shares, and suggest-partition cuts them for training"
        )
        raise PlanError("device_map", text, problem, origin=origin)
    if text.lstrip().startswith("{"):
        node = parse_yaml(text, origin.source, line=False)
    elif not text:
        return Node(None, origin)
    else:
        node = parse_yaml(read_text(path_of(text), field.path), text)
    return field_value(field, node)
