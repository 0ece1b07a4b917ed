"""Every program's replay against one event by event, on one stream and on several."""

from __future__ import annotations

import pytest

from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.replay import replay
from memplan.estimate import programs_of
from memplan.layers.module import Options
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.program import Program, fold_program

from ..oracle.replay import replay_one_by_one


def program_of(**flags: object) -> Program:
    merged = {"model": "llama-3-8b", "layers": 3, "seq": 512, "framework": "single", "optimizer": "adamw", **flags}
    plan = resolve(read_plan(None, {name: str(value) for name, value in merged.items()}).plan)
    (program,) = programs_of(plan, Options(kernel_workspaces=True))
    return program


FSDP = {"framework": "fsdp", "gpus": 4, "gbs": 16}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"gbs": 2},
        {"gbs": 5, "recompute": "full"},
        {"model": "gpt2", "attention": "eager", "seq": 256, "optimizer": "adam8bit", "gbs": 2},
        {"model": "bert-5.1b", "layers": 2},
        FSDP,
        {**FSDP, "gradient-sync": "false"},
        {**FSDP, "fsdp-code": "torchtitan", "reshard-after-forward": "false"},
        {"framework": "ddp", "gpus": 2, "gbs": 8, "gradient-as-bucket-view": "true", "ddp-gradient-sync": "false"},
    ],
)
@pytest.mark.parametrize("expandable", [False, True])
def test_a_replay_is_its_events(flags: dict[str, object], expandable: bool) -> None:
    program, settings = program_of(**flags), AllocatorSettings(expandable_segments=expandable)
    (found,) = replay((program,), settings, ())
    assert found == replay_one_by_one(program, settings, ())
    if expandable:
        assert found.allocated == fold_program(program).peak
