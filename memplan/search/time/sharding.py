"""FSDP and ZeRO-3 in the time of a step: parameters gathered before layers run, gradients scattered behind them."""

from __future__ import annotations

from ...values import NamedTuple
from .collectives import Group, collective, group
from .kernels import overlapped, streamed
from .rates import Rates
from .shape import Elements, of_each
from .updates import Exchange, Replicas


class Ends(NamedTuple):
    """Units of FSDP around the layers. One, the root's, has embedding, norm and head, and is gathered before the
    layers, unless those ``behind`` them are apart."""

    behind: int = 0
    """Parameters of a unit with norm and head."""
    again: bool = False
    """Whether backward gathers again the unit with the head. Nothing runs beside: the gather waits until its forward,
    behind which parameters were freed, has ended (``FSDPParamGroup.unshard``, ``_reshard_after_forward_event``)."""


class Traffic(NamedTuple):
    """Seconds that gathers and scatters of one rank take, in links and in the copies around them."""

    rates: Rates
    shards: Group
    """Ranks that share a parameter."""
    between: Group
    """Groups of them, which sum the gradients of their shards."""
    same: Group | None
    """Fewer ranks that share an expert's parameters; ``None`` where those are shared like the others."""
    element: float
    """Bytes of a parameter in a gather."""
    gradient: float
    """Bytes in a scatter of a parameter's gradient, on average of those that are trained and those that are not."""
    unpacked: float
    """Bytes that are read and written to copy a gathered parameter to where layers find it."""
    packed: float
    """Bytes that are read and written to copy a parameter's gradient into what is scattered."""

    def gathered(self, count: float, across: Group | None = None) -> float:
        return collective(self.rates, "all-gather", count * self.element, across or self.shards)

    def scattered(self, count: float, across: Group | None = None) -> float:
        across, size = across or self.shards, count * self.gradient
        summed = collective(self.rates, "all-reduce", size / across.ranks, self.between)
        return collective(self.rates, "reduce-scatter", size, across) + summed

    def layer(self, size: Elements) -> tuple[float, float]:
        """A layer's gather and scatter: of its own parameters, and of its experts', which fewer ranks share."""
        if self.same is None:
            return self.gathered(size.held), self.scattered(size.held)
        own, experts = size.held - size.experts, size.experts
        gather = self.gathered(own) + self.gathered(experts, self.same)
        return gather, self.scattered(own) + self.scattered(experts, self.same)

    def copied_out(self, count: float) -> float:
        return streamed(self.rates, count * self.unpacked)

    def copied_in(self, count: float) -> float:
        return streamed(self.rates, count * self.packed)


def _traffic(replicas: Replicas, rank: Exchange, groups: int, flat: bool) -> Traffic:
    plan, rates, shape = replicas.plan, replicas.rates, replicas.shape
    owners, trained = replicas.own.owners(replicas), rank.trained / rank.held
    element, gradient = shape.element, replicas.gradient
    same = group(replicas.own.expert_owners(replicas), shape.ranks.ep * shape.ranks.etp, rates.node)
    if flat:
        cast = element + gradient if gradient != element else 0
        unpacked, packed = 0, 2 * element + 2 * gradient + cast
    else:
        unpacked, packed = 2 * element, element + gradient
    return Traffic(
        rates,
        group(owners, plan.layout.tp, rates.node),
        group(groups, plan.layout.tp * owners, rates.node),
        None if shape.ranks.ep == 1 else same,
        element,
        trained * gradient,
        unpacked,
        trained * packed,
    )


def sharded(
    replicas: Replicas,
    rank: Exchange,
    groups: int = 1,
    *,
    regathers: bool = True,
    reduces_once: bool = False,
    flat: bool = False,
    ahead: bool = True,
    ends: Ends | None = None,
) -> float:
    """FSDP and ZeRO-3: each layer is gathered while the one before it runs, and its gradients are scattered while the
    next backward runs. What is longer than a layer's pass is exposed, and so are the first gather and last scatter;
    nothing hides the copies of what was gathered into parameters, and of gradients into what is scattered
    (``_fsdp_collectives.py``, ``foreach_all_gather_copy_out`` and ``foreach_reduce_scatter_copy_in``; DeepSpeed's
    ``AllGatherCoalescedHandle.wait`` and ``__add_grad_to_ipg_bucket``).

    Gradients are summed across ``groups`` of shards, for the last micro-batch alone if it ``reduces_once``; backward of
    each ``regathers`` a layer, not ``ahead`` of its turn where nothing asks for it before: then nothing runs beside.

    Parameters of FSDP1 are views of a ``flat`` one, which is gathered in place. Their gradients come together as one
    (``SplitWithSizesBackward``), which is cast if it is reduced in another dtype, and divided before it is reduced
    (``_runtime_utils.py``, ``_reduce_grad``).

    With ``ends`` the units are FSDP's: no layer runs before the first layer's gather, nor behind its scatter, so that
    both are exposed, too; the last layer is gathered again while the head's backward runs. Without, parameters come
    module by module (DeepSpeed's ``fetch_sub_module``), or a pipeline's stage gathers its own once."""
    plan, rates = replicas.plan, replicas.rates
    traffic = _traffic(replicas, rank, groups, flat)

    def in_backward(gather: float, scatter: float, took: float) -> float:
        """Exposed seconds of one gather and one scatter while something ``took`` so long."""
        aside = overlapped(rates, (gather if ahead else 0.0) + scatter, took)
        return aside if ahead else aside + gather

    sizes = [one for chunk in rank.work for one, _ in zip(of_each(replicas.shape.entries), chunk.counts, strict=False)]
    layers = [(size, *kind) for size, kind in zip(sizes, rank.kinds, strict=True) if kind[1]]
    around = max(0.0, rank.held - sum(float(count * size.held) for size, _, count, _ in layers))
    apart = float(ends.behind) if ends else 0.0

    def exposed(reduces: bool) -> float:
        """Of one micro-batch, which ``reduces`` its gradients or leaves that to a later one."""
        total, first = traffic.gathered(around - apart) + traffic.copied_out(around), None
        total += traffic.scattered(around - apart) + traffic.copied_in(around) if reduces else 0.0
        for size, times, count, recomputed in layers:
            gather, scatter = traffic.layer(size)
            again, scatter = gather if regathers else 0.0, scatter if reduces else 0.0
            took = times.backward + times.recompute * recomputed / count
            total += count * (overlapped(rates, gather, times.forward) + in_backward(again, scatter, took))
            copied = traffic.copied_out(size.held) * (1 + regathers)
            total += count * (copied + (traffic.copied_in(size.held) if reduces else 0.0))
            first = first or (gather, again, scatter, times.forward, took)
        if not (ends and first):
            return total
        gather, again, scatter, passed, took = first
        reduced = traffic.scattered(apart) if reduces else 0.0
        total += gather - overlapped(rates, gather, passed) + overlapped(rates, traffic.gathered(apart), passed)
        total += scatter + in_backward(again, reduced, rank.times.head.backward) - in_backward(again, scatter, took)
        if apart and regathers:
            total += overlapped(rates, traffic.gathered(around - apart), took) + traffic.copied_out(around - apart)
        if ends.again:
            total += traffic.gathered(apart or around) + traffic.copied_out(apart or around)
        return total

    whole = exposed(True)
    if plan.layout.pp > 1:
        return whole
    return whole + (rank.microbatches - 1) * (exposed(False) if reduces_once else whole)
