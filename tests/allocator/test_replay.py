"""Passes of many events at once take what their events take one by one."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from memplan.allocator import rank as ranking, replay as replaying
from memplan.allocator.blocks import SegmentPool, Stretch
from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.passes import Pass, passes
from memplan.allocator.rank import Rank
from memplan.estimate import estimate, fold, programs_of
from memplan.layers.module import Options
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category
from memplan.tape.program import Program
from tests.oracle.caching_allocator import CachingAllocator

MEGATRON = {"model": "llama-3-8b", "framework": "megatron", "tp": "2", "pp": "2", "dp": "1", "gbs": "4", "seq": "3000"}
PLAIN = {"model": "gpt2-xl", "framework": "single", "gpus": "1", "gbs": "2", "seq": "1000", "dtype": "fp32"}
CONFIGURATIONS = ("", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4")


class OneByOne:
    """A rank that asks the allocator for one tensor at a time."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self.allocator = CachingAllocator(settings)
        self.by = [0] * len(Category)
        self.peak = 0
        self.peak_by: list[int] = []

    def run(self, events: Pass, microbatch: int) -> None:
        for slot, units, size, category, _ in events.operations:
            if units > 0:
                self.allocator.allocate((microbatch, slot), size)
                self.by[category] += size
            else:
                self.allocator.free((microbatch, slot))
                self.by[category] -= size
            if self.allocator.allocated > self.peak:
                self.peak, self.peak_by = self.allocator.allocated, self.by.copy()


def last_program(flags: dict[str, str]) -> Program:
    return programs_of(resolve(read_plan(None, flags).plan), Options(kernel_workspaces=True))[-1]


@pytest.mark.parametrize("flags", [MEGATRON, PLAIN], ids=["megatron", "single"])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_a_pass_is_its_events(flags: dict[str, str], configuration: str) -> None:
    settings = AllocatorSettings.parse(configuration)
    once = passes(last_program(flags).order.chunks[-1], settings)
    rank, expected = Rank(settings), OneByOne(settings)
    frames = [[0] * once.slots for _ in range(3)]
    forward, first, steady = once.of("forward", "steady"), once.of("backward", "first"), once.of("backward", "steady")
    order = [(forward, 0), (forward, 1), (first, 0), (forward, 2), (steady, 1)]
    for events, microbatch in order:
        rank.run(events, frames[microbatch])
        expected.run(events, microbatch)
        assert rank.by == expected.by
        assert rank.reserved == expected.allocator.peak_reserved
        assert rank.peak * 512 == expected.peak
        breakdown = list(rank.breakdown())
        assert sum(breakdown) == expected.peak
        breakdown[Category.BLOCK_ROUNDING] = 0
        assert breakdown == expected.peak_by


@pytest.mark.parametrize("flags", [MEGATRON, PLAIN], ids=["megatron", "single"])
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_steps_that_are_remembered_come_to_what_they_come_to(
    flags: dict[str, str], configuration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = last_program({**flags, "layers": "3", "gbs": "16", **({"pp": "1"} if "pp" in flags else {})})
    settings, run_all = AllocatorSettings.parse(configuration), SegmentPool.run_all
    calls: list[int] = []

    def counted(pool: SegmentPool, stretches: Iterable[Stretch], blocks: list[int], limit: int) -> tuple[int, int, int]:
        calls[-1] += 1
        return run_all(pool, stretches, blocks, limit)

    monkeypatch.setattr(SegmentPool, "run_all", counted)
    found = []
    for least in (1, 1 << 60):
        monkeypatch.setattr(ranking, "WORTH_KNOWING", least)
        calls.append(0)
        found.append(replaying.replay((program,), settings, ()))
    assert found[0] == found[1]
    assert calls[0] < calls[1]


@pytest.mark.parametrize("framework", ["single", "ddp"])
@pytest.mark.parametrize("gbs", ["4", "8"])
def test_a_fused_loss_leaves_its_gradients_once(framework: str, gbs: str) -> None:
    """Liger's loss computes the head's gradient in forward: of the first micro-batch that is the tensor which stays,
    of later ones another, which is added to it."""
    plan = read_plan(None, {**LIGER, "framework": framework, "gbs": gbs}).plan
    (stage,), (folded,) = estimate(plan).stages, fold(resolve(plan))
    assert stage.of(Category.GRADIENTS) == folded.peak_by[Category.GRADIENTS] > 0
    assert 0 <= stage.of(Category.BLOCK_ROUNDING) < 16 << 20


LIGER = {"model": "gpt2", "layers": "4", "seq": "256", "mbs": "4", "loss": "liger"}


PIPELINE = {
    "model": "llama-3-8b",
    "framework": "megatron",
    "pp": "8",
    "dp": "1",
    "gbs": "16",
    "seq": "1000",
    "zero": "1",
}
PIPELINES = {
    "one chunk": {},
    "interleaved": {"vpp": "2"},
    "late sends": {"vpp": "2", "overlap-p2p": "false"},
    "taking turns": {
        "model": "qwen3-30b-a3b",
        "layers": "16",
        "vpp": "2",
        "dp": "2",
        "ep": "2",
        "moe-overlap-exchange": "true",
    },
    "torch": {
        "framework": "fsdp",
        "fsdp-code": "torchtitan",
        "gbs": "64",
        "pp": "4",
        "vpp": "2",
        "zero": "0",
        "dp": "2",
    },
}


@pytest.mark.parametrize("flags", PIPELINES.values(), ids=PIPELINES)
def test_stages_whose_first_passes_are_run_once_are_as_each_alone(flags: dict[str, str]) -> None:
    programs = programs_of(resolve(read_plan(None, {**PIPELINE, **flags}).plan), Options())
    settings = AllocatorSettings()
    together = replaying.replay(programs, settings, ())
    assert together == tuple(replaying.replay((program,), settings, ())[0] for program in programs)
