from __future__ import annotations

import pytest

from memplan.estimate import programs_of
from memplan.layers.module import Options
from memplan.search.time import StageWork, shape_of, work_of
from memplan.search.time.shape import elements

from .plans import EVERY_FRAMEWORK, plan


@pytest.mark.parametrize("framework", EVERY_FRAMEWORK)
def test_stages_are_those_of_the_estimate(framework: str) -> None:
    """Layers and ends of every stage, and parameters."""
    given = plan(**EVERY_FRAMEWORK[framework])
    programs, work, shape = programs_of(given, Options()), work_of(given), shape_of(given)
    assert len(programs) == len(work)
    for program, stage in zip(programs, work, strict=True):
        names = [name for name in program.entries if name.startswith("layer.")]
        assert sum(chunk.layers for chunk in stage) == len(names)
        assert any(chunk.embedding for chunk in stage) == ("embedding" in program.entries)
        assert any(chunk.head for chunk in stage) == ("head" in program.entries)
        if framework in ("fsdp", "deepspeed"):
            continue
        assert elements(shape.entries, stage) == (program.parameters(), program.parameters())


def test_recomputed_layers_of_a_block() -> None:
    flags = {**EVERY_FRAMEWORK["megatron"], "recompute": "full", "recompute_method": "block", "recompute_layers": 1}
    work = work_of(plan(**flags))
    assert work[1][0] == StageWork(4, 1)


def test_megatron_deepspeeds_groups_count_whole_groups_only() -> None:
    """Two layers a group: the first stage of type:transformer begins with embedding and transposition."""
    flags = {**EVERY_FRAMEWORK["megatron-deepspeed"], "recompute_layers": 2}
    for stage in work_of(plan(**flags)):
        assert stage[0].recomputed in (0, 2)
