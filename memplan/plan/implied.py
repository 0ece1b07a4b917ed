"""What a plan leaves out and other fields of it decide: the framework, and the dtype on GPUs without bf16."""

from __future__ import annotations

from ..families import ROOMS as FAMILIES
from ..families import family
from ..frameworks import BY_ITSELF, IMPLIED_BY, OF_SIZE_ALONE, RECIPES, framework
from .errors import Node, Origin, one_line
from .fields import sections
from .hub import in_four_bits
from .notes import FRAMEWORK_CHOSEN, Note
from .section import FrameworkSection

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
    note = Note(FRAMEWORK_CHOSEN, f"no framework was named: {name}, {because}")
    return plan.with_items({"framework": Node(name, origin)}), (note,) if because else ()


def _meant(plan: Node) -> tuple[str, str, Origin]:
    """The framework, why, which is empty for one process on one GPU, and where what decides it was written."""
    for name, groups in IMPLIED_BY:
        reasons = [next((said for path in paths if (said := _said(plan, path)) is not None), None) for paths in groups]
        found = [one for one in reasons if one is not None]
        if len(found) == len(groups) and not (found[1:] and _lacks_recipe(plan, name)):
            alone = _alone(plan, name) if groups == (OF_SIZE_ALONE,) else None
            return alone or (name, f"because of {' and '.join(text for text, _ in found)}", found[0][1])
    return _alone(plan, BY_ITSELF) or (BY_ITSELF, "", IMPLIED)


def _family(plan: Node) -> str:
    """The family of the model; empty where it is none that is known."""
    named = plan.at("model.family")
    return str(named.value) if named is not None and isinstance(named.value, str) and named.value in FAMILIES else ""


def _lacks_recipe(plan: Node, name: str) -> bool:
    """The framework ``name`` has no recipe of the model: another is meant that has, of those that share its fields."""
    own = _family(plan)
    return bool(own) and not has_recipe(own, name)


def _alone(plan: Node, name: str) -> tuple[str, str, Origin] | None:
    """The one framework that has a recipe of the model, where ``name`` has none."""
    own = _family(plan)
    if not own or has_recipe(own, name):
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
