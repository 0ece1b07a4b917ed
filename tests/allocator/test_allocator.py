"""The replay of PyTorch's caching allocator: by hand, against figures of PyTorch itself, and by property."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from memplan.allocator.caching import AllocatorSettings
from tests.oracle.caching_allocator import CachingAllocator, block_size

KIB = 1 << 10
MIB = 1 << 20
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def blocks(allocator: CachingAllocator) -> list[list[int]]:
    """Bytes of each block, segment by segment; free ones negative."""
    return [[block.size if block.live else -block.size for block in segment.blocks] for segment in allocator.snapshot()]


# ---- by hand ----------------------------------------------------------------------------------------


def test_small_requests_share_a_segment_of_2_mib() -> None:
    """100 B → 512; 1 MiB is still small; the 1 MiB - 512 B that are left do not hold another 1 MiB."""
    allocator = CachingAllocator()
    assert allocator.allocate("a", 100) == 512
    assert allocator.allocate("b", MIB) == MIB
    assert blocks(allocator) == [[512, MIB, -(MIB - 512)]]
    allocator.allocate("c", MIB)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB + 512, 4 * MIB)


def test_a_small_block_is_split_down_to_512_bytes() -> None:
    """1 MiB - 512 B and 1 MiB leave 512 B of 2 MiB, which serve a request of one byte."""
    allocator = CachingAllocator()
    allocator.allocate("a", MIB - 512)
    allocator.allocate("b", MIB)
    assert allocator.allocate("c", 1) == 512
    assert blocks(allocator) == [[MIB - 512, MIB, 512]]


def test_a_request_between_1_and_10_mib_takes_a_segment_of_20_mib() -> None:
    """1.5 + 8 MiB leave 10.5 MiB of 20, from which 9.5 MiB take all: a rest of 1 MiB is not split off."""
    allocator = CachingAllocator()
    assert allocator.allocate("a", 3 * MIB // 2) == 3 * MIB // 2
    assert allocator.reserved == 20 * MIB
    assert allocator.allocate("b", 8 * MIB) == 8 * MIB
    assert allocator.allocate("c", 19 * MIB // 2) == 21 * MIB // 2
    assert (allocator.requested, allocator.allocated, allocator.reserved) == (19 * MIB, 20 * MIB, 20 * MIB)


@pytest.mark.parametrize(
    ("size", "block", "reserved"),
    [
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),  # rounded to 512 B first, then 10 MiB: a segment of its own
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # a rest of 1 MiB + 512 B is split off
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is not
        (101 * MIB, 102 * MIB, 102 * MIB),
    ],
)
def test_from_10_mib_on_a_segment_is_a_multiple_of_2_mib(size: int, block: int, reserved: int) -> None:
    """The segment is ⌈size / 2 MiB⌉ · 2 MiB; what is left of it is split off above 1 MiB."""
    allocator = CachingAllocator()
    assert allocator.allocate("a", size) == block == block_size(size)
    assert allocator.reserved == reserved


def test_free_neighbours_merge() -> None:
    """Four times 5 MiB fill 20 MiB. Freed in the order 1, 3, 2 the blocks make 5 | 5, then 15 MiB."""
    allocator = CachingAllocator()
    for key in range(4):
        allocator.allocate(key, 5 * MIB)
    allocator.free(0)
    allocator.free(2)
    assert blocks(allocator) == [[-5 * MIB, 5 * MIB, -5 * MIB, 5 * MIB]]
    allocator.free(1)
    assert blocks(allocator) == [[-15 * MIB, 5 * MIB]]
    assert allocator.allocate("all", 15 * MIB) == 15 * MIB
    assert allocator.reserved == 20 * MIB


def test_the_smallest_block_that_fits_is_used_the_lower_of_two_equal_ones() -> None:
    """Free: 30, 12 and 12 MiB. 11.5 MiB take the first of the 12, though the 30 came before."""
    allocator = CachingAllocator()
    for key, size in enumerate((30, 12, 12)):
        allocator.allocate(key, size * MIB)
    for key in range(3):
        allocator.free(key)
    assert allocator.allocate("best", 23 * MIB // 2) == 12 * MIB
    assert blocks(allocator) == [[-30 * MIB], [12 * MIB], [-12 * MIB]]


def test_small_requests_never_use_large_blocks() -> None:
    """A free block of 20 MiB does not serve 512 B, nor 2 MiB of small memory 1 MiB + 1."""
    allocator = CachingAllocator()
    allocator.allocate("large", 2 * MIB)
    allocator.free("large")
    allocator.allocate("small", 512)
    assert allocator.reserved == 22 * MIB


def test_streams_do_not_share_blocks() -> None:
    """A block freed on stream 0 stays there: stream 1 reserves its own 20 MiB."""
    allocator = CachingAllocator()
    allocator.allocate("a", 5 * MIB, stream=0)
    allocator.free("a")
    allocator.allocate("b", 5 * MIB, stream=1)
    assert allocator.reserved == 40 * MIB
    allocator.allocate("c", 5 * MIB, stream=0)
    assert allocator.reserved == 40 * MIB


def test_empty_cache_returns_wholly_free_segments_only() -> None:
    """Of 20 MiB with a live block nothing goes back; 50 MiB do. The peak remembers both."""
    allocator = CachingAllocator()
    allocator.allocate("live", 2 * MIB)
    allocator.allocate("free", 50 * MIB)
    allocator.free("free")
    allocator.empty_cache()
    assert (allocator.reserved, allocator.peak_reserved) == (20 * MIB, 70 * MIB)


def test_expandable_segments_map_pages_and_keep_no_rest() -> None:
    """101 MiB map 6 pages of 20 MiB and the block is exactly 101; 19 MiB then fill the last page,
    and 1 MiB more maps another."""
    allocator = CachingAllocator(EXPANDABLE)
    assert allocator.allocate("a", 101 * MIB) == 101 * MIB
    assert allocator.reserved == 120 * MIB
    assert allocator.allocate("b", 19 * MIB) == 19 * MIB
    assert allocator.reserved == 120 * MIB
    assert allocator.allocate("c", 2 * MIB) == 2 * MIB
    assert allocator.reserved == 140 * MIB
    assert blocks(allocator) == [[101 * MIB, 19 * MIB, 2 * MIB, -18 * MIB]]


def test_an_expandable_segment_grows_behind_its_free_end() -> None:
    """30 MiB map 40; the 10 free at the end need 15 more for 25: one page. A cudaMalloc would take 26."""
    allocator = CachingAllocator(EXPANDABLE)
    allocator.allocate("a", 30 * MIB)
    allocator.allocate("b", 25 * MIB)
    assert (allocator.allocated, allocator.reserved) == (55 * MIB, 60 * MIB)


def test_an_expandable_segment_spares_its_end_where_a_larger_hole_fits() -> None:
    """Free: 6 MiB, and 4 at the end. 3 MiB fit the end better, but that could still grow: the hole is used."""
    allocator = CachingAllocator(EXPANDABLE)
    for key, size in (("hole", 6), ("wall", 10)):
        allocator.allocate(key, size * MIB)
    allocator.free("hole")
    allocator.allocate("a", 3 * MIB)
    assert blocks(allocator) == [[3 * MIB, -3 * MIB, 10 * MIB, -4 * MIB]]


def test_empty_cache_unmaps_whole_pages_of_an_expandable_segment() -> None:
    """Live 10, free 60, live 10 of 80 MiB: of [10, 70) the pages [20, 60) go back, 40 MiB. A request of
    15 MiB then maps [20, 40) again, behind the free [10, 20), and gets [10, 25)."""
    allocator = CachingAllocator(EXPANDABLE)
    for key, size in (("a", 10), ("b", 60), ("c", 10)):
        allocator.allocate(key, size * MIB)
    allocator.free("b")
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB
    assert blocks(allocator) == [[10 * MIB, -10 * MIB], [-10 * MIB, 10 * MIB]]
    allocator.allocate("d", 15 * MIB)
    assert allocator.reserved == 60 * MIB
    assert blocks(allocator) == [[10 * MIB, 15 * MIB, -15 * MIB], [-10 * MIB, 10 * MIB]]


def test_blocks_of_max_split_size_stay_whole() -> None:
    """At 40 MiB: 30 MiB do not split a free 50; 45 MiB take it whole, and 25 of the free 30 are split off."""
    allocator = CachingAllocator(AllocatorSettings.parse("max_split_size_mb:40"))
    allocator.allocate("a", 50 * MIB)
    allocator.free("a")
    assert allocator.allocate("b", 30 * MIB) == 30 * MIB
    assert allocator.allocate("c", 45 * MIB) == 50 * MIB
    assert allocator.reserved == 80 * MIB
    allocator.free("b")
    assert allocator.allocate("d", 25 * MIB) == 25 * MIB
    assert allocator.reserved == 80 * MIB


def test_an_oversize_request_takes_no_block_20_mib_larger() -> None:
    """Split below 40 MiB: a free 60 MiB block serves 41 MiB (19 more), but not 40 (20 more)."""
    allocator = CachingAllocator(AllocatorSettings.parse("max_split_size_mb:40"))
    allocator.allocate("a", 60 * MIB)
    allocator.free("a")
    assert allocator.copy().allocate("b", 41 * MIB) == 60 * MIB
    assert allocator.allocate("b", 40 * MIB) == 40 * MIB


def test_keys_are_live_once() -> None:
    allocator = CachingAllocator()
    allocator.allocate("a", 1)
    with pytest.raises(ValueError, match="'a' is live already"):
        allocator.allocate("a", 1)
    allocator.free("a")
    with pytest.raises(ValueError, match="'a' is not live"):
        allocator.free("a")
    with pytest.raises(ValueError, match="-1 bytes"):
        allocator.allocate("a", -1)


def test_an_empty_tensor_takes_no_memory() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate("empty", 0) == 0
    allocator.free("empty")
    assert (allocator.requested, allocator.allocated, allocator.reserved, allocator.snapshot()) == (0, 0, 0, ())


# ---- figures of PyTorch itself ----------------------------------------------------------------------


def test_snapshot_of_a_matrix_product() -> None:
    """``y = X @ W + b`` with W 1000 x 10, b 10, X 1000 in fp32, and cuBLAS's workspace of 8,519,680 B:
    https://discuss.pytorch.org/t/178671 prints these two segments of ``torch.cuda.memory_snapshot()``."""
    allocator = CachingAllocator()
    for key, size in (("W", 40_000), ("b", 40), ("X", 4_000), ("X @ W", 40), ("workspace", 8_519_680), ("y", 40)):
        allocator.allocate(key, size)
    allocator.free("X @ W")
    assert blocks(allocator) == [[40_448, 512, 4_096, -512, 512, -2_051_072], [8_519_680, -12_451_840]]


def test_roundup_power2_divisions() -> None:
    """84 MiB lie between 64 and 128: in 4 steps of 16 they become 96, in 8 of 8 they become 88
    (``test_allocator_settings`` in PyTorch's ``test/test_cuda.py``)."""
    size = 4 * 21 * MIB
    assert block_size(size, AllocatorSettings.parse("roundup_power2_divisions:4")) == 96 * MIB
    assert block_size(size, AllocatorSettings.parse("roundup_power2_divisions:[64:8,128:2,256:2,>:1]")) == 88 * MIB
    assert block_size(3 * 512, AllocatorSettings.parse("roundup_power2_divisions:4")) == 3 * 512  # below 4 x 512 B


def test_divisions_by_interval() -> None:
    """The string and what it means, MiB by MiB: ``allocator_config_test`` in PyTorch's
    ``c10/test/core/AllocatorConfig_test.cpp``."""
    conf = "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]"
    divisions = AllocatorSettings.parse(conf).roundup_power2_divisions
    assert {1 << i: divisions[i] for i in range(5, 12)} == {32: 8, 64: 8, 128: 2, 256: 4, 512: 2, 1024: 4, 2048: 1}


def tape(seed: int, length: int = 3000) -> Iterator[tuple[str, int, int, int]]:
    """Allocations up to 128 MiB on two streams, frees in no order, and ``empty_cache`` now and then."""
    state = seed
    live: list[int] = []

    def draw(below: int) -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % below

    for key in range(length):
        choice = draw(100)
        if choice == 0:
            yield "empty", 0, 0, 0
        elif live and choice < 50:
            yield "free", live.pop(draw(len(live))), 0, 0
        else:
            live.append(key)
            yield "allocate", key, draw(1 << 8 + draw(20)) + 1, draw(2)


def apply(allocator: CachingAllocator, event: tuple[str, int, int, int]) -> None:
    kind, key, size, stream = event
    if kind == "allocate":
        allocator.allocate(key, size, stream)
    elif kind == "free":
        allocator.free(key)
    else:
        allocator.empty_cache()


@pytest.mark.parametrize(
    ("conf", "peak_allocated", "peak_reserved", "allocated_units", "reserved_units"),
    [
        ("", 449_868_288, 719_323_136, 657_781_494, 1_970_315_264),
        ("expandable_segments:True", 449_657_856, 643_825_664, 656_662_474, 1_691_127_808),
        ("max_split_size_mb:32", 485_652_480, 1_119_879_168, 674_742_750, 2_247_737_344),
        ("roundup_power2_divisions:[16:8,>:2]", 518_560_256, 775_946_240, 738_949_676, 2_121_314_304),
        ("large_segment_size_mb:12", 449_868_288, 719_323_136, 657_919_858, 1_970_536_448),
    ],
)
def test_recorded_from_pytorch(
    conf: str, peak_allocated: int, peak_reserved: int, allocated_units: int, reserved_units: int
) -> None:
    """What ``libc10_cuda.so`` of torch 2.13.0 counts for this tape, on a CUDA runtime whose ``cudaMalloc``
    only hands out rising addresses: both peaks, and both readings summed over every event in units of 512 B."""
    allocator = CachingAllocator(AllocatorSettings.parse(conf))
    allocated = reserved = 0
    for event in tape(seed=2024):
        apply(allocator, event)
        allocated += allocator.allocated // 512
        reserved += allocator.reserved // 512
    assert (allocator.peak_allocated, allocator.peak_reserved) == (peak_allocated, peak_reserved)
    assert (allocated, reserved) == (allocated_units, reserved_units)


# ---- settings ---------------------------------------------------------------------------------------


def test_settings_that_are_modelled() -> None:
    conf = " max_split_size_mb : 512, expandable_segments:True,large_segment_size_mb:64,"
    assert AllocatorSettings.parse(conf) == AllocatorSettings(
        expandable_segments=True,
        max_split_size=512 * MIB,
        large_segment_size=64 * MIB,
        max_non_split_rounding=64 * MIB,
    )
    conf = "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9"
    settings = AllocatorSettings(memory_fraction=0.9, garbage_collection_threshold=0.8)
    assert AllocatorSettings.parse(conf) == settings


@pytest.mark.parametrize(
    "conf",
    [
        "",
        "backend:native",
        "pinned_use_background_threads:True,per_process_memory_fraction:1",
        "expandable_segments_reserve_by_class:[a:0.5,b:40G],expandable_segments:False",
    ],
)
def test_settings_without_effect(conf: str) -> None:
    assert AllocatorSettings.parse(conf) == AllocatorSettings()


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync is not modelled"),
        ("max_split_size_mb:19", r"max_split_size_mb:19 .* at least 20"),
        ("large_segment_size_mb:64,max_split_size_mb:32", "at least 64"),
        ("max_split_size_mb:many", "max_split_size_mb:many"),
        ("max_split_size_mb:-1", "max_split_size_mb:-1"),
        ("large_segment_size_mb:10", "at least 11"),
        ("expandable_segments:true", "expandable_segments:true .* True or False"),
        ("expandable_segments", "no value"),
        ("expandable_segment:True", "unknown allocator setting 'expandable_segment'"),
        ("garbage_collection_threshold:1.5", "between 0 and 1"),
        ("per_process_memory_fraction:1.5", "from 0 to 1"),
        ("roundup_power2_divisions:3", "power of 2"),
        ("roundup_power2_divisions:[100:2]", "power of 2"),
        ("roundup_power2_divisions:[64:6]", "power of 2"),
    ],
)
def test_settings_that_are_refused(conf: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        AllocatorSettings.parse(conf)
    assert "\n" not in str(refusal.value)


# ---- properties -------------------------------------------------------------------------------------

SETTINGS = st.sampled_from(
    [
        AllocatorSettings(),
        EXPANDABLE,
        AllocatorSettings.parse("max_split_size_mb:20"),
        AllocatorSettings.parse("roundup_power2_divisions:[1:2,8:8,>:4]"),
        AllocatorSettings.parse("expandable_segments:True,large_segment_size_mb:12,max_split_size_mb:30"),
    ]
)
REQUEST = st.tuples(st.integers(1, 27).flatmap(lambda bits: st.integers(1, 1 << bits)), st.integers(0, 1))
Steps = list[tuple[int, int] | float | None]
STEPS = st.lists(st.one_of(REQUEST, st.floats(0, 1, exclude_max=True), st.none()), max_size=60)
"""(size, stream) to allocate, a number that says which live block to free, or ``None`` to empty the cache."""


def replay(allocator: CachingAllocator, steps: Steps, live: list[int]) -> Iterator[None]:
    """Take ``steps`` one by one, keeping ``live`` the keys that are."""
    for step in steps:
        if isinstance(step, tuple):
            live.append(max(live, default=0) + 1)
            allocator.allocate(live[-1], *step)
        elif step is None:
            allocator.empty_cache()
        elif live:
            allocator.free(live.pop(int(step * len(live))))
        yield


@given(SETTINGS, STEPS)
def test_readings_and_blocks_agree(settings: AllocatorSettings, steps: Steps) -> None:
    """requested ≤ allocated ≤ reserved; blocks tile what is reserved, and no two free ones touch."""
    allocator = CachingAllocator(settings)
    for _ in replay(allocator, steps, []):
        segments = allocator.snapshot()
        held = [block for segment in segments for block in segment.blocks]
        assert allocator.requested <= allocator.allocated <= allocator.peak_allocated
        assert allocator.allocated == sum(block.size for block in held if block.live)
        assert allocator.reserved == sum(block.size for block in held) <= allocator.peak_reserved
        for segment in segments:
            pairs = list(zip(segment.blocks, segment.blocks[1:], strict=False))
            assert all(left.address + left.size == right.address for left, right in pairs)
            assert all(left.live or right.live for left, right in pairs)
            assert segment.size % (2 * MIB) == 0


@given(SETTINGS, STEPS)
def test_freeing_everything_leaves_nothing(settings: AllocatorSettings, steps: Steps) -> None:
    allocator = CachingAllocator(settings)
    live: list[int] = []
    list(replay(allocator, steps, live))
    for key in live:
        allocator.free(key)
    assert (allocator.requested, allocator.allocated) == (0, 0)
    assert not any(block.live for segment in allocator.snapshot() for block in segment.blocks)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.snapshot()) == (0, ())


@given(SETTINGS, STEPS, STEPS)
def test_a_copy_goes_its_own_way_and_the_same_way(settings: AllocatorSettings, before: Steps, after: Steps) -> None:
    """What happens to a copy leaves the original alone; the same steps make the same blocks of both."""
    original = CachingAllocator(settings)
    live: list[int] = []
    list(replay(original, before, live))
    copy, kept = original.copy(), original.snapshot()
    list(replay(copy, after, live.copy()))
    assert original.snapshot() == kept
    list(replay(original, after, live))
    assert original.snapshot() == copy.snapshot()
    assert (original.requested, original.allocated) == (copy.requested, copy.allocated)
    assert (original.peak_allocated, original.peak_reserved) == (copy.peak_allocated, copy.peak_reserved)


@given(st.lists(st.tuples(REQUEST, st.booleans()), max_size=60))
def test_a_block_exceeds_its_request_by_1_mib_at_most(requests: list[tuple[tuple[int, int], bool]]) -> None:
    """A large block by up to 1 MiB, a small one not at all, nor any in an expandable segment."""
    plain, expandable = CachingAllocator(), CachingAllocator(EXPANDABLE)
    for key, ((size, stream), drop) in enumerate(requests):
        rounded = -(-size // 512) * 512
        assert expandable.allocate(key, size, stream) == rounded
        assert 0 <= plain.allocate(key, size, stream) - rounded <= (MIB if rounded > MIB else 0)
        if drop:
            plain.free(key)
            expandable.free(key)
