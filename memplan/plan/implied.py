"""What a plan leaves out and other fields of it decide: the framework, and the dtype on GPUs without bf16."""

from __future__ import annotations

from ..frameworks import BY_ITSELF, IMPLIED_BY
from .errors import Origin
from .node import Node
from .notes import FRAMEWORK_CHOSEN, Note

_ORIGIN = Origin("what else the plan says")


def with_implied(plan: Node) -> tuple[Node, tuple[Note, ...]]:
    """``plan`` with a framework and a dtype, and what to tell where they were chosen here."""
    plan, framework = with_framework(plan)
    plan, dtype = with_dtype(plan)
    return plan, (*framework, *dtype)


def with_framework(plan: Node) -> tuple[Node, tuple[Note, ...]]:
    """``plan`` with a framework, and what to tell where that was chosen here; none is told for one process on one
    GPU."""
    if "framework" in plan.mapping:
        return plan, ()
    for name, groups in IMPLIED_BY:
        reasons = [next((said for path in paths if (said := _said(plan, path))), "") for paths in groups]
        if all(reasons):
            note = Note(FRAMEWORK_CHOSEN, f"no framework was named: {name}, because of {' and '.join(reasons)}")
            return plan.with_items({"framework": Node(name, _ORIGIN)}), (note,)
    return plan.with_items({"framework": Node(BY_ITSELF, _ORIGIN)}), ()


def with_dtype(plan: Node) -> tuple[Node, tuple[Note, ...]]:
    """``plan`` in fp16 where it names no dtype, and a GPU whose tensor cores take no bf16, the default elsewhere."""
    hardware, precision = plan.mapping.get("hardware"), plan.mapping.get("precision")
    named = hardware.mapping.get("gpu") if hardware is not None else None
    if named is None or not isinstance(named.value, str) or (precision is not None and "dtype" in precision.mapping):
        return plan, ()
    from ..device.gpus import GPUS

    gpu = GPUS.get(named.value)
    if gpu is None or gpu.has_bf16:
        return plan, ()
    before = precision if precision is not None else Node({}, _ORIGIN)
    note = Note("dtype-chosen", f"no dtype was named: fp16, because the tensor cores of {gpu.name} take no bf16")
    return plan.with_items({"precision": before.with_items({"dtype": Node("fp16", named.origin)})}), (note,)


def _said(plan: Node, path: str) -> str:
    """``gpus 8``, ``fp8 delayed``, or the name of a section that says something; empty where none is given."""
    section, _, name = path.partition(".")
    node = plan.mapping.get(section)
    if node is None:
        return ""
    if not name:
        return section if node.mapping else ""
    size = node.mapping.get(name)
    if size is not None and isinstance(size.value, str):
        return f"{name} {size.value}"
    least = 1 if name == "zero" else 2
    return f"{name} {size.value}" if size is not None and type(size.value) is int and size.value >= least else ""
