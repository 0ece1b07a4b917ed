"""Replaying on several streams: where there is one only it is ``replay``, and what several cost."""

from __future__ import annotations

import pytest

from memplan.allocator import AllocatorSettings
from memplan.estimate import programs_of
from memplan.layers.module import Options
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.program import Program, fold_program
from memplan.replay import replay
from memplan.replay_streams import replay_streams


def program_of(**flags: object) -> Program:
    merged = {"model": "llama-3-8b", "layers": 3, "seq": 512, "framework": "single", "optimizer": "adamw", **flags}
    plan = resolve(read_plan(None, {name: str(value) for name, value in merged.items()}).plan)
    (program,) = programs_of(plan, Options(kernel_workspaces=True))
    return program


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"gbs": 2},
        {"gbs": 5, "recompute": "full"},
        {"model": "gpt2", "attention": "eager", "seq": 256, "optimizer": "adam8bit", "gbs": 2},
        {"model": "bert-5.1b", "layers": 2},
    ],
)
@pytest.mark.parametrize("expandable", [False, True])
def test_one_stream(flags: dict[str, object], expandable: bool) -> None:
    program, settings = program_of(**flags), AllocatorSettings(expandable_segments=expandable)
    (expected,) = replay((program,), settings, ())
    found = replay_streams(program, settings, ())
    assert (found.allocated, found.static) == (expected.allocated, expected.static)
    assert found.breakdown == expected.breakdown
    assert found.reserved == pytest.approx(expected.reserved, rel=0.01)
    if expandable:
        assert found.allocated == fold_program(program).peak
