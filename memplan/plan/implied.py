"""What a plan leaves out and other fields of it decide: the framework, and the dtype on GPUs without bf16.

Keys at the top of a plan's file that belong into a section: ``tp: 4`` is ``layout: {tp: 4}``.

They are called as flags are (``mbs``), or as other tools call a flag (``micro_batch_size``). What may only be meant is
refused, with the key that says it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..families import ROOMS as FAMILIES, family
from ..frameworks import BY_ITSELF, IMPLIED_BY, OF_SIZE_ALONE, RECIPES, REPLICATING, framework
from .errors import Node, Origin, PlanError, one_line, together
from .fields import by_flag, plan_fields, sections
from .hub import in_four_bits
from .notes import FRAMEWORK_CHOSEN, Note
from .section import FrameworkSection
from .spellings import gpus_named

if TYPE_CHECKING:
    from .plan import Plan

IMPLIED = Origin("what else the plan says")
"""Where a field came from that nobody named."""


def with_implied(plan: Node) -> tuple[Node, tuple[Note, ...]]:
    """``plan`` with a framework and a dtype, and what to tell where they were chosen here."""
    plan, chosen = with_framework(plan)
    plan, dtype = with_dtype(plan)
    return plan, (*chosen, *dtype)


def with_packed_weights(plan: Node) -> tuple[Node, tuple[Note, ...]]:
    """``plan`` of a model that a repository holds in 4 bits: that model, quantised as its weights are."""
    base = plan.at("model.base")
    name = base.value if base is not None else None
    if base is None or not isinstance(name, str) or not name.endswith("-bnb-4bit"):
        return plan, ()
    whole = in_four_bits(name, base)
    if whole is None:
        return plan, ()
    said = plan.mapping.get("quantisation", Node({}, base.origin))
    packed = {"kind": Node("nf4", base.origin), "double": Node(True, base.origin), **said.mapping}
    note = f"{one_line(name)} holds {whole} in 4 bits: NF4, doubly quantised (--quantisation and --double-quantisation)"
    packed_plan = plan.put("model.base", Node(whole, base.origin)).put("quantisation", Node(packed, said.origin))
    return packed_plan, (Note("packed-weights", note),)


def with_framework(plan: Node) -> tuple[Node, tuple[Note, ...]]:
    """``plan`` with a framework, and what to tell where that was chosen here; none is told for one process on one
    GPU."""
    if "framework" in plan.mapping:
        return plan, ()
    name, because, origin = _meant(plan)
    if origin is IMPLIED and because and (stage := _stage(plan, name)):
        plan = plan.put("layout.zero", Node(stage, IMPLIED))
        because += f", with the {framework(name).zero_words(stage)} (--zero {stage})"
    note = Note(FRAMEWORK_CHOSEN, f"no framework was named: {name}, {because}")
    return plan.with_items({"framework": Node(name, origin)}), (note,) if because else ()


def _stage(plan: Node, name: str) -> int:
    """The stage of ZeRO of a plan that says none, where its model alone decides that it is the framework ``name``'s."""
    if plan.at("layout.zero") is not None or not any(_said(plan, path) for path in OF_SIZE_ALONE):
        return 0
    optimizer = plan.at("optimizer.name")
    default = sections()["optimizer"].model_fields["name"].default
    return framework(name).zero_where_chosen(str(default if optimizer is None else optimizer.value))


def _meant(plan: Node) -> tuple[str, str, Origin]:
    """The framework, why, which is empty for one process on one GPU, and where what decides it was written."""
    for name, groups in IMPLIED_BY:
        reasons = [next((said for path in paths if (said := _said(plan, path)) is not None), None) for paths in groups]
        found = [one for one in reasons if one is not None]
        if len(found) == len(groups) and not (found[1:] and _lacks_recipe(plan, name)):
            alone = _alone(plan, name) if groups == (OF_SIZE_ALONE,) or name in RECIPES else None
            because = f"because of {' and '.join(text for text, _ in found)}"
            if groups == (OF_SIZE_ALONE,) and _lacks_recipe(plan, name) and not _lacks_recipe(plan, REPLICATING):
                return REPLICATING, f"{because}: {name} has no recipe of {_family(plan)}", found[0][1]
            return alone or (name, because, found[0][1])
    return _alone(plan, BY_ITSELF) or (BY_ITSELF, "", IMPLIED)


def meant(plan: Plan) -> str:
    """The framework that a plan of the same words would have, if it named none."""
    said: dict[str, Node] = {}
    for path in plan_fields():
        section, _, name = path.rpartition(".")
        own = getattr(plan, section, None) if section else plan
        if own is not None and name in own.model_fields_set:
            items = {name: Node(getattr(own, name), IMPLIED)}
            said |= {section: said.get(section, Node({}, IMPLIED)).with_items(items)} if section else items
    model = Node({"family": Node(plan.model.family, IMPLIED)}, IMPLIED)
    return _meant(Node({**said, "model": model}, IMPLIED))[0]


def _family(plan: Node) -> str:
    """The family of the model; empty where it is none that is known."""
    named = plan.at("model.family")
    return str(named.value) if named is not None and isinstance(named.value, str) and named.value in FAMILIES else ""


def _lacks_recipe(plan: Node, name: str) -> bool:
    """The framework ``name`` has no recipe of the model: another is meant that has, of those that share its fields."""
    own = _family(plan)
    return bool(own) and not has_recipe(own, name)


def _alone(plan: Node, name: str) -> tuple[str, str, Origin] | None:
    """The one framework that has a recipe of the model, where ``name`` has none, and none runs transformers' code."""
    own = _family(plan)
    if not own or has_recipe(own, name) or has_recipe(own, BY_ITSELF):
        return None
    others = [one for one in RECIPES if has_recipe(own, one)]
    if len(others) != 1 or not _reads(others[0], plan):
        return None
    return others[0], f"which has a recipe of {own}", IMPLIED


def has_recipe(own: str, name: str) -> bool:
    """Whether the framework ``name`` has a recipe of the layers of the family ``own``."""
    return getattr(family(own), RECIPES.get(name, "covers")) is not None


def _reads(name: str, plan: Node) -> bool:
    """Whether the framework ``name`` reads all that ``plan`` has sections of."""
    supports, autocast = framework(name).supports, plan.at("precision.autocast")
    apart = {one for one, kind in sections().items() if issubclass(kind, FrameworkSection)}
    if autocast is not None and autocast.value is True and not supports.autocast:
        return False
    return not {one for one in apart if one in plan.mapping and plan.mapping[one].mapping} - {*supports.sections}


def with_dtype(plan: Node) -> tuple[Node, tuple[Note, ...]]:
    """``plan`` in fp16 where it names no dtype, and a GPU whose tensor cores take no bf16, the default elsewhere."""
    named, precision = plan.at("hardware.gpu"), plan.mapping.get("precision")
    if named is None or not isinstance(named.value, str) or plan.at("precision.dtype") is not None:
        return plan, ()
    from ..device.gpus import GPUS

    gpu = GPUS.get(named.value)
    if gpu is None or gpu.has_bf16:
        return plan, ()
    before = precision if precision is not None else Node({}, IMPLIED)
    note = Note("dtype-chosen", f"no dtype was named: fp16, because the tensor cores of {gpu.name} take no bf16")
    return plan.with_items({"precision": before.with_items({"dtype": Node("fp16", named.origin)})}), (note,)


def _said(plan: Node, path: str) -> tuple[str, Origin] | None:
    """``gpus 8``, ``fp8 delayed``, or the name of a section that says something, and where; nothing where none is
    given."""
    section, _, name = path.partition(".")
    node = plan.mapping.get(section)
    if node is None:
        return None
    if not name:
        return (section, node.origin) if node.mapping else None
    size = node.mapping.get(name)
    least = 1 if name == "zero" else 2
    if size is None or not (isinstance(size.value, str) or (type(size.value) is int and size.value >= least)):
        return None
    return f"{name} {size.value}", size.origin


# -- flat ----------------------------------------------------------------------------------------------


_DOCUMENT = frozenset({"$schema", "extends"})


def nested(plan: Node) -> tuple[Node, tuple[Note, ...]]:
    """``plan`` with every flat key in its section, and what is told of those that change nothing."""
    plan = _renamed(plan)
    own = {path.partition(".")[0] for path in plan_fields()} | _DOCUMENT
    flat = {key: node for key, node in plan.mapping.items() if key not in own}
    if not flat:
        return plan, ()
    items = {key: node for key, node in plan.mapping.items() if key in own}
    notes: list[Note] = []
    wrong: list[PlanError] = []
    for key, node in flat.items():
        told = f"{key} ({node.origin}) changes no memory and is left out"
        try:
            path = _path(key, node)
            if path:
                _put(items, path, key, node)
        except PlanError as error:
            wrong.append(error)
            continue
        if path is None:
            items[key] = node
        elif not path:
            notes.append(Note("changes-nothing", told))
    if wrong:
        raise together([*wrong, *_strange(items, own)])
    return Node(items, plan.origin), tuple(notes)


def _renamed(plan: Node) -> Node:
    """``plan`` where a section calls a field of its own as other tools do: ``batch: {micro_batch_size: 2}``."""
    from .near_misses import SAME

    fields, items = plan_fields(), dict(plan.mapping)
    for name, section in plan.mapping.items():
        made: dict[str, Node] = {}
        for key, node in section.mapping.items():
            same = SAME.get(f"--{key.replace('_', '-')}", "") if f"{name}.{key}" not in fields else ""
            field = by_flag().get(same[2:])
            renamed = field is not None and field.section == name and field.name not in section.mapping
            made[field.name if field is not None and renamed else key] = node
        if made.keys() != section.mapping.keys():
            items[name] = Node(made, section.origin)
    return Node(items, plan.origin)


def with_counted_gpus(plan: Node) -> Node:
    """``plan`` where ``hardware: {gpu: 8xh100}`` is a name and a number."""
    named = plan.at("hardware.gpu")
    found = gpus_named(named.value) if named is not None and isinstance(named.value, str) else None
    if named is None or found is None:
        return plan
    name, count, each = found
    said = {"gpus": count} if each is None else {"gpus": count, "gpus_per_node": each}
    for field, value in said.items():
        node = plan.at(f"hardware.{field}")
        if node is not None and node.value != value:
            raise node.wrong(f"hardware.{field}", f"is not the {value} of hardware.gpu = {named.value}")
    apart: dict[str, str | int] = {"gpu": name, **said}
    for field, part in apart.items():
        plan = plan.put(f"hardware.{field}", Node(part, named.origin))
    return plan


def _path(key: str, node: Node) -> str | None:
    """The field that ``key`` is; empty where it changes nothing, ``None`` where nobody knows it."""
    from .near_misses import CHANGES_NOTHING, MEANT, NOT_MODELLED, SAME

    flag = f"--{key.replace('_', '-')}"
    if flag in CHANGES_NOTHING:
        return ""
    said, _, value = SAME.get(flag, flag).partition("=")
    field = by_flag().get(said[2:])
    if field is not None and (not value or node.value is True):
        return field.path if not value else f"{field.path}={value}"
    meant = MEANT.get(flag, SAME.get(flag))
    if meant is not None:
        raise node.wrong(key, f"is not a field; write {_in_a_plan(meant)}")
    if flag in NOT_MODELLED:
        raise node.wrong(key, NOT_MODELLED[flag])
    return None


def _put(items: dict[str, Node], path: str, key: str, node: Node) -> None:
    """Sets the field at ``path``, unless its section says another thing."""
    path, equals, value = path.partition("=")
    node = Node(value, node.origin) if equals else node
    if path == "model":
        section, name = "model", "base"
    else:
        section, _, name = path.rpartition(".")
    if not section:
        items[name] = node
        return
    before = items.get(section, Node({}, node.origin))
    if not isinstance(before.value, dict):
        short = "base" if section == "model" else getattr(sections()[section], "shorthand", None)
        before = Node({short: before} if short is not None and before.value is not None else {}, before.origin)
    said = before.mapping.get(name)
    if said is not None and said.plain() != node.plain():
        raise node.wrong(key, f"is the same field as {path}, which is {said.plain()} at {said.origin}; give one")
    items[section] = before.with_items({name: node})


def _in_a_plan(flags: str) -> str:
    """``--dtype bf16`` as a plan has it: ``precision: {dtype: bf16}``."""
    words = flags.split()
    made: list[str] = []
    while words:
        word = words.pop(0)
        field = by_flag().get(word[2:]) if word.startswith("--") else None
        if field is None:
            return flags
        value = words.pop(0) if words and not words[0].startswith("--") else "…"
        made.append(f"{field.section}: {{{field.name}: {value}}}" if field.section else f"{field.name}: {value}")
    return ", ".join(made)


def _strange(items: dict[str, Node], own: set[str]) -> Iterator[PlanError]:
    """Keys that nobody knows."""
    for key, node in items.items():
        if key not in own:
            known = {*own, *(flag.replace("-", "_") for flag in by_flag())}
            yield node.lacks(key, "is not a field of a plan", known=known)
