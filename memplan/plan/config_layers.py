"""Which layer of a Hugging Face ``config.json`` is of which kind, and what sizes of its own it has."""

from __future__ import annotations

from collections.abc import Callable

from .errors import Node, PlanError
from .spec import MOST_LAYERS

LARGEST = 2**31
"""Elements in one dimension."""

MIXED = "sparse"
"""A layer with experts (``mlp_layer_types``)."""

Rule = tuple[str, Callable[[object], bool]]
"""What a setting may be, in words, and whether a value is that."""


def whole(least: int, most: int) -> Rule:
    """A whole number between these, both included."""
    return f"a whole number from {least} to {most:,}", lambda value: type(value) is int and least <= value <= most


SIZE_RULE = whole(1, LARGEST)


# -- kinds ------------------------------------------------------------------------------------------------


_KINDS = {
    "M": "M", "*": "*", "-": "-", "E": "E", "mamba": "M", "linear_attention": "M", "attention": "*",
    "full_attention": "*", "mlp": "-", "moe": "E",
}  # fmt: skip
"""Kinds of a hybrid's layers, in letters or words."""


def hybrid_layers(items: dict[str, Node]) -> dict[str, Node]:
    """Kinds of layers, all of Mamba-2 where none are named; sizes of experts only where there are some."""
    node = items.get("layer_pattern")
    if node is None:
        layers = items["layers"]
        return {"layer_pattern": Node("M" * layers.whole, layers.origin)}
    pattern = _kinds(node)
    found = {"layer_pattern": Node(pattern, node.origin), "layers": Node(len(pattern), node.origin)}
    if "E" not in pattern:
        for name in [name for name in items if name.startswith(("expert", "router_", "shared_expert"))]:
            del items[name]
    return found | _further_layers(items)


def _further_layers(items: dict[str, Node]) -> dict[str, Node]:
    """Those that predict further tokens, one for all of them (Megatron-Bridge, ``nemotron_h_bridge.py``)."""
    count, kinds = items.pop("mtp_layers", None), items.pop("mtp_pattern", None)
    if count is None or kinds is None or kinds.value is None or not count.value:
        return {}
    shared = Node(True, count.origin)
    return {"mtp_layers": count, "mtp_pattern": Node(_kinds(kinds), kinds.origin), "mtp_shared": shared}


def _kinds(node: Node) -> str:
    """Letters of a hybrid's layers."""
    parts = [str(one.value) for one in node.value] if isinstance(node.value, list) else list(str(node.value))
    for part in parts:
        if part not in _KINDS:
            known = ", ".join(dict.fromkeys(_KINDS))
            raise PlanError(
                "layer_types", part, f"is no kind of layer that is modelled; {known} are", origin=node.origin
            )
    return "".join(map(_KINDS.__getitem__, parts))


def dense_layers_of(config: Node, items: dict[str, Node]) -> Node:
    """Layers with an MLP in place of experts: the first ones (``first_k_dense_replace``), those of
    ``mlp_only_layers`` and ``mlp_layer_types``, those that ``moe_layers`` leaves out, and those between every
    ``moe_layer_freq``-th, ``decoder_sparse_step``-th or ``interleave_moe_layer_step``-th layer."""
    layers = items["layers"].whole

    def number(name: str, default: int) -> int:
        node = config.mapping.get(name)
        if node is None or node.value is None:
            return default
        allowed, accepts = whole(min(default, 1), MOST_LAYERS)
        if not accepts(node.value):
            raise node.wrong(name, f"must be {allowed}")
        return node.whole

    first = items.pop("first_dense", None)
    dense_first = first.value if first is not None and isinstance(first.value, int) else 0
    step, every = number("decoder_sparse_step", 1), number("moe_layer_freq", 1)
    only = config.mapping.get("mlp_only_layers")
    listed = [one.value for one in only.value] if only is not None and isinstance(only.value, list) else []
    if "expert_layers" in items:
        step, mixed = number("interleave_moe_layer_step", 1), items.pop("expert_layers").value
        named = [one.value for one in mixed] if isinstance(mixed, list) else None
        listed = [i for i in range(layers) if i not in named] if named is not None else []
        step = 1 if named is not None else step
    kinds = items.pop("mlp_kinds", None)
    if kinds is not None and (kinds.value is not None or first is None):
        listed, dense_first = [i for i, one in enumerate(_mlp_kinds(kinds, layers)) if one != MIXED], 0
    dense = [i for i in range(layers) if i < dense_first or (i + 1) % step or i % every or i in listed]
    return Node([Node(i, config.origin) for i in dense], config.origin)


def _mlp_kinds(given: Node, layers: int) -> list[object]:
    """What each layer has behind its attention; experts in all but the first unless it is said."""
    if given.value is None:
        return ["dense", *[MIXED] * (layers - 1)]
    kinds: list[object] = [one.value for one in given.value] if isinstance(given.value, list) else []
    if len(kinds) != layers:
        raise given.lacks("mlp_layer_types", f"must name all {layers} layers, not {len(kinds)}")
    return kinds


# -- sizes ------------------------------------------------------------------------------------------------


_PER_LAYER = {"head_dim": "full_head_dim", "num_key_value_heads": "full_kv_heads"}
"""Settings of single layers in ``per_layer_config``, by the fields that say them of layers that see all tokens."""


def of_full_layers(items: dict[str, Node], config: Node) -> dict[str, Node]:
    """Heads of layers that see all tokens (``Gemma4TextConfig.__post_init__``): as ``per_layer_config`` says, in which
    transformers saves them, else ``global_head_dim`` and, where keys are values, ``num_global_key_value_heads``."""
    if items["layers"].whole % items["full_interval"].whole:
        problem = "must end with full_attention, which transformers makes of the last layer in any case"
        raise config.lacks("layer_types", problem)
    own = items["keys_as_values"].value and items["full_kv_heads"].value is not None
    found = {"full_kv_heads": items["full_kv_heads" if own else "kv_heads"]}
    said = config.mapping.get("per_layer_config")
    if said is None or not isinstance(said.value, dict):
        return found
    layers, interval = items["layers"].whole, items["full_interval"].whole
    full = [layer for layer in range(layers) if (layer + 1) % interval == 0]
    numbers = sorted(int(number) for number in said.mapping if number.isdecimal())
    each = [{name: one.plain() for name, one in node.mapping.items()} for node in said.mapping.values()]
    if (
        numbers != full
        or len(each) != len(full)
        or any(one != each[0] or one.keys() - _PER_LAYER.keys() for one in each)
    ):
        problem = "is not modelled; only one head_dim and num_key_value_heads of all layers with full_attention are"
        raise said.lacks("per_layer_config", problem)
    found = {"full_head_dim": items["head_dim"], "full_kv_heads": items["kv_heads"]}
    (first, *_) = said.mapping.values()
    return found | {field: _checked(first.mapping[name], name) for name, field in _PER_LAYER.items() if name in each[0]}


def _checked(node: Node, name: str) -> Node:
    """A size of elements."""
    allowed, accepts = SIZE_RULE
    if not accepts(node.value):
        raise node.wrong(name, f"must be {allowed}")
    return node
