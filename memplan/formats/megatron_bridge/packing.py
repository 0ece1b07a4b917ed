"""Packed sequences of Megatron-Bridge's fine-tuning sets: one flat sequence of a micro-batch, with its documents.

``training/gpt_step.py`` (``_uses_packed_sequence_metadata``, ``get_packed_seq_params``) tells attention where the
documents of each row begin (``qkv_format="thd"``), as Megatron-LM's ``--sft`` does, and ``training/config.py``
(``ConfigContainer.validate``) asks for one row a micro-batch.
"""

from __future__ import annotations

from dataclasses import replace

from ...plan.errors import Node, PlanError
from ...plan.notes import Note
from ...plan.read import ReadPlan
from ..launch import Launch
from .arguments import FRAMEWORK

SPECS = ("dataset.offline_packing_specs", "dataset.packed_sequence_specs")
"""Sections that say how sequences are packed, of today and before ``enable_offline_packing`` turned it on and off."""


def packs(root: Node) -> Node | None:
    """What says that sequences are packed before training; nothing where they are not."""
    switch = root.at("dataset.enable_offline_packing")
    sizes = (root.at(f"{path}.packed_sequence_size") for path in SPECS)
    size = next((one for one in sizes if one is not None and isinstance(one.value, int)), None)
    if switch is not None and switch.value is not None:
        return switch if switch.value is True and (size is None or size.value != 0) else None
    return size if size is not None and isinstance(size.value, int) and size.value > 0 else None


def packed(launch: Launch, root: Node) -> Launch:
    """``launch`` with the packed sequences of its data, where memplan has a recipe for them in such a plan."""
    said = packs(root)
    if said is None:
        return launch
    finish = launch.finish
    return replace(launch, finish=lambda read: _packed(finish(read), said))


def _packed(read: ReadPlan, said: Node) -> ReadPlan:
    from ...frameworks import framework
    from ...layers.module import Options
    from ...plan.resolve import resolve

    plan = read.plan
    if plan.batch.mbs > 1:
        problem = f"must be 1 with packed sequences ({said.origin}): Megatron-Bridge stops"
        raise PlanError("batch.mbs", plan.batch.mbs, problem, origin=read.origins.get("batch.mbs"))
    if "packed" in plan.megatron.model_fields_set:
        return read
    whole = plan.model_copy(update={"megatron": plan.megatron.model_copy(update={"packed": True})})
    try:
        framework(FRAMEWORK).programs(resolve(whole), Options())
    except PlanError as error:
        found = next((one.problem for one in error.errors if "packed" in one.problem), None)
        if found is None:
            return read  # told where it is estimated
        told = f"sequences are packed ({said.origin}), and taken as whole ones: {found}"
        return replace(read, warnings=(*read.warnings, Note("packing-not-modelled", told)))
    return replace(read, plan=whole)
