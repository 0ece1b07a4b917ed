"""Pools of blocks: many requests in a row."""

from __future__ import annotations

from hypothesis import given, strategies as st

from memplan.allocator.blocks import AT_ONCE, MIB, SHIFT, UNBOUNDED, Given, Step
from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.requests import Requests

SETTINGS = st.sampled_from(
    [
        AllocatorSettings(),
        AllocatorSettings(expandable_segments=True),
        AllocatorSettings.parse("max_split_size_mb:20"),
        AllocatorSettings.parse("roundup_power2_divisions:[1:2,8:8,>:4]"),
        AllocatorSettings.parse("expandable_segments:True,large_segment_size_mb:12,max_split_size_mb:30"),
    ]
)
REQUEST = st.integers(1, 27).flatmap(lambda bits: st.integers(1, 1 << bits))


@given(SETTINGS, st.lists(st.tuples(REQUEST) | st.floats(0, 1, exclude_max=True), max_size=60), st.integers(0, 1 << 16))
def test_a_run_of_steps_is_taking_and_giving(
    settings: AllocatorSettings, steps: list[tuple[int] | float], limit: int
) -> None:
    """``run`` hands out the same blocks as ``take`` and ``give``, and finds the most that they hold."""
    alone, together = settings.pool(small=False), settings.pool(small=False)
    expected: list[int] = []
    live: dict[int, int] = {}
    run: list[Step] = []
    held = requested = 0
    most, place = limit, -1
    for step in steps:
        if isinstance(step, tuple):
            slot, units = len(expected), settings.units(step[0] + (MIB << 9))
            expected.append(alone.take(units))
            live[slot] = units
            held += expected[slot] >> SHIFT
        elif live:
            slot = sorted(live)[int(step * len(live))]
            units = -live.pop(slot)
            alone.give(expected[slot])
            held -= expected[slot] >> SHIFT
        else:
            continue
        requested += units
        run.append((slot, units, units << SHIFT, requested, len(run)))
        if held > most:
            most, place = held, len(run) - 1
    blocks = [0] * len(expected)
    assert together.run(run, blocks, limit) == (held - requested, most, place)
    assert blocks == expected


@given(
    st.booleans(),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 12 * MIB), st.integers(0, 3)), min_size=8, max_size=3 * AT_ONCE),
)
def test_blocks_that_come_back_at_once(small: bool, crowded: bool, blocks: list[tuple[int, int]]) -> None:
    """They leave the same free blocks as one after the other: 0 comes back before them, 1 never. ``crowded``: among
    many free ones that have no free neighbours."""
    alone, together = (AllocatorSettings().pool(small) for _ in range(2))
    for pool in (alone, together):
        for code in [pool.take(1) for _ in range(1200 if crowded else 0)][::2]:
            pool.give(code)
        codes = [pool.take(units) for units, _ in blocks]
        pool.give(pool.take(100 * MIB))  # serves the request whatever comes back
        for code, (_, order) in zip(codes, blocks, strict=True):
            if not order:
                pool.give(code)
    steps: list[Step] = [(slot, -units, 0, 0, -1) for slot, (units, order) in enumerate(blocks) if order > 1]
    expected = alone.run(steps, codes, UNBOUNDED)[0]
    given = Given([step[0] for step in steps], -sum([step[1] for step in steps]))
    assert together.give_all([Requests([1 << SHIFT, -1])], given, codes) == expected
    assert (together.free, together.edges) == (alone.free, alone.edges)
