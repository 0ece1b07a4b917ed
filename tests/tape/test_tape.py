"""Properties of tapes and excursions (``memplan/tape/events.py``)."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, strategies as st

from memplan.tape.events import (
    NOTHING,
    ROUND,
    ZERO,
    Category,
    Drop,
    Event,
    Excursion,
    Hold,
    Hook,
    Seam,
    Stretch,
    Tape,
    behind,
    change,
    compose,
    cut,
    fold,
    insert,
    rounded,
)

sizes = st.one_of(st.integers(1, 8), st.integers(1, 2**31)).map(lambda blocks: blocks * ROUND)
"""Small sizes too, so that peaks tie."""
categories = st.sampled_from(Category)
names = st.sampled_from(["weight", "scores", "logits_fp32", "grad"])

holds = st.builds(Hold, st.integers(0, 99), sizes, categories, names)
drops = st.builds(Drop, st.integers(0, 99), sizes, categories)
seams = st.builds(Seam, st.sampled_from(["layer.0/forward", "layer.0/backward", "step"]), st.none())
events = st.one_of(holds, drops, seams)


def tapes(max_size: int = 24) -> st.SearchStrategy[Tape]:
    return st.lists(events, max_size=max_size).map(tuple)


excursions = tapes(12).map(fold)


def without_place(excursion: Excursion) -> Excursion:
    return Excursion(excursion.net, excursion.peak, excursion.net_by, excursion.peak_by)


# Composition ------------------------------------------------------------------------------------


@given(excursions, excursions, excursions)
def test_composition_is_associative(a: Excursion, b: Excursion, c: Excursion) -> None:
    assert a.then(b).then(c) == a.then(b.then(c))


@given(excursions)
def test_zero_changes_nothing_on_either_side(a: Excursion) -> None:
    assert ZERO.then(a) == a == a.then(ZERO)


@given(st.lists(excursions, max_size=6))
def test_compose_is_then_from_left_to_right(parts: list[Excursion]) -> None:
    whole = ZERO
    for part in parts:
        whole = whole.then(part)
    assert compose(parts) == whole


@given(excursions, st.integers(0, 50))
def test_times_is_composition_with_itself(a: Excursion, n: int) -> None:
    assert a.times(n) == compose([a] * n)


@given(excursions, st.integers(0, 20), st.integers(0, 20))
def test_times_adds(a: Excursion, n: int, m: int) -> None:
    assert a.times(n).then(a.times(m)) == a.times(n + m)


@given(holds, holds)
def test_the_first_of_two_equal_peaks_is_named(first: Hold, second: Hold) -> None:
    second = second._replace(bytes=first.bytes)
    forward = fold([Seam("forward"), first, Drop(first.tensor, first.bytes, first.category)])
    backward = fold([Seam("backward"), second])
    assert forward.then(backward).place == f"forward/{first.name}"
    assert forward.then(backward).peak_by == forward.peak_by


@given(excursions, excursions)
def test_the_module_prefixes_the_place_and_changes_nothing_else(a: Excursion, b: Excursion) -> None:
    assert without_place(a.within("layer.1")) == without_place(a)
    assert a.within("layer.1").place == (f"layer.1/{a.place}" if a.place else "")
    assert a.within("layer.1").then(b.within("layer.1")) == a.then(b).within("layer.1")


# Folding ----------------------------------------------------------------------------------------


@given(tapes(), st.data())
def test_a_tape_folds_as_its_parts_do_wherever_it_is_cut(tape: Tape, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tape)), max_size=4)))
    parts = [tape[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(tape)], strict=True)]
    assert without_place(compose(map(fold, parts))) == without_place(fold(tape))


@given(st.lists(tapes(8), max_size=6))
def test_the_place_survives_a_cut_at_a_seam(bodies: list[Tape]) -> None:
    """Between seams a cut loses the seam's name, which is why modules fold from one seam on."""
    parts: list[Tape] = [(Seam(f"part.{index}"), *body) for index, body in enumerate(bodies)]
    assert compose(map(fold, parts)) == fold(event for part in parts for event in part)


@given(tapes())
def test_categories_sum_to_the_totals(tape: Tape) -> None:
    excursion = fold(tape)
    assert len(excursion.net_by) == len(excursion.peak_by) == len(Category)
    assert sum(excursion.net_by) == excursion.net
    assert sum(excursion.peak_by) == excursion.peak


@given(st.lists(excursions, max_size=5), st.integers(0, 9))
def test_categories_sum_to_the_totals_after_composition(parts: list[Excursion], n: int) -> None:
    excursion = compose(parts).times(n)
    assert sum(excursion.net_by) == excursion.net
    assert sum(excursion.peak_by) == excursion.peak


@given(st.lists(excursions, max_size=5), st.integers(0, 9))
def test_a_peak_is_never_below_the_start_nor_below_the_end(parts: list[Excursion], n: int) -> None:
    excursion = compose(parts).times(n)
    assert excursion.peak >= max(0, excursion.net)
    assert bool(excursion.peak) or (excursion.place == "" and excursion.peak_by == NOTHING)


@given(tapes())
def test_the_peak_is_that_of_the_running_total(tape: Tape) -> None:
    """The definition, spelled out: the largest prefix sum, where it is first reached."""
    running = peak = 0
    seam = place = ""
    for event in tape:
        match event:
            case Hold():
                running += event.bytes
                if running > peak:
                    peak, place = running, f"{seam}/{event.name}" if seam else event.name
            case Drop():
                running -= event.bytes
            case Seam():
                seam = event.name
    excursion = fold(tape)
    assert (excursion.net, excursion.peak, excursion.place) == (running, peak, place)


@given(tapes())
def test_folding_is_deterministic_and_reads_any_iterable_once(tape: Tape) -> None:
    assert fold(tape) == fold(iter(tape)) == fold(list(tape))


@given(tapes())
def test_a_tape_that_drops_all_it_held_nets_zero(tape: Tape) -> None:
    held = [event for event in tape if isinstance(event, Hold)]
    whole: Tape = (*held, *(Drop(event.tensor, event.bytes, event.category) for event in reversed(held)))
    assert fold(whole).net == 0
    assert fold(whole).net_by == NOTHING
    assert fold(whole).times(50).peak == fold(whole).peak


# Single changes and sizes -----------------------------------------------------------------------


@given(sizes, categories, names)
def test_a_change_is_the_fold_of_one_event(size: int, category: Category, name: str) -> None:
    assert change(size, category, name) == fold([Hold(0, size, category, name)])
    assert change(-size, category, name) == fold([Drop(0, size, category)])


@given(categories)
def test_no_change_is_zero(category: Category) -> None:
    assert change(0, category, "nothing") == ZERO == fold([])


@given(tapes(12))
def test_a_tape_is_the_composition_of_its_events_changes(tape: Tape) -> None:
    def one(event: Event) -> Excursion:
        match event:
            case Hold():
                return change(event.bytes, event.category, event.name)
            case Drop():
                return change(-event.bytes, event.category)
            case Seam():
                return ZERO

    assert without_place(compose(map(one, tape))) == without_place(fold(tape))


@given(st.integers(0, 2**50))
def test_rounding_goes_up_to_the_next_block(size: int) -> None:
    block = rounded(size)
    assert block % ROUND == 0
    assert block >= max(size, ROUND)
    assert block == ROUND or block - size < ROUND
    assert rounded(block) == block


def test_rounding_by_example() -> None:
    assert [rounded(size) for size in (0, 1, 512, 513, 1024, 4_102_029_312)] == [
        *(512, 512, 512, 1024, 1024),
        4_102_029_312,
    ]


# Insertion --------------------------------------------------------------------------------------

hooks = st.builds(Seam, st.sampled_from(["layer.0", "layer.1"]), st.sampled_from(Hook))
hooked_tapes = st.tuples(tapes(), st.lists(st.tuples(hooks, tapes(4)), max_size=5)).map(
    lambda drawn: tuple(drawn[0]) + tuple(event for seam, rest in drawn[1] for event in (seam, *rest))
)


def is_hook(event: Event) -> bool:
    return isinstance(event, Seam) and event.hook is not None


@given(hooked_tapes, tapes(4))
def test_hooks_events_stand_in_place_of_their_seams_and_the_rest_keeps_its_order(tape: Tape, extra: Tape) -> None:
    def behind_forward(seam: Seam) -> Tape:
        return extra if seam.hook is Hook.AFTER_FORWARD else ()

    stitched = list(insert(tape, behind_forward))
    for event in tape:
        expected = (event,) if not is_hook(event) else behind_forward(event)  # type: ignore[arg-type]
        assert tuple(stitched[: len(expected)]) == expected
        del stitched[: len(expected)]
    assert stitched == []


@given(hooked_tapes, tapes(4))
def test_insertion_adds_the_events_and_their_net_once_for_each_seam(tape: Tape, extra: Tape) -> None:
    count = sum(map(is_hook, tape))
    stitched = insert(tape, lambda seam: (seam, *extra))
    assert Counter(stitched) == Counter(tape) + Counter(extra * count)
    assert fold(stitched).net == fold(tape).net + count * fold(extra).net


@given(hooked_tapes)
def test_seams_with_hooks_change_no_fold_and_inserting_nothing_leaves_the_rest(tape: Tape) -> None:
    plain = insert(tape, lambda seam: ())
    assert plain == tuple(event for event in tape if not is_hook(event))
    assert insert(tape, lambda seam: (seam,)) == tape
    assert fold(plain) == fold(tape)


@given(hooked_tapes)
def test_a_tape_is_cut_into_runs_without_hooks(tape: Tape) -> None:
    assert cut(Stretch(tape)) == cut(tape)
    assert tuple(event for run, seam in cut(tape) for event in (*run, *([seam] if seam else []))) == tape


def test_a_tensor_that_a_framework_takes_over_does_not_end_on_the_tape() -> None:
    mine, other = (Hold(id, 512, Category.GRADIENTS, "gradient") for id in (1, 2))
    ends = tuple(Drop(hold.tensor, hold.bytes, hold.category) for hold in (mine, other))
    taken: set[int] = set()

    def at(seam: Seam) -> Tape:
        taken.add(seam.tensor)
        return ()

    assert insert((mine, other, Seam("weight", Hook.GRADIENT, 1), *ends), at, taken) == (mine, other, ends[1])


@given(tapes(), tapes(4))
def test_events_behind_a_tape_are_before_the_hooks_at_its_end(tape: Tape, extra: Tape) -> None:
    end = Seam("layer.0", Hook.AFTER_BACKWARD)
    assert behind(tape, extra) == (*tape, *extra)
    assert behind((*tape, end), extra) == (*tape, *extra, end)


# Words ------------------------------------------------------------------------------------------


def test_categories_are_those_of_the_json() -> None:
    assert [category.key for category in Category] == [
        *("parameters", "main_parameters", "gradients", "optimizer_states", "buffers", "inputs", "activations"),
        *("logits", "temporaries", "gathered_parameters", "communication_buffers", "workspaces", "block_rounding"),
    ]
    assert list(Category) == list(range(len(NOTHING)))
