"""What a rank makes before its first iteration, and in its first step for good, in the order in which it is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..layers.module import Parameter
from ..optimizers.base import State
from ..tape.events import Category, Drop, Event, Hold
from ..tape.program import Program, drop_all


def construction(program: Program, *, named: bool = False) -> Iterator[Event]:
    """Parameters, optimizer, buffers and workspaces, in the order in which they are made. ``named``: states, too, say
    of which parameter they are."""
    if program.kept is not None:
        yield from (*program.kept.construction, *program.kept.workspaces)
        return
    early = [state for state in program.states if not _is_late(program, state)]
    tensors = program.parameter_tensors()
    grouped = sorted(tensors, key=lambda parameter: len(parameter.shape) <= 1)  # Megatron's groups: matrices first
    yield from program.before
    for state in early:
        if state.category is not Category.OPTIMIZER_STATES:
            yield from _holds((state,), tensors if state.category is Category.PARAMETERS else grouped, named)
    building = drop_all(program.building, 1)
    half = len(building) // 2
    yield from building[:half]
    yield from _holds([one for one in early if one.category is Category.OPTIMIZER_STATES], grouped, named)
    yield from building[half:]
    yield from program.extra[program.made :]


def states(program: Program, *, named: bool = False) -> Iterator[Hold]:
    """What the first step adds for good; ``named`` as of ``construction``."""
    if program.kept is not None:
        yield from (event for event in program.kept.states if isinstance(event, Hold))
        return
    late = [state for state in program.states if _is_late(program, state)]
    tensors = program.parameter_tensors()
    if program.clipping:
        tensors.sort(key=lambda parameter: not parameter.decays)
    yield from (*_holds(late, tensors, named), *program.late_extra)


def dropped(tape: Iterable[Event]) -> Iterator[Drop]:
    """The end of every tensor that ``tape`` holds."""
    return (one.end for one in tape if isinstance(one, Hold))


def _holds(states: Sequence[State], parameters: Iterable[Parameter], named: bool) -> Iterator[Hold]:
    """Parameter by parameter, every state."""
    for parameter in parameters:
        for state in states:
            size = state.size(parameter)
            if size:
                yield Hold(0, size, state.category, f"{parameter.name}/{state.name}" if named else "")


def _is_late(program: Program, state: State) -> bool:
    return program.late_states and state.category is Category.OPTIMIZER_STATES


def workspaces_of(program: Program, workspaces: Sequence[Hold]) -> Sequence[Hold]:
    """Those that libraries take while the first iteration runs, unless ``program`` has them itself."""
    return workspaces if program.kept is None else ()
