"""A stage's tape, layer by layer (``memplan/report/detail.py``)."""

from __future__ import annotations

import pytest

from memplan.report.detail import print_detail, repeats, sections_of
from memplan.result import ModuleTape
from memplan.tape.events import GRAD_OUTPUT, INPUT, Category, Drop, Hold, fold

from .fabricated import tapes
from .printing import printed, widest


def detailed(module_tapes: tuple[ModuleTape, ...], width: int = 80, *, verbose: bool = False) -> str:
    return printed(lambda console: print_detail(module_tapes, console, verbose), width)


def test_running_totals_and_nets_are_those_of_the_fold() -> None:
    made = tapes()
    sections = sections_of(made)
    whole = fold(event for tape in made for event in tape.events)
    assert sections[-1].lines[-1].running == whole.net
    assert max(line.running for section in sections for line in section.lines) == whole.peak
    assert [section.net for section in sections] == [fold(tape.events).net for tape in made]


def test_a_drop_bears_the_name_of_what_its_own_module_held() -> None:
    own = Hold(1, 512, Category.ACTIVATIONS, "own")
    other = Hold(1, 512, Category.ACTIVATIONS, "other")
    made = (
        ModuleTape("layer.0", "forward", (own,)),
        ModuleTape("layer.1", "forward", (other,)),
        ModuleTape("layer.0", "backward", (Drop(1, 512, Category.ACTIVATIONS),)),
        ModuleTape("head", "backward", (Drop(1, 512, Category.ACTIVATIONS),)),
    )
    assert [section.lines[0].name for section in sections_of(made)] == ["own", "other", "own", "other"]


def test_saved_is_what_outlives_forward() -> None:
    forward = sections_of(tapes())[0]
    assert [hold.name for hold in forward.saved] == ["norm_out", "scores"]


def test_what_the_next_layer_drops_in_forward_is_not_saved() -> None:
    made = (
        ModuleTape("layer.0", "forward", (Hold(1, 512, Category.ACTIVATIONS, "out"),)),
        ModuleTape("layer.1", "forward", (Drop(1, 512, Category.ACTIVATIONS),)),
    )
    assert sections_of(made)[0].saved == ()


def test_what_a_module_borrows_bears_the_name_that_its_maker_gave_it() -> None:
    out, grad = Hold(5, 512, Category.ACTIVATIONS, "out"), Hold(6, 512, Category.TEMPORARIES, "grad_in")
    made = (
        ModuleTape("layer.0", "forward", (out,)),
        ModuleTape("layer.1", "forward", ()),
        ModuleTape("layer.1", "backward", (Drop(INPUT, 512, Category.ACTIVATIONS), grad)),
        ModuleTape("layer.0", "backward", (Drop(GRAD_OUTPUT, 512, Category.TEMPORARIES),)),
    )
    sections = sections_of(made)
    assert [line.name for section in sections for line in section.lines] == ["out", "out", "grad_in", "grad_in"]
    assert sections[0].saved == (out,)
    sent = (*made[:1], ModuleTape("depart", "forward", (Drop(INPUT, 512, Category.ACTIVATIONS),)))
    assert sections_of(sent)[0].saved == ()


def test_a_drop_of_something_older_than_the_tape_is_shown_by_number() -> None:
    made = (ModuleTape("head", "backward", (Drop(7, 1024, Category.LOGITS),)),)
    assert "#7" in detailed(made)
    assert "−1,024" in detailed(made)


def test_layers_that_do_the_same_take_a_line() -> None:
    runs = repeats(sections_of(tapes()))
    assert [len(run) for run, _ in runs] == [1, 3, 1, 1, 1, 3]
    assert [earlier is None for _, earlier in runs] == [True, False, True, True, True, False]
    text = detailed(tapes())
    assert "layer.1 … layer.3, forward  same as layer.0: +215,285,760 (205 MiB) each" in text
    assert text.count("norm_out") == 3


def test_verbose_spells_every_layer_out() -> None:
    text = detailed(tapes(), verbose=True)
    assert "same as" not in text
    assert text.count("norm_out") == 4 * 2 + 1


def test_every_tensor_has_name_shape_dtype_and_exact_bytes() -> None:
    text = detailed(tapes())
    assert "+4,102,029,312  4,733.2  logits" in text
    assert "logits_fp32" in text
    assert "2048×8×62592" in text
    assert "Held at the end of forward by layers 0–3: 2 tensors, +215,285,760 (205 MiB) each" in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_nothing_is_wider_than_the_console(width: int) -> None:
    assert widest(detailed(tapes(), width)) <= width


def test_an_empty_tape_is_no_error() -> None:
    assert "running total" in detailed(())
    assert "layer.0, forward" in detailed((ModuleTape("layer.0", "forward", ()),))
