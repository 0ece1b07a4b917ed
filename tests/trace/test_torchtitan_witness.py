"""memplan's tracer beside the tests' own, on the same modules: what both find must be the same."""

from __future__ import annotations

from collections import Counter

import pytest

from memplan.tape.events import Drop, Hold
from memplan.trace.framework import job_of_plan
from memplan.trace.recording import BACKWARD, FORWARD, Traced
from memplan.trace.torchtitan_step import traced_torchtitan

from ..oracle import torchtitan_tp
from ..oracle.fsdp import Sharding, Steps, traced as fsdp_traced
from ..oracle.pipelining import Pipeline, traced_pipeline
from ..oracle.torchtitan import Sizes, builder
from ..oracle.tracer import Change
from .test_step import SCALARS, sizes
from .titan_cases import plan_of

SIZES = Sizes(hidden=192, heads=8, kv_heads=4, ffn=448, vocab=1008, layers=3, b=2, s=64)
SCALAR = 512


def traced(flags: dict[str, str], stage: int = 0) -> Traced:
    """Gradients are summed out of place, as the tests' tracer has it."""
    return traced_torchtitan(job_of_plan(plan_of(flags), stage=stage), sums_in_place=False)


def counted(changes: list[Change] | list[int]) -> Counter[int]:
    """How often so many bytes begin (or end, negative), but for scalars."""
    found = [one if isinstance(one, int) else one.sign * one.bytes for one in changes]
    return Counter(one for one in found if abs(one) != SCALAR)


def same(ours: Traced, witness: Steps) -> None:
    assert ours.setup.net == witness.before
    events = list(zip(ours.recording.events, ours.recording.places, strict=True))
    for phase, changes in zip((FORWARD, BACKWARD), witness.stretches, strict=False):
        own = [event for event, place in events if place[:2] == (0, phase)]
        assert counted(sizes(own)) == counted(changes)
        assert abs(sum(sizes(own)) - sum(one.sign * one.bytes for one in changes)) <= SCALARS
    assert len([one for one in ours.recording.events if isinstance(one, Hold | Drop)]) > 500


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_fully_shard(recompute: str) -> None:
    sharding = Sharding(4)
    build = builder(SIZES, sharding, [recompute] * SIZES.layers, ends_apart=False)
    same(traced({"recompute": recompute}), fsdp_traced(build, sharding))


def test_tensor_parallelism() -> None:
    witness = torchtitan_tp.traced(SIZES, Sharding(4), 2, ["op"] * SIZES.layers, parallel_loss=True)
    same(traced({"tp": "2", "recompute-per-operator": "true"}), witness)


@pytest.mark.parametrize(("stage", "edges", "apart"), [(0, (0, 1, 2, 3, 4), False), (1, (0, 1, 3, 4, 4), True)])
def test_pipeline(stage: int, edges: tuple[int, ...], apart: bool) -> None:
    """What is held as each pass begins, of stages of December 2024 and of the newest, whose ends count as layers."""
    flags = {"pp": "2", "vpp": "2", "layers": "4", "gbs": "24", "schedule": "1f1b"}
    flags |= {} if apart else {"ends-apart": "false", "return-outputs": "false"}
    pipeline = Pipeline(edges, 2, "interleaved", 3)
    sizes_of_four = Sizes(hidden=192, heads=8, kv_heads=4, ffn=448, vocab=1008, layers=4, b=2, s=64)
    witness = traced_pipeline(sizes_of_four, pipeline, stage, Sharding(4), ends_apart=apart)
    ours = traced(flags, stage)
    changes = sizes(ours.recording.events)
    begins = [one.begin for one in ours.passes if one.what != "loss"]
    assert [sum(changes[:begin]) for begin in begins] == witness.levels[1 : 1 + len(begins)]
    assert ours.setup.net == witness.before
