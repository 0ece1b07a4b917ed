"""What modules in a row take, looked at once for each kind of module, against their events one by one."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.operations import Listed, Operation, Operations, Placed
from memplan.allocator.passes import Pass, _module_steps
from memplan.allocator.rank import NO_BLOCK, Rank
from memplan.tape.events import GRAD_OUTPUT, INPUT, Category

from .test_blocks import SETTINGS
from .test_replay import OneByOne

UNITS = [1, 64, 700, 2048, 2049, 9000, 30000]
Kind = list[tuple[int, int, bool]]
"""Of each tensor its units, how many later ones it outlives, and whether it stays for backward instead."""
KIND = st.lists(st.tuples(st.sampled_from(UNITS), st.integers(0, 5), st.booleans()), max_size=9)
OUTPUT, GRADIENT, SIZE = 1, 20, 40
"""Ids of what modules hand on, and the slots of each module."""


def listed(rules: AllocatorSettings, *tensors: tuple[int, int]) -> Listed:
    """Ids with units, negative where the tensor ends."""
    sizes = [(id, units, abs(units) << 9) for id, units in tensors]
    return Listed(
        [
            Operation(id, rules.units(size) if units > 0 else -rules.units(size), size, Category.ACTIVATIONS)
            for id, units, size in sizes
        ]
    )


def tape(kind: Kind, made: tuple[int, int], *, again: bool) -> list[tuple[int, int]]:
    """The tensors of a module, amid them the one that it hands on; ``again``: in backward, without those that stay."""
    found: list[tuple[int, int]] = []
    ends: list[tuple[int, int, int]] = []
    for at, (units, outlives, stays) in enumerate(kind):
        found += [(id, -size) for end, id, size in ends if end <= at]
        ends = [one for one in ends if one[0] > at]
        if at == len(kind) // 2:
            found.append(made)
        if not (again and stays):
            found.append((2 + at, units))
        if not stays:
            ends.append((at + 1 + outlives, 2 + at, units))
    return [*found, *([] if kind else [made]), *[(id, -size) for _, id, size in ends]]


def pass_of(placed: list[Placed]) -> Pass:
    operations = Operations(placed, {})
    small, large, net = _module_steps(operations)
    net_by = tuple(enumerate(operations.change(0, len(operations))))
    return Pass(operations, small, large, 0, 0, (), (), (), net, net_by)


@given(
    SETTINGS,
    st.lists(KIND, min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=24),
    st.sampled_from([64, 3000]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_modules_take_what_their_events_take_wherever_they_are(
    rules: AllocatorSettings, kinds: list[Kind], order: list[int], handed: int, early: bool
) -> None:
    """A module hands on ``handed`` units; its input ends ``early`` or in backward."""
    modules = []
    for kind in kinds:
        saved = [(2 + at, -units) for at, (units, _, stays) in enumerate(kind) if stays]
        forward, backward = (tape(kind, (made, handed), again=made == GRADIENT) for made in (OUTPUT, GRADIENT))
        backward += [*saved, (GRAD_OUTPUT, -handed)]
        (forward if early else backward).append((INPUT, -handed))
        modules.append((listed(rules, *forward), listed(rules, *backward)))
    end = SIZE * (len(order) + 1)
    ahead = [Placed(listed(rules, (OUTPUT, handed)), 0, {})]
    behind = [Placed(listed(rules, (GRAD_OUTPUT, -handed)), 0, {GRAD_OUTPUT: SIZE + GRADIENT})]
    for place, one in enumerate(order, 1):
        at, (forward_of, backward_of) = SIZE * place, modules[one % len(modules)]
        outer = {INPUT: at - SIZE + OUTPUT, GRAD_OUTPUT: at + SIZE + GRADIENT}
        ahead.append(Placed(forward_of, at, outer))
        behind.append(Placed(backward_of, at, outer))
    behind.append(Placed(listed(rules, (GRADIENT, handed), (INPUT, -handed)), end, {INPUT: end - SIZE + OUTPUT}))
    both = pass_of(ahead), pass_of(behind[::-1])
    rank, expected = Rank(rules), OneByOne(rules)
    frames = [[NO_BLOCK] * (end + SIZE) for _ in range(3)]
    for which, microbatch in [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2), (0, 0), (1, 0)]:
        rank.run(both[which], frames[microbatch])
        expected.run(both[which], microbatch)
        assert rank.by == expected.by
        assert rank.reserved == expected.allocator.peak_reserved
        assert rank.allocated * 512 == expected.allocator.allocated
        assert rank.peak * 512 == expected.peak
        assert list(rank.breakdown()[:-1]) == expected.peak_by[:-1]
    assert not rank.allocated


def test_tensors_of_others_are_followed_one_by_one() -> None:
    """What an id that several modules know stands for may be ended by another module."""
    own = listed(AllocatorSettings(), (3, 8), (-11, 4), (3, -8), (-11, -4), (4, 2))
    assert [at for at, _ in own.lasting] == [1, 3, 4]
    assert own.begun == {2: 0}
    assert own.sums[-1][Category.ACTIVATIONS] == 2 << 9
    assert own.held == (8 << 9, 12 << 9, 4 << 9, 0, 2 << 9)
