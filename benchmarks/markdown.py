"""``docs/accuracy.md``: the tables with figures, sources and causes, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from .campaign.page import kept, section
from .comparison import MIB, Comparison, Table, mib

HEAD = """# Accuracy

Written by `python benchmarks/accuracy.py --markdown docs/accuracy.md`; do not edit by hand.

Estimated beside measured memory, in MiB (2^20 bytes). The error is estimated minus measured. No constant is fitted to
a row: every estimate follows from recipes and named facts, and what remains has a named cause or is *not explained*.
"""

COLUMNS = ("run", "reading", "measured", "estimated", "error %", "error MiB", "within", "cause")


def document(tables: Sequence[Table]) -> str:
    """The whole page."""
    summary = ["## Summary", "", *(f"- {table.summary()}" for table in tables)]
    own = ["", section(kept())]
    return "\n".join([HEAD, *summary, *own, *(line for table in tables for line in _section(table)), ""])


def _section(table: Table) -> list[str]:
    lines = ["", f"## {table.name}", ""]
    lines += [f"- {label}: {text}" for label, text in (("Measured", table.what), ("Source", table.source)) if text]
    if table.rows:
        columns = COLUMNS if any(row.cause for row in table.rows) else COLUMNS[:-1]
        lines += ["", line(columns), line(["---", "---", *["---:"] * 4, *["---"] * (len(columns) - 6)])]
        lines += [line(_cells(row)[: len(columns)]) for row in table.rows]
    if table.not_modelled:
        lines += ["", "Not modelled yet: " + "; ".join(table.not_modelled) + "."]
    for note in table.notes:
        lines += ["", note]
    return lines


def _cells(row: Comparison) -> list[str]:
    within = {True: "yes", False: "no", None: ""}[row.within]
    error = f"{row.error / MIB:+,.2f}" if row.error else "0"
    percent = f"{row.percent:+.3f}" if row.error else "0"
    return [row.id, row.reading, mib(row.measured), mib(row.estimated), percent, error, within, row.cause]


def line(cells: Sequence[str]) -> str:
    """A row of a table."""
    return "| " + " | ".join(cells) + " |"
