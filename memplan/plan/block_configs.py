"""``block_configs``, attention and MLP of each layer as Llama-Nemotron's ``config.json`` and Megatron-Core say them
(``megatron/core/transformer/heterogeneous/heterogeneous_config.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .errors import ABSENT, Node, PlanError
from .spec import LINEAR, NONE, block_of

KEY = "block_configs"
LARGEST = 2**31


def blocks_of(config: Node, heads: int, hidden: int, kv_heads: int | None, ffn: int | None) -> list[Node]:
    """Of each layer, as ``ModelSpec.layer_blocks`` has them; ``kv_heads`` and ``ffn`` are those of layers that say
    none."""
    blocks = config.mapping.get(KEY)
    if blocks is None or not isinstance(blocks.value, list) or not blocks.value:
        value = ABSENT if blocks is None else blocks.plain()
        raise PlanError(KEY, value, "must be a list of layers, each with attention and ffn", origin=config.origin)
    found = []
    for at, block in enumerate(blocks.value):
        attention, mlp = _part(block, at, "attention"), _part(block, at, "ffn", "mlp")
        groups = _kind(attention, at, "attention", _groups(attention, at, heads), kv_heads)
        width = _kind(mlp, at, "ffn", _width(mlp, at, hidden), ffn)
        found.append(Node(f"{groups}:{width}", block.origin))
    return found


def _part(block: Node, at: int, *names: str) -> Node:
    """``block_configs[at].name`` under the first of its names."""
    for name in names:
        part = block.mapping.get(name)
        if part is not None and isinstance(part.value, dict) and part.value:
            return part
    raise block.lacks(f"{KEY}[{at}].{names[0]}", "is missing")


def _kind(part: Node, at: int, name: str, size: int | None, default: int | None) -> str:
    """What the layer has in this place: a size, or one of the others."""
    given = part.mapping
    others = [value for key, value in (("no_op", NONE), ("replace_with_linear", LINEAR)) if _is_true(given, key)]
    if others and size is not None:
        problem = f"must have no size: no_op and replace_with_linear leave no {name} (Megatron-Core stops)"
        raise PlanError(f"{KEY}[{at}].{name}", size, problem, origin=part.origin)
    if others:
        return others[0]
    if size is None and default is None:
        raise part.lacks(f"{KEY}[{at}].{name}", "has no size")
    return str(size if size is not None else default)


def _is_true(given: Mapping[str, Node], key: str) -> bool:
    node = given.get(key)
    return node is not None and node.value is True


def _groups(attention: Node, at: int, heads: int) -> int | None:
    """Groups of key and value, said as they are or by the heads of each."""
    name, given = f"{KEY}[{at}].attention", attention.mapping
    if "num_query_groups" in given:
        return _size(given["num_query_groups"], f"{name}.num_query_groups")
    if "n_heads_in_group" not in given:
        raise attention.lacks(f"{name}.n_heads_in_group", "is missing")
    size = _size(node := given["n_heads_in_group"], f"{name}.n_heads_in_group")
    if size is None:
        return None
    if heads % size:
        problem = f"must divide the {heads} attention heads"
        raise PlanError(f"{name}.n_heads_in_group", size, problem, origin=node.origin)
    return heads // size


def _width(mlp: Node, at: int, hidden: int) -> int | None:
    """As it is, or as a multiple of two thirds of the hidden size, up to a multiple of 256."""
    name, given = f"{KEY}[{at}].ffn", mlp.mapping
    if "ffn_hidden_size" in given:
        return _size(given["ffn_hidden_size"], f"{name}.ffn_hidden_size")
    node = given.get("ffn_mult")
    if node is None:
        raise mlp.lacks(f"{name}.ffn_mult", "is missing")
    if node.value is None:
        return None
    if type(node.value) not in (int, float) or not 0 < float(str(node.value)) * hidden <= LARGEST:
        raise node.wrong(f"{name}.ffn_mult", "must be a number above 0")
    size = int(2 * float(str(node.value)) * hidden / 3)
    return max(1, -(-size // 256)) * 256


def _size(node: Node, name: str) -> int | None:
    if node.value is None:
        return None
    whole = type(node.value) is int or (isinstance(node.value, float) and node.value.is_integer())
    if not whole or not 0 < float(str(node.value)) <= LARGEST:
        raise node.wrong(name, "must be a whole number above 0")
    return int(float(str(node.value)))


def require(config: Node, name: str, rule: str, holds: Callable[[object], bool]) -> Node:
    """``name`` of ``config``, which must be there and hold."""
    node = config.mapping.get(name)
    if node is None or not holds(node.value):
        value = ABSENT if node is None else node.plain()
        raise PlanError(name, value, f"must be {rule}", origin=(node or config).origin)
    return node


def written(blocks: Sequence[str], heads: int) -> list[dict[str, dict[str, object]]]:
    """``block_configs`` of these layers; widths are said as they are."""
    return [_written(text, heads) for text in blocks]


def _written(text: str, heads: int) -> dict[str, dict[str, object]]:
    own = block_of(text)
    group = heads // own.kv_heads if own.kv_heads else None
    return {
        "attention": {"n_heads_in_group": group, **_others(own.attention)},
        "ffn": {"ffn_hidden_size": own.ffn or None, **_others(own.mlp)},
    }


def _others(kind: str) -> dict[str, object]:
    return {"no_op": kind == NONE, "replace_with_linear": kind == LINEAR}
