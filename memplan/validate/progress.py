"""What the ranks of a run are at, on standard error while the run goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import TYPE_CHECKING, Literal, TextIO

from ..report.names import size
from ..report.progress import PATIENCE
from ..streams import silence
from ..values import dataclass
from .run_files import Progress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

BAR = 24
"""Cells of a memory bar."""
MOST_ROWS = 16
"""Ranks of which each has a row; more share the row of their stage."""
BETWEEN = 5.0
"""Seconds between two plain lines."""
REDRAWS = 4
"""A second."""

Verbosity = Literal["quiet", "normal", "verbose"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the display."""

    name: str
    what: str
    allocated: int | None
    total: int | None


def rows_of(progress: Sequence[Progress], stages: Mapping[int, int]) -> tuple[Row, ...]:
    """A row for each rank, or, of more than ``MOST_ROWS``, for each stage: what its slowest rank does, and the memory
    of its most loaded one. ``stages``: the stage of each rank."""
    if len(progress) <= MOST_ROWS or not stages:
        return tuple(Row(f"rank {one.rank}", one.what, one.allocated, one.total) for one in progress)
    together: dict[int, list[Progress]] = {}
    for one in progress:
        together.setdefault(stages.get(one.rank, 0), []).append(one)
    return tuple(_stage(stage, ranks) for stage, ranks in sorted(together.items()))


def _stage(stage: int, ranks: Sequence[Progress]) -> Row:
    slowest = min(ranks, key=lambda one: (one.done, one.at))
    fullest = max(ranks, key=lambda one: one.allocated or 0)
    return Row(f"stage {stage} ({len(ranks)} ranks)", slowest.what, fullest.allocated, fullest.total)


@contextmanager
def shown(
    verbosity: Verbosity = "normal", stages: Mapping[int, int] = {}, stream: TextIO | None = None
) -> Iterator[Display]:
    """A display to call with the progress of all ranks: rows that redraw themselves on a terminal, and vanish at the
    end; lines elsewhere, if ``verbose``; nothing if ``quiet``. Nothing either before ``PATIENCE`` seconds."""
    display = Display(verbosity, stages, sys.stderr if stream is None else stream)
    try:
        yield display
    finally:
        display.close()


@dataclass
class Display:
    """Shows what it is called with."""

    verbosity: Verbosity
    stages: Mapping[int, int]
    stream: TextIO | None
    began: float = field(default_factory=time.monotonic)
    _live: Live | None = None
    _printed: float = 0.0
    _last: tuple[str, ...] = ()

    def __call__(self, progress: Sequence[Progress]) -> None:
        now = time.monotonic()
        if self.verbosity == "quiet" or self.stream is None or now - self.began < PATIENCE or not progress:
            return
        rows = rows_of(progress, self.stages)
        if self.stream.isatty():
            self._draw(rows)
        elif self.verbosity == "verbose" and now - self._printed >= BETWEEN:
            self._print(rows, now)

    def _draw(self, rows: Sequence[Row]) -> None:
        from rich.console import Console
        from rich.live import Live

        if self._live is None:
            console = Console(file=self.stream, markup=False, emoji=False)
            self._live = Live(console=console, refresh_per_second=REDRAWS, transient=True, redirect_stdout=False)
            self._live.start()
        self._live.update(table_of(rows[: max(self._live.console.height - 1, 1)], self._live.console))

    def _print(self, rows: Sequence[Row], now: float) -> None:
        """Those that changed."""
        assert self.stream is not None
        lines = tuple(_line(row) for row in rows)
        new = [line for line in lines if line not in self._last]
        if new:
            try:
                print(f"{now - self.began:6.0f} s  {'; '.join(new)}", file=self.stream, flush=True)
            except OSError:  # nobody reads: the run goes on
                silence(self.stream)
            self._printed = now
        self._last = lines

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def table_of(rows: Sequence[Row], console: Console) -> RenderableType:
    """The rows with their bars."""
    from rich.table import Table

    from ..report.printing import Share, bar

    table = Table.grid(padding=(0, 2))
    for row in rows:
        if row.allocated is None:
            table.add_row(row.name, "", "", row.what)
        elif row.total is None:
            table.add_row(row.name, "", size(row.allocated), row.what)
        else:
            memory = bar([Share("activations", row.allocated)], row.total, BAR, limit=row.total)
            table.add_row(row.name, memory, f"{size(row.allocated)} of {size(row.total)}", row.what)
    return table


def _line(row: Row) -> str:
    if row.allocated is None:
        return f"{row.name}: {row.what}"
    total = "" if row.total is None else f" of {size(row.total)}"
    return f"{row.name}: {row.what} ({size(row.allocated)}{total})"
