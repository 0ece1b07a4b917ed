"""``ddp`` in the time of a step."""

from __future__ import annotations

from ...search.time.collectives import collective
from ...search.time.shape import ITEMSIZE
from ...search.time.updates import Exchange, Replicas, beside
from ..plain.timing import PlainTime
from .reducer import limits


class DdpTime(PlainTime):
    compared = ""

    def exposed(self, replicas: Replicas, rank: Exchange) -> float:
        """Buckets are summed while backward goes on, but the last; ``ZeroRedundancyOptimizer`` broadcasts what its
        owners updated."""
        plan, rates, across = replicas.plan, replicas.rates, replicas.across
        size = rank.trained * replicas.gradient
        summed, bucket = collective(rates, "all-reduce", size, across), limits(plan.ddp)[1]
        reduced = beside(rates, summed, rank.backward, bucket / size)
        parameters = rank.trained * ITEMSIZE[plan.precision.stored]
        shared = collective(rates, "all-gather", parameters, across) if plan.layout.zero else 0.0
        return reduced * (rank.microbatches if plan.ddp.gradient_sync else 1) + shared
