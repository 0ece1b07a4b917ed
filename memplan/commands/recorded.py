"""What the user's records say of GPUs, for the commands that estimate."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ..device.measured import NOTHING, Measured
from ..plan.notes import Note
from ..plan.read import ReadPlan

NoRecords = Annotated[
    bool,
    typer.Option(
        "--no-records",
        help="use published figures only; ignore measurements of your own runs (`memplan runs` lists them)",
        rich_help_panel="Hardware",
    ),
]


def measured_of(*, no_records: bool) -> tuple[Measured, str]:
    """What was measured, and what kept it from being read."""
    if no_records:
        return NOTHING, ""
    from ..records.known import known_measurements

    return known_measurements()


def warned(read: ReadPlan, problem: str) -> ReadPlan:
    """``read`` with a notice of records that could not be read, where a ``problem`` says so."""
    if not problem:
        return read
    note = Note("records-unreadable", f"what your runs measured is left out: {problem} (--no-records: without them)")
    return replace(read, warnings=(*read.warnings, note))
