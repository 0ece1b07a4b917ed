"""Seconds of one micro-batch through one layer, the embedding, the final norm, the head with its loss, and of sends
between stages: folds of the kernels that their recipes record.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from ...frameworks import framework
from ...layers.module import Counted, Passes
from ...layers.work import NO_CALLS, Calls, Exchange, Product
from ...plan.plan import ResolvedPlan
from ...values import NamedTuple, dataclass
from . import kernels, power
from .collectives import collective, group, send
from .host import HOST_WAIT, Host, seconds
from .kernels import Ranks
from .rates import Rates, rates_of
from .shape import Shape, StageWork, shape_of


class LayerTimes(NamedTuple):
    """Seconds of one micro-batch of one entry on one rank, communication of tensor and context parallelism included."""

    forward: float
    backward: float
    recompute: float
    """What recompute adds to backward where the entry is recomputed."""
    parallel: float = 0.0
    """The part of forward and backward that is exposed communication."""
    recomputed_parallel: float = 0.0
    """The part of recompute that is."""


EXPERT_AXES = ("etp", "ep", "experts")
"""Of exchanges among ranks that share experts."""

NO_TIME = LayerTimes(0.0, 0.0, 0.0)


@lru_cache(maxsize=1 << 14)
def layer_times(once: Passes, again: Passes, rates: Rates, ranks: Ranks, host: Host) -> LayerTimes:
    """One entry, as it runs without recompute and with it, on one of ``ranks``."""
    forward, backward, parallel = _passes(once, rates, ranks, host)
    first, second, exposed = _passes(again, rates, ranks, host)
    return LayerTimes(forward, backward, (first - forward) + (second - backward), parallel, exposed - parallel)


@lru_cache(maxsize=1 << 14)
def _clock(work: Passes, rates: Rates, ranks: Ranks, host: Host) -> float:
    """The part of its full clock that a layer's passes leave a GPU, whose power they average."""
    if rates.power is None:
        return 1.0
    drawn = kernels.drawn((*work.forward, *work.backward), rates)
    idle = sum(_passes(work, rates, ranks, host)[:2]) - drawn.bound - drawn.other
    return power.clock(rates, drawn._replace(other=drawn.other + idle))


@lru_cache(maxsize=1 << 14)
def _passes(work: Passes, rates: Rates, ranks: Ranks, host: Host) -> tuple[float, float, float]:
    """Forward, backward, and exposed communication of both."""
    before, behind = _read(work.forward) if host.reads else (work.forward, ())
    first = _pass(before, rates, ranks, host, False, work.forward_replayed)
    second = _pass(behind, rates, ranks, host, False, NO_CALLS)
    back = _pass(work.backward, rates, ranks, host, True, work.backward_replayed)
    return first[0] + second[0], back[0], first[1] + second[1] + back[1]


def host_seconds(work: Passes, rates: Rates, host: Host) -> float:
    """Of the host alone for the products of both passes, of which there are as many for any number of sequences; other
    kernels can be fewer for a single one. Passes take no less, unless a graph launches them
    or the host waits for each."""
    if host.replays or host.blocking:
        return 0.0
    forward, back = (
        [(one, times) for one, times in own if isinstance(one, Product)] for own in (work.forward, work.backward)
    )
    spent = seconds(forward, host, rates.host_slower, False, work.forward_replayed)
    return spent + seconds(back, host, rates.host_slower, True, work.backward_replayed)


def _read(forward: Counted) -> tuple[Counted, Counted]:
    """What the host calls before it reads how many rows experts have, and behind: nothing, where it does not."""
    for at, (kernel, _) in enumerate(forward):
        if isinstance(kernel, Exchange) and kernel.axis in EXPERT_AXES:
            return forward[:at], forward[at:]
    return forward, ()


def _pass(
    work: Counted, rates: Rates, ranks: Ranks, host: Host, backward: bool, replayed: Calls
) -> tuple[float, float]:
    """Seconds, and those of exposed communication: the host runs ahead of the device, unless it is the slower one;
    where it waits for every kernel, its time and the waiting add up."""
    spent = kernels.seconds(work, rates, ranks)
    device = spent.device + spent.exposed
    if host.blocking:
        return device + spent.launches * ((host.back if backward else host.operator) + HOST_WAIT), spent.exposed
    if host.replays:
        return device, spent.exposed
    return max(device, seconds(work, host, rates.host_slower, backward, replayed)), spent.exposed


@dataclass(frozen=True, slots=True)
class EntryTimes:
    """Seconds of one micro-batch through each kind of entry of the layer list, on one rank."""

    embedding: LayerTimes
    layer: LayerTimes
    final_norm: LayerTimes
    head: LayerTimes
    """Output layer and loss."""
    send: float
    """A hidden state from one stage to the next, or its gradient back."""
    dense: LayerTimes = NO_TIME
    """A layer with an MLP where others have experts."""
    further: LayerTimes = NO_TIME
    """What predicts further tokens, in a stage before the last."""
    kinds: tuple[LayerTimes, ...] = ()
    """Of layers that are counted by kinds, as ``Entries.kinds``."""

    @property
    def of_layers(self) -> tuple[LayerTimes, ...]:
        """As ``Entries.of_layers``."""
        return self.kinds or (self.layer, self.dense)

    def layers(self, work: StageWork) -> list[tuple[LayerTimes, int, int]]:
        """Each kind of layer in ``work``, how many there are, and how many of them are recomputed."""
        each = (self.layer, self.dense, *self.kinds)
        return [(one, *counts) for one, counts in zip(each, work.counts, strict=False)]


def entry_times(plan: ResolvedPlan, shape: Shape | None = None, rates: Rates | None = None) -> EntryTimes:
    """Of a resolved plan, whose ``shape`` and ``rates`` may be known. Plans that agree in what their layers do, in GPU
    and links share one value, however many stages, replicas and layers they have."""
    layout, rates = plan.layout, rates or rates_of(plan)
    across = layout.pp > 1 and layout.tp * layout.cp * layout.pp * (layout.dp or 1) > rates.node
    staged = layout.pp > 1 or not framework(plan.framework).time.pipelined
    return times_of(shape or shape_of(plan), rates, staged, across)


@lru_cache(maxsize=1 << 14)
def times_of(shape: Shape, rates: Rates, staged: bool, across_nodes: bool) -> EntryTimes:
    """``staged`` where hidden states go from stage to stage, ``across_nodes`` where stages are on several nodes."""
    entries = shape.entries
    first = len(entries.kinds) - entries.wide
    parts = entries.kinds[:first], entries.kinds[first:]

    def clocked(work: Iterable[Passes]) -> Rates:
        return power.at(rates, min((_clock(one, rates, shape.ranks, shape.host) for one in work), default=1.0))

    own = [clocked([entries.recomputed, *(again for _, again in parts[0])]), clocked(again for _, again in parts[1])]
    lower = own[entries.wide > 0]  # the head's products have 16 bits, as those of layers at the ends

    def of(once: Passes, again: Passes, rates: Rates = lower) -> LayerTimes:
        ranks = shape.ranks if _exchanges_experts(once) else Ranks(shape.ranks.t, shape.ranks.c)
        return layer_times(once, again, rates, ranks, shape.host)

    return EntryTimes(
        of(entries.embedding, entries.embedding, rates),  # no products
        of(entries.layer, entries.recomputed),
        of(entries.final_norm, entries.final_norm, rates),
        of(entries.head, entries.head),
        send_time(shape, rates, across_nodes) if staged else 0.0,
        of(entries.dense, entries.dense_recomputed),
        of(entries.further, entries.further),
        tuple(of(*kind, at) for part, at in zip(parts, own, strict=True) for kind in part),
    )


@lru_cache(maxsize=1 << 14)
def _exchanges_experts(work: Passes) -> bool:
    """Whether groups of experts' ranks matter. Recompute exchanges nothing that the passes do not."""
    return any(isinstance(one, Exchange) and one.axis in EXPERT_AXES for one, _ in (*work.forward, *work.backward))


def send_time(shape: Shape, rates: Rates, across_nodes: bool) -> float:
    """Whole, or a tensor-parallel rank's part of it, which Megatron of 2021 and DeepSpeed gather again behind it."""
    if not shape.scattered_sends or shape.ranks.t == 1:
        return send(rates, shape.hidden_bytes, across_nodes)
    part = send(rates, shape.hidden_bytes / shape.ranks.t, across_nodes)
    if shape.sequence_parallel:
        return part
    return part + collective(rates, "all-gather", shape.hidden_bytes, group(shape.ranks.t, 1, rates.node))
