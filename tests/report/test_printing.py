"""Where names wrap (``memplan/report/printing.py``)."""

from __future__ import annotations

import contextlib
import io

from hypothesis import given, strategies as st
from rich.text import Text

from memplan.commands.output import print_file, print_json, print_text
from memplan.report.printing import Breakable, Pieces, entries, folded, left, plain_table, put, put_line
from memplan.streams import tell

from .printing import printed, widest

names = st.text(alphabet="abc_/. ×\n", max_size=60)


def lines(text: str, width: int) -> list[str]:
    return [line.rstrip() for line in printed(lambda console: console.print(Breakable(text)), width).splitlines()]


def test_names_break_behind_their_separators() -> None:
    assert lines("attention_dropout_mask", 20) == ["attention_dropout_", "mask"]
    assert lines("recompute/grad_down_input in layer.2", 16) == ["recompute/grad_", "down_input in", "layer.2"]
    assert lines("final_norm, head, to_fp32", 20) == ["final_norm, head,", "to_fp32"]
    assert lines("1×20×2048×2048", 10) == ["1×20×2048×", "2048"]
    assert lines("logits_fp32 in head\nforward", 40) == ["logits_fp32 in head", "forward"]


def test_a_piece_longer_than_the_line_is_folded() -> None:
    assert lines("abcdefghij_k", 6) == ["abcdef", "ghij_", "k"]


@given(names, st.integers(1, 70))
def test_no_character_is_lost_and_no_line_too_wide(text: str, width: int) -> None:
    shown = lines(text, width)
    assert "".join("".join(shown).split()) == "".join(text.split())
    assert widest("\n".join(shown)) <= width


def test_a_setting_is_broken_behind_its_name_before_its_value_is() -> None:
    text = "optimizer=paged_adamw_8bit recompute=full"
    assert lines(text, 28) == ["optimizer=paged_adamw_8bit", "recompute=full"]
    assert lines(text, 20) == ["optimizer=", "paged_adamw_8bit", "recompute=full"]
    assert lines(text, 12) == ["optimizer=", "paged_adamw_", "8bit", "recompute=", "full"]


def test_styles_survive() -> None:
    text = printed(lambda console: console.print(Breakable(Text("red_name", "red"))), 4, colour=True)
    assert text.count("\x1b[31m") == 2


STEERING = st.text(st.characters(codec="utf-8") | st.sampled_from("\x1b\x9b\x07\x08\r\x7f\u202e\u2028[]/"), max_size=40)


@given(STEERING, st.integers(10, 90))
def test_nothing_that_is_printed_steers_a_terminal(text: str, width: int) -> None:
    """In whatever part of a report, whoever forgot to escape it."""
    table = plain_table(left(), folded())
    table.add_row(Text(text), Breakable(text))
    for show in (
        lambda console: put(console, Text(text), table, Pieces([text, text]), entries([(text, text)], "")),
        lambda console: put_line(console, Text.assemble((text, "bold"), text)),
    ):
        shown = printed(show, width)
        assert all(c.isprintable() or c == "\n" for c in shown)
    marked = text.replace("\n", "").replace("\t", "")
    if "\x1b" in marked:
        assert "\\x1b" in printed(lambda console: put_line(console, Text(text)), width)


@given(STEERING)
def test_nothing_that_is_told_steers_a_terminal(text: str) -> None:
    for stream, tells in (("stderr", tell), ("stdout", print_text), ("stdout", lambda text: print_json({text: text}))):
        file = io.StringIO()
        with (contextlib.redirect_stderr if stream == "stderr" else contextlib.redirect_stdout)(file):
            tells(text)
        assert all(c.isprintable() or c == "\n" for c in file.getvalue()), repr(file.getvalue())


def test_a_file_on_standard_output_is_changed_on_a_terminal_alone() -> None:
    for is_terminal in (False, True):
        file = io.StringIO()
        file.isatty = lambda is_terminal=is_terminal: is_terminal  # type: ignore[method-assign]
        with contextlib.redirect_stdout(file):
            print_file("a\n\x1b[31mb\n")
        assert file.getvalue() == ("a\n\\x1b[31mb\n" if is_terminal else "a\n\x1b[31mb\n")
