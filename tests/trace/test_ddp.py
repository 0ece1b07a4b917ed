"""DistributedDataParallel's own reducer on fake tensors: beside the estimate, and beside real processes on gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from memplan.tape.events import Category, Hold
from memplan.trace.comparison import compared
from memplan.trace.framework import job_of_plan
from memplan.trace.job import Job
from memplan.trace.recording import BACKWARD, FORWARD, Traced
from memplan.trace.run import planned
from memplan.trace.step import traced_step

from ..frameworks.test_ddp_against_torch import CASES, GOLDEN, TIED, plan_of, without_tables
from ..oracle.ddp import RANKS
from ..oracle.deepspeed import summary
from .equality import assert_equal
from .test_step import DELTA, FAMILIES, WITHOUT_RECIPE, model_flags, of

REPLICATED = {"framework": "ddp", "gpus": "4"}
ACCUMULATING = {"dtype": "fp32", "attention": "eager", "gbs": "16"}
SETTINGS: dict[str, dict[str, str]] = {
    "copies": ACCUMULATING,
    "recomputed": {"dtype": "bf16", "attention": "eager", "recompute": "full", "gpus": "512"},
    "views": {"dtype": "bf16", "attention": "flash", "gbs": "16", "gradient-as-bucket-view": "true"},
    "views-no-sync": {**ACCUMULATING, "gradient-as-bucket-view": "true", "ddp-gradient-sync": "false"},
    "no-sync": {**ACCUMULATING, "bucket-cap-mb": "0.1", "ddp-gradient-sync": "false"},
    "static": {**ACCUMULATING, "bucket-cap-mb": "0.05", "static-graph": "true"},
    "unused": {**ACCUMULATING, "bucket-cap-mb": "0.05", "find-unused-parameters": "true"},
    "zero": {**ACCUMULATING, "zero": "1", "optimizer": "sgd", "momentum": "0.9", "gpus": "8", "gbs": "16"},
    "zero-views": {
        **{"dtype": "bf16", "attention": "eager", "zero": "1", "gpus": "16"},
        **{"parameters-as-bucket-view": "true", "gradient-as-bucket-view": "true", "broadcast-buffers": "false"},
    },
}
CHECKED = ("llama", "gpt2")
"""In every setting; other families in one, and in up to two more that are slow."""
WITHOUT = {
    ("gptj", "views"),
    ("falcon", "views"),
    ("gemma2", "views"),
    ("falcon", "recomputed"),
    ("gptj", "recomputed"),
}
"""What a plan refuses."""
CASES_HERE = [
    pytest.param(family, setting, marks=[] if family in CHECKED or turn == at % 9 else [pytest.mark.slow])
    for at, family in enumerate(FAMILIES)
    for turn, setting in enumerate(SETTINGS)
    if family in CHECKED or turn in (at % 9, at % 4, 4 + at % 5)
    if (family, setting) not in WITHOUT
]


@pytest.mark.parametrize(("family", "setting"), CASES_HERE)
def test_trace_equals_estimate(family: str, setting: str) -> None:
    assert_equal(*of(**(model_flags(family) | REPLICATED | SETTINGS[setting])))


def test_buckets_are_named_for_what_they_are() -> None:
    """Copies are communication buffers; views of buckets are the gradients, which stay between steps."""
    for views, kept in (("false", Category.COMMUNICATION_BUFFERS), ("true", Category.GRADIENTS)):
        job, program = of(**(model_flags("llama") | REPLICATED), **{"gradient-as-bucket-view": views, "dtype": "fp32"})
        traced = traced_step(job)
        n = sum(hold.bytes for hold in program.extra if hold.name == "ddp_bucket")
        assert traced.setup.net_by[kept] == n >= 4 * traced.outline.parameters


def test_only_what_a_rank_owns() -> None:
    """ZeroRedundancyOptimizer, as the rank sees it that needs most: the one with the table of words."""
    job, program = of(**(model_flags("llama") | REPLICATED), zero="1", dtype="fp32")
    assert job.ddp is not None
    owned = traced_step(job).setup.net_by[Category.OPTIMIZER_STATES]
    assert owned == sum(hold.bytes for hold in program.late_extra)
    other = Job.from_json({**job.to_json(), "ddp": {**job.to_json()["ddp"], "rank": 3 - job.ddp.rank}})
    assert 0 < traced_step(other).setup.net_by[Category.OPTIMIZER_STATES] < owned


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("flex_olmo", {"static-graph": "true"}),
        ("olmo", {"autocast": "true", "gradient-as-bucket-view": "true"}),
        ("t5", {"recompute": "full"}),
    ],
)
def test_models_without_a_recipe(kind: str, flags: dict[str, str], tmp_path: Path) -> None:
    """What was there before is there after, and buckets are as large as parameters."""
    made = transformers.AutoConfig.for_model(kind, **WITHOUT_RECIPE[kind])
    made.to_json_file(tmp_path / "config.json", use_diff=False)
    asked = planned(
        None, {"model": str(tmp_path), "mbs": "2", "seq": "32", "attention": "eager", **REPLICATED, **flags}
    )
    assert asked.program is None
    traced = traced_step(asked.job)
    points = {one.name: one.traced for one in compared(traced, None).points}
    assert points["between steps"] == points["after the step"] < points["peak of forward and backward"]
    setup = traced.setup.net_by
    buckets = setup[Category.GRADIENTS] or setup[Category.COMMUNICATION_BUFFERS]
    assert 0 <= setup[Category.PARAMETERS] - buckets < 512 * 200


# -- real processes ---------------------------------------------------------------------------------


def of_case(name: str, rank: int) -> Traced:
    """The oracle's case as rank ``rank`` of the fake process group, sums of gradients out of place as there."""
    given: dict[str, Any] = job_of_plan(plan_of(name)).to_json()
    own = {"microbatches": CASES[name].microbatches, "ddp": {**given["ddp"], "rank": rank}}
    return traced_step(Job.from_json({**given, **own}), sums_in_place=False)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        pytest.param(name, rank, marks=[] if at % RANKS == rank else [pytest.mark.slow])
        for at, name in enumerate(CASES)
        if CASES[name].family.removesuffix("_text") not in DELTA
        for rank in range(RANKS)
    ],
)
def test_same_tensors_as_real_processes(name: str, rank: int) -> None:
    """Buckets, every tensor of forward and backward, what is held: the reducer does on fake tensors what it does on
    two ranks with gloo."""
    record, traced = GOLDEN[name][rank], of_case(name, rank)
    events = traced.recording.events
    buckets = {e.bytes for e in events if isinstance(e, Hold) and e.category is Category.COMMUNICATION_BUFFERS}
    real = record["rebuilt_buckets"] or record["initial_buckets"]
    assert CASES[name].ddp.get("gradient_as_bucket_view") or {-(-size // 512) * 512 for size in real} <= buckets
    stretches = iter(record["stretches"])
    for microbatch in range(CASES[name].microbatches):
        for phase in (FORWARD, BACKWARD):
            found = summary(changes(traced, microbatch, phase))
            expected = next(stretches)
            assert (found["net"], found["peak"]) == (expected["net"], expected["peak"])
            if CASES[name].family in TIED:
                assert without_tables(found) == without_tables(expected)
            else:
                assert found["sizes"] == expected["sizes"]


def changes(traced: Traced, microbatch: int, phase: str) -> list[tuple[int, int]]:
    return [
        (1 if isinstance(event, Hold) else -1, event.bytes)
        for event, place in zip(traced.recording.events, traced.recording.places, strict=True)
        if place[:2] == (microbatch, phase)
    ]
