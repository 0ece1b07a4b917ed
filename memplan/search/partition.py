"""The best way to deal out a list of entries to pipeline stages: exact, whatever the costs of stages look like.

Two problems, one for each kind of layer list:

``contiguous``
    n entries in order, cut into p runs; ``cost(stage, low, high)`` of a run is arbitrary. Bellman's principle: the
    least bottleneck of the first j entries on k + 1 stages is the minimum over i of max(that of the first i entries
    on k stages, cost(k, i, j)), because whatever is the best way to serve the last stage with entries i to j, the
    stages before it cannot do better than their own optimum. O(p n²) costs.

``choose``
    All layers are alike, so only how many each stage holds matters; a stage offers *options*, each with so many
    layers (in one chunk or in several of an interleaved schedule) and a cost. Some threshold T admits a solution if
    and only if one option below T can be taken from every stage such that the layers add up; the sums that stages
    0 to k can reach are a set of numbers, here the bits of one integer, and stage k + 1 shifts it by what it offers.
    Reachability only grows with T, so bisection over the costs that occur finds the least T. O(log(options) ·
    options) shifts of integers of L bits.

Neither needs costs to grow with the number of layers, or stages to be alike. Ties are broken by a stated rule: the
least bottleneck of ``cost``; among those solutions the least of ``second``; among those, the most even one, stage by
stage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import inf

Cost = Callable[[int, int, int], float]
"""Of a stage that holds entries from ``low`` up to ``high``: bytes, or seconds; ``inf`` where it cannot hold them."""


@dataclass(frozen=True, slots=True)
class Option:
    """What a stage may hold: ``chunks`` layers in each of its chunks."""

    chunks: tuple[int, ...]
    cost: float
    second: float = 0.0

    @property
    def layers(self) -> int:
        return sum(self.chunks)


# -- entries in order -------------------------------------------------------------------------------------


def contiguous(stages: int, entries: int, cost: Cost, second: Cost | None = None) -> tuple[int, ...] | None:
    """Where each stage begins, and ``entries``, of the cut with the least largest ``cost``; ``None`` without any."""
    cost = cache(cost)
    least = _bottleneck(stages, entries, cost)
    if least is None:
        return None
    if second is None:
        return _most_even(stages, entries, lambda stage, low, high: cost(stage, low, high) <= least)
    also = cache(lambda stage, low, high: second(stage, low, high) if cost(stage, low, high) <= least else inf)
    then = _bottleneck(stages, entries, also)
    assert then is not None
    return _most_even(stages, entries, lambda stage, low, high: also(stage, low, high) <= then)


def bottleneck(bounds: Sequence[int], cost: Cost) -> float:
    """The largest ``cost`` of the stages that ``bounds`` cut."""
    return max(cost(stage, low, high) for stage, (low, high) in enumerate(pairwise(bounds)))


def _bottleneck(stages: int, entries: int, cost: Cost) -> float | None:
    """The least largest ``cost``; ``None`` where every cut has a stage that cannot hold its entries."""
    best: list[float] = [0.0] + [inf] * entries
    for stage in range(stages):
        following = [inf] * (entries + 1)
        for low, before in enumerate(best):
            if before == inf:
                continue
            for high in range(low, entries + 1):
                if following[high] > before:
                    following[high] = min(following[high], max(before, cost(stage, low, high)))
        best = following
    return best[entries] if best[entries] < inf else None


def _most_even(stages: int, entries: int, allowed: Callable[[int, int, int], bool]) -> tuple[int, ...]:
    """Of the cuts whose every stage is ``allowed`` the one whose first stage is nearest to its equal share, then the
    second to its share of what is left, …; the smaller one where two are as near."""

    @cache
    def ends(stage: int, low: int) -> bool:
        """Whether stages from ``stage`` on can hold the entries from ``low`` on."""
        if stage == stages:
            return low == entries
        return any(allowed(stage, low, high) and ends(stage + 1, high) for high in range(low, entries + 1))

    bounds = [0]
    for stage in range(stages):
        low = bounds[-1]
        share = (entries - low) / (stages - stage)
        possible = (high for high in range(low, entries + 1) if allowed(stage, low, high) and ends(stage + 1, high))
        bounds.append(min(possible, key=lambda high: (abs(high - low - share), high)))
    return tuple(bounds)


# -- layers that are alike --------------------------------------------------------------------------------


def choose(stages: Sequence[Sequence[Option]], layers: int) -> tuple[Option, ...] | None:
    """One option of each stage, ``layers`` in all, with the least largest cost; ``None`` where there is none."""
    chosen = _cheapest(stages, layers, [option.cost for options in stages for option in options], _cost)
    if chosen is None:
        return None
    chosen = _cheapest(chosen, layers, [option.second for options in chosen for option in options], _second)
    assert chosen is not None
    return _evenly(chosen, layers)


def _cost(option: Option) -> float:
    return option.cost


def _second(option: Option) -> float:
    return option.second


def _cheapest(
    stages: Sequence[Sequence[Option]], layers: int, values: Sequence[float], value: Callable[[Option], float]
) -> list[list[Option]] | None:
    """The options up to the least threshold of ``value`` below which ``layers`` can be reached."""
    thresholds = sorted({one for one in values if one < inf})

    def below(threshold: float) -> list[list[Option]]:
        return [[option for option in options if value(option) <= threshold] for options in stages]

    at = bisect_left(thresholds, True, key=lambda threshold: _reaches(below(threshold), layers))
    return below(thresholds[at]) if at < len(thresholds) else None


def _reaches(stages: Sequence[Sequence[Option]], layers: int) -> bool:
    return bool(_sums(stages, layers)[0] >> layers & 1)


def _sums(stages: Sequence[Sequence[Option]], layers: int) -> list[int]:
    """By stage, the numbers of layers that it and those behind it can hold together: bit n for n layers."""
    mask = (1 << layers + 1) - 1
    sums = [1]
    for options in reversed(stages):
        reached = 0
        for count in {option.layers for option in options}:
            reached |= sums[-1] << count
        sums.append(reached & mask)
    return sums[::-1]


def _evenly(stages: Sequence[Sequence[Option]], layers: int) -> tuple[Option, ...]:
    """The most even of the choices that are left, by the rule of ``_most_even``; of equal counts the cheapest."""
    sums, chosen, left = _sums(stages, layers), list[Option](), layers
    for stage, options in enumerate(stages):
        behind, share = sums[stage + 1], left / (len(stages) - stage)
        possible = [option for option in options if option.layers <= left and behind >> left - option.layers & 1]
        nearest = min((abs(option.layers - share), option.layers) for option in possible)[1]
        best = min(
            (option for option in possible if option.layers == nearest),
            key=lambda one: (one.second, one.cost, one.chunks),
        )
        chosen.append(best)
        left -= best.layers
    return tuple(chosen)
