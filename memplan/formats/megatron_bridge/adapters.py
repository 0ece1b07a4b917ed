"""Megatron-Bridge's ``peft`` as the section ``lora`` of a plan (0.6.0, ``peft/lora.py``: ``LoRA``, ``peft/dora.py``:
``DoRA``, ``peft/canonical_lora.py``: ``CanonicalLoRA``)."""

from __future__ import annotations

from collections.abc import Mapping

from ...plan.errors import Node
from ...plan.lora import PARTS

RANK = 32
"""``LoRA.dim`` and ``DoRA.dim``, unless it is said."""

_KINDS = ("lora", "dora", "canonicallora")
_CANONICAL = [one for parts in PARTS.values() for one in parts]

_FIELDS = {"dim": "rank", "alpha": "alpha", "dropout": "dropout", "target_modules": "targets"}
"""Fields of ``LoRA``, as a plan calls them."""

_NEEDLESS = frozenset(
    ("lora_A_init_method", "lora_B_init_method", "lora_dtype", "canonical_mapping", "params_to_save", "_target_")
)
"""Of no memory; ``lora_dtype`` is of adapters on ``torch.nn.Linear`` alone (``LinearAdapter``)."""

_DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "dropout_position": ("pre",),
    "sequence_parallel_input_regather": (False,),
    "a2a_experimental": (False,),
    "normalize_moe_lora": (False,),
    "share_expert_adapters": (True,),
    "experts_shared_outer_loras": (False,),
    "exclude_modules": ([], None),
}
"""Fields of which the default alone is modelled."""


def section_of(root: Node) -> Node | None:
    """The plan's section, where the configuration has adapters."""
    peft = root.mapping.get("peft")
    if peft is None or not peft.value or peft.value == "none":
        return None
    said = peft.mapping.get("_target_", Node("lora", peft.origin)) if peft.mapping else peft
    kind = str(said.value).rpartition(".")[2].lower()
    if kind not in _KINDS:
        field = "peft._target_" if peft.mapping else "peft"
        raise said.wrong(field, "is not modelled yet: LoRA, DoRA and CanonicalLoRA are (peft=lora)")
    found = {"rank": Node(RANK, peft.origin)} | ({"dora": Node(True, said.origin)} if kind == "dora" else {})
    if kind == "canonicallora":
        found["targets"] = Node(
            [Node(one, said.origin) for one in (*_CANONICAL, "linear_proj", "linear_fc2")], said.origin
        )
    for field, node in peft.mapping.items():
        if field in _FIELDS and node.value is not None:
            found[_FIELDS[field]] = node
        elif field in _DEFAULTS:
            if node.plain() not in _DEFAULTS[field]:
                raise node.wrong(f"peft.{field}", f"must be {_shown(_DEFAULTS[field][0])}: another is not modelled yet")
        elif field not in _FIELDS and field not in _NEEDLESS:
            known = sorted({*_FIELDS, *_DEFAULTS})
            raise node.lacks(f"peft.{field}", f"is no field of LoRA; these are: {', '.join(known)}", known=known)
    _check_targets(found.get("targets"), parts=kind == "canonicallora")
    return Node(found, peft.origin)


def _check_targets(targets: Node | None, *, parts: bool) -> None:
    """Patterns tell layers apart by their numbers, which no plan does. ``CanonicalLoRA`` alone has ``parts`` of layers,
    and asserts that it is given no whole ones in their place."""
    names = targets.plain() if targets is not None else []
    for one in names if isinstance(names, list) else [names]:
        if targets is not None and not str(one).isidentifier():
            raise targets.wrong("peft.target_modules", "must be names of linear layers: patterns are not modelled yet")
        if targets is not None and str(one) in (PARTS if parts else _CANONICAL):
            other = f"CanonicalLoRA has {', '.join(_CANONICAL)}" if parts else "only CanonicalLoRA has it"
            raise targets.wrong("peft.target_modules", f"must not name {one}: {other}")


def _shown(value: object) -> str:
    return "left out" if value == [] else str(value).lower()
