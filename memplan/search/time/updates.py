"""Seconds of what happens once a step: gradients between replicas, gathered parameters, the optimizer, and offload.

Communication that a framework runs beside backward or forward counts only as far as it is longer than these.
"""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING

from ...frameworks import framework
from ...plan.plan import ResolvedPlan
from ...values import NamedTuple, dataclass
from .collectives import Group, Kind, collective, group
from .kernels import overlapped, streamed
from .layer import EntryTimes, LayerTimes
from .rates import Rates
from .shape import ITEMSIZE, Shape, StageWork, elements

if TYPE_CHECKING:
    from .framework import FrameworkTime

HOST_ADAM = 0.257e-9
"""Seconds a parameter of DeepSpeed's CPU Adam with a whole node's cores; PyTorch's takes ``HOST_ADAM_TORCH``
(arXiv 2101.06840, table 4: 10 billion parameters in 2.57 and 14.76 s)."""
HOST_ADAM_TORCH = 1.476e-9

NVME = 25.6e9
"""Bytes/s of a node's NVMe (arXiv 2104.07857, figure 2b: 16 GPUs at 1.6 GB/s)."""


def node_gpus(plan: ResolvedPlan) -> int:
    """Ranks that share a node's host."""
    return min(plan.hardware.gpus_per_node, plan.hardware.gpus or 1)


class Updates(NamedTuple):
    """Seconds a step, exposed."""

    data_parallel: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0

    @property
    def total(self) -> float:
        return self.data_parallel + self.optimizer + self.offload


@dataclass(frozen=True, slots=True)
class Replicas:
    """How a plan's replicas keep states and exchange gradients. Built once for a family of plans."""

    plan: ResolvedPlan
    shape: Shape
    rates: Rates

    @property
    def ranks(self) -> int:
        """Ranks that gradients are summed over."""
        layout = self.plan.layout
        return (layout.dp or 1) * layout.cp

    @property
    def across(self) -> Group:
        return group(self.ranks, self.plan.layout.tp, self.rates.node)

    @property
    def gradient(self) -> int:
        """Bytes of a gradient's element between replicas."""
        return ITEMSIZE[self.own.gradient_dtype(self.plan)]

    @property
    def own(self) -> FrameworkTime:
        """What the framework says of it."""
        return framework(self.plan.framework).time

    @property
    def across_experts(self) -> Group:
        """Ranks that have the same experts."""
        together = self.shape.ranks.ep * self.shape.ranks.etp
        return group(max(1, self.ranks * self.shape.ranks.t // together), together, self.rates.node)

    def exchanged(
        self, elements: float, across: Group | None = None, buckets: tuple[float, float] = (inf, inf)
    ) -> tuple[float, float]:
        """Seconds in which gradients of so many parameters are summed ``across`` ranks, whole or to their owners, and
        in which those give the parameters back; ``buckets``: elements of what is summed, and given back, at once."""
        across = self.across if across is None else across
        zero, of = self.plan.layout.zero, ITEMSIZE[self.plan.precision.dtype]
        if zero == 0:
            return bucketed(self.rates, "all-reduce", elements, self.gradient, across, buckets[0]), 0.0
        reduced = bucketed(self.rates, "reduce-scatter", elements, self.gradient, across, buckets[0])
        return reduced, bucketed(self.rates, "all-gather", elements, of, across, buckets[1])


def bucketed(rates: Rates, kind: Kind, elements: float, size: int, across: Group, bucket: float) -> float:
    """Seconds of collectives of so many ``elements`` of ``size`` bytes together, each of one ``bucket`` of them."""
    count = max(1, ceil(elements / bucket)) if bucket else 1
    return count * collective(rates, kind, elements * size / count, across)


class Exchange(NamedTuple):
    """What one rank exchanges with its replicas in a step."""

    work: tuple[StageWork, ...]
    times: EntryTimes
    held: float
    """Parameters of the rank."""
    trained: float
    """Those that have gradients."""
    microbatches: int
    experts: float = 0.0
    """Of those that have gradients, the ones that ranks with the same experts share."""

    @property
    def forward(self) -> float:
        """Seconds of the layers' forward passes, once."""
        return sum(n * one.forward for one, n, _ in self.kinds)

    @property
    def backward(self) -> float:
        return sum(n * one.backward + again * one.recompute for one, n, again in self.kinds)

    @property
    def kinds(self) -> list[tuple[LayerTimes, int, int]]:
        """Layers of each kind, how many there are, and how many of them are recomputed, chunk by chunk."""
        return [kind for chunk in self.work for kind in self.times.layers(chunk)]


def updates(
    replicas: Replicas, work: tuple[StageWork, ...], times: EntryTimes, microbatches: int, staged: bool
) -> Updates:
    """Of the rank that holds ``work``; ``staged`` where it is one stage of several."""
    plan, shape, own = replicas.plan, replicas.shape, replicas.own
    held, trained, experts = map(float, elements(shape.entries, work))
    exposed = own.exposed(replicas, Exchange(work, times, held, trained, microbatches, experts))
    if staged and plan.layout.pp > 1 and (shape.spec.tied_embeddings or shape.spec.mtp_layers):
        exposed += _tied(replicas, work)
    owners = own.owners(replicas)
    passes = streamed(replicas.rates, held * own.buffer_bytes(plan, replicas.ranks))
    owned = (trained - experts) / owners + (experts / own.expert_owners(replicas) if experts else 0.0)
    moved = owned * own.stepped(plan)
    issue = plan.optimizer.algorithm.issue(plan.optimizer, own.main_bytes(plan))
    step = streamed(replicas.rates, moved * step_bytes(plan), 1, int(moved * issue))
    return Updates(exposed, step + passes, own.offload(replicas, owned, held / owners, microbatches))


def beside(rates: Rates, communication: float, work: float, tail: float) -> float:
    """What communication adds to ``work`` that it runs beside, but for its last part, ``tail`` of it."""
    last = communication * min(1.0, tail)
    return last + overlapped(rates, communication - last, work)


def _tied(replicas: Replicas, work: tuple[StageWork, ...]) -> float:
    """The gradients of a tied weight are summed between the first and the last stage; those of the embedding, if layers
    that predict further tokens have another one (``finalize_model_grads.py``, ``_allreduce_word_embedding_grads``)."""
    shape, rates = replicas.shape, replicas.rates
    with_head = shape.spec.tied_embeddings or not shape.entries.further.forward
    if not any(chunk.embedding or chunk.further or (chunk.head and with_head) for chunk in work):
        return 0.0
    size = shape.vocab // shape.ranks.t * shape.spec.hidden * replicas.gradient
    return collective(rates, "all-reduce", float(size), group(2, rates.node, rates.node))


def step_bytes(plan: ResolvedPlan) -> float:
    """Bytes that a parameter's update moves."""
    own, optimizer = framework(plan.framework).time, plan.optimizer
    mixed, main = own.mixed(plan), own.main_bytes(plan)
    gradient = ITEMSIZE[plan.precision.gradients or "fp32"]
    moved = optimizer.algorithm.bytes_moved(optimizer, main, gradient)
    if mixed:
        # Gradients: their norm, and the copy to fp32; parameters: the copy back.
        moved += gradient + (gradient + 4 if gradient < 4 else 2 * gradient) + ITEMSIZE[plan.precision.dtype]
    return moved
