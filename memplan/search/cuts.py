"""Cuts of a model into pipeline stages: the fastest one, the fastest one that fits, and the one that needs least.

What the stages of a layout hold is chosen last, because everything else about it is known by then: how long a layer,
the embedding and the head take, and how many micro-batches each stage has in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from math import ceil, floor, inf
from typing import NamedTuple

from ..estimate import fold
from ..frameworks import megatron, megatron_deepspeed
from ..layers.module import Options
from ..pipeline.megatron_flight import Range
from ..plan.errors import PlanError
from ..plan.plan import Plan
from ..program import Program, fold_program
from .partition import Option, choose, contiguous
from .peaks import between
from .works import BEFORE, Work, Works, edges, mapped

CUT = ("megatron", "megatron-deepspeed")
"""Frameworks whose cut into stages is chosen."""


def may_be_alone(framework: str) -> bool:
    """Whether embedding or head can be a stage without a layer: BigScience's could not run (``notices``)."""
    return framework != "megatron-deepspeed"


class Ratios(NamedTuple):
    """How long embedding and head take, in layers."""

    embedding: float = 0.0
    head: float = 0.0


# -- the fastest -----------------------------------------------------------------------------------------


def fastest(layers: int, pp: int, vpp: int, ratios: Ratios, alone: bool = True) -> Works:
    """The cut whose slowest stage takes least, all its chunks together; of several the most even one, and of those the
    one whose first stages, which have most in flight, hold least.

    A stage that may take the time of t layers holds floor(t - what its ends take) of them, and the first t for which
    these add up to enough is a whole number, or a whole number and what the first or the last stage's ends take.
    Without ``alone`` an embedding or a head is beside a layer.
    """
    if pp == 1:
        return (stage_works(0, 1, (layers,)),)
    least = _fewest_of(pp, vpp, alone)
    start = max(
        (layers + ratios.embedding + ratios.head) / pp - 1e-9,
        least[0] + ratios.embedding,
        least[-1] + ratios.head,
        float(max(least)) if pp > 2 else 0.0,
    )
    first, between, last = min(_least_time(layers, pp, ratios, start, ends) for ends in (0.0, *ratios))[1:]
    return _levelled(layers, pp, vpp, least, first, between, last)


@lru_cache(maxsize=1 << 10)
def _fewest_of(pp: int, vpp: int, alone: bool) -> tuple[int, ...]:
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
def _levelled(layers: int, pp: int, vpp: int, least: tuple[int, ...], first: int, between: int, last: int) -> Works:
    """At most so many layers in each stage and at ``least`` those, as even as can be, ``layers`` in all."""
    most = [first, *[between] * (pp - 2), last]

    def counts_at(level: int) -> list[int]:
        return [max(low, min(high, level)) for low, high in zip(least, most, strict=True)]

    level = next(level for level in range(layers + 1) if sum(counts_at(level)) >= layers)
    counts = counts_at(level)
    surplus = sum(counts) - layers
    for at, count in enumerate(counts):
        if surplus and count == level > least[at]:
            counts[at] -= 1
            surplus -= 1
    return tuple(stage_works(at, pp, spread(count, vpp, last=at == pp - 1)) for at, count in enumerate(counts))


# -- by memory -----------------------------------------------------------------------------------------


class Peaks:
    """Requested bytes of any stage of a resolved plan, whatever it holds."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        if plan.framework == "megatron":
            self._stages = megatron.stages_of(plan, Options())
        self._of = cache(self._computed)
        self._bounds = cache(self._between)

    def __call__(self, stage: int, works: tuple[Work, ...]) -> int:
        return self._of(stage, works)

    def keep_to(self, limit: int, stage: int, works: tuple[Work, ...]) -> bool:
        """Whether that is ``limit`` at most."""
        bounds = self._bounds(stage, works)
        if bounds.most <= limit:
            return True
        return bounds.least <= limit and self(stage, works) <= limit

    def _computed(self, stage: int, works: tuple[Work, ...]) -> int:
        return fold_program(self._program(stage, works)).peak

    def _between(self, stage: int, works: tuple[Work, ...]) -> Range:
        return between(self._program(stage, works))

    def _program(self, stage: int, works: tuple[Work, ...]) -> Program:
        return self._stages.program(stage, tuple(_entries(work) for work in works))


def _entries(work: Work) -> tuple[str, ...]:
    return (
        *(("embedding",) if work.embedding else ()),
        *(f"layer.{at}" for at in range(work.layers)),
        *(("final_norm", "head") if work.head else ()),
    )


def capped(layers: int, vpp: int, ratios: Ratios, caps: Sequence[int], alone: bool) -> Works | None:
    """The cut whose slowest stage takes least among those with at most ``caps`` layers in a stage."""
    pp = len(caps)
    least = _fewest_of(pp, vpp, alone)
    stages = [
        [
            Option(spread(count, vpp, last=at == pp - 1), _seconds(works, ratios))
            for count in range(least[at], min(cap, layers) + 1)
            for works in (stage_works(at, pp, spread(count, vpp, last=at == pp - 1)),)
        ]
        for at, cap in enumerate(caps)
    ]
    chosen = choose(stages, layers)
    return None if chosen is None else tuple(stage_works(at, pp, one.chunks) for at, one in enumerate(chosen))


def fitting(plan: Plan, ratios: Ratios, limit: int, caps: Sequence[int] | None = None) -> Works | None:
    """Of the cuts whose every stage requests at most ``limit`` bytes, the one whose slowest stage takes least, and then
    the one whose largest needs least. ``caps`` are known bounds of the layers in each stage."""
    return _chosen(plan, ratios, limit, lambda peak, seconds: (seconds if peak <= limit else inf, peak), caps)


def smallest(plan: Plan, ratios: Ratios) -> Works | None:
    """The cut whose largest stage requests least; of several the fastest."""
    return _chosen(plan, ratios, None, lambda peak, seconds: (peak, seconds))


Criteria = Callable[[int, float], tuple[float, float]]
"""From bytes and time to what is least, and what decides among equals."""


def _chosen(
    plan: Plan, ratios: Ratios, limit: int | None, criteria: Criteria, caps: Sequence[int] | None = None
) -> Works | None:
    if plan.framework == "megatron-deepspeed":
        return _of_entries(plan, ratios, limit, criteria)
    if plan.framework == "device-map":
        return _of_devices(plan, limit, criteria)
    if plan.framework != "megatron":
        problem = "has no stages whose cut can be chosen"
        raise PlanError("framework", plan.framework, problem)
    return _of_layers(plan, ratios, limit, criteria, caps)


def _of_layers(
    plan: Plan, ratios: Ratios, limit: int | None, criteria: Criteria, caps: Sequence[int] | None
) -> Works | None:
    """Megatron-Core: embedding and head have their places, layers are all alike.

    Options of a stage reach from the fewest layers that leave the others no more than they can hold, to the most that
    keep to ``limit``, or to what the fastest cut needs, which is one to be beaten. That more layers never need less is
    used for these two ends only (``tests/search/test_cuts.py`` checks it).
    """
    layers, pp, vpp = plan.model.layers, plan.layout.pp, plan.layout.vpp
    peaks, first = Peaks(plan), fastest(layers, pp, vpp, ratios, may_be_alone(plan.framework))
    threshold = max(peaks(at, works) for at, works in enumerate(first)) if limit is None else limit

    def held(stage: int, count: int) -> tuple[Work, ...]:
        return stage_works(stage, pp, spread(count, vpp, last=stage == pp - 1))

    least = _fewest_of(pp, vpp, True)

    tops = [layers] * pp if caps is None else [min(layers, cap) for cap in caps]
    most: list[int] = []
    for stage, top in enumerate(tops):
        if sum(most) + sum(tops[stage:]) < layers:
            return None

        def holds(count: int, stage: int = stage) -> bool:
            return peaks.keep_to(threshold, stage, held(stage, count))

        most.append(_most(holds, least[stage], top, downwards=caps is not None))
    if sum(most) < layers or any(map(int.__lt__, most, least)):
        return None
    spare = sum(most) - layers
    options = [
        [
            Option(tuple(work.layers for work in works), *criteria(peaks(stage, works), _seconds(works, ratios)))
            for count in range(max(least[stage], most[stage] - spare), most[stage] + 1)
            for works in (held(stage, count),)
        ]
        for stage in range(pp)
    ]
    chosen = choose(options, layers)
    if chosen is None:
        return None
    return tuple(stage_works(at, pp, option.chunks) for at, option in enumerate(chosen))


def _most(holds: Callable[[int], bool], fewest: int, layers: int, downwards: bool = False) -> int:
    """The largest number from ``fewest`` up to ``layers`` that ``holds``, if smaller ones do; one less if none does.
    ``downwards`` where it is near the upper end."""
    low, high, step = fewest - 1, layers, 1
    while downwards and low < high and step <= 4:
        if holds(high):
            return high
        high, step = high - 1, step + 1
    step = 1
    while low + step <= high and holds(low + step):
        low, step = low + step, 2 * step
    high = min(high, low + step - 1)
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


def stage_works(stage: int, pp: int, chunks: Sequence[int]) -> tuple[Work, ...]:
    """A stage with so many layers in its chunks."""
    last = len(chunks) - 1
    return tuple(Work(count, stage == 0 and at == 0, stage == pp - 1 and at == last) for at, count in enumerate(chunks))


def _seconds(works: Sequence[Work], ratios: Ratios) -> float:
    """Time of a stage, in layers: its chunks take turns."""
    return sum(work.layers + work.embedding * ratios.embedding + work.head * ratios.head for work in works)


def _of_devices(plan: Plan, limit: int | None, criteria: Criteria) -> Works | None:
    """A device map: devices run one after the other, so that every map takes the same time. What a device needs depends
    on its own layers alone."""
    layers, devices = plan.model.layers, plan.hardware.gpus or 1

    @cache
    def peaks(shares: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(one.peak for one in fold(plan.model_copy(update={"device_map": mapped(shares)})))

    @cache
    def peak(device: int, count: int) -> int:
        """With ``count`` layers on ``device``, as many as there are for the others."""
        others = devices - 1
        rest = [(layers - count + others - 1 - at) // others for at in range(others)]
        return peaks((*rest[:device], count, *rest[device:]))[device]

    if devices == 1:
        return ((Work(layers, True, True),),)
    even = tuple((layers + devices - 1 - at) // devices for at in range(devices))
    threshold = max(peaks(even)) if limit is None else limit

    def most_of(device: int) -> int:
        return _most(lambda count: peak(device, count) <= threshold, 1, layers - devices + 1)

    most = [most_of(device) for device in range(devices)]
    if sum(most) < layers or min(most) < 1:
        return None
    spare = sum(most) - layers
    options = [
        [Option((count,), *criteria(peak(at, count), 0.0)) for count in range(max(1, top - spare), top + 1)]
        for at, top in enumerate(most)
    ]
    chosen = choose(options, layers)
    return None if chosen is None else tuple(stage_works(at, devices, one.chunks) for at, one in enumerate(chosen))


def _of_entries(plan: Plan, ratios: Ratios, limit: int | None, criteria: Criteria) -> Works | None:
    """BigScience's list: any run of entries may be a stage that has a layer; others could not run (``notices``)."""
    shape = megatron_deepspeed.parallel_shape(plan)
    entries = megatron_deepspeed.layer_list(plan, shape)
    stages, total = plan.layout.pp, len(entries)
    names = [entry.name for entry in entries]
    layer = [name.startswith("layer.") for name in names]

    @cache
    def peak(stage: int, held: tuple[str, ...]) -> int:
        """Of a stage with entries of these names, layers of which are all alike."""
        low = names.index(held[0])
        found = entries[low : low + len(held)]
        return fold_program(megatron_deepspeed.stage_program(plan, shape, stage, found, stages, Options())).peak

    def canonical(low: int, high: int) -> tuple[str, ...]:
        """``names[low:high]`` as the first run that is the same but for the numbers of its layers."""
        if layer[low] and not all(layer[low:high]):
            return tuple(names[low:high])
        if layer[low]:
            return tuple(names[BEFORE : BEFORE + high - low])
        return tuple(names[low:high])

    bounds = edges(fastest(plan.model.layers, stages, 1, ratios, may_be_alone(plan.framework)))
    threshold = limit
    if threshold is None:
        threshold = max(peak(at, canonical(low, high)) for at, (low, high) in enumerate(pairwise(bounds)))
    alone = peak(stages - 1, canonical(BEFORE, BEFORE + 2)) - peak(stages - 1, canonical(BEFORE, BEFORE + 1))
    weights = {"embedding": ratios.embedding, "head": ratios.head}
    seconds = [weights.get(name, 1.0 if layer[at] else 0.0) for at, name in enumerate(names)]

    @cache
    def values(stage: int, low: int, high: int) -> tuple[float, float]:
        held = names[low:high]
        if ("embedding" in held) != (stage == 0) or ("head" in held) != (stage == stages - 1):
            return inf, inf  # what follows the head stays with it
        if not sum(layer[low:high]) or sum(layer[low:high]) * alone > threshold:
            return inf, inf
        size = peak(stage, canonical(low, high))
        return criteria(size, sum(seconds[low:high])) if size <= threshold else (inf, inf)

    chosen = contiguous(stages, total, lambda *at: values(*at)[0] if at[1] < at[2] else inf, lambda *at: values(*at)[1])
    if chosen is None:
        return None

    def work(low: int, high: int) -> Work:
        held = names[low:high]
        return Work(sum(layer[low:high]), "embedding" in held, "head" in held, "final_norm" in held, high)

    return tuple((work(low, high),) for low, high in pairwise(chosen))
