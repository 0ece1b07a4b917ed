"""Where names wrap (``memplan/report/printing.py``)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from memplan.report.printing import Breakable

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


def test_styles_survive() -> None:
    text = printed(lambda console: console.print(Breakable(Text("red_name", "red"))), 4, colour=True)
    assert text.count("\x1b[31m") == 2
