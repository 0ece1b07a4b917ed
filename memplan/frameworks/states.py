"""What an optimizer keeps for every parameter. Sizes in bytes, per tensor.

PyTorch: ``torch/optim/adam.py``, ``sgd.py``, ``_adafactor.py`` and ``_muon.py`` (``_init_group``). apex:
``apex/optimizers/fused_adam.py``. bitsandbytes: ``optim/optimizer.py`` (``init_state``,
``get_state_buffer``). transformers: ``optimization.py`` (``Adafactor.step``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from ..layers.module import Parameter, hold_bytes
from ..plan.optimizer_checks import EIGHT_BIT
from ..plan.plan import Optimizer
from ..tape import Category, Hold, rounded
from .groups import EMBEDDINGS, is_hidden_matrix
from .steps import step_temporaries as step_temporaries

MIN_8BIT_SIZE = 4096
"""Elements below which bitsandbytes keeps 32-bit states (``min_8bit_size``)."""

QUANTISATION_MAP = 256 * 4
"""Bytes of one of bitsandbytes' maps, 256 fp32 values, shared by all parameters: one a moment."""

QUANTISATION_MAPS = 2 * QUANTISATION_MAP
"""Those of 8-bit Adam, signed and unsigned."""

PAGED_SIZE = 100_000
"""Elements from which a paged optimizer's states are in managed memory (``get_state_buffer``)."""

MOMENTS = {"adam": 2, "adamw": 2, "adam8bit": 2, "lion": 1, "lion8bit": 1}
"""States of bitsandbytes' optimizers (``Optimizer2State``, ``Optimizer1State``)."""


@dataclass(frozen=True, slots=True)
class State:
    """One tensor that is kept for each parameter."""

    name: str
    category: Category
    size: Callable[[Parameter], int]
    """Bytes for a parameter, rounded; 0 where it has none."""

    def hold(self, parameter: Parameter, tensor: int, dtype: str = "") -> Hold | None:
        size = self.size(parameter)
        if not size:
            return None
        return Hold(tensor, size, self.category, f"{parameter.name}/{self.name}", parameter.shape, dtype)


@lru_cache(maxsize=64)
def full(name: str, category: Category, dtype: str) -> State:
    """A tensor like the parameter, in ``dtype``."""
    return State(name, category, lambda parameter: parameter.bytes(dtype))


def optimizer_states(optimizer: Optimizer, dtype: str, *, embeddings_32bit: bool) -> tuple[State, ...]:
    """States of ``optimizer`` on the device, over parameters of ``dtype``."""
    kept = Category.OPTIMIZER_STATES
    if optimizer.name == "sgd":
        return (full("momentum_buffer", kept, dtype),) if optimizer.momentum else ()
    if is_bitsandbytes(optimizer):
        return tuple(
            on_device(state) if optimizer.paged else state for state in _bitsandbytes(optimizer, embeddings_32bit)
        )
    if optimizer.name == "lion":
        return (full("exp_avg", kept, dtype),)
    if optimizer.name == "adafactor":
        return adafactor_states(
            "fp32" if optimizer.implementation == "transformers" else dtype, optimizer.implementation
        )
    states: tuple[State, ...] = (full("exp_avg", kept, dtype), full("exp_avg_sq", kept, dtype))
    if optimizer.implementation == "fused":
        states = (STEP, *states)
    if optimizer.name == "muon":
        return (only(full("momentum_buffer", kept, dtype), True), *(only(state, False) for state in states))
    return states


STEP = State("step", Category.OPTIMIZER_STATES, lambda _: rounded(4))
"""The step count of a fused optimizer, one fp32 number for each parameter."""


@lru_cache(maxsize=64)
def only(state: State, hidden_matrices: bool) -> State:
    """``state`` of hidden matrices alone (Muon), or of the others alone (AdamW beside it)."""

    def size(parameter: Parameter) -> int:
        return state.size(parameter) if is_hidden_matrix(parameter) == hidden_matrices else 0

    return State(state.name, state.category, size)


@lru_cache(maxsize=64)
def adafactor_states(dtype: str, implementation: str | None) -> tuple[State, ...]:
    """Second moments of matrices as their row and column means, those of vectors whole; in fp32 with
    transformers', which also keeps the root mean square of every parameter."""

    def rows(parameter: Parameter) -> int:
        return hold_bytes(parameter.shape[:-1], dtype) if len(parameter.shape) > 1 else 0

    def columns(parameter: Parameter) -> int:
        shape = parameter.shape
        return hold_bytes((*shape[:-2], shape[-1]), dtype) if len(shape) > 1 else 0

    def whole(parameter: Parameter) -> int:
        return parameter.bytes(dtype) if len(parameter.shape) <= 1 else 0

    kept = Category.OPTIMIZER_STATES
    states = (State("row_var", kept, rows), State("col_var", kept, columns), State("variance", kept, whole))
    return (*states, RMS) if implementation == "transformers" else states


RMS = State("rms", Category.OPTIMIZER_STATES, lambda _: rounded(4))
"""A parameter's root mean square, one fp32 number (transformers' Adafactor)."""


# -- bitsandbytes -----------------------------------------------------------------------------------


def is_bitsandbytes(optimizer: Optimizer) -> bool:
    return optimizer.name in EIGHT_BIT or optimizer.implementation == "bitsandbytes"


def _bitsandbytes(optimizer: Optimizer, embeddings_32bit: bool) -> tuple[State, ...]:
    moments = MOMENTS[optimizer.name]
    if optimizer.name not in EIGHT_BIT:
        return tuple(full(f"state{i}", Category.OPTIMIZER_STATES, "fp32") for i in range(1, moments + 1))
    assert optimizer.block_size is not None
    return eight_bit_states(optimizer.block_size, embeddings_32bit, moments)


@lru_cache(maxsize=64)
def eight_bit_states(block: int, embeddings_32bit: bool, moments: int = 2) -> tuple[State, ...]:
    """For each moment a byte a parameter and an fp32 scale a block; small tensors (and embeddings) in fp32."""

    def in_32bit(parameter: Parameter) -> bool:
        return parameter.elements < MIN_8BIT_SIZE or (embeddings_32bit and parameter.name in EMBEDDINGS)

    def state(parameter: Parameter) -> int:
        return parameter.bytes("fp32") if in_32bit(parameter) else rounded(parameter.elements)

    def scales(parameter: Parameter) -> int:
        return 0 if in_32bit(parameter) else rounded(4 * -(-parameter.elements // block))

    kept = Category.OPTIMIZER_STATES
    numbers = range(1, moments + 1)
    return (
        *(State(f"state{i}", kept, state) for i in numbers),
        *(State(f"absmax{i}", kept, scales) for i in numbers),
    )


@lru_cache(maxsize=64)
def on_device(state: State) -> State:
    """``state`` of a paged optimizer: moments of large parameters are in managed memory, scales never."""
    if not is_moment(state):
        return state

    def size(parameter: Parameter) -> int:
        return 0 if parameter.elements >= PAGED_SIZE else state.size(parameter)

    return State(state.name, state.category, size)


def is_moment(state: State) -> bool:
    """Whether bitsandbytes makes it with ``get_state_buffer``."""
    return state.name.startswith("state")


def managed_bytes(optimizer: Optimizer, parameters: Iterable[Parameter]) -> int:
    """Bytes (not rounded) of a paged optimizer's states in CUDA's unified memory, which PyTorch's allocator does not
    see: on the device while they are in use and there is room, else on the host (``functional.py``, ``get_paged``)."""
    if not optimizer.paged:
        return 0
    large = [parameter for parameter in parameters if parameter.trained and parameter.elements >= PAGED_SIZE]
    return MOMENTS[optimizer.name] * sum(p.elements * (4 if _in_32bit(optimizer, p) else 1) for p in large)


def _in_32bit(optimizer: Optimizer, parameter: Parameter) -> bool:
    """Whether a large parameter has fp32 states."""
    return optimizer.name not in EIGHT_BIT or (optimizer.embeddings_32bit and parameter.name in EMBEDDINGS)


def quantisation_maps(optimizer: Optimizer) -> tuple[Hold, ...]:
    """The maps of 8-bit states on one device."""
    if optimizer.name not in EIGHT_BIT:
        return ()
    size = rounded(MOMENTS[optimizer.name] * QUANTISATION_MAP)
    return (Hold(0, size, Category.OPTIMIZER_STATES, "quantisation_maps"),)
