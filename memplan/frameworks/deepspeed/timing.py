"""DeepSpeed in the time of a step."""

from __future__ import annotations

from ...plan.plan import ResolvedPlan
from ...search.time.shape import ITEMSIZE
from ...search.time.sharding import sharded
from ...search.time.updates import HOST_ADAM, NVME, Exchange, Replicas, beside, node_gpus
from ..plain.timing import PlainTime


class DeepspeedTime(PlainTime):
    compared = ""

    def exposed(self, replicas: Replicas, rank: Exchange) -> float:
        plan = replicas.plan
        if plan.layout.zero == 3:
            return sharded(replicas, rank)
        buckets = plan.deepspeed.reduce_bucket_size, plan.deepspeed.allgather_bucket_size
        reduced, gathered = replicas.exchanged(rank.trained, buckets=buckets)
        if plan.deepspeed.overlap_comm:
            reduced = beside(replicas.rates, reduced, rank.backward, buckets[0] / rank.trained)
        return reduced * (rank.microbatches if plan.layout.zero == 2 else 1) + gathered

    def mixed(self, plan: ResolvedPlan) -> bool:
        return plan.precision.dtype != "fp32"

    def stepped(self, plan: ResolvedPlan) -> float:
        given = plan.deepspeed
        return 1.0 if given.offload_optimizer == "none" else 1 - given.offload_optimizer_ratio

    def offload(self, replicas: Replicas, owned: float, shard: float, microbatches: int) -> float:
        """DeepSpeed's CPU Adam shares the node's cores."""
        plan, host, total = replicas.plan, replicas.rates.host, 0.0
        given, element, together = plan.deepspeed, ITEMSIZE[plan.precision.dtype], node_gpus(plan)
        if given.offload_optimizer != "none":
            away = owned * given.offload_optimizer_ratio
            total += away * (element + element) / host + away * together * HOST_ADAM
            if given.offload_optimizer == "nvme":
                total += away * together * 24 / NVME
        if given.offload_param != "none":
            copies = 2 * microbatches * shard * element
            total += copies / host if given.offload_param == "cpu" else copies * together / NVME
        return total
