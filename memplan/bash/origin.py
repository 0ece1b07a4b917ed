"""Where text was written, and the error of a script that cannot be followed."""

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
