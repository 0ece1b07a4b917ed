"""A terminal's report as HTML, part by part, so that a page says what the terminal says, in the same words."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from itertools import pairwise

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..printing import BAD, CAUTION, FAINT, GOOD, Breakable, Pieces
from .markup import Child, Markup, table, tag

CLASSES = {GOOD: "good", BAD: "bad", CAUTION: "caution", FAINT: "faint", "bold": "strong"}


def wide_console() -> Console:
    """For which reports shorten nothing, and draw no bars."""
    return Console(file=io.StringIO(), width=1_000, no_color=True, highlight=False, markup=False, emoji=False)


def converted(parts: Iterable[RenderableType]) -> Iterator[Markup]:
    """``parts`` of a report: texts as paragraphs, those that begin in bold as headings, tables as tables."""
    for part in parts:
        match part:
            case Padding():
                yield from converted([part.renderable])
            case Table():
                yield _table(part)
            case Text() if part.plain and _is_bold(part):
                title, _, rest = part.plain.partition(": ")
                yield tag("h2", title)
                yield tag("p", rest, class_="faint") if rest else Markup()
            case _:
                shown = cell(part)
                if shown:
                    yield tag("p", shown, class_=_class(part))


def _is_bold(text: Text) -> bool:
    """All of it, or its beginning; a verdict's word has a colour besides."""
    return text.style == "bold" or any(span.start == 0 and span.style == "bold" for span in text.spans)


def _class(part: RenderableType) -> str | None:
    style = part.style if isinstance(part, Text | Pieces) else ""
    return CLASSES.get(str(style))


def cell(part: RenderableType) -> Markup:
    """What a cell holds."""
    match part:
        case Breakable():
            return cell(part.text)
        case Pieces():
            return Markup(Markup(part.separator).join(cell(piece) for piece in part.pieces))
        case Text():
            return _styled(part)
    return Markup() if not isinstance(part, str) else tag("span", part) if part else Markup()


def _styled(part: Text) -> Markup:
    """Stretches of one style after the other."""
    ends = sorted({0, len(part), *(end for span in part.spans for end in (span.start, min(span.end, len(part))))})
    found: list[Child] = []
    for start, end in pairwise(ends):
        styles = [str(part.style), *(str(span.style) for span in part.spans if span.start <= start < span.end)]
        classes = dict.fromkeys(CLASSES[word] for style in styles for word in style.split() if word in CLASSES)
        found.append(tag("span", part.plain[start:end], class_=" ".join(classes) or None))
    return Markup("".join(filter(None, found)))


def _table(part: Table) -> Markup:
    columns = [column for column in part.columns if column.header or any(column.cells)]
    kinds = ["figure" if column.justify == "right" else None if column.no_wrap else "wraps" for column in columns]
    cells = zip(*(list(column.cells) for column in columns), strict=True)
    rows: list[list[Child]] = [[cell(one) for one in row] for row in cells]
    head: list[Child] = [cell(column.header) for column in columns] if part.show_header else []
    return table(head, rows, kinds)
