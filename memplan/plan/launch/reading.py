"""What was read from a script that was followed, and how following it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import Origin
from .values import Ledger, Unknown, Value


@dataclass(frozen=True, slots=True)
class Started:
    """A command that the script starts: its words, launchers first, and the variables that it exports to it."""

    words: tuple[Value, ...]
    environment: Mapping[str, Value]
    origin: Origin


@dataclass(slots=True)
class Reading:
    """What was read from a script: commands in which a Python file is run, files written, conditions left open."""

    started: list[Started] = field(default_factory=list)
    files: dict[str, Value] = field(default_factory=dict)
    undecided: list[Unknown] = field(default_factory=list)
    sourced: list[tuple[str, Origin]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    job: Mapping[str, Value] = field(default_factory=dict)
    """Variables of the job that the script's ``#SBATCH`` lines ask for."""


class ExitError(Exception):
    """``exit``: what follows in the script is not run."""


class LeaveError(Exception):
    """``return``, ``break`` or ``continue``: what follows in the function or loop is not run."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
