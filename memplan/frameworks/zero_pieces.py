"""Tapes of hooked modules, cut where DeepSpeed's hooks run: the same cuts for every instance of a module."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from ..tape import Event, Hold, Seam, Tape
from .zero_hooks import FAMILIES, NONE
from .zero_modules import HookedModule
from .zero_recorder import Mark, mark_of

Role = Literal["first", "steady", "evaluation"]
"""Gradients appear, or are added to those that do; or there is no graph."""


class Piece(NamedTuple):
    """A stretch of tape without seams, and what is behind it."""

    events: Tape
    mark: Mark | None = None
    """The seam; ``None`` where there is none."""
    passed: int = 0
    """Or how many modules without parameters run there."""


@lru_cache(maxsize=1024)
def pieces(hooked: HookedModule, family: str, role: Role, *, backward: bool = False) -> tuple[Piece, ...]:
    """Of a module of a model of ``family``."""
    counts = FAMILIES[family].get(hooked.module.name, NONE).at
    found: list[Piece] = []
    run: list[Event] = []
    for event in _tape(hooked, role, backward):
        mark = mark_of(event) if isinstance(event, Seam) else None
        passed = counts.get(event.name, 0) if isinstance(event, Hold) else 0
        if mark is not None or passed:
            found.append(Piece(tuple(run), mark, passed))
            run.clear()
        if mark is None:
            run.append(event)
    return (*found, Piece(tuple(run)))


def _tape(hooked: HookedModule, role: Role, backward: bool) -> Tape:
    if role == "evaluation":
        return hooked.module.evaluation
    tapes = hooked.module.first if role == "first" else hooked.module.steady
    return tapes.backward if backward else tapes.forward
