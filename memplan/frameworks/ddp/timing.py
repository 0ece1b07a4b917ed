"""``ddp`` in the time of a step."""

from __future__ import annotations

from ...search.time.collectives import collective
from ...search.time.shape import ITEMSIZE
from ...search.time.updates import Exchange, Replicas, beside, bucketed
from ..plain.timing import PlainTime
from .reducer import limits


class DdpTime(PlainTime):
    compared = ""

    def exposed(self, replicas: Replicas, rank: Exchange) -> float:
        """Buckets, each of whole gradients, are summed while backward goes on, but the last;
        ``ZeroRedundancyOptimizer`` broadcasts what its owners updated."""
        plan, rates, across = replicas.plan, replicas.rates, replicas.across
        layers = zip(replicas.shape.entries.each, rank.work[0].counts, strict=False)
        tensors = sum(n * sum(one.trained for one in own.parameters) for (own, _), (n, _) in layers)
        bucket = max(limits(plan.ddp)[1] / replicas.gradient, rank.trained / max(1, tensors))
        summed = bucketed(rates, "all-reduce", rank.trained, replicas.gradient, across, bucket)
        reduced = beside(rates, summed, rank.backward, bucket / rank.trained)
        parameters = rank.trained * ITEMSIZE[plan.precision.stored]
        shared = collective(rates, "all-gather", parameters, across) if plan.layout.zero else 0.0
        return reduced * (rank.microbatches if plan.ddp.gradient_sync else 1) + shared
