"""The allocator where the device's memory ends: by hand, and against figures of PyTorch itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memplan.allocator.blocks import LARGEST_SMALL, SHIFT, UNIT_BITS, SegmentPool
from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.limited import LimitedRank
from memplan.allocator.memory import DeviceMemory, OutOfMemoryError
from memplan.allocator.replay import Run, replay
from memplan.device.measured import NOTHING, held_workspaces
from memplan.estimate import programs_of
from memplan.layers.module import Options
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from tests.oracle.caching_allocator import CachingAllocator
from tests.oracle.cuda_allocator import TORCH, Counts, Request, built, counted, replayed, requests

MIB = 1 << 20


def limited(mebibytes: int, conf: str = "") -> CachingAllocator:
    return CachingAllocator(AllocatorSettings.parse(conf), DeviceMemory(mebibytes * MIB))


# ---- by hand ----------------------------------------------------------------------------------------


def test_cached_segments_are_given_back_before_a_request_fails() -> None:
    """Of 100 MiB 20 are cached in a segment with a live block, and 50 in one of their own. 60 MiB take the room of the
    50; 40 MiB more find 20 MiB free, and nothing to give back."""
    allocator = limited(100)
    allocator.allocate("live", 5 * MIB)
    allocator.allocate("cached", 50 * MIB)
    allocator.free("cached")
    allocator.allocate("a", 60 * MIB)
    assert (allocator.reserved, allocator.retries, allocator.ooms) == (80 * MIB, 1, 0)
    assert allocator.peak_reserved == 80 * MIB
    with pytest.raises(OutOfMemoryError) as failure:
        allocator.allocate("b", 40 * MIB - 100)
    assert (failure.value.size, failure.value.tried) == (40 * MIB, 40 * MIB)
    assert (failure.value.allocated, failure.value.reserved) == (65 * MIB, 80 * MIB)
    assert (allocator.retries, allocator.ooms) == (2, 1)
    allocator.allocate("b", 20 * MIB)  # it goes on
    assert allocator.reserved == 100 * MIB


def test_never_split_blocks_go_first_and_count_as_no_retry() -> None:
    """At 40 MiB: the free 50 does not serve 30, but its segment goes back for it; the free 20 is left."""
    allocator = limited(90, "max_split_size_mb:40")
    for key, size in (("large", 50), ("small", 20)):
        allocator.allocate(key, size * MIB)
        allocator.free(key)
    allocator.allocate("a", 30 * MIB)
    assert (allocator.reserved, allocator.retries) == (50 * MIB, 0)


def test_blocks_in_use_by_another_stream_come_back_when_the_allocator_waits() -> None:
    """60 MiB freed in use serve no request before 50 MiB find no memory; then their segment is given back."""
    allocator = limited(100)
    allocator.allocate("a", 60 * MIB)
    allocator.free("a", in_use=True)
    allocator.allocate("b", 40 * MIB)
    assert (allocator.reserved, allocator.retries) == (100 * MIB, 0)
    allocator.allocate("c", 50 * MIB)
    assert (allocator.reserved, allocator.retries) == (90 * MIB, 1)


def test_expandable_segments_give_pages_back() -> None:
    """80 of 100 MiB in 4 pages, of which 10 live in the first: 3 pages move to the other stream's segment."""
    allocator = limited(100, "expandable_segments:True")
    allocator.allocate("a", 10 * MIB)
    allocator.allocate("b", 70 * MIB)
    allocator.free("b")
    allocator.allocate("c", 80 * MIB, stream=1)
    assert (allocator.reserved, allocator.retries) == (100 * MIB, 1)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate("d", 11 * MIB)
    assert (allocator.reserved, allocator.retries) == (100 * MIB, 2)


def test_a_memory_fraction_is_a_limit_and_starts_garbage_collection() -> None:
    """90 of 100 MiB are allowed. At half of that, the older of two free segments goes when a third is needed."""
    conf = "per_process_memory_fraction:0.9,garbage_collection_threshold:0.5"
    allocator = limited(100, conf)
    for key in ("old", "young"):
        allocator.allocate(key, 30 * MIB)
    allocator.free("old")
    allocator.allocate("small", 1)
    allocator.allocate("large", 20 * MIB, stream=1)
    assert (allocator.reserved, allocator.retries) == (52 * MIB, 0)
    with pytest.raises(OutOfMemoryError):
        allocator.allocate("more", 40 * MIB)
    without = limited(100, "garbage_collection_threshold:0.5")
    for key in ("old", "young"):
        without.allocate(key, 30 * MIB)
    without.free("old")
    without.allocate("large", 20 * MIB, stream=1)
    assert without.reserved == 80 * MIB


# ---- figures of PyTorch itself ----------------------------------------------------------------------

CONFIGURATIONS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:41",
    "roundup_power2_divisions:4",
    "large_segment_size_mb:12,expandable_segments:True",
    "per_process_memory_fraction:0.7",
    "per_process_memory_fraction:0.8,garbage_collection_threshold:0.6",
    "per_process_memory_fraction:1.0,garbage_collection_threshold:0.5",
]
LIMITS = [(24, 90 * MIB), (27, 300 * MIB + 12345)]
"""Sizes below 2^24 and 2^27 bytes, and the device's memory."""


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if TORCH not in os.environ:
        pytest.skip(f"{TORCH} names no CUDA build of torch")
    return built(Path(os.environ[TORCH]), tmp_path_factory.mktemp("cuda_allocator"))


@pytest.mark.parametrize("conf", CONFIGURATIONS)
def test_every_count_is_pytorchs(build: Path, conf: str) -> None:
    for seed in range(10):
        bits, limit = LIMITS[seed % 2]
        asked = list(requests(seed, 1500, bits))
        counts, _ = counted(build, asked, conf, limit)
        assert counts == replayed(asked, conf, limit)


class Logging(LimitedRank):
    """A rank that writes down its requests, and what it holds after each."""

    def __init__(self, settings: AllocatorSettings, device: DeviceMemory) -> None:
        super().__init__(settings, device)
        self.memory.collect_above = device.limit  # never exceeded: every request is asked by itself
        self.requests: list[Request] = []
        self.counts: list[Counts] = []
        self.live: dict[tuple[int, int], int] = {}

    def note(self, request: Request) -> None:
        self.requests.append(request)
        self.counts.append(Counts(self.live_bytes(), self.reserved, self.memory.retries, 0))

    def live_bytes(self) -> int:
        return sum(code >> SHIFT for _, code in self.live) << UNIT_BITS

    def take(self, pool: SegmentPool, units: int) -> int:
        code = super().take(pool, units)
        pools = self.small if units <= LARGEST_SMALL else self.large
        stream = next(stream for stream, one in pools.items() if one is pool)
        key = self.live[stream, code] = len(self.requests)
        self.note(Request("allocate", key, units << UNIT_BITS, stream))
        return code

    def drop(self, block: int, size: int, category: int, stream: int = 0) -> None:
        super().drop(block, size, category, stream)
        if block:
            self.note(Request("free", self.live.pop((stream, block))))


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:512"])
def test_a_program_in_pytorchs_allocator(build: Path, conf: str) -> None:
    """FSDP's streams on a device with less memory than they would reserve: every request of construction, an iteration
    and a step, as PyTorch serves it."""
    flags = {"model": "llama-3-8b", "framework": "fsdp", "gpus": "8", "layers": "4", "seq": "4096"}
    plan = resolve(read_plan(None, flags).plan)
    (program,) = programs_of(plan, Options(kernel_workspaces=True))
    settings, workspaces = AllocatorSettings.parse(conf), held_workspaces(plan, NOTHING)
    (free,) = replay((program,), settings, workspaces)
    limit = (free.allocated + free.reserved) // 2
    rank = Logging(settings, DeviceMemory(limit))
    run = Run(program, rank, workspaces)
    for step in (run.first_step, run.step):
        run.begin()
        run.iterate(program.order.shortened)
        step()
    assert rank.reserved <= limit < free.reserved
    counts, _ = counted(build, rank.requests, conf, limit)
    assert counts == rank.counts


def summed(counts: list[Counts]) -> tuple[int, int, int, int]:
    """Both readings over every request, in units of 512 B, and retries and failures in the end."""
    allocated, reserved = (sum(one[at] for one in counts) // 512 for at in (0, 1))
    return allocated, reserved, counts[-1].retries, counts[-1].ooms


RECORDED: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "": (
        (118360460, 213483520, 35, 33),
        (355432177, 554606592, 10, 6),
    ),
    "expandable_segments:True": (
        (116057513, 213372928, 40, 34),
        (325207475, 567902208, 6, 3),
    ),
    "max_split_size_mb:20": (
        (118360460, 214794240, 35, 33),
        (361686790, 578134016, 11, 6),
    ),
    "max_split_size_mb:41": (
        (118360460, 213483520, 35, 33),
        (356029233, 555589632, 10, 6),
    ),
    "roundup_power2_divisions:4": (
        (136160782, 234151936, 37, 35),
        (366184350, 579792896, 8, 4),
    ),
    "large_segment_size_mb:12,expandable_segments:True": (
        (120605888, 213876736, 19, 16),
        (325433765, 550625280, 2, 1),
    ),
    "per_process_memory_fraction:0.7": (
        (86427642, 153972736, 67, 65),
        (294102519, 464547840, 23, 15),
    ),
    "per_process_memory_fraction:0.8,garbage_collection_threshold:0.6": (
        (104839599, 190783488, 35, 32),
        (320805227, 488071168, 13, 11),
    ),
    "per_process_memory_fraction:1.0,garbage_collection_threshold:0.5": (
        (118360460, 213483520, 35, 33),
        (355432177, 554606592, 10, 6),
    ),
}


@pytest.mark.parametrize("conf", CONFIGURATIONS)
def test_recorded_from_pytorch(conf: str) -> None:
    """What ``libc10_cuda.so`` of torch 2.13.0 counted."""
    found = tuple(summed(replayed(list(requests(2026, 1500, bits)), conf, limit)) for bits, limit in LIMITS)
    assert found == RECORDED[conf]


def test_the_message_is_pytorchs(build: Path) -> None:
    from memplan.report.estimate import printed

    asked = [Request("allocate", 1, 65 * MIB), Request("allocate", 2, 40 * MIB - 100)]
    _, (message,) = counted(build, asked, "", 100 * MIB)
    start = (
        f"CUDA out of memory. Tried to allocate {printed(40 * MIB)}. GPU 0 has a total capacity of {printed(100 * MIB)}"
    )
    assert message.startswith(start)
