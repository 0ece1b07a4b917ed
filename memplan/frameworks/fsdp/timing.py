"""``fully_shard`` in the time of a step."""

from __future__ import annotations

from ...layers.counting import GRAPHS
from ...layers.module import Options, joined
from ...plan.plan import ResolvedPlan
from ...search.time.host import Host
from ...search.time.shape import ITEMSIZE, Entries, StageWork, Work, counted
from ...search.time.sharding import Ends, sharded
from ...search.time.updates import HOST_ADAM_TORCH, Exchange, Replicas, node_gpus
from ..plain.timing import PlainTime, last_of_each, of_kinds, work_of_layers
from .flat import of_one_device
from .stages import partition
from .titan_experts import cut_of_experts
from .titan_lora import tuning_of
from .torchtitan import Checkpointing, recipes
from .units import lacks_fully_shard


def is_flat(plan: ResolvedPlan) -> bool:
    """Whether ``FullyShardedDataParallel`` runs, with flat parameters."""
    return plan.fsdp.version == "1" or lacks_fully_shard(plan)


def gathers_ahead(plan: ResolvedPlan) -> bool:
    """Whether backward gathers a unit while the one behind it computes: not under reentrant recompute, whose forward
    leaves no hook that asks for it."""
    return plan.fsdp.backward_prefetch == "pre" and not (is_flat(plan) and plan.recompute.reentrant)


def ends_of(replicas: Replicas) -> Ends | None:
    """A weight that embedding and head share keeps both in one unit; FSDP1 always has one, which stays gathered. Stages
    of a pipeline have these units, too, but gather each once."""
    plan, entries = replicas.plan, replicas.shape.entries
    if plan.layout.pp > 1:
        return None
    if is_flat(plan):
        return Ends()
    if not plan.fsdp.ends_apart or plan.model.tied_embeddings:
        return Ends(again=plan.fsdp.reshard_root)
    behind = counted((*entries.final_norm.parameters, *entries.head.parameters))
    return Ends(behind.held, plan.fsdp.reshard_root)


def _gathered(plan: ResolvedPlan) -> ResolvedPlan:
    """What runs of transformers' modules. FSDP1 gathers weights in the dtype of compute, which under autocast are not
    cast again, and hidden states stay in it. Adapters have small units of their own: with them it is timed as on one
    GPU, beside which steps of Mistral 7B are 0 to 2 % too slow; by this they would be 8 to 11 % too fast."""
    return of_one_device(plan) if plan.fsdp.version == "1" and plan.lora.rank is None else plan


class FsdpTime(PlainTime):
    def entries(self, plan: ResolvedPlan) -> Entries:
        if plan.fsdp.code == "transformers":
            return super().entries(_gathered(plan))
        several, pool = plan.microbatches > 1, GRAPHS if plan.fsdp.cuda_graphs else 0
        tuning = tuning_of(plan)
        made, options = recipes(plan), Options(counts="later" if several else "first", pool=pool, tuning=tuning)
        modes: dict[str, Checkpointing] = {"none": "none", "full": "full"}
        mode = modes.get(plan.recompute.mode, "op")
        embedding, norm, head, loss = made.ends(options)
        numbers = last_of_each(made.shape, plan.model.layers)  # behind the first layer backward goes on
        layers = [(made.block("none", options, one).work, made.block(mode, options, one).work) for one in numbers]
        return of_kinds(embedding.work, layers, norm.work, joined(head.work, loss.work))

    def host(self, plan: ResolvedPlan) -> Host:
        return super().host(plan) if plan.fsdp.code == "transformers" else Host()

    def stages(self, plan: ResolvedPlan) -> Work:
        if plan.layout.pp == 1:
            return super().stages(plan)
        edges, pp, chunks = partition(plan), plan.layout.pp, plan.layout.vpp
        total = pp * chunks

        def work(at: int) -> StageWork:
            last = at == total - 1
            return work_of_layers(plan, range(edges[at], edges[at + 1]), not at, last, last)

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
            ends=ends_of(replicas),
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
