"""A stage's peak as a bar: one coloured stretch for each share, against the device's capacity."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from .palette import BAD, Share

FILLED, EMPTY, LIMIT = "■", "·", "│"
SWATCH = "■"


def bar(parts: Sequence[Share], scale: int, width: int, limit: int | None = None) -> Text:
    """``parts`` (bytes) drawn so that ``scale`` bytes fill ``width`` cells, with a mark at ``limit`` bytes.

    A cell takes the colour of the share at its middle, so the stretches are right to half a cell.
    Between the last share and the limit there are dots: what is still free.
    """
    text = Text(no_wrap=True)
    ends, total = [], 0
    for part in parts:
        total += part.size
        ends.append(total)
    limit_cell = None if limit is None else min(width - 1, limit * width // max(scale, 1))
    index = 0
    for cell in range(width):
        middle = (2 * cell + 1) * scale // (2 * width)
        while index < len(ends) and ends[index] <= middle:
            index += 1
        if cell == limit_cell:
            text.append(LIMIT, style=f"bold {BAD}" if total > (limit or 0) else "bold")
        elif index < len(parts):
            text.append(FILLED, style=parts[index].colour)
        elif limit_cell is not None and cell < limit_cell:
            text.append(EMPTY, style="dim")
        else:
            text.append(" ")
    return text
