"""Steps that are passed over, against running all of them."""

from __future__ import annotations

from itertools import chain
from unittest.mock import patch

import pytest
from hypothesis import given, settings, strategies as st

from memplan.allocator import requests as repeats, stretches as cut
from memplan.allocator.blocks import MIB, SHIFT, Brief, Step
from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.operations import Operation, alone
from memplan.allocator.passes import Pass, parts_of
from memplan.allocator.requests import Requests
from memplan.allocator.stretches import NEVER, stretches
from memplan.tape.events import Category

from .test_blocks import SETTINGS

SIZES = st.sampled_from([2, 3, 5, 12, 16, 40])


@settings(max_examples=400, deadline=None)
@given(
    SETTINGS,
    st.lists(SIZES, max_size=12),
    st.lists(SIZES | st.floats(0, 1, exclude_max=True), min_size=1, max_size=60),
    st.integers(1, 6),
    st.integers(0, 100),
    st.sampled_from([2, 4, 64]),
    st.booleans(),
)
def test_what_is_passed_over_changes_nothing(
    rules: AllocatorSettings, before: list[int], once: list[int | float], times: int, limit: int, part: int, small: bool
) -> None:
    """``before``: blocks that have been taken and given back; requests in MiB, or 20 KiB if ``small``, ``times`` in a
    row; what is looked at again after ``part`` steps."""
    wanted, unit = once * times, 40 if small else MIB
    whole, apart = rules.pool(small), rules.pool(small)
    for pool in (whole, apart):
        for block in [pool.take(size * unit) for size in before]:
            pool.give(block)
    live: dict[int, int] = {}
    steps: list[Step] = [(len(wanted), 0, 0, NEVER, -1)]  # nothing happens
    held = 0
    for at, one in enumerate(wanted):
        if isinstance(one, int):
            slot, units = at, one * unit + at
            live[slot] = units
        elif live:
            slot = sorted(live)[-1 - int(one * one * len(live))]
            units = -live.pop(slot)
        else:
            continue
        held += units
        steps.append((slot, units, units << SHIFT, *((NEVER, -1) if small else (held, at))))
    one_by_one, together = ([0] * (1 + len(wanted)) for _ in range(2))
    with patch.multiple(cut, FIRST_PART=part, WORTHWHILE=min(part, 8)), patch.object(repeats, "PROBE", part):
        parts = stretches(steps, small=small)
    run = [step[-1].steps if isinstance(step[-1], Brief) else (step,) for part in parts for step in part.steps]
    assert [*chain.from_iterable(run)] == steps
    assert whole.run(steps, one_by_one, limit * MIB) == apart.run_all(parts, together, limit * MIB)
    assert whole.free == apart.free
    assert whole.edges == apart.edges
    assert whole.reserved == apart.reserved
    assert all(one_by_one[slot] == together[slot] for slot in live)


def test_a_stretch_gives_back_what_it_takes() -> None:
    """Slots 2 to 6 do; slot 1 stays, and 9 was there before. Short ones are not looked at alone."""
    held = [(2, 4), (3, 4), (3, -4), (2, -4), (4, 6), (4, -6), (9, -8), (5, 4), (6, 4), (6, -4), (5, -4)]
    found = stretches([(slot, size, size << SHIFT, 0, 0) for slot, size in [(1, 8), *held]])
    assert [len(part.steps) for part in found] == [1, 11]
    assert [part.together for part in found] == [0, 2]
    assert list(found[1].parts[0][0].slots) == [9]
    (together,) = stretches([(slot, size, size << SHIFT, 0, 0) for slot, size in [(1, 8), *held[:4]]])
    assert not together.together
    (together,) = stretches([(slot, size, size << SHIFT, 0, 0) for slot, size in [(0, 0), *held]])
    assert together.together
    assert list(together.parts[0][0].slots) == [9]


@pytest.mark.parametrize(
    ("requests", "segments"),
    [((2048, 2047), 1), ((2048, 2048), 2), ((1300, 1300, 1300), 1), ((1300, 1300, 1300, 1300), 2)],
)
@pytest.mark.parametrize("settings", [AllocatorSettings(), AllocatorSettings(expandable_segments=True)])
def test_few_small_steps_are_one(settings: AllocatorSettings, requests: tuple[int, ...], segments: int) -> None:
    """Requests for so many units, which end in the opposite order, behind one for a unit that takes a segment of
    4096."""
    begin = [*enumerate((1, *requests))]
    sizes = [*begin, *[(slot, -units) for slot, units in begin[:0:-1]]]
    (found,) = stretches([(slot, units, units << SHIFT, NEVER, -1) for slot, units in sizes], small=True)
    assert len(found.steps) == 2
    pool = settings.pool(small=True)
    assert pool.run_all((found,), [0] * len(begin), 0) == (0, 0, -1)
    assert pool.reserved == segments * 4096
    assert sum(code >> SHIFT for code in pool.free) == segments * 4096 - 1


@pytest.mark.parametrize(
    ("free", "changing", "served"),
    [
        ((40, 40), (), True),
        ((10, 40), (), True),  # 10 serves 8 while it is whole, so that 40 stays whole for 30
        ((40,), (), False),  # 8 may lie in it when 30 is asked for
        ((10, 40), (10,), False),  # what is given back may make the first one larger than the second
        ((8, 9, 30), (), True),
        ((7, 30), (), False),
    ],
)
def test_whether_free_blocks_serve_requests(free: tuple[int, ...], changing: tuple[int, ...], served: bool) -> None:
    """One of 8, and while it is held one of 30."""
    requests = Requests([8 << SHIFT, 30 << SHIFT, -1, -1])
    codes = [size << SHIFT | at for at, size in enumerate(free)]
    assert requests.served(codes, [code for code in codes if code >> SHIFT in changing]) is served


def test_parts_keep_small_and_large_tensors_of_a_slot_apart() -> None:
    """A part's small steps run before its large ones, so a slot that one part held both in would be mixed up."""
    small, large = 1, 4 * MIB
    order = [(5, large), (5, -large), (5, small), (6, large), (5, -small), (5, large), (6, -large), (5, -large)]
    operations = tuple(Operation(slot, units, abs(units) << 9, Category.GRADIENTS, 0) for slot, units in order)
    parts = parts_of(Pass(alone(operations), (), (), 0, 0, (), (), (), 0, ()), 512)
    assert [one for part in parts for one in part.operations] == list(operations)
    for part in parts:
        kinds = {(one.slot, abs(one.units) == small) for one in part.operations}
        assert len(kinds) == len({slot for slot, _ in kinds})
