"""The discussions that the project grew from, and what the search says to them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from memplan.estimate import fold
from memplan.frameworks.plain.searching import mapped
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.answer import suggest
from memplan.search.cuts import Ratios, fields_of, layers_of, smallest
from memplan.search.point import changed
from memplan.search.time import work_of


def peak(plan: Plan, fields: tuple = ()) -> int:
    return max(stage.peak for stage in fold(resolve(changed(plan, dict(fields)))))


def peak_by(plan: Plan, method: str) -> int | None:
    """``None`` where a stage would have no layer, which BigScience's pipeline could not run."""
    by = changed(plan, {"pipeline.partition": method})
    try:
        cut = work_of(resolve(by))
    except PlanError:
        return None
    return peak(by) if all(chunk.layers for stage in cut for chunk in stage) else None


@pytest.mark.parametrize("layers", [64, 62])
@pytest.mark.parametrize("mbs", [1, 2, 8])
def test_no_method_of_the_thread_beats_the_smallest_cut(layers: int, mbs: int) -> None:
    """BigScience's 104B with mt5's vocabulary at TP=4 PP=32 (story 1). With the 64 layers that the model should have
    had, ``type:transformer`` is what DeepSpeed of 2021 can do; the others leave a stage without a layer."""
    plan = resolve(
        read_plan("bigscience-104b-250k", {"layers": str(layers), "mbs": str(mbs), "partition": "uniform"}).plan
    )
    least = smallest(plan, Ratios(0.05, 1.2))
    assert least is not None
    assert sum(layers_of(least)) == layers
    assert min(layers_of(least)) >= 1
    best = peak(plan, fields_of(plan.framework, least))
    methods = ("type:transformer", "type:embed|transformer", "parameters", "uniform")
    found = [size for method in methods if (size := peak_by(plan, method)) is not None]
    assert found
    assert best <= min(found)
    if layers == 64 and mbs == 1:
        assert peak_by(plan, "type:transformer") == pytest.approx(29.93 * 2**30, rel=1e-3)
        assert best < 0.9 * min(found)


def test_the_way_out_is_a_smaller_micro_batch() -> None:
    """The job that ran out of memory had micro-batches of 8; the thread tried adaptive softmax, and then fewer."""
    found = suggest(read_plan("bigscience-104b-250k", {"mbs": "8"}).plan, {"layout.tp": 4, "layout.pp": 32})
    assert found.given is not None
    assert found.given.needs > found.limit
    best = found.best[0]
    assert best.point.mbs < 8
    assert best.point.extras == ()
    assert best.needs <= found.limit
    assert best.seconds < found.given.seconds
    smaller = next(change for change in found.changes if change.fits)
    assert smaller.what.startswith("micro-batch 8 → ")


@pytest.mark.parametrize("devices", [4, 8])
def test_the_balanced_map_of_gpt2_xl(devices: int) -> None:
    """Story 2: the head is beside the embedding, so that device 0 takes fewer layers than the others."""
    flags = {"gpus": str(devices), "multiply-by-visible-gpus": "false", "mbs": "1", "device-map": ""}
    plan = resolve(read_plan(f"gpt2-xl-{devices}gpu", flags).plan)
    cut = smallest(plan, Ratios())
    assert cut is not None
    first, *others = layers_of(cut)
    assert first < min(others)
    assert max(others) - min(others) <= 2
    equal = [48 // devices] * devices
    best = peak(plan, fields_of("device-map", cut))
    assert best < peak(plan, (("device_map", mapped(equal)),))
    for at, to in [(0, 1), (1, 0), (1, 2), (devices - 1, 0)]:
        moved = list(layers_of(cut))
        moved[at], moved[to] = moved[at] - 1, moved[to] + 1
        assert peak(plan, (("device_map", mapped(moved)),)) >= best


def test_a_cut_is_without_gaps() -> None:
    assert all(high[0] == low[-1] + 1 for low, high in pairwise(mapped((3, 1, 2)).values()))
