"""Cuts of a model into pipeline stages: what stages hold, the fastest cut, the fastest that fits, and the smallest.

What the stages of a layout hold is chosen last, because everything else about it is known by then: how long a layer,
the embedding and the head take, and how many micro-batches each stage has in flight. How a cut by memory is found is
the framework's own (``FrameworkSearch.cut``), of one of two problems that are solved here, exactly, whatever the costs
of stages look like:

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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from math import ceil, floor, inf
from typing import Any

from ..frameworks import framework
from ..plan.errors import PlanError
from ..plan.plan import ResolvedPlan
from ..values import NamedTuple, dataclass


class ChunkLayers(NamedTuple):
    """What one chunk of a stage runs."""

    layers: int
    embedding: bool = False
    head: bool = False
    has_norm: bool | None = None
    """Whether the final norm is in it, where that is not where the head is."""
    until: int = 0
    """BigScience's layer list: the first entry of the next stage, where it is no layer of its own."""
    dense: int = 0
    """Layers, the first of them, that have an MLP where others have experts."""

    @property
    def final_norm(self) -> bool:
        return self.head if self.has_norm is None else self.has_norm


StageLayers = tuple[tuple[ChunkLayers, ...], ...]
"""By stage, then by chunk."""


@lru_cache(maxsize=4096)
def norm_behind_layers(cut: StageLayers) -> StageLayers:
    """``cut`` with the final norm where the last layer is, which multi-token prediction wants."""
    chunks = len(cut[0])
    last = next(
        (chunk, stage)
        for chunk in range(chunks - 1, -1, -1)
        for stage in range(len(cut) - 1, -1, -1)
        if cut[stage][chunk].layers
    )
    return tuple(
        tuple(one._replace(has_norm=(chunk, stage) == last) for chunk, one in enumerate(own))
        for stage, own in enumerate(cut)
    )


Fields = tuple[tuple[str, Any], ...]
"""Fields of a plan by their paths, and their values."""


def layers_of(cut: Iterable[Sequence[ChunkLayers]]) -> tuple[int, ...]:
    """Layers of each stage."""
    return tuple(sum(chunk.layers for chunk in stage) for stage in cut)


@lru_cache(maxsize=4096)
def fields_of(name: str, cut: StageLayers) -> Fields:
    """The fields of a plan of the framework ``name`` that say what its stages hold."""
    return framework(name).search.cut_fields(cut)


class Ratios(NamedTuple):
    """How long embedding and head take, in layers; and the model's first layers, where these have an MLP and all others
    experts, each in one of those others."""

    embedding: float = 0.0
    head: float = 0.0
    dense: float = 1.0
    first: int = 0
    """How many those are."""


# -- the fastest -----------------------------------------------------------------------------------------


def fastest(layers: int, pp: int, vpp: int, ratios: Ratios, alone: bool = True) -> StageLayers:
    """The cut whose slowest stage takes least, all its chunks together; of several the most even one, and of those the
    one whose first stages, which have most in flight, hold least.

    A stage that may take the time of t layers holds floor(t - what its ends take) of them, and the first t for which
    these add up to enough is a whole number, or a whole number and what the first or the last stage's ends take.
    Without ``alone`` an embedding or a head is beside a layer.
    """
    if pp == 1:
        return (stage_layers(0, 1, (layers,), ratios.first),)
    if ratios.first:
        return _fastest_behind(layers, pp, vpp, ratios, alone)
    least = fewest_of(pp, vpp, alone)
    start = max(
        (layers + ratios.embedding + ratios.head) / pp - 1e-9,
        least[0] + ratios.embedding,
        least[-1] + ratios.head,
        float(max(least)) if pp > 2 else 0.0,
    )
    ends = (0.0, ratios.embedding, ratios.head)
    first, between, last = min(_least_time(layers, pp, ratios, start, end) for end in ends)[1:]
    return _levelled(layers, pp, vpp, least, (first, *(between,) * (pp - 2), last), ())


def _fastest_behind(layers: int, pp: int, vpp: int, ratios: Ratios, alone: bool) -> StageLayers:
    """The same where the first layers take another time, of every way in which these lie on the first stages."""
    time: float = inf
    dense: tuple[int, ...] = ()
    for ways, stages in _ways(ratios.first, layers, (pp, vpp, alone)):
        less = _time_behind(stages, layers, pp, ratios, time)
        if less < time:
            time, dense = less, ways
    if time == inf:
        raise PlanError(
            "layout.pp", pp, f"leaves the {ratios.first} layers without experts no place on the first stages"
        )
    least, tops = held_with(dense, pp, vpp, alone, layers)
    offsets = _offsets(dense, pp, ratios)
    most = tuple([min(top, floor(time - offset + 1e-9)) for offset, top in zip(offsets, tops, strict=True)])
    return _levelled(layers, pp, vpp, least, most, dense)


def has_place(first: int, layers: int, sizes: tuple[int, int, bool]) -> bool:
    """Whether the model's first layers can lie on the first stages (``sizes``: as of ``capped``)."""
    return not first or sizes[0] == 1 or bool(_ways(first, layers, sizes))


def _offsets(dense: tuple[int, ...], pp: int, ratios: Ratios) -> list[float]:
    """What each stage takes besides its layers, less what its first layers save."""
    offsets = [-(1 - ratios.dense) * count for count in dense] + [0.0] * (pp - len(dense))
    offsets[0] += ratios.embedding
    offsets[-1] += ratios.head
    return offsets


Alike = tuple[int, int, int, int, int, int]
"""How many stages have so many of the first layers, embedding and head or not, and hold so many layers at least and at
most."""


@lru_cache(maxsize=1 << 10)
def _ways(first: int, layers: int, sizes: tuple[int, int, bool]) -> list[tuple[tuple[int, ...], tuple[Alike, ...]]]:
    """Every way in which the first layers are ``dealt`` and stages can hold ``layers``, with the stages by what decides
    how much they hold; ``sizes``: stages, chunks of each, and if ends may be alone."""
    found, last = [], sizes[0] - 1
    for dense in dealt(first, sizes[0]):
        least, tops = held_with(dense, *sizes, layers)
        if sum(tops) < layers or sum(least) > layers or any(map(int.__gt__, least, tops)):
            continue
        kinds = Counter(
            (dense_of(dense, at), int(at == 0), int(at == last), *held)
            for at, held in enumerate(zip(least, tops, strict=True))
        )
        found.append((dense, tuple((stages, *kind) for kind, stages in kinds.items())))
    return found


def _time_behind(alike: tuple[Alike, ...], layers: int, pp: int, ratios: Ratios, bound: float) -> float:
    """Of the slowest stage, at least, with the first layers as ``dealt``; infinite where it is not below ``bound``. A
    stage that takes the time of t layers holds floor(t - what it takes besides) of them; so the first t for which these
    add up to enough is a whole number and what some stage takes besides, or where none holds less than it must."""
    saved, embedding, head = ratios.dense - 1, ratios.embedding, ratios.head
    lowest, together, groups = -inf, float(layers), []
    for stages, first, begins, ends, least, top in alike:
        offset = saved * first + begins * embedding + ends * head
        if least + offset > lowest:
            lowest = least + offset
        together += stages * offset
        groups.append((stages, offset, top))
    start = max(lowest, together / pp) - 1e-9
    if start >= bound or (bound < inf and _held(groups, bound) < layers):
        return inf
    steps: list[float] = sorted({one + ceil(start - one) for one in (lowest, *(offset for _, offset, _ in groups))})
    while True:
        for time in steps:
            if time >= bound:
                return inf
            if _held(groups, time) >= layers:
                return time
        steps = [time + 1 for time in steps]


def _held(groups: Sequence[tuple[int, float, int]], time: float) -> int:
    """Layers of stages that take so much ``time``; ``groups``: how many stages, what they take besides, and the most
    that they hold."""
    held = 0
    for stages, offset, top in groups:
        most = int(time - offset + 1e-9)
        held += stages * (top if top < most else most)
    return held


@lru_cache(maxsize=1 << 10)
def dealt(first: int, pp: int) -> tuple[tuple[int, ...], ...]:
    """How many of the ``first`` layers each of the first stages holds, all of them in its first chunk: every way. The
    last of these stages may hold other layers behind them there, those before it none. The first stage can have the
    embedding alone."""
    if not first:
        return ((),)
    ways: list[tuple[int, ...]] = [(first,)]
    if pp > 1:
        ways += [(count, *rest) for count in range(first - 1, -1, -1) for rest in _behind(first - count, pp - 1)]
    return tuple(ways)


def _behind(first: int, pp: int) -> list[tuple[int, ...]]:
    if pp == 1:
        return [(first,)]
    return [
        (first,), *((count, *rest) for count in range(first - 1, 0, -1) for rest in _behind(first - count, pp - 1))
    ]  # fmt: skip


@lru_cache(maxsize=1 << 12)
def held_with(
    dense: tuple[int, ...], pp: int, vpp: int, alone: bool, layers: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The fewest and the most layers of each stage where the model's first ones lie as ``dealt`` says."""
    least, tops = list(fewest_of(pp, vpp, alone)), [layers] * pp
    for stage, count in enumerate(dense):
        held = [n for n in range(vpp * (count + 1) + 1) if spread(n, vpp, last=stage == pp - 1)[0] == count]
        least[stage] = max(least[stage], held[0])
        if stage < len(dense) - 1:
            tops[stage] = held[-1]
    return tuple(least), tuple(tops)


@lru_cache(maxsize=1 << 10)
def fewest_of(pp: int, vpp: int, alone: bool) -> tuple[int, ...]:
    """Layers that every stage has at least, so that no chunk is empty."""
    return tuple(max(fewest(stage, pp, vpp), int(not alone)) for stage in range(pp))


def _least_time(layers: int, pp: int, ratios: Ratios, start: float, ends: float) -> tuple[float, int, int, int]:
    """The first of ``ends`` and whole numbers more, from ``start`` on, in which all layers can be held; and how many
    the first stage holds in it, each one between, and the last."""
    time = ends + max(0, ceil(start - ends - 1e-9))
    while True:
        first, between = floor(time - ratios.embedding + 1e-9), floor(time + 1e-9)
        last = floor(time - ratios.head + 1e-9)
        if first + (pp - 2) * between + last >= layers:
            return time, first, between, last
        time += 1


@lru_cache(maxsize=1 << 14)
def _levelled(
    layers: int, pp: int, vpp: int, least: tuple[int, ...], most: tuple[int, ...], dense: tuple[int, ...]
) -> StageLayers:
    """At most so many layers in each stage and at ``least`` those, as even as can be, ``layers`` in all, of them the
    first ones as ``dealt``."""

    def counts_at(level: int) -> list[int]:
        return [max(low, min(high, level)) for low, high in zip(least, most, strict=True)]

    level = next(level for level in range(layers + 1) if sum(counts_at(level)) >= layers)
    counts = counts_at(level)
    surplus = sum(counts) - layers
    for at, count in enumerate(counts):
        if surplus and count == level > least[at]:
            counts[at] -= 1
            surplus -= 1
    return tuple(
        stage_layers(at, pp, spread(count, vpp, last=at == pp - 1), dense_of(dense, at))
        for at, count in enumerate(counts)
    )


# -- by memory -----------------------------------------------------------------------------------------


Holds = Callable[[int, tuple[ChunkLayers, ...]], bool]
"""Whether a stage may hold what is given: with more layers no more easily."""


def capped(layers: int, sizes: tuple[int, int, bool], ratios: Ratios, holds: Holds) -> StageLayers | None:
    """The cut whose slowest stage takes least among those whose every stage ``holds`` it; ``sizes``: stages, chunks of
    each, and if ends may be alone."""

    pp, vpp, _ = sizes

    def option(stage: int, count: int, dense: tuple[int, ...]) -> Option:
        cut = stage_of(stage, pp, vpp, count, dense)
        return Option(tuple([one.layers for one in cut]), stage_seconds(cut, ratios))

    def options(dense: tuple[int, ...]) -> list[list[Option]] | None:
        most = most_held(dense, sizes, layers, holds)
        if most is None:
            return None
        least, _ = held_with(dense, *sizes, layers)
        spare = sum(most) - layers
        return [
            [option(at, count, dense) for count in range(max(fewest, top - spare), top + 1)]
            for at, (fewest, top) in enumerate(zip(least, most, strict=True))
        ]

    return best_of(layers, pp, fastest_ways(layers, sizes, ratios), options)


def most_held(
    dense: tuple[int, ...], sizes: tuple[int, int, bool], layers: int, holds: Holds
) -> tuple[int, ...] | None:
    """Of each stage the most layers that it ``holds``, with the model's first ones as ``dealt``; ``None`` where stages
    do not hold all ``layers``."""
    pp, vpp, _ = sizes
    found: list[int] = []
    for stage, (fewest, top) in enumerate(zip(*held_with(dense, *sizes, layers), strict=True)):

        def held(count: int, stage: int = stage) -> bool:
            return holds(stage, stage_of(stage, pp, vpp, count, dense))

        found.append(most_that(held, fewest, top, found[-1] if found else layers // pp))
        if found[-1] < fewest:
            return None
    return tuple(found) if sum(found) >= layers else None


Ways = Sequence[tuple[float, tuple[int, ...]]]
"""In which the model's first layers are ``dealt``; in front of each what the largest cost is at least."""


def fastest_ways(layers: int, sizes: tuple[int, int, bool], ratios: Ratios) -> Ways:
    """Every way, the fastest first."""
    if not ratios.first:
        return [(0.0, ())]
    ways = _ways(ratios.first, layers, sizes)
    return sorted((_time_behind(stages, layers, sizes[0], ratios, inf) - 1e-6, dense) for dense, stages in ways)


def best_of(
    layers: int, pp: int, ways: Ways, options: Callable[[tuple[int, ...]], list[list[Option]] | None]
) -> StageLayers | None:
    """The best choice of each stage's ``options``, whichever way the model's first layers lie: of equal ones the first;
    ``None`` where there is none."""
    best: tuple[tuple[float, float], StageLayers] | None = None
    for least, dense in ways:
        if best is not None and least >= best[0][0]:
            break
        stages = options(dense)
        chosen = None if stages is None else choose(stages, layers)
        if chosen is None:
            continue
        worst = max(one.cost for one in chosen), max(one.second for one in chosen)
        if best is None or worst < best[0]:
            cut = tuple(stage_layers(at, pp, one.chunks, dense_of(dense, at)) for at, one in enumerate(chosen))
            best = worst, cut
    return None if best is None else best[1]


def dense_of(dense: tuple[int, ...], stage: int) -> int:
    """Of the model's first layers, those of ``stage``."""
    return dense[stage] if stage < len(dense) else 0


def fitting(plan: ResolvedPlan, ratios: Ratios, limit: int, holds: Holds | None = None) -> StageLayers | None:
    """Of the cuts whose every stage requests at most ``limit`` bytes, the one whose slowest stage takes least, and then
    the one whose largest needs least. Stages that do not hold what they are given (``holds``) are known to need more.
    """
    return framework(plan.framework).search.cut(
        plan, ratios, limit, lambda peak, seconds: (seconds if peak <= limit else inf, peak), holds
    )


def smallest(plan: ResolvedPlan, ratios: Ratios) -> StageLayers | None:
    """The cut whose largest stage requests least; of several the fastest."""
    return framework(plan.framework).search.cut(plan, ratios, None, lambda peak, seconds: (peak, seconds), None)


Criteria = Callable[[int, float], tuple[float, float]]
"""From bytes and time to what is least, and what decides among equals."""


def most_that(holds: Callable[[int], bool], fewest: int, layers: int, near: int) -> int:
    """The largest number from ``fewest`` up to ``layers`` that ``holds``, if smaller ones do; one less if none does.
    Found in steps that double, from ``near`` on."""
    low, high, step = fewest - 1, layers, 1
    at = min(max(near, fewest), layers)
    if low < high and holds(at):
        low = at
        while low < high and holds(min(low + step, high)):
            low, step = min(low + step, high), 2 * step
        high = min(high, low + step - 1)
    else:
        high = min(high, at - 1)
        while low < high and not holds(max(high - step + 1, fewest)):
            high, step = max(high - step, low), 2 * step
        low = max(low, high - step + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def fewest(stage: int, pp: int, vpp: int) -> int:
    """Layers without which a chunk would be empty; embedding and head can be alone."""
    return vpp - (stage == 0) - (stage == pp - 1) if vpp > 1 or pp > 1 else 1


def spread(layers: int, chunks: int, last: bool) -> tuple[int, ...]:
    """Layers of each chunk of a stage: they differ by one at most, as an interleaved schedule waits for the longest.

    The fuller ones come last, where fewer micro-batches are in flight; on the ``last`` stage first, because the last
    chunk has the head.
    """
    share, fuller = divmod(layers, chunks)
    counts = [share + (chunk >= chunks - fuller) for chunk in range(chunks)]
    return tuple(counts[::-1] if last else counts)


def stage_layers(stage: int, pp: int, chunks: Sequence[int], dense: int = 0) -> tuple[ChunkLayers, ...]:
    """A stage with so many layers in its chunks, of the first ``dense`` ones without experts."""
    last = len(chunks) - 1
    found = [
        ChunkLayers(count, stage == 0 and at == 0, stage == pp - 1 and at == last) for at, count in enumerate(chunks)
    ]
    if dense:
        found[0] = found[0]._replace(dense=dense)
    return tuple(found)


@lru_cache(maxsize=1 << 14)
def stage_of(stage: int, pp: int, vpp: int, layers: int, dense: tuple[int, ...]) -> tuple[ChunkLayers, ...]:
    """A stage with so many layers, the model's first ones as ``dealt``."""
    return stage_layers(stage, pp, spread(layers, vpp, last=stage == pp - 1), dense_of(dense, stage))


def stage_seconds(cut: Sequence[ChunkLayers], ratios: Ratios) -> float:
    """Time of a stage, in layers: its chunks take turns."""
    return sum(
        chunk.layers - chunk.dense * (1 - ratios.dense) + chunk.embedding * ratios.embedding + chunk.head * ratios.head
        for chunk in cut
    )


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

    at = bisect_left(thresholds, True, key=lambda threshold: bool(_sums(below(threshold), layers)[0] >> layers & 1))
    return below(thresholds[at]) if at < len(thresholds) else None


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
