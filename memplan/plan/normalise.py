"""From what people write to what the models of ``plan.py`` hold: shorthands, lists in text, sizes with units.

Everything here is kind to form and silent about content: what it cannot make sense of stays as it is,
and validation refuses it.
"""

from __future__ import annotations

from ..values import pattern
from .errors import Node, PlanError, scalar
from .fields import Kind, PlanField, plan_fields, sections
from .sizes import check_unit, parse_size
from .spec import MOST_LAYERS
from .spellings import respelled

_RANGE = pattern(r"([0-9]{1,6})(?:\s*-\s*([0-9]{1,6}))?")
LONGEST_TEXT = 10_000
"""Characters of one value in a plan."""


def normalised(plan: Node) -> Node:
    """The plan as a mapping of sections, each field in the form that its model holds."""
    if not isinstance(plan.value, dict):
        raise plan.wrong("", "a plan is a mapping of fields, such as `model: gpt2-xl`")
    fields, items = plan_fields(), dict(plan.mapping)
    items.pop("$schema", None)
    for name, section in sections().items():
        if name in items:
            items[name] = _section(name, items[name], getattr(section, "shorthand", None))
    for name, node in items.items():
        if name in fields and fields[name].kind is not Kind.MODEL:
            items[name] = field_value(fields[name], node)
    return Node(items, plan.origin)


def section_fields(name: str, node: Node) -> Node:
    """The mapping of section ``name`` with each field in the form that its model holds."""
    fields = plan_fields()
    items = {
        key: field_value(fields[path], item) if (path := f"{name}.{key}") in fields else item
        for key, item in node.mapping.items()
    }
    return Node(items, node.origin)


def field_value(field: PlanField, node: Node) -> Node:
    """``node`` in the form that the model of ``field`` holds."""
    for part in (node, *node.mapping.values()):
        if isinstance(part.value, str) and len(part.value) > LONGEST_TEXT:
            raise part.wrong(field.path, f"must be at most {LONGEST_TEXT:,} characters long")
    match field.kind:
        case Kind.TEXT | Kind.CHOICE:
            return respelled(field, _text(node))
        case Kind.SIZE:
            return _size(field.path, node)
        case Kind.INTEGERS | Kind.PARTITION:
            return _integers(node, alone=field.kind is Kind.INTEGERS)
        case Kind.NAMES if isinstance(node.value, str):
            return Node([scalar(part.strip(), node.origin) for part in node.value.split(",")], node.origin)
        case Kind.DEVICE_MAP if isinstance(node.value, dict):
            from .module_names import by_device, is_by_module

            node = by_device(node) if is_by_module(node) else node
            placed: dict[str, Node] = {}
            left = MOST_LAYERS
            for device, layers in node.mapping.items():
                placed[device], left = _layers(device, layers, left)
            return Node(placed, node.origin)
        case Kind.VARIABLES if isinstance(node.value, dict):
            return Node({name: _text(value) for name, value in node.mapping.items()}, node.origin)
        case Kind.VARIABLES if node.value is None:
            return Node({}, node.origin)
    return respelled(field, node)


def _section(name: str, node: Node, shorthand: str | None) -> Node:
    if name == "model" and not isinstance(node.value, dict):
        return Node({"base": _text(node)}, node.origin)
    if isinstance(node.value, dict):
        return section_fields(name, _by_source(node) if name == "model" else node)
    if node.value is None:
        return Node({}, node.origin)
    if shorthand is not None and not isinstance(node.value, list):
        return section_fields(name, Node({shorthand: node}, node.origin))
    return node


def _by_source(model: Node) -> Node:
    """A model without a recipe as ``--json`` has it (``TracedSpec``): by where it was read, and its layers where they
    can be changed."""
    source, layers = model.mapping.get("source"), model.mapping.get("layers")
    if "no_recipe" not in model.mapping or source is None:
        return model
    changed = {} if layers is None or layers.value is None else {"layers": layers}
    return Node({"base": _text(source), **changed}, model.origin)


def _text(node: Node) -> Node:
    """An unquoted scalar as it was written: ``code: 2020`` is text there."""
    return Node(node.text, node.origin, node.text) if node.text is not None and node.value is not None else node


def _size(field: str, node: Node) -> Node:
    size = parse_size(node.value) if isinstance(node.value, str) else node.value
    if type(size) is not int:
        return node
    try:
        check_unit(field, node.value, size)
    except PlanError as error:
        raise error.located({field: node.origin}) from None
    return Node(size, node.origin, node.text)


def _integers(node: Node, *, alone: bool) -> Node:
    """``0,4,6`` as a list; a number ``alone``, or with a comma behind it, as a list of one."""
    if isinstance(node.value, str) and "," in node.value:
        parts = [part.strip() for part in node.value.strip().removesuffix(",").split(",")]
        if (len(parts) > 1 or alone) and all(part.isascii() and part.isdigit() for part in parts):
            return Node([scalar(part, node.origin) for part in parts], node.origin)
    if alone and type(node.value) is int:
        return Node([node], node.origin)
    return node


def _layers(device: str, node: Node, left: int) -> tuple[Node, int]:
    """``0-11, 20`` or ``[0-11, 20]`` as the list of those layers, and how many of ``left`` other devices may have."""
    match node.value:
        case list():
            parts = list(node.value)
        case str():
            parts = [scalar(part.strip(), node.origin) for part in node.value.split(",")]
        case None:
            parts = []
        case _:
            parts = [node]
    layers: list[Node] = []
    for part in parts:
        layers.extend(_range(part))
        if len(layers) > left:
            raise part.lacks(
                f"device_map.{device}", f"names more layers than a model can have: {MOST_LAYERS:,} on all devices"
            )
    return Node(layers, node.origin), left - len(layers)


def _range(node: Node) -> list[Node]:
    match = _RANGE.fullmatch(node.value.strip()) if isinstance(node.value, str) else None
    if match is None or match[2] is None:
        return [node]
    first, last = int(match[1]), int(match[2])
    if last < first or last - first > MOST_LAYERS:
        return [node]
    return [Node(layer, node.origin) for layer in range(first, last + 1)]
