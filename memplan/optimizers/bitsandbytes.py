"""bitsandbytes' optimizers: states in 8 bits or in fp32, paged or not (``optim/optimizer.py``, ``init_state``)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from ..layers.module import Parameter
from ..tape.events import Category, Hold, rounded
from .base import EMBEDDINGS, Algorithm, State, full

if TYPE_CHECKING:
    from ..plan.plan import Optimizer

MIN_8BIT_SIZE = 4096
"""Elements below which bitsandbytes keeps 32-bit states (``min_8bit_size``)."""

QUANTISATION_MAP = 256 * 4
"""Bytes of one map, 256 fp32 values, shared by all parameters: one a moment, signed or unsigned."""

PAGED_SIZE = 100_000
"""Elements from which a paged optimizer's states are in managed memory (``get_state_buffer``)."""


ISSUE = 14_000
"""Femtoseconds on an H200 for each 8-bit moment of a parameter: Adam's two take 28 picoseconds
(``kOptimizerStatic8bit2StateBlockwise``, bitsandbytes 0.50, in a step of Llama 3, 26 November 2026), eight times what
their bytes do, as each is looked for among the 256 values of a map. Of one moment no figure was found."""


class EightBit(Algorithm):
    """An optimizer whose states are bytes, with an fp32 scale for every block."""

    implementations = (None,)
    eight_bit = True
    block_sizes = (256, 2048)
    block_sizes_are = "bitsandbytes' value since 0.44, and the value before"
    states_per_parameter: ClassVar[int]

    def moments(self, optimizer: Optimizer) -> int:
        return self.states_per_parameter

    def states(self, optimizer: Optimizer, dtype: str, *, embeddings_32bit: bool) -> tuple[State, ...]:
        assert optimizer.block_size is not None
        return eight_bit_states(optimizer.block_size, embeddings_32bit, self.states_per_parameter, optimizer.paged)

    def issue(self, optimizer: Optimizer, main: int) -> int:
        return ISSUE * self.states_per_parameter

    def assumptions(self, optimizer: Optimizer) -> tuple[str, ...]:
        size = optimizer.block_size or 0
        whose = {256: "bitsandbytes' from 0.44", 2048: "bitsandbytes' before 0.44"}.get(size, "as given")
        return (f"an fp32 scale for every {size} elements of 8-bit states ({whose})",)


@lru_cache(maxsize=64)
def eight_bit_states(block: int, embeddings_32bit: bool, moments: int, paged: bool) -> tuple[State, ...]:
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
        *_on_device(tuple(State(f"state{i}", kept, state) for i in numbers), paged),
        *(State(f"absmax{i}", kept, scales) for i in numbers),
    )


@lru_cache(maxsize=8)
def states_in_fp32(moments: int, paged: bool) -> tuple[State, ...]:
    """Of the optimizers whose states are fp32 whatever the parameters' dtype."""
    kept = Category.OPTIMIZER_STATES
    return _on_device(tuple(full(f"state{i}", kept, "fp32") for i in range(1, moments + 1)), paged)


def _on_device(moments: tuple[State, ...], paged: bool) -> tuple[State, ...]:
    """Moments of a paged optimizer's large parameters are in managed memory."""
    return tuple(map(_small, moments)) if paged else moments


def _small(state: State) -> State:
    def size(parameter: Parameter) -> int:
        return 0 if parameter.elements >= PAGED_SIZE else state.size(parameter)

    return State(state.name, state.category, size)


def managed_bytes(optimizer: Optimizer, parameters: Iterable[Parameter]) -> int:
    """Bytes (not rounded) of a paged optimizer's states in CUDA's unified memory, which PyTorch's allocator does not
    see: on the device while they are in use and there is room, else on the host (``functional.py``, ``get_paged``)."""
    if not optimizer.paged:
        return 0
    large = [parameter for parameter in parameters if parameter.trained and parameter.elements >= PAGED_SIZE]
    moments = optimizer.algorithm.moments(optimizer)
    return moments * sum(p.elements * (4 if _in_32bit(optimizer, p) else 1) for p in large)


def _in_32bit(optimizer: Optimizer, parameter: Parameter) -> bool:
    """Whether a large parameter has fp32 states."""
    return not optimizer.algorithm.eight_bit or (optimizer.embeddings_32bit and parameter.name in EMBEDDINGS)


def quantisation_maps(optimizer: Optimizer) -> tuple[Hold, ...]:
    """The maps of 8-bit states on one device."""
    if not optimizer.algorithm.eight_bit:
        return ()
    size = rounded(optimizer.algorithm.moments(optimizer) * QUANTISATION_MAP)
    return (Hold(0, size, Category.OPTIMIZER_STATES, "quantisation_maps"),)
