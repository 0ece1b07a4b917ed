"""``memplan estimate --from … --explain-args``: each argument, where it was read, and what became of it."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column
from rich.text import Text

from .printing import CAUTION, FAINT, Breakable, plain_table, put, put_line

if TYPE_CHECKING:
    from ..formats.launch import Explained, Launch

LONGEST_VALUE = 60
"""Characters of a value that are printed."""

_UNKNOWN = "unknown"


def print_arguments(launch: Launch, console: Console, *, quiet: bool = False) -> None:
    """Prints a table of every argument of ``launch``; ``quiet`` only how many there are of each kind."""
    if quiet:
        put_line(console, Text(_summary(launch)))
        return
    table = plain_table(*[Column(header) for header in ("argument", "value", "line", "became")])
    sources = {explained.origin.source for explained in launch.explained if explained.origin.line is not None}
    for explained in launch.explained:
        table.add_row(
            _name(explained.name, console.width),
            Breakable(_cut(explained.value)),
            Text(_where(explained, sources)),
            Breakable(Text(explained.became, _style(explained))),
        )
    put(console, Text(_title(sources), FAINT), Text(), table, Text(), Text(_summary(launch), FAINT))


def arguments_to_json(launch: Launch) -> dict[str, Any]:
    """The same for scripts: every argument with its value, origin, table and what became of it."""
    return {
        "schema": 1,
        "arguments": [
            {
                "argument": explained.name,
                "value": explained.value,
                "from": str(explained.origin),
                "table": explained.table.value if explained.table is not None else _UNKNOWN,
                "became": explained.became,
            }
            for explained in launch.explained
        ],
        "warnings": [{"code": note.code, "message": note.message} for note in launch.notes],
    }


def _name(name: str, width: int) -> Text | Breakable:
    """An argument's name, broken behind hyphens; a key's, behind dots and underscores."""
    if not name.startswith("-"):
        return Breakable(name)
    return Text("\n".join(wrap(name, max(20, width * 3 // 10))), overflow="fold")


def _title(sources: set[str]) -> str:
    return f"Arguments in {', '.join(sorted(sources))}" if sources else "Arguments"


def _where(explained: Explained, sources: set[str]) -> str:
    """The line alone where all are of one file."""
    origin = explained.origin
    return str(origin.line) if origin.line is not None and len(sources) == 1 else str(origin)


def _cut(value: str) -> str:
    return value if len(value) <= LONGEST_VALUE else value[: LONGEST_VALUE - 1] + "…"


def _style(explained: Explained) -> str:
    kind = explained.table.value if explained.table is not None else _UNKNOWN
    return {"modelled": "", "irrelevant": FAINT}.get(kind, CAUTION)


def _summary(launch: Launch) -> str:
    counts: dict[str, int] = {}
    for explained in launch.explained:
        kind = explained.table.value.replace("-", " ") if explained.table is not None else _UNKNOWN
        counts[kind] = counts.get(kind, 0) + 1
    parts = [f"{count} {kind}" for kind, count in counts.items()]
    return f"{len(launch.explained)} arguments: {', '.join(parts)}" if parts else "no arguments"
