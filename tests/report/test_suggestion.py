"""What ``memplan suggest-partition`` prints (``memplan/report/suggestion*.py``)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from memplan.estimate import estimate
from memplan.frameworks import framework
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.report.json import to_json
from memplan.report.printing import Pieces
from memplan.report.suggestion import Answer, print_suggestion
from memplan.report.suggestion_json import COLUMNS, suggestion_to_csv, suggestion_to_json
from memplan.report.suggestion_tables import changes_table
from memplan.report.suggestion_words import (
    change_percent,
    cut_words,
    difference_pieces,
    layout_words,
    same_layout,
    speed_words,
    time_unit,
)
from memplan.result import Failure, Judged, Verdict
from memplan.search.answer import _roomiest_first, _with_more_room, suggest
from memplan.search.changes import methods_of
from memplan.search.cuts import ChunkLayers
from memplan.search.point import Extra
from memplan.search.result import Found, Offer, Suggestion

from .printing import printed, widest

FLAGS: dict[str, dict[str, str]] = {
    "megatron": {"model": "llama-3-8b", "framework": "megatron", "pp": "2", "gpu": "h100-80gb", "seq": "512"},
    "megatron-deepspeed": {
        "model": "bigscience-104b-250k", "framework": "megatron-deepspeed", "pp": "2", "gpu": "h100-80gb",
        "dtype": "fp16", "optimizer": "adam", "hidden": "1024", "heads": "8", "head-dim": "128", "kv-heads": "8",
        "ffn": "4096", "seq": "512", "price": "2",
    },
    "deepspeed": {"model": "gpt2", "framework": "deepspeed", "gpu": "h100-80gb", "seq": "256"},
    "does not fit": {"model": "gpt2-xl", "gpu": "v100-16gb", "seq": "1024", "gpus": "1", "mbs": "32", "dtype": "fp16"},
}  # fmt: skip


@cache
def answer(name: str) -> Answer:
    flags = {"layers": "6", "gpus": "2", "gbs": "8", **FLAGS[name]}
    if name == "does not fit":
        flags |= {"layers": "48", "gbs": "32"}
    fixed = {"layout.pp": 2} if "pp" in flags else {}
    found = suggest(read_plan(None, flags).plan, fixed)
    return Answer(found, methods_of(found.best[0]) if found.best else ())


def shown(name: str, width: int = 80, *, colour: bool = False, **more: bool) -> str:
    return printed(lambda console: print_suggestion(answer(name), console, **more), width, colour=colour)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize(("width", "colour"), [(80, False), (80, True), (160, True), (60, False)])
@pytest.mark.parametrize("verbose", [False, True])
def test_it_keeps_to_the_width(name: str, width: int, colour: bool, verbose: bool) -> None:
    text = shown(name, width, colour=colour, verbose=verbose)
    assert widest(text) <= width
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_first_the_layout_then_why_then_the_front() -> None:
    text = shown("megatron")
    assert text.startswith("Recommended: pp 2 · ")
    order = ["\nstep ", "\nmemory  Fits: ", "\nlayers ", "stage  modules", "Why this one", "Other cuts", "Searched "]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)


def test_each_alternative_says_what_it_costs() -> None:
    found = answer("megatron").found
    text = shown("megatron", 160)
    best, *others = found.best
    for other in others:
        line = next(line for line in text.splitlines() if line.startswith(" · ".join(difference_pieces(other, best))))
        assert change_percent(other.seconds, best.seconds) in line


def test_cuts_of_deepspeed_stand_beside_the_proposed_one() -> None:
    text = shown("megatron-deepspeed")
    methods = {method.name: method for method in answer("megatron-deepspeed").methods}
    assert {"proposed", "type:transformer", "type:embed|transformer", "parameters", "uniform"} <= methods.keys()
    for name, method in methods.items():
        assert name in text
        if name.startswith("type:") or name in ("parameters", "uniform"):
            plan = answer("megatron-deepspeed").found.best[0].plan
            changed = plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update={"partition": name})})
            stages = estimate(changed).stages
            assert method.requested == max(stage.requested for stage in stages)


def test_a_plan_that_does_not_fit_gets_changes() -> None:
    found = answer("does not fit").found
    given = found.given if found.best else found.closest
    assert given is not None
    assert found.changes
    text = shown("does not fit")
    assert "Single changes of" in text
    for change in found.changes[:8]:
        assert change.what in text
        assert change.gained == given.needs - change.suggestion.needs


def test_what_alone_fails_beside_training_is_named_with_the_verdict() -> None:
    """An iteration's peak beside it looks as if it fitted."""
    change = answer("does not fit").found.changes[0]
    after = change.suggestion
    places = [Failure(moment, "", "", "", None, 0, 0, 0, 0) for moment in ("evaluation", "checkpoint", "steady")]
    expected = {
        Judged(Verdict.DOES_NOT_FIT, failures=(places[0],)): "too large in evaluation",
        Judged(Verdict.DOES_NOT_FIT, failures=tuple(places[:2])): "too large in evaluation and checkpoint",
        Judged(Verdict.DOES_NOT_FIT, failures=tuple(places)): "too large",
        Judged(Verdict.RETRIES, 1): "fits with retries at first",
        Judged(Verdict.RETRIES, 3, 1): "fits with 1 retry an iteration",
        Judged(Verdict.RETRIES, 9, 4, at_least=True): "fits with at least 4 retries an iteration",
        Judged(Verdict.TIGHT): "tight",
        Judged(Verdict.UNKNOWN): "may fit",
        Judged(Verdict.FITS): "fits",
    }
    for judged, words in expected.items():
        one = replace(change, suggestion=replace(after, estimate=None, fullest_judged=judged))
        console = Console(width=160, color_system=None)
        with console.capture() as caught:
            console.print(changes_table(after, [one]))
        assert f" {words}  " in caught.get().splitlines()[-1]


def test_quiet_is_one_line() -> None:
    text = shown("megatron", 40, quiet=True)
    assert text == f"Recommended: {layout_words(answer('megatron').found.best[0])}\n"


def test_ascii_terminals() -> None:
    class Ascii(Console):
        @property
        def encoding(self) -> str:
            return "ascii"

    import io

    file = io.StringIO()
    print_suggestion(answer("megatron"), Ascii(file=file, width=80, color_system=None, _environ={}))
    assert file.getvalue().isascii()


# -- JSON and CSV --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["megatron", "megatron-deepspeed", "deepspeed"])
def test_json_has_the_stages_of_the_estimate(name: str) -> None:
    whole = suggestion_to_json(answer(name))
    best = whole["recommended"]
    estimated = to_json(estimate(answer(name).found.best[0].plan))
    assert best["plan"] == estimated["plan"]
    assert best["stages"] == estimated["stages"]
    assert best["requested_bytes"] == max(stage["requested_bytes"] for stage in estimated["stages"])
    assert best["device_bytes"] == estimated["peak_bytes"]
    assert sum(best["parts_seconds"].values()) == pytest.approx(best["seconds"])
    assert sum(map(sum, best["layers"])) in (0, best["plan"]["model"]["layers"])
    assert [one["seconds"] for one in whole["front"]] == sorted(one["seconds"] for one in whole["front"])
    counts = whole["search"]
    assert counts["total"] == counts["considered"] + sum(counts["refused"].values())


def test_an_mfu_that_nobody_published_is_said() -> None:
    """Of an H100 above 54 %, in print and in JSON, with half of causal scores, which no kernel computes whole; not of
    half of it, not without a time."""
    known = answer("megatron")
    best = known.found.best[0]
    assert best.step is not None

    def answered(mfu: float) -> Answer:
        step = replace(best.step, mfu=0.8, mfu_halved=mfu)
        return replace(known, found=replace(known.found, best=(replace(best, step=step),)))

    def codes(one: Answer) -> list[str]:
        return [warning["code"] for warning in suggestion_to_json(one)["warnings"]]

    assert "mfu-above-published" in codes(answered(0.7))
    text = printed(lambda console: print_suggestion(answered(0.7), console), 400, colour=False)
    said = "the predicted MFU of 70 %, with half of causal scores, is above the best published one known for h100-80gb"
    assert f"{said} in 16 bits, 54 %" in text
    assert "MFU 80 % (70 % with half of causal scores)" in text
    near = printed(lambda console: print_suggestion(answered(0.5421), console), 400, colour=False)
    assert "MFU of 54.2 %, with half" in near
    assert "in 16 bits, 54.0 %" in near
    assert not {"mfu-above-published"} & {*codes(answered(0.5402)), *codes(answered(0.35))}
    assert "mfu-above-published" not in codes(replace(known, found=replace(known.found, best=(), closest=None)))


def test_csv_has_a_row_for_each_layout() -> None:
    found = answer("megatron").found
    header, *rows = suggestion_to_csv(found).splitlines()
    assert tuple(header.split(",")) == COLUMNS
    assert len(rows) == len(found.best) + len(found.front) + (found.given is not None)


def test_a_search_that_finds_no_layout_at_all_has_an_answer() -> None:
    found = answer("megatron").found
    empty: Found = replace(found, best=(), front=(), closest=None, given=None, changes=())
    whole = suggestion_to_json(Answer(empty))
    assert (whole["fits"], whole["recommended"], whole["closest"]) == (False, None, None)
    text = printed(lambda console: print_suggestion(Answer(empty), console))
    assert text.startswith("Nothing fits, and no layout runs")


# -- words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([[1], [2], [2], [2], [1]], "1, 2 ×3, 1"),
        ([[4], [4], [4], [5], [5]], "4 ×3, 5 ×2"),
        ([[1, 2], [1, 2], [2, 1]], "1+2 ×2, 2+1"),
        ([[3]], "3"),
    ],
)
def test_a_cut_in_words(layers: list[list[int]], text: str) -> None:
    assert cut_words(tuple(tuple(ChunkLayers(count) for count in stage) for stage in layers)) == text


def test_long_partitions_are_cut_unless_asked_for() -> None:
    plan = answer("megatron-deepspeed").found.best[0].plan
    long = plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update={"partition": tuple(range(40))})})
    assert framework(long.framework).cut_field(long, whole=False) == "--partition 0,1,2,3,4,5,6,7,8,…,38,39"
    assert framework(long.framework).cut_field(long, whole=True).endswith(",37,38,39")


@pytest.mark.parametrize(
    ("seconds", "than", "change", "words"),
    [
        (1.011, 1.0, "+1 %", "slower by 1 %"),
        (0.5, 1.0, "−50 %", "faster by 50 %"),
        (1.0042, 1.0, "0 %", "as fast"),
        (21.0, 1.0, "+2,000 %", "slower by 2,000 %"),
    ],
)
def test_times_compared(seconds: float, than: float, change: str, words: str) -> None:
    assert change_percent(seconds, than) == change
    assert speed_words(seconds, than) == words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1201.52, "1,202 s"), (38.084, "38.1 s"), (6.678, "6.68 s"), (0.4004, "400 ms"), (0.0254, "25.4 ms")],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert time_unit(seconds).text(seconds) == text


def test_a_layout_is_the_same_as_itself_only() -> None:
    best, *others = answer("megatron").found.best
    assert same_layout(best, best)
    assert not any(same_layout(other, best) for other in others)


WORDS = ["tp 4", "mbs 16", "no recompute", "full recompute of 12 layers a stage", "fused cross entropy", "×", "pp 32"]


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=12), st.integers(30, 90))
def test_pieces_are_not_broken_where_they_fit(pieces: list[str], width: int) -> None:
    text = printed(lambda console: console.print(Pieces(pieces)), width)
    assert text.replace("\n", " ").split() == " · ".join(pieces).split()
    lines = text.splitlines()
    whole: list[Any] = [piece for line in lines for piece in line.strip(" ·").split(" · ")]
    assert max(map(len, lines)) <= width
    assert whole == pieces or any(len(piece) + 2 > width for piece in pieces)


def test_why_a_faster_layout_is_not_recommended() -> None:
    """The plan as given leaves less than the reserve; others train with other numbers, and are not what is weighed."""
    flags = {"model": "gpt2", "layers": "4", "gpus": "1", "gpu": "h100", "seq": "1024", "mbs": "8", "gbs": "8"}
    given = {**flags, "loss": "liger", "optimizer": "sgd", "capacity": "5.5GiB"}
    text = printed(lambda console: print_suggestion(Answer(suggest(read_plan(None, given).plan, {})), console), 120)
    assert "The plan as given is faster by 21 %, needs 1.92 GiB more, and keeps less than 1GiB free.\n" in text
    needs = [estimate(read_plan(None, {**given, "mbs": mbs}).plan).stages[0] for mbs in ("4", "8")]
    evaluation = [one.headline + one.worst(evaluated=True)[1] for one in needs]
    assert f"{(evaluation[1] - evaluation[0]) / 2**30:.2f}" == "1.92"
    found = answer("deepspeed").found
    best = found.best[0]
    changed = replace(best, seconds=best.seconds / 2, device=best.needs + 1, estimate=None)
    other_numbers = (Extra("8-bit Adam", (), keeps_numerics=False),)
    changed = replace(changed, point=changed.point._replace(extras=other_numbers))
    beside = Answer(replace(found, best=(best, changed), given=None))
    text = printed(lambda console: print_suggestion(beside, console), 120)
    assert "A layout that changes the numerics is recommended only where no other layout fits.\n" in text
    assert "count as equally fast" not in text


def test_most_room_is_that_of_the_device() -> None:
    """Not what tensors request: of two that are as fast, the one that takes less of the device."""
    best = replace(answer("megatron").found.best[0], estimate=None, fullest_judged=Judged(Verdict.FITS))
    whole, other = replace(best, device=10, seconds=2.0), replace(best, device=9, seconds=1.9)
    search: Any = SimpleNamespace(estimated=lambda one: one)
    assert _with_more_room(search, whole, [whole, other], 2.0, 1) is other
    assert _with_more_room(search, whole, [whole, other], 1.8, 1) is whole
    assert _with_more_room(search, whole, [whole, replace(other, device=11)], 2.0, 1) is whole
    assert _with_more_room(search, whole, [whole, other], 2.0, 2) is whole


@pytest.mark.parametrize(("gain", "expected"), [(1, 4), (2, 4), (3, 1)])
def test_less_room_than_is_kept_free_is_not_worth_a_change(gain: int, expected: int) -> None:
    """The fastest takes 10, the roomier one 8."""
    first = replace(answer("megatron").found.best[0], estimate=None, fullest_judged=Judged(Verdict.FITS))
    fastest, roomy = (
        replace(first, point=first.point._replace(mbs=mbs), device=device) for mbs, device in ((1, 10), (4, 8))
    )
    search: Any = SimpleNamespace(
        roomier=lambda fastest, within, gain: [roomy], replayed_fullest=lambda one: one, estimated=lambda one: one
    )
    assert _roomiest_first(search, [fastest], 0.05, gain)[0].point.mbs == expected


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ((Verdict.FITS, 0, 0), "roomiest"),
        ((Verdict.DOES_NOT_FIT, 0, 0), "second"),
        ((Verdict.TIGHT, 0, 0), "second"),
        ((Verdict.RETRIES, 1, 0), "second"),
        ((Verdict.FITS, 0, 5), "second"),
    ],
)
def test_a_stage_between_the_ends_rules_the_roomiest_out(inner: tuple[Verdict, int, int], expected: str) -> None:
    """Layouts with most room are replayed at their fullest stage and their ends; of the one that is to be recommended
    every stage is, and where one between them fails, needs a retry or takes more than the fastest layout does, the one
    with the next most room is recommended."""
    verdict, retries, more = inner
    first = replace(answer("megatron").found.best[0], estimate=None, fullest_judged=Judged(Verdict.FITS))
    named = {
        name: replace(first, point=first.point._replace(mbs=mbs), device=device, seconds=seconds)
        for name, mbs, device, seconds in (("fastest", 1, 10, 2.0), ("second", 2, 9, 2.01), ("roomiest", 4, 8, 2.02))
    }
    whole = {one.point.mbs: one for one in named.values()}
    whole[4] = replace(named["roomiest"], device=8 + more, fullest_judged=Judged(verdict, retries))
    search: Any = SimpleNamespace(
        roomier=lambda fastest, within, gain: [named["roomiest"], named["second"]],
        replayed_fullest=lambda one: one,
        estimated=lambda one: whole[one.point.mbs],
    )
    found = _roomiest_first(search, [named["fastest"]], 0.05, 1)
    assert found == [named[expected], named["fastest"]]


def test_where_all_with_more_room_are_ruled_out_the_fastest_is_recommended() -> None:
    first = replace(answer("megatron").found.best[0], estimate=None, fullest_judged=Judged(Verdict.FITS))
    fastest, roomy = (
        replace(first, point=first.point._replace(mbs=mbs), device=device) for mbs, device in ((1, 10), (2, 9))
    )
    too_large = replace(roomy, fullest_judged=Judged(Verdict.DOES_NOT_FIT))
    search: Any = SimpleNamespace(
        roomier=lambda fastest, within, gain: [roomy],
        replayed_fullest=lambda one: one,
        estimated=lambda one: too_large if one is roomy else one,
    )
    assert _roomiest_first(search, [fastest], 0.05, 1) == [fastest]


@pytest.mark.parametrize(
    ("roomy_takes", "fastest_takes", "expected", "replayed"),
    [(9, 10, 2, [2]), (11, 10, 1, [2, 1]), (11, 12, 2, [2, 1])],
)
def test_stages_between_the_ends_of_the_fastest_count_where_they_decide(
    roomy_takes: int, fastest_takes: int, expected: int, replayed: list[int]
) -> None:
    """At its ends the fastest takes 10, the roomier one 9: where a stage in between makes that more, those of the
    fastest say which of them has more room."""
    first = replace(answer("megatron").found.best[0], estimate=None, fullest_judged=Judged(Verdict.FITS))
    fastest, roomy = (
        replace(first, point=first.point._replace(mbs=mbs), device=device) for mbs, device in ((1, 10), (2, 9))
    )
    takes, asked = {1: fastest_takes, 2: roomy_takes}, []

    def estimated(one: Suggestion) -> Suggestion:
        asked.append(one.point.mbs)
        return replace(one, device=takes[one.point.mbs])

    search: Any = SimpleNamespace(
        roomier=lambda fastest, within, gain: [roomy], replayed_fullest=lambda one: one, estimated=estimated
    )
    found = _roomiest_first(search, [fastest], 0.05, 1)
    assert found[0].point.mbs == expected
    assert [*dict.fromkeys(asked)] == replayed


def test_a_faster_layout_that_needs_retries_has_a_sentence() -> None:
    """Llama 3 8B on 8 A100 with 7,800 tokens: its own estimate gives cached memory back twice in every iteration, and
    what fits without that keeps everything on the CPU."""
    job = {"model": "llama-3-8b", "framework": "fsdp", "gpu": "a100-80gb", "gpus": "8", "gbs": "8", "mbs": "1"}
    fixed = {"batch.mbs": 1, "recompute.mode": "none", "loss.kind": "plain"}
    plan = read_plan(None, {**job, "seq": "7800", "headroom": "0"}).plan
    found = suggest(plan, fixed)
    assert [extra.label for extra in found.best[0].point.extras] == ["CPU offload"]
    judged = estimate(plan).judged
    assert (judged.verdict, judged.retries_in_iteration) == (Verdict.RETRIES, 2)
    text = " ".join(printed(lambda console: print_suggestion(Answer(found), console), 120).split())
    assert (
        "without CPU offload is faster by 84 % and runs, but the allocator gives cached memory back 2 times in every "
        "iteration; predicted times do not include retries (0.04 to 0.15 s each on an H100), so a layout without "
        "retries is recommended first." in text
    )
    assert "without CPU offload · fits with 2 retries an iteration" in text


def test_why_a_layout_with_more_room_is_not_recommended() -> None:
    """It keeps more off the GPU than the fastest layout does."""
    found = answer("deepspeed").found
    best = replace(found.best[0], estimate=None, fullest_judged=Judged(Verdict.FITS), device=10)
    offload = Extra("optimizer on the CPU", (("deepspeed.offload_optimizer", "cpu"),), moves_states=True)
    moved = replace(best, device=9, point=best.point._replace(extras=(offload,)))
    sentence = "Among equally fast layouts, those that offload more than the fastest are not recommended.\n"

    def text(device: int) -> str:
        beside = Answer(replace(found, best=(best, replace(moved, device=device)), given=None))
        return printed(lambda console: print_suggestion(beside, console), 120)

    assert sentence in text(9)
    assert sentence not in text(11)


def test_flags_make_the_recommended_layout() -> None:
    beside = replace(answer("megatron"), flags="--mbs 2 --headroom 2%")
    text = printed(lambda console: print_suggestion(beside, console), 120)
    assert "\nflags   --mbs 2 --headroom 2%\n" in text
    assert suggestion_to_json(beside)["flags"] == "--mbs 2 --headroom 2%"


def test_what_ends_the_retries_of_a_faster_layout_is_said() -> None:
    """Llama 3 8B without recompute needs a retry before it settles; with expandable segments its own estimate has none,
    and needs what the sentence says."""
    plan = read_plan("llama-3-8b-8gpu", {"gbs": "64"}).plan
    found = suggest(plan, {})
    after = found.ends_retries
    assert after is not None
    assert after.plan.environment == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    (retrying,) = (one for one in found.best if one.judged.verdict is Verdict.RETRIES)
    own = estimate(after.plan)
    assert estimate(retrying.plan).judged.verdict is Verdict.RETRIES
    assert own.judged.verdict is Verdict.FITS
    text = " ".join(printed(lambda console: print_suggestion(Answer(found), console), 120).split())
    faster = speed_words(retrying.seconds, found.best[0].seconds)
    assert f"The layout that needs retries, {faster}, needs none with expandable segments" in text
    assert f"{own.peak / 2**30:.2f} GiB on the device." in text
    assert suggestion_to_json(Answer(found))["ends_retries"]["device_bytes"] == own.peak
    again = suggest(plan.model_copy(update={"environment": after.plan.environment}), {})
    assert again.best[0].estimate == own
    assert again.ends_retries is None


def test_frameworks_in_which_nothing_fits_are_named() -> None:
    """With what the closest layout needs; those that cannot run at all are left out."""
    best = answer("deepspeed").found.best[0]
    closest = answer("does not fit").found.given
    assert closest is not None
    assert not closest.fits
    offers = (
        Offer("ddp", "time", None, closest),
        Offer("deepspeed", "time", best),
        Offer("single", "time", refused=PlanError("hardware.gpus", 2, "must be 1 with framework single")),
    )
    beside = Answer(answer("deepspeed").found, offers=offers)
    text = printed(lambda console: print_suggestion(beside, console), 120)
    _, told = text.split("In each framework\n")
    rows = told.split("\n\n")[0].splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["deepspeed", "ddp"]
    assert rows[1].endswith("does not fit")
    assert f"{closest.needs / 2**30:.2f}" in rows[1]
    told_in_json = {one["framework"]: one for one in suggestion_to_json(beside)["frameworks"]}
    assert told_in_json["ddp"]["closest"]["device_bytes"] == closest.needs
    assert told_in_json["deepspeed"]["closest"] is None


def test_a_framework_whose_best_layout_needs_retries_says_so() -> None:
    """Its peak may be more than there is, as an alternative's, which is marked so, too."""
    best = answer("deepspeed").found.best[0]
    retrying = replace(best, estimate=None, fullest_judged=Judged(Verdict.RETRIES, 3, 1), device=best.needs)
    offers = Offer("deepspeed", "time", best), Offer("fsdp", "time", retrying)
    beside = Answer(answer("deepspeed").found, offers=offers)
    text = printed(lambda console: print_suggestion(beside, console), 160)
    (row,) = (line for line in text.splitlines() if line.startswith("fsdp "))
    assert "fits with 1 retry an iteration" in row


def test_single_changes_stand_below_the_layout_as_it_is() -> None:
    """And not below ``none``, which could be no recompute."""
    found = answer("does not fit").found
    given = found.given
    assert given is not None
    text = printed(lambda console: console.print(changes_table(given, found.changes)), 120)
    assert text.splitlines()[2].startswith("as it is  ")
