"""Cuts into stages, against trying all of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

import pytest
from hypothesis import assume, given, settings, strategies as st

from memplan.estimate import fold
from memplan.frameworks.megatron.modules import stage_entries
from memplan.frameworks.megatron.searching import Peaks
from memplan.plan.errors import PlanError
from memplan.plan.megatron_layout import layout_text, stages
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.cuts import (
    ChunkLayers,
    Option,
    Ratios,
    StageLayers,
    choose,
    fastest,
    fewest,
    fields_of,
    fitting,
    layers_of,
    smallest,
    spread,
    stage_layers,
    stage_seconds,
)
from memplan.search.point import changed
from memplan.search.time import work_of

SMALL = {
    "model": "llama-2-7b", "layers": "7", "hidden": "256", "ffn": "512", "heads": "4", "kv-heads": "4",
    "head-dim": "64", "vocab": "32000", "seq": "256", "gbs": "24", "dtype": "bf16", "gpu": "a100-40gb",
}  # fmt: skip
RATIOS = Ratios(0.1, 1.7)


def megatron(**flags: str) -> Plan:
    names = {name.replace("_", "-"): value for name, value in flags.items()}
    return resolve(read_plan(None, {**SMALL, "framework": "megatron", **names}).plan)


def bigscience(**flags: str) -> Plan:
    size = {
        "model": "gpt2",
        "layers": "6",
        "seq": "128",
        "gbs": "16",
        "dtype": "fp16",
        "framework": "megatron-deepspeed",
    }
    return resolve(read_plan(None, {**size, "partition": "uniform", "recompute": "full", **flags}).plan)


def peak(plan: Plan, fields: tuple) -> int:
    return max(stage.peak for stage in fold(resolve(changed(plan, dict(fields)))))


def peak_or_none(plan: Plan, bounds: tuple[int, ...]) -> int | None:
    """Of a cut of BigScience's list; ``None`` where a stage would have no module."""
    try:
        return peak(plan, (("pipeline.partition", bounds),))
    except PlanError:
        return None


def time_of(cut: StageLayers, ratios: Ratios) -> float:
    """Of the slowest stage, in layers."""

    def seconds(stage: tuple[ChunkLayers, ...]) -> float:
        return sum(chunk.layers + chunk.embedding * ratios.embedding + chunk.head * ratios.head for chunk in stage)

    return max(map(seconds, cut))


# -- the fastest -----------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 4), st.floats(0, 5), st.floats(0, 9), st.integers(0, 1))
def test_the_fastest_cut_is_that_of_dynamic_programming(
    layers: int, pp: int, vpp: int, embedding: float, head: float, least: int
) -> None:
    assume((pp > 1 or vpp == 1) and layers >= pp * vpp)
    ratios = Ratios(embedding, head)
    cut = fastest(layers, pp, vpp, ratios, not least)
    ends = [embedding * (stage == 0) + head * (stage == pp - 1) for stage in range(pp)]
    fewest_of = [max(least, fewest(stage, pp, vpp)) for stage in range(pp)]
    options = [
        [Option((count,), count + taken) for count in range(low, layers + 1)]
        for low, taken in zip(fewest_of, ends, strict=True)
    ]
    chosen = choose(options, layers)
    assert chosen is not None
    assert sum(layers_of(cut)) == layers
    assert all(count >= low for count, low in zip(layers_of(cut), fewest_of, strict=True))
    assert time_of(cut, ratios) == pytest.approx(max(one.cost for one in chosen), abs=1e-6)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(3, 12), st.integers(2, 4), st.integers(1, 3), st.floats(0, 3), st.floats(0, 3), st.floats(0.05, 3),
    st.integers(1, 3),
)  # fmt: skip
def test_the_fastest_cut_behind_layers_of_another_kind(
    layers: int, pp: int, vpp: int, embedding: float, head: float, dense: float, first: int
) -> None:
    """Against every number of layers of each stage, where the first ones lie in the first chunks."""
    assume(vpp * pp <= layers + 2)
    ratios = Ratios(embedding, head, dense, first)
    times = [max(stage_seconds(stage, ratios) for stage in cut) for cut in cuts_behind(layers, pp, vpp, first)]
    try:
        cut = fastest(layers, pp, vpp, ratios)
    except PlanError:
        assert not times
        return
    assert sum(layers_of(cut)) == layers
    assert sum(chunk.dense for stage in cut for chunk in stage) == first
    assert max(stage_seconds(stage, ratios) for stage in cut) == pytest.approx(min(times), abs=1e-6)


def cuts_behind(layers: int, pp: int, vpp: int, first: int) -> Iterator[StageLayers]:
    for counts in product(range(layers + 1), repeat=pp):
        if sum(counts) != layers or any(n < fewest(at, pp, vpp) for at, n in enumerate(counts)):
            continue
        left, cut = first, []
        for at, count in enumerate(counts):
            chunks = spread(count, vpp, last=at == pp - 1)
            cut.append(stage_layers(at, pp, chunks, min(left, chunks[0])))
            left -= min(left, chunks[0])
        if not left:
            yield tuple(cut)


def test_equal_stages_where_ends_take_nothing() -> None:
    assert layers_of(fastest(126, 16, 1, Ratios())) == (7, 7, *[8] * 14)


# -- as fields --------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=2, max_size=9))
def test_a_layout_string_says_what_it_was_made_from(counts: list[list[int]]) -> None:
    layers = sum(map(sum, counts))
    read = stages(layers, len(counts), 2, layout=layout_text(counts))
    assert [[len(chunk.layers) for chunk in stage] for stage in read] == counts


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (3, 1), (4, 1), (3, 2), (2, 3)])
def test_fields_cut_as_they_were_meant_to(pp: int, vpp: int) -> None:
    plan = megatron(pp=str(pp), count_embedding="false")
    plan = plan.model_copy(update={"layout": plan.layout.model_copy(update={"vpp": vpp})})
    cut = fastest(plan.model.layers, pp, vpp, RATIOS)
    entries = stage_entries(changed(plan, dict(fields_of("megatron", cut))))
    held = [[sum(name.startswith("layer.") for name in chunk) for chunk in stage] for stage in entries]
    assert held == [[chunk.layers for chunk in stage] for stage in cut]


# -- by memory --------------------------------------------------------------------------------------------


def counts_of(layers: int, pp: int, vpp: int) -> Iterator[StageLayers]:
    """Every way to give each stage of Megatron-Core layers, chunks of a stage as ``spread`` has them."""

    def rest(stage: int, left: int) -> Iterator[tuple]:
        if stage == pp:
            if not left:
                yield ()
            return
        for count in range(fewest(stage, pp, vpp), left + 1):
            cut = stage_layers(stage, pp, spread(count, vpp, last=stage == pp - 1))
            yield from ((cut, *others) for others in rest(stage + 1, left - count))

    return rest(0, layers)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("pp", "vpp", "vocab"), [(2, 1, 32000), (3, 1, 128000), (4, 1, 512), (3, 2, 128000), (2, 3, 32000)]
)
def test_megatron_core_cuts_are_the_best_of_all(pp: int, vpp: int, vocab: int, recompute: str) -> None:
    """Every cut is folded through the plan that says so; ``gbs`` 24 keeps stages unequally full."""
    plan = megatron(
        pp=str(pp), vocab=str(vocab), recompute=recompute, zero="0", **({} if vpp == 1 else {"vpp": str(vpp)})
    )
    every = list(counts_of(plan.model.layers, pp, vpp))
    peaks = {cut: peak(plan, fields_of("megatron", cut)) for cut in every}
    least = smallest(plan, RATIOS)
    assert least is not None
    assert peaks[least] == min(peaks.values())
    equal = [cut for cut in every if peaks[cut] == peaks[least]]
    assert time_of(least, RATIOS) == min(time_of(cut, RATIOS) for cut in equal)
    for limit in (min(peaks.values()) - 1, *sorted(peaks.values())[:: max(1, len(every) // 5)]):
        fits = [cut for cut in every if peaks[cut] <= limit]
        found = fitting(plan, RATIOS, limit)
        if not fits:
            assert found is None
            continue
        assert found is not None
        assert peaks[found] <= limit
        assert time_of(found, RATIOS) == min(time_of(cut, RATIOS) for cut in fits)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("pp", "mbs", "vocab"), [(2, 1, 50257), (3, 2, 250100), (4, 1, 250100), (4, 4, 1000)])
def test_bigscience_cuts_are_the_best_of_all(pp: int, mbs: int, vocab: int, recompute: str) -> None:
    """Every run of entries may be a stage, if it has a layer."""
    plan = bigscience(pp=str(pp), mbs=str(mbs), vocab=str(vocab), recompute=recompute)
    total = plan.model.layers + 7
    layers = range(3, 3 + plan.model.layers)
    every = [(0, *edges, total) for edges in combinations(range(1, total), pp - 1)]
    every = [bounds for bounds in every if all(set(range(*run)) & set(layers) for run in pairwise(bounds))]
    peaks = {bounds: size for bounds in every if (size := peak_or_none(plan, bounds)) is not None}
    least = smallest(plan, RATIOS)
    assert least is not None
    bounds = dict(fields_of("megatron-deepspeed", least))["pipeline.partition"]
    assert peaks[bounds] == min(peaks.values())
    limit = sorted(peaks.values())[len(peaks) // 4]
    found = fitting(plan, RATIOS, limit)
    assert found is not None
    assert peaks[dict(fields_of("megatron-deepspeed", found))["pipeline.partition"]] <= limit


def test_more_layers_need_more() -> None:
    """What ``_of_layers`` uses to find the ends of its options."""
    for plan in (megatron(pp="3", zero="1"), megatron(pp="3", zero="0", recompute="full"), megatron(pp="4", tp="2")):
        peaks = Peaks(plan)
        for stage in range(plan.layout.pp):
            sizes = [peaks(stage, stage_layers(stage, plan.layout.pp, (count,))) for count in range(1, 8)]
            assert all(low < high for low, high in pairwise(sizes))


def test_work_is_what_the_time_model_sees() -> None:
    plan = megatron(pp="3")
    cut = fastest(plan.model.layers, 3, 1, RATIOS)
    seen = work_of(resolve(changed(plan, dict(fields_of("megatron", cut)))))
    assert [[chunk.layers for chunk in stage] for stage in seen] == [[chunk.layers for chunk in stage] for stage in cut]
