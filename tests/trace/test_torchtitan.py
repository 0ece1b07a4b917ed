"""torchtitan's Llama traced under ``fully_shard``, with and without tensor parallelism, beside estimates."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from memplan.plan.errors import PlanError
from memplan.tape.events import Category, Drop, Event, Hold
from memplan.trace.comparison import ENDS
from memplan.trace.framework import job_of_plan
from memplan.trace.job import Job
from memplan.trace.recording import BACKWARD, EMBEDDING, FINAL_NORM, FORWARD, HEAD, Traced

from .test_step import SCALARS, sizes
from .titan_cases import GROUPED, ONE_SEQUENCE, WIDE_HEADS, found, plan_of

SHAPES = {"grouped": GROUPED, "one-sequence": ONE_SEQUENCE, "wide-heads": WIDE_HEADS}
FULL, OPERATORS = {"recompute": "full"}, {"recompute-per-operator": "true"}
SETTINGS: dict[str, dict[str, str]] = {
    "none": {},
    "full": {**FULL, "fsdp-replicas": "2"},
    "operators": {**OPERATORS, "dp": "3"},
    "tp": {"tp": "2"},
    "tp-full": {"tp": "2", **FULL, "loss": "plain"},
    "tp-operators": {"tp": "2", **OPERATORS, "ends-apart": "true"},
}
OTHERS: dict[str, dict[str, str]] = {
    "accumulated": {"gbs": "16"},
    "accumulated-tp4": {"tp": "4", "gbs": "16", **FULL},
    "unsynced": {"gbs": "16", "gradient-sync": "false"},
    "every-second-apart": {**FULL, "recompute-every": "2", "ends-apart": "true"},
    "kept": {"reshard-after-forward": "false", "dtype": "fp16"},
    "one-shard-tp": {"tp": "2", "dp": "1"},
    "bf16-sgd": {"fsdp-parameters": "bf16", "fsdp-reduce": "bf16", "optimizer": "sgd", "momentum": "0.9"},
    "fp32": {"dtype": "fp32", "seq": "80"},
    "fp32-operators-tp": {"dtype": "fp32", "tp": "2", **OPERATORS},
    "fp32-full-one-shard": {**ONE_SEQUENCE, "dtype": "fp32", "dp": "1", **FULL, "seq": "72"},
    "fused-tp": {"tp": "2", "optimizer": "adam", "optimizer-implementation": "fused"},
    "for-loop-tp-replicas": {"tp": "2", "optimizer-implementation": "for-loop", "fsdp-replicas": "2"},
}
CASES = {
    f"{shape}-{setting}": {**SHAPES[shape], **SETTINGS[setting]}
    for shape in SHAPES
    for turn, setting in enumerate(SETTINGS)
    if shape == "grouped" or (turn % 2 == 0) is (shape == "wide-heads")
}
CASES |= OTHERS
EDGES = (EMBEDDING, FINAL_NORM, HEAD)


def changes(events: Iterable[Event]) -> list[int]:
    """Sizes that begin, in order, each with those that end before the next one begins."""
    result: list[int] = []
    ended: list[int] = []
    for size in sizes(events):
        if size < 0:
            ended.append(size)
        else:
            result += [*sorted(ended), size]
            ended = []
    return [*result, *sorted(ended)]


@pytest.mark.parametrize("name", CASES)
def test_trace_equals_estimate(name: str) -> None:
    """Every named point but for the loss's scalars; every layer to the byte, and every event of the middle one."""
    case = found(CASES[name])
    comparison, traced = case.comparison, case.traced
    for point in comparison.points:
        scalars = SCALARS if point.name == "peak of forward and backward" else 0
        assert point.estimated is not None
        assert 0 <= point.traced - point.estimated <= scalars, point
    for row in comparison.rows:
        assert row.estimated is not None
        apart = SCALARS if row.entry in EDGES and row.phase == BACKWARD else 0  # the loss ends in a caller's frame
        assert abs(row.traced.net - row.estimated.net) <= apart, row
        assert abs(row.traced.peak - row.estimated.peak) <= apart, row
        buffers = () if "one-shard" in name else (Category.COMMUNICATION_BUFFERS,)  # nothing is sent to one rank
        for category in (Category.GATHERED_PARAMETERS, *buffers):
            assert row.traced.net_by[category] == row.estimated.net_by[category], row
            assert row.traced.peak_by[category] == row.estimated.peak_by[category], row
    assert len(comparison.rows) % (2 * 5) == 0
    module = next(span.module for span in case.program.spans if "layer.1" in span.names)
    assert changes(traced.events("layer.1", FORWARD)) == changes(module.first.forward)
    assert changes(traced.events("layer.1", BACKWARD)) == changes(module.first.backward)


def test_names_and_categories() -> None:
    """Modules have torchtitan's names, wrapped or not; parameters and states are those of one rank."""
    case = found({"tp": "2", "recompute": "full"})
    recording = case.traced.recording
    places = {place.module for place in recording.places if place.phase == FORWARD}
    assert {"tok_embeddings", "layers.1.attention.wq", "layers.2.feed_forward", "norm", "output"} <= places
    assert any(place.recompute and place.module == "layers.1.feed_forward" for place in recording.places)
    assert set(case.traced.entries) == {"", EMBEDDING, "layer.0", "layer.1", "layer.2", *ENDS[::2], "optimizer"}
    setup = case.traced.setup.net_by
    assert setup[Category.OPTIMIZER_STATES] == 2 * setup[Category.PARAMETERS]
    left = [span.module.first.backward_fold.net_by[Category.GRADIENTS] for span in case.program.spans]
    assert recording.of(0, BACKWARD).net_by[Category.GRADIENTS] == sum(left)
    freqs, tokens = 64 * 12 * 8, 2 * 64 * 8
    assert (setup[Category.BUFFERS], setup[Category.INPUTS]) == (freqs, 2 * tokens)
    logits = [e for e in recording.events if isinstance(e, Hold) and e.category is Category.LOGITS]
    assert logits


def test_tensor_parallel_gradients_meet_in_a_tensor_of_their_own() -> None:
    """``DTensor``s are not summed in place, plain tensors are: attention's input has three readers."""
    alone, parts = (_sums(found({"tp": tp, "layers": "1"}).traced) for tp in ("1", "2"))
    assert parts > alone


def _sums(traced: Traced) -> int:
    events = traced.events("layer.0", BACKWARD)
    return sum(isinstance(event, Hold) and event.name == "aten.add.Tensor" for event in events)


def test_json_and_back() -> None:
    job = job_of_plan(plan_of({"pp": "2", "vpp": "2", "layers": "4", "gbs": "32"}), stage=1)
    assert Job.from_json(job.to_json()) == job
    traced = found({"tp": "2"}).traced
    again = Traced.from_json(traced.to_json())
    assert (again.recording.events, again.recording.places) == (traced.recording.events, traced.recording.places)
    assert again.outline == traced.outline
    assert sum(isinstance(event, Drop) for event in again.recording.events) > 100


def test_offload_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^fsdp\.offload = true: must be false"):
        job_of_plan(plan_of({"fsdp-offload": "true"}))


def test_what_else_does_not_run_here_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^fsdp\.cuda_graphs = true: must be false"):
        job_of_plan(plan_of({"fsdp-cuda-graphs": "true"}))
    with pytest.raises(PlanError, match=r"^loss\.kind = chunked: must be plain or vocab-parallel"):
        job_of_plan(plan_of({"loss": "chunked", "ends-apart": "true"}))
    with pytest.raises(PlanError, match=r"^model\.tied_embeddings = true: must be false: the module"):
        job_of_plan(plan_of({"tied-embeddings": "true", "ends-apart": "true"}))


def test_stage_without_a_pipeline() -> None:
    with pytest.raises(PlanError, match="--stage: must be 0: there is no pipeline"):
        job_of_plan(plan_of({}), stage=1)
