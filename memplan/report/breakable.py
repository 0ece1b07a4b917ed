"""Names that wrap where a reader would break them: ``attention_dropout_`` / ``mask``, not ``attention_dropout_m``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

_PIECE = re.compile(r"[^\s_/.×]*(?:[_/.×]+|\s+|$)")
"""A stretch that stays together, with the ``_``, ``/``, ``.``, ``×`` or blanks that end it."""


class Breakable:
    """Text in a table's cell, broken behind the separators of names as well as at blanks."""

    def __init__(self, text: Text | str) -> None:
        self.text = Text(text) if isinstance(text, str) else text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for paragraph in self.text.split("\n", allow_blank=True):
            for line in _lines(paragraph, options.max_width):
                line.overflow = "fold"
                yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        paragraphs = self.text.plain.split("\n")
        pieces = (piece.rstrip() for paragraph in paragraphs for piece in _PIECE.findall(paragraph))
        shortest = max(map(cell_len, pieces), default=0)
        return Measurement(shortest, max(map(cell_len, paragraphs))).with_maximum(options.max_width)


def _lines(text: Text, width: int) -> Iterator[Text]:
    """``text`` in stretches of at most ``width`` columns, or of one piece where that is longer."""
    start = 0
    for piece in _unbroken(text.plain, width):
        if piece[0] > start and cell_len(text.plain[start : piece[1]].rstrip()) > width:
            yield _trimmed(text[start : piece[0]])
            start = piece[0]
    yield _trimmed(text[start:])


def _unbroken(plain: str, width: int) -> Iterator[tuple[int, int]]:
    """Start and end of what stays together: words that fit on a line, and the pieces of those that do not."""
    for word in re.finditer(r"\s*\S+\s*", plain):
        if cell_len(word[0].strip()) <= width:
            yield word.span()
        else:
            yield from (piece.span() for piece in _PIECE.finditer(plain, *word.span()) if piece[0])


def _trimmed(text: Text) -> Text:
    text.rstrip()
    return text
