"""Where a piece of a user's text was written, and what reading it may cost.

An origin stands in every error, also in that of a script that cannot be followed. A budget is a number of steps and an
amount of memory for one file.

Whoever reads a file charges each character and element that it handles. A step is about a tenth of a microsecond, so
that a file over the limit is refused within a second, whatever is in it; a real one needs a hundredth of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: a file (or ``standard input``) and line, or a flag."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class ScriptError(ValueError):
    """The script cannot be followed: ``problem`` says why, ``origin`` where, if that is known."""

    def __init__(self, problem: str, origin: Origin | None) -> None:
        super().__init__(problem, origin)
        self.problem = problem
        self.origin = origin


# -- budget --------------------------------------------------------------------------------------------


MOST_STEPS = 4_000_000
"""Steps that reading one file may take."""
MOST_MEMORY = 1 << 27
"""Bytes that may be made from one file, counted as if nothing were given back."""

CHARACTERS = 16
"""Characters that are copied or searched in one step."""
ELEMENT = 100
"""Bytes of a small object."""


class Budget:
    """What is spent of it so far: ``steps`` of ``most``, and ``memory``. ``origin``, where reading is, stands in the
    error of whoever spends more."""

    __slots__ = ("memory", "most", "origin", "steps")

    def __init__(self, origin: Origin | None = None, most: int = MOST_STEPS) -> None:
        self.origin = origin
        self.most = most
        self.steps = 0
        self.memory = 0

    def spend(self, steps: int, origin: Origin | None = None) -> None:
        """Charges ``steps`` for work at ``origin``."""
        self.steps += steps
        if self.steps > self.most:
            raise ScriptError(f"takes more work to read than the limit of {self.most:,} steps", self._at(origin))

    def search(self, size: int, origin: Origin | None = None) -> None:
        """Charges a search of ``size`` characters, or a copy of them that is not kept."""
        self.spend(1 + size // CHARACTERS, origin)

    def make(self, elements: int, size: int = 0, origin: Origin | None = None, *, steps: int = 0) -> None:
        """Charges ``elements`` that are kept, ``size`` characters in them, and ``steps`` besides."""
        self.memory += ELEMENT * elements + size
        if self.memory > MOST_MEMORY:
            problem = f"makes more text than a file should: over the limit of {MOST_MEMORY >> 20} MiB"
            raise ScriptError(problem, self._at(origin))
        self.spend(steps + elements + size // CHARACTERS, origin)

    def _at(self, origin: Origin | None) -> Origin | None:
        return origin if origin is not None else self.origin
