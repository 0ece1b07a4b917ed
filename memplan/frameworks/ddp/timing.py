"""``ddp`` in the time of a step."""

from __future__ import annotations

from ...search.time.collectives import collective
from ...search.time.shape import ITEMSIZE
from ...search.time.updates import Exchange, Replicas, beside
from ..plain.timing import PlainTime

BUCKET = 25 * 2**20
"""Bytes of DDP's bucket, the last of which nothing hides."""


class DdpTime(PlainTime):
    def exposed(self, replicas: Replicas, rank: Exchange) -> float:
        """Buckets are summed while backward goes on; ``ZeroRedundancyOptimizer`` broadcasts what its owners updated."""
        plan, rates, across = replicas.plan, replicas.rates, replicas.across
        size = rank.trained * replicas.gradient
        reduced = beside(rates, collective(rates, "all-reduce", size, across), rank.backward, BUCKET / size)
        parameters = rank.trained * ITEMSIZE[plan.precision.stored]
        shared = collective(rates, "all-gather", parameters, across) if plan.layout.zero else 0.0
        return reduced * (rank.microbatches if plan.ddp.gradient_sync else 1) + shared
