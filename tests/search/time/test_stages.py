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
        assert elements(shape.entries, stage) == (program.parameters(), program.parameters(), 0)


DEEPSEEK = {
    "model": "deepseek-v3", "framework": "megatron", "gpu": "h100-80gb", "gpus": 16, "pp": 2, "ep": 4, "seq": 4096,
    "mbs": 1, "gbs": 64, "layers": 6, "mtp_layers": 1,
}  # fmt: skip


def test_stages_with_experts() -> None:
    """Six layers on two stages, the first three with an MLP. Of a layer with experts a rank has 64 of 256, each of
    three matrices of 7,168 by 2,048, and so has the layer that predicts a further token, on the last stage."""
    given = plan(**DEEPSEEK)
    programs, work, shape = programs_of(given, Options()), work_of(given), shape_of(given)
    (first,), (last,) = work
    assert (first.layers, first.dense, last.layers, last.dense) == (3, 3, 3, 0)
    for program, stage, layers in zip(programs, work, (0, 4), strict=True):
        counted = elements(shape.entries, stage)
        assert (counted.held, counted.trained) == (program.parameters(), program.parameters())
        assert counted.experts == layers * 64 * 3 * 7168 * 2048


@pytest.mark.parametrize(("pp", "layout"), [(2, "Ett|tttt|m|L"), (3, "Ett|t|t|tt|m|L")])
def test_stages_with_multi_token_prediction_before_the_last_chunk(pp: int, layout: str) -> None:
    """Its embedding is a parameter of its own, also on the first stage."""
    flags = {**DEEPSEEK, "pp": pp, "vpp": 2, "pipeline_layout": layout, "gpus": 8 * pp, "ep": 8, "gbs": 24 * pp}
    given = plan(**flags)
    programs, work, shape = programs_of(given, Options()), work_of(given), shape_of(given)
    for program, stage in zip(programs, work, strict=True):
        assert elements(shape.entries, stage).held == program.parameters()


def test_recomputed_layers_of_a_block() -> None:
    flags = {**EVERY_FRAMEWORK["megatron"], "recompute": "full", "recompute_method": "block", "recompute_layers": 1}
    work = work_of(plan(**flags))
    assert work[1][0] == StageWork(4, 1)


def test_megatron_deepspeeds_groups_count_whole_groups_only() -> None:
    """Two layers a group: the first stage of type:transformer begins with embedding and transposition."""
    flags = {**EVERY_FRAMEWORK["megatron-deepspeed"], "recompute_layers": 2}
    for stage in work_of(plan(**flags)):
        assert stage[0].recomputed in (0, 2)
