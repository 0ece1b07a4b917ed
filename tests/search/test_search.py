"""The search against evaluating everything, and its figures against those of the estimate."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import islice, pairwise, product
from random import Random
from statistics import median

import pytest

from memplan.device.measured import NOTHING
from memplan.estimate import estimate, fold
from memplan.frameworks.megatron import programs as megatron
from memplan.frameworks.megatron.searching import between
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.result import Verdict
from memplan.search.answer import Sought
from memplan.search.candidates import Clock
from memplan.search.cuts import StageLayers, fields_of, smallest
from memplan.search.lower_bounds import least_of
from memplan.search.point import Point, Recomputing, changed
from memplan.search.search import Candidate, Search
from memplan.search.space import Space, filled, space_of
from memplan.search.time import step_time
from memplan.tape.program import fold_program, static

from .at_random import at_random
from .test_cuts import counts_of

TINY = {
    "layers": "5", "hidden": "256", "ffn": "512", "heads": "4", "kv-heads": "4", "head-dim": "64", "vocab": "32000",
    "seq": "256", "gpu": "a100-40gb", "gpus-per-node": "4",
}  # fmt: skip
LLAMA = {**TINY, "model": "llama-2-7b", "dtype": "bf16"}
SPACES = {
    "megatron": {**LLAMA, "framework": "megatron", "gpus": "8", "gbs": "16"},
    "megatron, long sequences": {**LLAMA, "framework": "megatron", "gpus": "16", "gbs": "8", "seq": "1024"},
    "megatron-deepspeed": {
        "model": "gpt2", "framework": "megatron-deepspeed", "layers": "5", "seq": "128", "dtype": "fp16", "gpus": "8",
        "gbs": "16", "gpu": "v100-32gb", "gpus-per-node": "4",
    },
    "single": {**LLAMA, "framework": "single", "gbs": "64"},
    "ddp": {**LLAMA, "framework": "ddp", "gpus": "4", "gbs": "64"},
    "deepspeed": {**LLAMA, "framework": "deepspeed", "gpus": "4", "gbs": "16"},
    "fsdp": {**LLAMA, "framework": "fsdp", "gpus": "4", "gbs": "64"},
    "fsdp, nodes": {**LLAMA, "framework": "fsdp", "gpus": "8", "gpus-per-node": "2", "gbs": "64"},
    "fsdp, torchtitan": {**LLAMA, "framework": "fsdp", "fsdp-code": "torchtitan", "gpus": "4", "gbs": "16"},
    "fsdp, torchtitan's adapters": {
        **LLAMA, "framework": "fsdp", "fsdp-code": "torchtitan", "fsdp-newest": "true", "gpus": "4", "gbs": "16",
        "lora-rank": "8", "lora-targets": "wqkv,wo",
    },
    "device-map": {**LLAMA, "framework": "device-map", "gpus": "4", "gbs": "16"},
}  # fmt: skip
_EXPERTS = {
    **LLAMA, "framework": "megatron", "gpu": "h100-80gb", "experts": "4", "expert-top-k": "2", "expert-ffn": "256",
    "router-groups": "0", "router-group-top-k": "0",
}  # fmt: skip
SPACES |= {
    "megatron, experts": {**_EXPERTS, "model": "mixtral-8x7b", "gpus": "8", "gbs": "16"},
    "megatron, experts behind dense layers": {
        **_EXPERTS, "model": "deepseek-v3", "gpus": "4", "gbs": "8", "shared-expert-ffn": "128", "dense-layers": "0,1",
        "latent-q-rank": "128", "latent-kv-rank": "64", "nope-head-dim": "64", "rope-head-dim": "64", "head-dim": "128",
        "value-head-dim": "64",
    },
    "megatron, 8 bits": {
        **LLAMA, "framework": "megatron", "gpu": "h100-80gb", "gpus": "8", "gbs": "16", "fp8": "tensorwise",
        "fp8-parameters": "true",
    },
    "megatron, ends in 16 bits": {
        **LLAMA, "framework": "megatron", "gpu": "b200", "gpus": "4", "gbs": "8", "fp8": "mxfp8",
        "first-16bit-layers": "1", "last-16bit-layers": "1",
    },
    "megatron, hybrid": {
        **LLAMA, "framework": "megatron", "gpu": "h100-80gb", "model": "nemotron-h-8b", "gpus": "4", "gbs": "8",
        "layers": "6", "layer-pattern": "M-M*M-", "mamba-heads": "8", "mamba-groups": "4", "mamba-state-dim": "64",
        "kv-heads": "2",
    },
    "megatron, further tokens": {**_EXPERTS, "model": "mixtral-8x7b", "gpus": "4", "gbs": "8", "mtp-layers": "1"},
}  # fmt: skip
UNLIMITED = 1 << 46
FEW = {"gpus": "4", "gbs": "8"}


def space(name: str, **flags: str) -> Space:
    base = read_plan(None, {**SPACES[name], **flags}).plan
    return space_of(base, filled(base), {})


@cache
def clock(name: str) -> Clock:
    """Of a space that several tests search: times are the same in each."""
    return Clock(space(name))


def searched(clock: Clock, requestable: int) -> Search:
    """A search in which only what tensors request is limited."""
    return Search(clock.space, clock, UNLIMITED, UNLIMITED - requestable, lambda what, done, of: None)


def candidates(search: Search, many: int) -> list[Candidate]:
    """So many at random, with what the search makes of them where they do not fit."""
    found = []
    for candidate in islice(at_random(search, Random(1)), many):
        found.append(search._timed(candidate))
        found += search._fitted(found[-1], search.requestable)
    return found


@pytest.mark.parametrize("many", [50, pytest.param(250, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SPACES)
def test_what_the_search_says_is_what_the_estimate_says(name: str, many: int) -> None:
    """Bytes exactly, of the plan that is written; seconds but for rounding."""
    search = searched(clock(name), 1 << 31)
    compared = 0
    for candidate in candidates(search, many):
        suggestion = search.folded(candidate)
        if suggestion is None:
            continue
        compared += 1
        plan = resolve(suggestion.plan)
        peaks = [stage.peak for stage in fold(plan)]
        assert suggestion.requested == max(peaks)
        assert peaks[suggestion.fullest] == max(peaks)
        assert candidate.floor <= suggestion.requested
        assert suggestion.seconds == pytest.approx(step_time(plan).total, rel=1e-9)
    assert compared >= min(20, search.counts().considered // 4)


@pytest.mark.parametrize("name", SPACES)
def test_estimates_of_a_few(name: str) -> None:
    search = searched(clock(name), UNLIMITED)
    for suggestion in search.fastest(2):
        whole = estimate(suggestion.plan)
        assert max(stage.requested for stage in whole.stages) == suggestion.requested
        assert suggestion.device == whole.peak  # whichever stage has it
        assert suggestion.judged.verdict is whole.judged.verdict


CUT = [
    name for name in SPACES if name.startswith("megatron") and name not in ("megatron-deepspeed", "megatron, hybrid")
]


@pytest.mark.parametrize("name", CUT)
def test_bounds_from_above_and_below(name: str) -> None:
    search = searched(clock(name), UNLIMITED)
    for candidate in islice(at_random(search, Random(2)), 25):
        point, plan = candidate.point, resolve(search._plan(candidate))
        programs = megatron.programs(plan, Options())
        peaks = [fold_program(program).peak for program in programs]
        load, beside = search.needs.load(point), search.needs._beside(point)
        for at, (program, peak) in enumerate(zip(programs, peaks, strict=True)):
            bounds = between(program)
            assert bounds.least <= peak <= bounds.most
            assert least_of(load, beside)(at, candidate.cut[at]) <= peak
        for at in range(2, len(programs) - 1):
            own, before = (between(programs[stage]) for stage in (at, at - 1))
            alike = candidate.cut[at] == candidate.cut[at - 1]
            assert not alike or (own.least <= before.least and own.most <= before.most)
        enough = min(peaks)
        most, stage = search.space.search.fullest(plan, enough)
        assert most == max(peaks) if max(peaks) <= enough else enough < most <= peaks[stage]
        least = smallest(plan, search.clock.ratios(point))
        assert least is not None
        peak, _ = search.space.search.fullest(resolve(changed(plan, dict(fields_of("megatron", least)))))
        assert search.needs.at_best(point) <= peak


@pytest.mark.parametrize("name", ["megatron", "megatron, experts behind dense layers", "megatron, hybrid"])
def test_a_checkpoint_is_bounded_in_every_cut(name: str) -> None:
    """By all that a stage keeps between iterations and the copies that its program makes (``Program.saving``)."""
    whole = replace(space(name, hidden="1024", ffn="4096", vocab="1000", **FEW), mbs=(1,))
    search, shares = searched(Clock(whole), UNLIMITED), list[float]()
    copying = [point for point in whole if search.needs.saved(point)]
    assert {bool(point.extras) for point in copying} == {True}  # moments in fp32 are saved as they are
    for candidate in [one for point in Random(4).sample(copying, 12) for one in search._points.cut([point])]:
        programs = megatron.programs(resolve(search._plan(candidate)), Options())
        most = max(static(program).net + program.saving for program in programs)
        assert search.needs.saved(candidate.point) <= most
        shares.append(search.needs.saved(candidate.point) / most)
    assert median(shares) > 0.4  # embedding and head are left out, and stages are uneven


@pytest.mark.parametrize("headroom", ["23.5GiB", "20GiB"])
def test_what_cannot_be_saved_is_not_replayed(headroom: str) -> None:
    """An iteration of 1.1 G parameters with moments in bf16 needs 12 GiB of tensors, and saving them 16.2 GiB. So some
    layouts fit but for their checkpoints, and the answer is that of estimates of all of them."""
    flags = {
        **LLAMA, "framework": "megatron", "hidden": "4096", "ffn": "16384", "vocab": "1000", "seq": "64", "heads": "32",
        "kv-heads": "32", "head-dim": "128", "gpus": "2", "gpus-per-node": "2", "gbs": "4", "headroom": headroom,
    }  # fmt: skip
    fixed = {"layout.pp": 1, "layout.tp": 1, "batch.mbs": 1, "recompute.mode": "none"}
    fixed |= {"megatron.cross_entropy_fusion": "none"}
    sought = Sought(read_plan(None, flags).plan, fixed, "time", 1, lambda what, done, of: None, NOTHING)
    search, whole = sought._search_of(sought._space), sought._space
    every = {point: estimate(whole.plan(point)) for point in whole}
    unsaved = [one for one in every.values() if {failure.moment for _, failure in one.failures} == {"checkpoint"}]
    assert len(unsaved) == (2 if headroom == "23.5GiB" else 0)
    fits = [point for point, one in every.items() if one.judged.verdict is Verdict.FITS]
    times = [(not point.keeps_numerics, step_time(every[point].plan).total) for point in fits]
    found = search.fastest(1)
    assert [(not one.point.keeps_numerics, one.seconds) for one in found] == sorted(times)[:1]
    assert search.counts().replayed == len(found)
    needs = [every[point].stages[0].requested for point in fits if point.keeps_numerics]
    sought.objective = "memory"
    least = sought.found().best[:1]
    assert [one.requested for one in least] == sorted(needs)[:1]


def test_only_the_first_of_those_that_retry_is_followed() -> None:
    """FSDP: the fastest layout that fits with retries is part of the answer; of later ones it is enough that they would
    reserve more than there is, which takes no second replay. The answer is that of estimates of all."""
    flags = {
        **LLAMA, "framework": "fsdp", "hidden": "4096", "ffn": "16384", "seq": "2048", "heads": "32", "kv-heads": "32",
        "head-dim": "128", "gpus": "2", "gpus-per-node": "2", "gbs": "32", "headroom": "20GiB",
        "mbs": "4", "recompute": "full",
    }  # fmt: skip
    fixed = {"batch.mbs": 4, "recompute.mode": "full"}
    sought = Sought(read_plan(None, flags).plan, fixed, "time", 9, lambda what, done, of: None, NOTHING)
    search, whole = sought._search_of(sought._space), sought._space
    every = {point: estimate(whole.plan(point)) for point in whole}
    verdicts = [one.judged.verdict for one in every.values()]
    assert verdicts.count(Verdict.RETRIES) > 1
    fits, retrying = (
        sorted(step_time(one.plan).total for one in every.values() if one.judged.verdict is verdict)
        for verdict in (Verdict.FITS, Verdict.RETRIES)
    )
    found = search.fastest(9)
    assert [one.seconds for one in found] == [fits[0], retrying[0]]  # another loss is no other layout
    assert len(search._replays.within) == 1


# -- cuts where they matter ------------------------------------------------------------------------------

LARGE = {
    "llama-3-405b": {"gpus": "16384", "gpu": "h100-80gb", "gbs": "2048", "seq": "8192"},
    "gpt3-175b": {"gpus": "512", "gpu": "a100-80gb", "gbs": "1536", "seq": "2048"},
    "deepseek-v3": {"gpus": "2048", "gpu": "h100-80gb", "gbs": "15360", "seq": "4096"},
    "mixtral-8x7b": {"gpus": "64", "gpu": "b200", "gbs": "512", "seq": "4096"},
    "qwen3-30b-a3b": {"gpus": "64", "gpu": "h200", "gbs": "240", "seq": "8192"},
}
"""Models of known sizes, as people train them."""


class WithoutBound(Clock):
    """Every point is cut before any of them is taken."""

    def least(self, point: Point) -> float:
        return 0.0


def large(name: str) -> Space:
    base = read_plan(None, {"model": name, "framework": "megatron", **LARGE[name]}).plan
    return space_of(base, filled(base), {})


def check_bounds(search: Search, many: int) -> None:
    """No cut has less than the bounds that stand for it."""
    uncut = [group for group in search._groups if not group.is_cut]
    for group in Random(3).sample(uncut, min(many, len(uncut))):
        bounds = {one.point: one for one in group.candidates}
        for one in search._with_cuts(group):
            assert bounds[one.point].seconds <= one.seconds, one
            assert bounds[one.point].floor <= one.floor + 1, one


def found(search: Search) -> list[object]:
    """All that a search gives, but for the figures of the allocator."""
    best = search.fastest(4)
    every = [*best, *search.roomier(best[0], 0.05, 1), *search.front(best[0], 0.1, 8)] if best else []
    return [(one.point, one.cut, one.requested, one.seconds) for one in every]


@pytest.mark.parametrize("name", ["megatron", *(pytest.param(one, marks=pytest.mark.slow) for one in CUT[1:])])
def test_bounds_of_points_that_are_not_cut(name: str) -> None:
    check_bounds(searched(Clock(space(name, **FEW)), UNLIMITED), 40)


def test_bounds_of_points_in_another_framework() -> None:
    check_bounds(searched(clock("megatron-deepspeed"), UNLIMITED), 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_bounds_of_large_models(name: str) -> None:
    search = searched(Clock(large(name)), 70 << 30)
    check_bounds(search, 1000)
    assert len({group.candidates[0].seconds for group in search._groups}) > 100


@pytest.mark.parametrize("name", ["megatron", *(pytest.param(one, marks=pytest.mark.slow) for one in CUT[1:])])
def test_points_that_are_never_cut_change_nothing(name: str) -> None:
    whole = replace(space(name, **FEW), mbs=(1,))
    search, every = (
        Search(whole, times, UNLIMITED, UNLIMITED - (100 << 20), lambda what, done, of: None)
        for times in (Clock(whole), WithoutBound(whole))
    )
    assert found(search) == found(every)
    assert search.counts().considered == every.counts().considered


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_points_of_large_models_that_are_never_cut_change_nothing(name: str) -> None:
    whole = large(name)
    search, every = (
        Search(whole, times, 70 << 30, 1 << 30, lambda what, done, of: None)
        for times in (Clock(whole), WithoutBound(whole))
    )
    assert found(search) == found(every)
    assert len(search._cut) < len(every._cut)


# -- against everything -----------------------------------------------------------------------------------


def everything(space: Space) -> list[tuple[bool, float, int]]:
    """Of every layout with every cut and every number of recomputed layers, where layers are recomputed: whether it
    changes the numbers of training, its seconds, and what its fullest stage requests."""
    blocks = Recomputing("full") in space.recompute
    is_cut = space.search.chooses_cut
    layers = space.base.model.layers
    found = []
    for point in space:
        ways = [point]
        if is_cut and blocks and point.recompute == Recomputing():
            ways += [point._replace(recompute=Recomputing("full", "block", count)) for count in range(1, layers + 1)]
        cuts = list(counts_of(layers, point.pp, point.vpp)) if is_cut else [()]
        found += [one for way, cut in product(ways, cuts) if (one := evaluated(space, way, cut)) is not None]
    return found


def evaluated(space: Space, point: Point, cut: StageLayers) -> tuple[bool, float, int] | None:
    """``None`` where the framework refuses the plan."""
    try:
        plan = resolve(space.plan(point, dict(fields_of(space.base.framework, cut))))
        size = max(stage.peak for stage in fold(plan))
    except PlanError:
        return None
    return not point.keeps_numerics, step_time(plan).total, size


@pytest.mark.parametrize(
    "fixed",
    [{"megatron.cross_entropy_fusion": "none"}, pytest.param({}, marks=pytest.mark.slow)],
    ids=["unfused", "all"],
)
def test_the_answer_is_that_of_evaluating_everything(fixed: dict[str, object]) -> None:
    """Megatron-Core: 4 GPUs, every cut, every number of recomputed layers, and as much memory as some layout needs."""
    small = space("megatron", gpus="4", gbs="8", layers="4", vocab="128000")
    small = space_of(small.base, small.resolved, fixed)
    every = everything(small)
    assert len(every) > 1000
    sizes, times = sorted(size for _, _, size in every), Clock(small)
    for requestable in (*sizes[:: len(sizes) // 12], sizes[-1]):
        fits = min(one for one in every if one[2] <= requestable)
        (best,) = searched(times, requestable).fastest(1)
        assert best.requested <= requestable
        assert (not best.point.keeps_numerics, best.seconds) == (fits[0], pytest.approx(fits[1], rel=1e-9))
    nothing = searched(times, sizes[0] - 1)
    assert nothing.fastest(3) == []
    closest = nothing.smallest()
    assert closest is not None
    assert closest.requested == sizes[0]


@pytest.mark.parametrize(("vpp", "counts"), [(1, (1, 2, 3, 4)), (2, (1, 2))])
def test_few_layers_are_recomputed_where_a_bound_without_recompute_is_too_much(
    vpp: int, counts: tuple[int, ...]
) -> None:
    """Half of Llama 3 8B on four stages, with as much memory as each number of recomputed layers needs, cut as is
    fastest."""
    flags = {"model": "llama-3-8b", "layers": "16", "seq": "8192", "gbs": "32", "gpus": "4"}
    base = read_plan(None, {**flags, "framework": "megatron", "gpu": "h100-80gb"}).plan
    layout = {"layout.tp": 1, "layout.pp": 4, "layout.vpp": vpp, "layout.cp": 1, "layout.zero": 0, "batch.mbs": 1}
    few = space_of(base, filled(base), {**layout, "megatron.cross_entropy_fusion": "none"})
    times, plain = Clock(few), next(iter(few))
    cut, _ = times.fastest(plain)
    bound = searched(times, UNLIMITED).needs.floor(plain, cut)
    tight = 0
    for count in counts:
        known = evaluated(few, plain._replace(recompute=Recomputing("full", "block", count)), cut)
        assert known is not None
        (best,) = searched(times, known[2]).fastest(1)
        assert (best.seconds, best.requested) == (pytest.approx(known[1], rel=1e-9), known[2])
        tight += bound > known[2]
    assert tight


REAL = {
    "Megatron-DeepSpeed": {
        "model": "bigscience-104b", "framework": "megatron-deepspeed", "layers": "30", "gpus": "64", "gpu": "v100-32gb",
        "gbs": "64", "seq": "2048", "dtype": "fp16", "tp": "4",
    },
    "Megatron-Core": {
        "model": "llama-3-8b", "framework": "megatron", "gpus": "4", "gpu": "a100-80gb", "gbs": "32", "seq": "8192",
        "pp": "2", "tp": "1", "cp": "1", "vpp": "1",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_nothing_faster_fits(name: str) -> None:
    """Of all layouts that keep the numbers, with every number of recomputed layers, cut as is fastest, beside what lies
    outside of PyTorch: none that takes less time than the answer fits without a retry."""
    flags = REAL[name]
    fixed = {f"layout.{size}": int(flags[size]) for size in ("tp", "pp", "cp", "vpp") if size in flags}
    sought = Sought(read_plan(None, flags).plan, fixed, "time", 1, lambda what, done, of: None, NOTHING)
    space, times = sought._space, Clock(sought._space)
    (best,) = sought._search_of(space).fastest(1)
    faster = 0
    for plain in (point for point in space if point.keeps_numerics):
        most = -(-space.base.model.layers // (plain.pp * plain.vpp))
        blocks = [Recomputing("full", "block", count) for count in range(1, most + 1)]
        for point in (plain, *(plain._replace(recompute=one) for one in blocks if plain.recompute == Recomputing())):
            try:
                cut, _ = times.fastest(plain)
                seconds = times.seconds(point, cut)
            except PlanError:
                continue
            if seconds < best.seconds * (1 - 1e-9):
                faster += 1
                whole = evaluated(space, point, cut)
                if whole is not None and whole[2] <= sought.limit:
                    given = space.plan(point, dict(fields_of(space.base.framework, cut)))
                    judged = estimate(changed(given, {"headroom": sought.base.headroom})).judged
                    assert judged.retries or judged.verdict in (Verdict.TIGHT, Verdict.DOES_NOT_FIT), point
    assert faster > 20


def test_the_answer_of_models_with_experts() -> None:
    """Expert-parallel sizes, either division of an expert, and every cut of a dense layer and three with experts."""
    flags = {"layers": "4", "dense-layers": "0", "vocab": "64000", "gbs": "64"}
    small = space("megatron, experts behind dense layers", **flags)
    fixed = {"megatron.cross_entropy_fusion": "none", "optimizer.precision_aware": False, "layout.zero": 1}
    small = space_of(small.base, small.resolved, {**fixed, "batch.mbs": 1})
    small = replace(small, recompute=small.recompute[:-1])
    every = everything(small)
    assert len(every) > 100
    sizes, times = sorted(size for _, _, size in every), Clock(small)
    for requestable in (*sizes[:: len(sizes) // 12], sizes[-1]):
        fits = min(one for one in every if one[2] <= requestable)
        (best,) = searched(times, requestable).fastest(1)
        assert best.requested <= requestable
        assert (not best.point.keeps_numerics, best.seconds) == (fits[0], pytest.approx(fits[1], rel=1e-9))
    closest = searched(times, sizes[0] - 1).smallest()
    assert closest is not None
    assert closest.requested == sizes[0]


@pytest.mark.parametrize("name", ["ddp", "deepspeed", "fsdp", "fsdp, nodes", "megatron, hybrid", "single"])
def test_the_answer_of_other_frameworks(name: str) -> None:
    """No cuts, and recompute of all layers or none."""
    every = everything(clock(name).space)
    for requestable in sorted(size for _, _, size in every)[:: len(every) // 5]:
        fits = sorted(one for one in every if one[2] <= requestable)
        (best,) = searched(clock(name), requestable).fastest(1)
        assert (not best.point.keeps_numerics, best.seconds) == (fits[0][0], pytest.approx(fits[0][1], rel=1e-9))


@pytest.mark.parametrize("name", ["ddp", "deepspeed", "fsdp", "fsdp, nodes"])
@pytest.mark.parametrize("within", [0.01, 0.05, 0.3])
def test_the_roomiest_of_those_that_are_as_fast(name: str, within: float) -> None:
    """That of evaluating everything, among what keeps the numbers and moves nothing off the GPU; with a least gain each
    one gains that."""
    whole = clock(name).space
    search = searched(clock(name), UNLIMITED)
    (fastest,) = search.fastest(1)
    roomier, gain = search.roomier(fastest, within, 1), 32 << 20
    gaining = [*search.roomier(fastest, within, gain), fastest]
    assert all(one.requested <= other.requested - gain for one, other in pairwise(gaining))
    points = [one for one in whole if one.keeps_numerics and not any(extra.moves_states for extra in one.extras)]
    every = [found for one in points if (found := evaluated(whole, one, ())) is not None]
    least = min(size for _, seconds, size in every if seconds <= fastest.seconds * (1 + within))
    assert (roomier[0] if roomier else fastest).requested == least
    assert all(one.requested < other.requested for one, other in pairwise([*roomier, fastest]))


@pytest.mark.parametrize("zero", ["0", "1"])
def test_overlapping_gradients_and_parameters_takes_no_memory(zero: str) -> None:
    """So it is no axis of the search: it changes time alone (``docs/suggest.md``)."""
    flags = {**SPACES["megatron"], "layers": "4", "tp": "2", "pp": "2", "zero": zero}
    without = resolve(read_plan(None, flags).plan)
    overlap = {"overlap-grad-reduce": "true", "overlap-param-gather": "true" if zero == "1" else "false"}
    beside = resolve(read_plan(None, {**flags, **overlap}).plan)
    assert [stage.peak for stage in fold(beside)] == [stage.peak for stage in fold(without)]
    assert step_time(beside).total <= step_time(without).total


def test_hybrid_shards_are_found() -> None:
    """On 64 nodes, where gathering among all of them is slower than what is computed meanwhile."""
    flags = {"model": "llama-3-8b", "framework": "fsdp", "gpu": "h100-80gb", "gpus": "512", "gbs": "512", "seq": "2048"}
    base = read_plan(None, flags).plan
    (best,) = searched(Clock(space_of(base, filled(base), {})), 70 << 30).fastest(1)
    assert resolve(best.plan).fsdp.replicas > 1
    (sharded,) = searched(Clock(space_of(base, filled(base), {"fsdp.replicas": 1})), 70 << 30).fastest(1)
    assert resolve(sharded.plan).fsdp.replicas == 1
    assert sharded.seconds > best.seconds


def test_the_same_answer_every_time() -> None:
    one, other = (searched(Clock(space("megatron")), 1 << 30) for _ in range(2))
    assert one.fastest(4) == other.fastest(4)
    assert one.counts() == other.counts()


def test_the_front_falls_in_memory_and_rises_in_time() -> None:
    search = searched(clock("megatron"), UNLIMITED)
    (best,) = search.fastest(1)
    front = search.front(best, 0.05, 20)
    assert front[0] is best
    assert len(front) > 3
    for faster, slower in pairwise(front):
        assert slower.seconds >= faster.seconds
        assert slower.requested <= 0.95 * faster.requested


def test_a_fixed_cut_is_kept() -> None:
    flags = {**SPACES["megatron"], "pp": "2", "pipeline-layout": "Ett|tttL"}
    base = read_plan(None, flags).plan
    fixed = space_of(base, filled(base), {"pipeline.layout": "Ett|tttL"})
    suggestions = searched(Clock(fixed), UNLIMITED).fastest(3)
    assert len(suggestions) == 3
    for suggestion in suggestions:
        assert resolve(suggestion.plan).pipeline.layout == "Ett|tttL"
        assert [sum(work.layers for work in stage) for stage in suggestion.cut] == [2, 3]
