"""Enumerations that wrap between their pieces: ``tp 4 · pp 32 ·`` / ``mbs 2``, never ``mbs`` / ``2``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

DOT = " · "


class Pieces:
    """``pieces`` with ``separator`` between them, as many on a line as there is room for."""

    def __init__(self, pieces: Sequence[Text | str], separator: str = DOT, style: str = "") -> None:
        self.pieces = [Text(piece) if isinstance(piece, str) else piece for piece in pieces]
        self.separator, self.style = separator, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self._lines(options.max_width):
            line.stylize_before(self.style)
            line.overflow = "fold"
            yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max((word for piece in self.pieces for word in map(len, piece.plain.split())), default=0)
        whole = len(self.separator.join(piece.plain for piece in self.pieces))
        shortest = min(whole, max((piece.cell_len + len(self.separator) for piece in self.pieces), default=longest))
        return Measurement(shortest, whole).with_maximum(options.max_width)

    def _lines(self, width: int) -> Iterator[Text]:
        line = Text()
        for at, piece in enumerate(self.pieces):
            last = at == len(self.pieces) - 1
            end = Text("" if last else self.separator.rstrip())
            if line and line.cell_len + 1 + piece.cell_len + end.cell_len > width:
                yield line
                line = Text()
            line = Text.assemble(line, " " if line else "", piece, end)
        yield line
