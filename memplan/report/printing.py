"""How reports come to a terminal or a pipe: without blanks at a line's end, control characters or characters that it
lacks, and with text that wraps where a reader would break it.

One label and one colour for each thing that memory is for, the same in every bar and table.

States of the model are cool, what a forward pass leaves behind is warm, and what PyTorch cannot see
is grey. The tones are of middle lightness, to be read on dark and on light terminals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from ..plan.errors import one_line
from ..result import BeyondAllocated, StageEstimate
from ..tape.events import Category
from ..values import dataclass, pattern

COLOURS: dict[Category, str] = {
    Category.PARAMETERS: "#4e8fce",
    Category.MAIN_PARAMETERS: "#86b6e4",
    Category.GRADIENTS: "#5aa66c",
    Category.OPTIMIZER_STATES: "#8f7cc8",
    Category.BUFFERS: "#a39584",
    Category.INPUTS: "#c9b18e",
    Category.ACTIVATIONS: "#e8a04c",
    Category.LOGITS: "#dc5f5f",
    Category.TEMPORARIES: "#d9c04f",
    Category.GATHERED_PARAMETERS: "#5eb1b0",
    Category.COMMUNICATION_BUFFERS: "#b573a8",
    Category.WORKSPACES: "#9b7b63",
    Category.BLOCK_ROUNDING: "#96928c",
}
CACHE = "allocator_cache"
BEYOND_COLOURS = {
    CACHE: "#83868c",
    "cuda_context": "#6f7379",
    "nccl": "#5f6369",
    "other": "#51555b",
}
SPECIAL_LABELS = {"cuda_context": "CUDA context", "nccl": "NCCL"}

GOOD, BAD, CAUTION, FAINT = "green", "red", "yellow", "dim"
"""Styles of verdicts, warnings and what stands in the background."""


@dataclass(frozen=True, slots=True)
class Share:
    """One part of a stage's memory: its JSON key and its bytes."""

    key: str
    size: int

    @property
    def label(self) -> str:
        return label(self.key)

    @property
    def colour(self) -> str:
        return BEYOND_COLOURS[self.key] if self.key in BEYOND_COLOURS else COLOURS[Category[self.key.upper()]]


def label(key: str) -> str:
    """A JSON key as words: ``optimizer states``, ``CUDA context``."""
    return SPECIAL_LABELS.get(key, key.replace("_", " "))


def allocated_shares(stage: StageEstimate) -> tuple[Share, ...]:
    """Every category that the stage uses; sums to ``allocated`` (``requested`` where that is not known)."""
    return tuple(Share(category.key, size) for category in Category if (size := stage.of(category)))


def beyond_shares(stage: StageEstimate) -> tuple[tuple[Share, ...], tuple[Share, ...]]:
    """What lies between allocated and reserved, and what between reserved and device, where known."""
    known = ((part.name, getattr(stage.beyond, part.name)) for part in fields(BeyondAllocated))
    parts = tuple(Share(key, size) for key, size in known if size)
    return tuple(part for part in parts if part.key == CACHE), tuple(part for part in parts if part.key != CACHE)


def span_of(stage: StageEstimate, key: str) -> tuple[int, int] | None:
    """The least and the most that a part outside PyTorch's allocator takes, where these differ."""
    found = [one for one in stage.outside if one.part == key]
    least, most = sum(one.least for one in found), sum(one.most for one in found)
    return (least, most) if least < most else None


def unknown_beyond(stage: StageEstimate) -> tuple[str, ...]:
    """Labels of what the device holds and nobody could say how much of."""
    return tuple(label(part.name) for part in fields(BeyondAllocated) if getattr(stage.beyond, part.name) is None)


def shares(stage: StageEstimate) -> tuple[Share, ...]:
    """The stage's headline reading in parts."""
    cache, others = beyond_shares(stage)
    return (
        *allocated_shares(stage),
        *(cache if stage.reserved is not None else ()),
        *(others if stage.device is not None else ()),
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a stage's ledger: a share, a reading that is complete (``colour`` is empty), or what nobody knows."""

    label: str
    size: int | None
    span: tuple[int, int] | None = None
    colour: str = ""


def ledger(stage: StageEstimate) -> Iterator[Entry]:
    """Every share of the stage's memory, with a line behind those that complete a reading."""
    cache, others = beyond_shares(stage)
    yield from _entries(stage, allocated_shares(stage))
    yield Entry("= requested" if stage.allocated is None else "= allocated", sum(stage.breakdown))
    if stage.reserved is not None:
        yield from _entries(stage, cache)
        yield Entry("= reserved", stage.reserved)
    if stage.device is not None:
        yield from _entries(stage, others)
        yield from (Entry(name, None) for name in unknown_beyond(stage))
        yield Entry("= device", stage.device, stage.device_range)


def _entries(stage: StageEstimate, parts: Iterable[Share]) -> Iterator[Entry]:
    return (Entry(part.label, part.size, span_of(stage, part.key), part.colour) for part in parts)


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


_PLAIN = str.maketrans("–−—×·■│→≤…▁▂▃▄▅▆▇█", "---x.#|><.._-=+*%#")


NARROW = 60
"""Columns below which a table's lines grow longer than the terminal, which breaks them, before a word is broken."""
SHORTEST = 4
"""Characters down to which a column of words goes on terminals of that width and more, before a line grows longer."""
WIDEST = 10_000
"""Columns of a line at most."""


class Tidy:
    """A renderable without blanks at the end of its lines, without control characters, which are shown escaped, and, in
    an ASCII encoding, without dashes and bars."""

    def __init__(self, renderable: RenderableType) -> None:
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        segments = console.render(self.renderable, options)
        for line in Segment.split_and_crop_lines(segments, WIDEST, include_new_lines=False, pad=False):
            while line and not line[-1].text.rstrip():
                line.pop()
            for index, (text, style, control) in enumerate(line):
                kept = one_line(text.rstrip() if index == len(line) - 1 else text)
                yield Segment(_plain(kept) if options.ascii_only else kept, style, control)
            yield Segment.line()


def _plain(text: str) -> str:
    """``text`` in ASCII, each character replaced by one of the same width."""
    return text.translate(_PLAIN).encode("ascii", "replace").decode()


def put_line(console: Console, text: Text) -> None:
    """Prints ``text`` on one line, however long, for scripts that read lines."""
    if not text.plain.isprintable():
        text = Text(one_line(text.plain))
    plain = Text(_plain(text.plain), spans=text.spans) if console.options.ascii_only else text
    console.print(plain, soft_wrap=True)


def put(console: Console, *renderables: RenderableType) -> None:
    """Prints each of ``renderables``."""
    for renderable in renderables:
        console.print(Tidy(renderable), end="", crop=False)


def put_report(console: Console, verdict: Text, report: Iterable[RenderableType], *, quiet: bool) -> None:
    """Prints ``report``; ``quiet`` only its ``verdict``."""
    if quiet:
        put_line(console, verdict)
    else:
        put(console, *report)


def spaced(*parts: RenderableType) -> Iterator[RenderableType]:
    """``parts`` behind an empty line."""
    yield Text()
    yield from parts


def titled(title: str, *parts: RenderableType) -> Iterator[RenderableType]:
    """``parts`` under their title, behind an empty line."""
    yield from spaced(Text(title, "bold"), *parts)


def written_lines(files: Sequence[str]) -> Iterator[RenderableType]:
    """Which ``files`` were written, behind an empty line."""
    if files:
        yield Text()
    yield from (Text(f"Written: {file}", GOOD) for file in files)


_PIECE = pattern(r"[^\s_/.×=,]*(?:[_/.×=,]+|\s+|$)")
"""A stretch that stays together, with the ``_``, ``/``, ``.``, ``×``, ``=``, ``,`` or blanks that end it."""
_STRETCHES = (pattern(r"\s*\S+\s*"), pattern(r"[^=]*(?:=|$)"), _PIECE)
"""Words, a setting's name and value in one, and pieces: what is broken where the one before does not fit."""


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
    for piece in _unbroken(text.plain, width, 0, len(text.plain)):
        if piece[0] > start and cell_len(text.plain[start : piece[1]].rstrip()) > width:
            yield _trimmed(text[start : piece[0]])
            start = piece[0]
    yield _trimmed(text[start:])


def _unbroken(
    plain: str, width: int, start: int = 0, end: int | None = None, level: int = 0
) -> Iterator[tuple[int, int]]:
    """Start and end of what stays together: words that fit on a line, and the stretches of those that do not."""
    last = level == len(_STRETCHES) - 1
    for part in _STRETCHES[level].finditer(plain, start, len(plain) if end is None else end):
        if part[0] and (last or cell_len(part[0].strip()) <= width):
            yield part.span()
        elif part[0]:
            yield from _unbroken(plain, width, *part.span(), level + 1)


def _trimmed(text: Text) -> Text:
    text.rstrip()
    return text


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


# -- tables -----------------------------------------------------------------------------------------

GAP = 2
"""Blanks between columns."""


class WholeTable(Table):
    """A table that is wider than a narrow terminal where that would cut a cell that stays on one line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(width=max(options.max_width, self._least(console, options)))
        return super().__rich_console__(console, options)

    def _least(self, console: Console, options: ConsoleOptions) -> int:
        """Columns that it takes: of what wraps a part of the longest word, all of what does not."""
        wide, narrow = options.update(width=WIDEST), options.max_width < NARROW
        shortest = WIDEST if narrow else SHORTEST
        least = GAP * (len(self.columns) - (0 if narrow else 1))
        for column in self.columns:
            sizes = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
            least += max(size.maximum if column.no_wrap else min(size.minimum, shortest) for size in sizes)
        return least


def plain_table(*columns: Column) -> Table:
    """A table with a rule under its header and nothing else."""
    return WholeTable(
        *columns, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style=""
    )


def right(header: str = "", **more: Any) -> Column:
    """A column of figures."""
    return Column(header, justify="right", no_wrap=True, **more)


def left(header: str = "", **more: Any) -> Column:
    """A column of words that stay on one line."""
    return Column(header, no_wrap=True, **more)


def folded(header: str = "", **more: Any) -> Column:
    """A column of words that wrap."""
    return Column(header, overflow="fold", **more)


def entries(rows: Iterable[tuple[str, Text | str]], style: str) -> Table:
    """Named entries, each with its text beside it."""
    table = Table.grid(folded(style=style), folded(ratio=1), padding=(0, GAP, 0, 0))
    for name, text in rows:
        table.add_row(Text(name), Text(text) if isinstance(text, str) else text)
    return table
