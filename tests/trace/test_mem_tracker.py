"""Traces beside PyTorch's own MemTracker and FSDPMemTracker: the same bytes but for differences that have a name."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.mem_tracker import traced, tracked
from memplan.tape.events import Hold, rounded
from memplan.trace.recording import BACKWARD
from memplan.trace.step import traced_step

from .test_step import model_flags, of as of_plan

of = partial(of_plan, layers="2")
SINGLE = {
    "gpt2-fp32": ("gpt2", {"dtype": "fp32", "attention": "eager"}),
    "gpt2-bf16-recompute": ("gpt2", {"dtype": "bf16", "attention": "eager", "recompute": "full"}),
    "bert-bf16-flash": ("bert", {"dtype": "bf16", "attention": "flash"}),
    "llama-sgd": ("llama", {"dtype": "fp32", "optimizer": "sgd"}),
}
SHARDED = {
    "gpt2": ("gpt2", {"gpus": "4"}),
    "llama-recompute": ("llama", {"gpus": "8", "recompute": "full"}),
}


@pytest.mark.parametrize("case", SINGLE)
def test_mem_tracker(case: str) -> None:
    """Before the step, after forward, at the peak, after the step; and at the peak what both have categories for."""
    family, flags = SINGLE[case]
    job, _ = of(**model_flags(family), **flags)
    theirs, ours = tracked(job), traced(job)
    assert theirs.less(ours) == (0, 0, 0, 0)
    assert theirs.before == theirs.after
    assert theirs.peak_by["Parameter"] == ours.peak_by["Parameter"]
    assert theirs.peak_by["Buffer"] == ours.peak_by["Buffer"]
    temporaries = 0 if theirs.peak_by["Gradient"] == 0 else ours.peak_by["Parameter"]
    assert theirs.peak_by["Optstate"] == ours.peak_by["Optstate"] + temporaries, (
        "in a step of foreach, what it takes besides (as much as the parameters) is an optimizer state to the tracker"
    )


@pytest.mark.parametrize("case", SHARDED)
def test_fsdp_mem_tracker(case: str) -> None:
    family, flags = SHARDED[case]
    job, _ = of(**model_flags(family), **flags, framework="fsdp")
    theirs, ours = tracked(job), traced(job)
    assert theirs.less(ours) == (0, 0, 0, 0)
    assert theirs.peak_by["Sharded Param"] == ours.peak_by["Parameter"]
    assert theirs.peak_by["OptState"] == ours.peak_by["Optstate"]


def test_sums_of_gradients() -> None:
    """A tied table's two gradients: on a GPU they are summed in place. MemTracker keeps PyTorch from it, as every
    mode that sees operators does, and counts a table more, which is its peak where sequences are short."""
    job, _ = of(**model_flags("gpt2") | {"vocab": "8000"}, dtype="fp32", attention="eager", mbs="1", seq="8")
    table = rounded(8000 * 64 * 4)
    tables = []
    for sums_in_place in (True, False):
        recording = traced_step(job, sums_in_place=sums_in_place).recording
        zipped = zip(recording.events, recording.places, strict=True)
        tables.append(sum(isinstance(e, Hold) and e.bytes == table and at.phase == BACKWARD for e, at in zipped))
    assert tables == [2, 3]
    theirs = tracked(job)
    assert theirs.less(traced(job)) == (0, 0, 0, 0)
    assert theirs.peak_by["Temp"] >= 2 * table
