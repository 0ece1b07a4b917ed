"""``fully_shard`` in the time of a step."""

from __future__ import annotations

from itertools import pairwise

from ...layers.counting import GRAPHS
from ...layers.module import Options, Passes, joined
from ...plan.plan import ResolvedPlan
from ...search.time.host import Host
from ...search.time.rates import before
from ...search.time.shape import ITEMSIZE, Entries, StageWork, Work, recomputed
from ...search.time.updates import HOST_ADAM_TORCH, Exchange, Replicas, node_gpus, sharded
from ..plain.timing import PlainTime, of_second_kind, with_second_kind
from .stages import partition
from .titan_experts import cut_of_experts
from .titan_lora import tuning_of
from .torchtitan import Checkpointing, recipes

FULLY_SHARD = (2, 4)
"""PyTorch that has ``fully_shard`` with a tensor for each parameter."""


def is_flat(plan: ResolvedPlan) -> bool:
    """Whether ``FullyShardedDataParallel`` runs, with flat parameters, as it must before ``FULLY_SHARD``."""
    return plan.fsdp.version == "1" or before(plan, FULLY_SHARD)


def gathers_ahead(plan: ResolvedPlan) -> bool:
    """Whether backward gathers a unit while the one behind it computes: not under reentrant recompute, whose forward
    leaves no hook that asks for it."""
    return plan.fsdp.backward_prefetch == "pre" and not (is_flat(plan) and plan.recompute.reentrant)


class FsdpTime(PlainTime):
    def entries(self, plan: ResolvedPlan) -> Entries:
        if plan.fsdp.code == "transformers":
            return super().entries(plan)
        several, pool = plan.microbatches > 1, GRAPHS if plan.fsdp.cuda_graphs else 0
        tuning = tuning_of(plan)
        made, options = recipes(plan), Options(counts="later" if several else "first", pool=pool, tuning=tuning)
        modes: dict[str, Checkpointing] = {"none": "none", "full": "full"}
        mode = modes.get(plan.recompute.mode, "op")
        embedding, norm, head, loss = made.ends(options)
        spec = plan.model

        def both(number: int) -> tuple[Passes, Passes]:
            return made.block("none", options, number).work, made.block(mode, options, number).work

        dense = both(spec.dense_layers[0]) if spec.experts and spec.dense_layers else ()
        most = next((at for at in range(spec.layers) if spec.has_experts(at)), 0)
        others = of_second_kind(plan, range(spec.layers))
        if tuning is not None:  # backward of all but the first goes on behind them
            most = max({*range(spec.layers)}.difference(others))
        dense = both(others[-1]) if others else dense
        return Entries(embedding.work, *both(most), norm.work, joined(head.work, loss.work), *dense)

    def host(self, plan: ResolvedPlan) -> Host:
        return super().host(plan) if plan.fsdp.code == "transformers" else Host()

    def stages(self, plan: ResolvedPlan) -> Work:
        if plan.layout.pp == 1:
            return super().stages(plan)
        edges, pp, chunks = partition(plan), plan.layout.pp, plan.layout.vpp
        total = pp * chunks
        sizes = [high - low for low, high in pairwise(edges)]

        def work(at: int) -> StageWork:
            last = at == total - 1
            own = StageWork(sizes[at], recomputed(plan.recompute, sizes[at]), not at, last, last)
            return with_second_kind(plan, own, range(edges[at], edges[at + 1]))

        return tuple(tuple(work(chunk * pp + stage) for chunk in range(chunks)) for stage in range(pp))

    def gradient_dtype(self, plan: ResolvedPlan) -> str:
        return plan.fsdp.reduce

    def owners(self, replicas: Replicas) -> int:
        layout = replicas.plan.layout
        return (layout.dp or 1) // replicas.plan.fsdp.replicas * layout.cp

    def expert_owners(self, replicas: Replicas) -> int:
        return cut_of_experts(replicas.plan).shards

    def exposed(self, replicas: Replicas, rank: Exchange) -> float:
        given = replicas.plan.fsdp
        return sharded(
            replicas,
            rank,
            given.replicas,
            regathers=bool(given.reshard_after_forward),
            reduces_once=not given.gradient_sync,
            flat=is_flat(replicas.plan),
            ahead=gathers_ahead(replicas.plan),
        )

    def main_bytes(self, plan: ResolvedPlan) -> int:
        return 4 if plan.fsdp.parameters == "fp32" else super().main_bytes(plan)

    def stepped(self, plan: ResolvedPlan) -> float:
        return 0.0 if plan.fsdp.offload else 1.0

    def offload(self, replicas: Replicas, owned: float, shard: float, microbatches: int) -> float:
        plan = replicas.plan
        if not plan.fsdp.offload:
            return 0.0
        parameter, gradient = ITEMSIZE[plan.fsdp.parameters], ITEMSIZE[plan.fsdp.reduce]
        copies = (shard * 2 * parameter * microbatches + owned * gradient) / replicas.rates.host
        return copies + owned * node_gpus(plan) * HOST_ADAM_TORCH
