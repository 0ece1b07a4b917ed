"""``fully_shard`` in a search: torchtitan's parallel sizes, groups of replicas, offload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...plan.plan import Plan, ResolvedPlan
from ...search.framework import FrameworkSearch, divisors, fused_losses
from ...search.lower_bounds import LowerBounds
from ...search.point import NO_RECOMPUTE, Extra, Point, Recomputing
from ...search.space import Space
from .titan import titan_of


class FsdpSearch(FrameworkSearch):
    def sizes(self, plan: ResolvedPlan) -> frozenset[str]:
        """Only torchtitan has more than data parallelism, and its adapters are modelled without (``titan_lora.check``).
        Bounds are of ``fully_shard``."""
        if plan.fsdp.version == "1":
            raise plan.wrong("fsdp.version", "must be 2 in a search: only memplan estimate models FSDP1")
        if plan.fsdp.code != "torchtitan":
            return frozenset()
        titan, tied = titan_of(plan.model), plan.model.tied_embeddings
        cut = titan.complete and not plan.fsdp.reshard_root
        cut = cut and plan.loss.kind != "chunked"  # whose chunks take a fold three times as long
        untried = frozenset() if cut else {"pp", "vpp"}
        untried |= {"tp", "pp", "vpp"} if plan.lora.rank is not None else set()
        return super().sizes(plan) - untried - {"cp"} - ({"tp"} if titan.norm_of_parts is None or tied else frozenset())

    def recomputing(self, plan: ResolvedPlan) -> tuple[Recomputing, ...]:
        selective = (Recomputing("selective"),) if plan.fsdp.code == "torchtitan" else ()
        return NO_RECOMPUTE, *selective, Recomputing("full")

    def extras(self, plan: ResolvedPlan) -> list[tuple[Extra, ...]]:
        groups = [] if plan.fsdp.code == "torchtitan" else fused_losses(plan)
        groups += [] if plan.fsdp.offload else [(_OFFLOAD,)]
        groups += [(_KEPT,)] if _may_keep(plan) else []
        hybrid = (_hybrid(count) for count in _replicas(plan) if count != plan.fsdp.replicas)
        return [*groups, tuple(hybrid)]

    def without_extras(self, base: Plan) -> Iterator[Mapping[str, Any]]:
        yield from super().without_extras(base)
        for extra in (_OFFLOAD, *([_KEPT] if base.fsdp.code == "transformers" else [])):
            yield {path: not value for path, value in extra.fields if base.at(path) is value}

    def unrunnable(self, space: Space, tp: int, cp: int, pp: int, vpp: int, microbatches: int) -> str:
        return "a pipeline needs as many micro-batches as stages" if pp > 1 and microbatches < pp else ""

    def divides_experts(self, tp: int, ep: int, etp: int) -> bool:
        """Experts that no ranks share are cut like the layers around them (``default_layout``)."""
        return etp == tp if ep == 1 else super().divides_experts(tp, ep, etp)

    def fields(self, space: Space, point: Point) -> Mapping[str, Any]:
        """torchtitan's selective recompute is that per operator, unless the plan says otherwise."""
        if space.base.fsdp.code != "torchtitan":
            return {}
        shared = {"layout.ep": point.ep, "layout.etp": point.etp} if space.base.model.experts else {}
        if not space.per_operator:
            return shared
        return {**shared, "fsdp.per_operator": point.recompute.mode == "selective", "fsdp.recompute_every": 1}

    def lower_bounds(self, space: Space) -> LowerBounds:
        from .bounds import FsdpBounds

        return FsdpBounds(space)


_OFFLOAD = Extra("CPU offload", (("fsdp.offload", True),), moves_states=True)
_KEPT = Extra(
    "no resharding after forward", (("fsdp.reshard_after_forward", False),), lacking="resharding after forward"
)
"""Gathered parameters stay until backward, which need not gather them again (``fully_shard`` of ``torch/distributed/
fsdp/_fully_shard/_fully_shard.py``)."""


def _may_keep(plan: ResolvedPlan) -> bool:
    """Whether parameters may be kept that are gathered again; torchtitan's policy stays as the plan has it."""
    given = plan.fsdp
    return given.code == "transformers" and bool(given.reshard_after_forward) and given.reshard_to is None


def _replicas(plan: ResolvedPlan) -> tuple[int, ...]:
    """Groups of ranks that hold the same shards: those that are whole nodes, or one group of all."""
    nodes, rest = divmod(plan.hardware.gpus or 1, plan.hardware.gpus_per_node)
    return divisors(nodes) if nodes > 1 and not rest else (1,)


def _hybrid(count: int) -> Extra:
    return Extra(f"HSDP ×{count}" if count > 1 else "one group of shards", (("fsdp.replicas", count),), groups=count)
