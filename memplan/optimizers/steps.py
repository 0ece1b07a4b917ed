"""What an optimizer's step takes while it runs: its recipe on storages without elements (``layers.autograd``).

Fused kernels, apex and bitsandbytes allocate nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..layers.autograd import Recorder, Tensor
from ..layers.module import Parameter
from ..tape.events import Drop, Hold, Tape

if TYPE_CHECKING:
    from ..plan.plan import Optimizer


def step_temporaries(optimizer: Optimizer, parameters: Iterable[Parameter], dtype: str) -> list[Hold]:
    """Tensors alive at the peak of the step itself, over parameters (and gradients) of ``dtype``."""
    return alive_at_peak(step_tape(optimizer, tuple(parameters), dtype))


def step_tape(optimizer: Optimizer, parameters: Sequence[Parameter], dtype: str) -> Tape:
    """The step's events from its first line to its return."""
    r = Recorder(grad_enabled=False)
    recipe = optimizer.algorithm.steps.get(optimizer.implementation)
    if recipe is not None:
        recipe(r, parameters, dtype, decay_of(optimizer))
    return r.tape()


def decay_of(optimizer: Optimizer) -> bool:
    """Whether weights decay; by default as the optimizer's constructor has it."""
    return optimizer.algorithm.decays if optimizer.weight_decay is None else optimizer.weight_decay > 0


def alive_at_peak(tape: Tape) -> list[Hold]:
    """The tensors that ``tape`` holds where it first holds most, in order of appearance."""
    live = peak = 0
    at = -1
    for index, event in enumerate(tape):
        if isinstance(event, Hold):
            live += event.bytes
            if live > peak:
                peak, at = live, index
        elif isinstance(event, Drop):
            live -= event.bytes
    holds = {event.tensor: event for event in tape[: at + 1] if isinstance(event, Hold)}
    for event in tape[: at + 1]:
        if isinstance(event, Drop):
            del holds[event.tensor]
    return list(holds.values())


def like(r: Recorder, parameter: Parameter, dtype: str, name: str) -> Tensor:
    """A fresh tensor like ``parameter``."""
    return r.empty(parameter.shape, dtype, name)


def number(r: Recorder, dtype: str, name: str) -> Tensor:
    """A tensor of no dimension."""
    return r.empty((), dtype, name)
