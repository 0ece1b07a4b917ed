"""Which stages share a row (``memplan/report/stages.py``)."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from memplan.estimate import estimate as estimated
from memplan.plan.read import read_plan
from memplan.report.estimate import verdict
from memplan.report.html.stages import stage_rows
from memplan.report.names import unit_for
from memplan.report.stages import free_on, free_words, rows_of
from memplan.result import Estimate

from .fabricated import GIB, bigscience, judged_by_size
from .strategies import estimates


def test_the_middle_of_a_pipeline_is_one_row() -> None:
    first, middle, last = rows_of(bigscience())
    assert [row.stages for row in (first, middle, last)] == ["0", "1–30", "31"]
    assert [row.ranks for row in (first, middle, last)] == ["0–3", "4–123", "124–127"]
    assert middle.modules() == "layers 1–60, 2 each"
    assert (middle.what, middle.when()) == ("scores in layer.*", "backward")
    assert (last.what, last.when()) == ("logits_fp32 in float16_to_fp32", "forward, micro-batch 0")
    assert middle.worst is middle.members[0]


def test_a_range_runs_from_the_least_to_the_most() -> None:
    _, middle, _ = rows_of(bigscience())
    unit = unit_for(30 * GIB)
    assert middle.figures(lambda stage: stage.headline, unit) == ("15.54", "16.81")
    assert middle.figures(lambda stage: stage.static, unit) == ("12.04",)


def test_verbose_folds_nothing() -> None:
    assert len(rows_of(bigscience(), folded=False)) == 32


def test_where_causes_differ_the_row_tells_that_of_the_worst_stage() -> None:
    estimate = bigscience()
    odd = replace(estimate.stages[1], peak=replace(estimate.stages[1].peak, tensor="gelu_out"))
    _, middle, _ = rows_of(replace(estimate, stages=(estimate.stages[0], odd, *estimate.stages[2:])))
    assert middle.stages == "1–30"
    assert (middle.what, middle.when("mb")) == ("gelu_out in layer.2", "backward, mb 31, stage 1")


def test_a_stage_that_holds_something_else_stands_alone() -> None:
    estimate = bigscience()
    odd = replace(estimate.stages[15], parameters=7)
    stages = (*estimate.stages[:15], odd, *estimate.stages[16:])
    assert [row.stages for row in rows_of(replace(estimate, stages=stages))] == ["0", "1–14", "15", "16–30", "31"]


def test_a_row_does_not_hide_a_stage_that_does_not_fit() -> None:
    estimate = bigscience()
    limit = estimate.stages[3].headline
    rows = rows_of(judged_by_size(replace(estimate, capacity=limit)))
    assert [row.stages for row in rows] == ["0", "1–2", "3–30", "31"]


@given(estimates())
def test_every_stage_stands_in_exactly_one_row(estimate: Estimate) -> None:
    for folded in (True, False):
        members = [stage for row in rows_of(estimate, folded=folded) for stage in row.members]
        assert members == list(estimate.stages)


@given(estimates())
def test_fits_means_that_every_stage_has_room(estimate: Estimate) -> None:
    free = [free_on(estimate, stage) for stage in estimate.stages]
    if estimate.fits is None:
        assert set(free) == {None}
    else:
        assert estimate.fits == all(left is not None and left >= 0 for left in free)


def test_free_is_what_the_moment_that_needs_most_leaves() -> None:
    """With Liger's loss training never holds the logits and evaluation does, so that it decides: the column agrees with
    the verdict's sentence. Free is capacity less headroom, what lies between iterations, and evaluation's tensors."""
    flags = {"mbs": "4", "recompute": "full", "loss": "liger", "headroom": "1GiB"}
    found = estimated(read_plan("llama-3-8b-8gpu", flags).plan)
    (stage,) = found.stages
    assert found.capacity is not None
    assert stage.device is not None
    assert stage.reserved is not None
    evaluation = stage.moments["evaluation"]
    assert evaluation is not None
    assert evaluation > stage.reserved
    outside = stage.device - stage.reserved
    left = found.capacity - GIB - evaluation - outside
    assert free_on(found, stage) == left
    assert f"{left / GIB:.2f} GiB free" in verdict(found).plain
    assert free_words(found) == f"free: in evaluation, which needs {(evaluation + outside) / GIB:.2f} GiB"
    assert f"{left / GIB:.2f} GiB free in evaluation" in stage_rows(found, chosen=False)
    without = estimated(read_plan("llama-3-8b-8gpu", {**flags, "loss": "plain"}).plan)
    assert free_words(without) == ""


def test_an_initialisation_that_needs_more_than_an_iteration_decides() -> None:
    """The GPU holds an iteration of every stage, and not the 14 bytes of a parameter of stage 0's initialisation."""
    estimate = bigscience()
    first = estimate.stages[0]
    assert first.reserved is not None
    moments = {**first.moments, "initialisation": first.reserved + GIB}
    limit = max(stage.headline for stage in estimate.stages)
    stages = (replace(first, moments=moments), *estimate.stages[1:])
    for more, fits in ((0, first.headline + GIB <= limit), (GIB, True)):
        found = judged_by_size(replace(estimate, stages=stages, capacity=limit + more))
        assert found.fits is fits
        free = free_on(found, found.stages[0])
        assert free == limit + more - first.headline - GIB
