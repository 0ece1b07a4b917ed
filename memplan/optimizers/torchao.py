"""torchao's AdamW with states in 8 and in 4 bits (0.18, ``torchao/optim``), which FSDP2's shards have, too.

Each step is one compiled function of a parameter, ``single_param_adam`` of ``adam.py``. What it allocates is what
Inductor of torch 2.13 writes for it on CUDA: both moments, quantised anew, between the kernel that finds the scales of
blocks and the one that looks values up. Where the parameter lies in memory as its blocks do, one kernel does it all.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, ClassVar

from ..layers.autograd import Recorder
from ..layers.module import Parameter
from ..tape.events import Category, rounded
from .base import Algorithm, FieldsByName, Parameters, State, Step

if TYPE_CHECKING:
    from ..plan.plan import Optimizer

LEAST = 4096
"""Elements below which states are like the parameter (``_AdamBase._new_buffer``), as are those that no whole number
of blocks holds."""


def is_low(parameter: Parameter, block: int) -> bool:
    """Whether its states are in few bits."""
    return parameter.elements >= LEAST and parameter.elements % block == 0


@lru_cache(maxsize=16)
def low_states(dtype: str, bits: int, block: int) -> tuple[State, ...]:
    """For each moment codes, an fp32 scale a block and the fp32 values of all codes (``OptimState8bit.zeros`` and
    ``OptimState4bit.zeros``); a tensor like the parameter, of ``dtype``, where it is small."""

    def codes(parameter: Parameter) -> int:
        return rounded(parameter.elements * bits // 8) if is_low(parameter, block) else parameter.bytes(dtype)

    def scales(parameter: Parameter) -> int:
        return rounded(4 * (parameter.elements // block)) if is_low(parameter, block) else 0

    def values(parameter: Parameter) -> int:
        return rounded(4 * 2**bits) if is_low(parameter, block) else 0

    kept = Category.OPTIMIZER_STATES
    parts = {"codes": codes, "scale": scales, "qmap": values}
    moments = ("exp_avg", "exp_avg_sq")
    return tuple(State(f"{moment}.{part}", kept, size) for moment in moments for part, size in parts.items())


def low_step(r: Recorder, parameters: Parameters, dtype: str, decay: bool, *, bits: int, block: int) -> None:
    """``single_param_adam`` of one parameter after the other."""
    for parameter in parameters:
        if is_low(parameter, block):
            _one_step(r, parameter, bits, block)


def _one_step(r: Recorder, parameter: Parameter, bits: int, block: int) -> None:
    """Two scales a block, two moments in fp32 and, of 4 bits, two of codes before they are packed in pairs."""
    as_blocks = len(parameter.shape) > 1 and parameter.shape[-1] == block
    if bits == 8 and (as_blocks or parameter.elements == max(parameter.shape)):
        return
    size, in_kernel = (parameter.elements,), as_blocks and block == 128
    scales = [r.empty((parameter.elements // block,), "fp32", "scale") for _ in range(0 if in_kernel else 2)]
    moments = [r.empty(size, "fp32", "quantised") for _ in range(2)]
    codes = [r.empty(size, "int64", "codes") for _ in range(2 if bits == 4 else 0)]
    del scales, moments, codes


class LowBit(Algorithm):
    """AdamW whose states have so many bits."""

    implementations = (None,)
    decays = True
    bits: ClassVar[int]
    gradient_reads: ClassVar[int]
    """How often the step reads a gradient, by the code that Inductor writes,"""
    moved: ClassVar[int]
    """and the bytes that it reads and writes for each parameter of states and of what lies between kernels."""
    block_sizes_are = "the values of torchao's constructors and of the Trainer"

    def moments(self, optimizer: Optimizer) -> int:
        return 2

    def states(self, optimizer: Optimizer, dtype: str, *, embeddings_32bit: bool) -> tuple[State, ...]:
        return low_states(dtype, self.bits, self._block(optimizer))

    def step_of(self, optimizer: Optimizer) -> Step:
        return partial(low_step, bits=self.bits, block=self._block(optimizer))

    def bytes_moved(self, optimizer: Optimizer, main: int, gradient: int) -> float:
        return self.gradient_reads * gradient + 2 * main + self.moved

    def assumptions(self, optimizer: Optimizer) -> tuple[str, ...]:
        return (
            f"torchao's AdamW, an fp32 scale for every {self._block(optimizer)} elements of {self.bits}-bit states; "
            "its step as Inductor of torch 2.13 compiles it, without what Triton takes to tune kernels in the first",
        )

    def _block(self, optimizer: Optimizer) -> int:
        return optimizer.block_size or self.block_sizes[0]


class EightBits(LowBit):
    name = "ao_adamw_8bit"
    bits = 8
    block_sizes = (256, 128)
    gradient_reads = 2
    moved = 2 + 8 + 2 + 8 + 2  # codes; both moments written; codes, moments; codes written
    trainer: ClassVar[FieldsByName] = {"adamw_torch_8bit": {"name": "ao_adamw_8bit", "block_size": 256}}


class FourBits(LowBit):
    name = "ao_adamw_4bit"
    bits = 4
    block_sizes = (128, 256)
    gradient_reads = 1
    moved = 1 + 24 + 24 + 1  # codes; moments and codes before they are packed, written and read; codes written
    trainer: ClassVar[FieldsByName] = {"adamw_torch_4bit": {"name": "ao_adamw_4bit", "block_size": 256}}
    classes: ClassVar[FieldsByName] = {"AdamW4bit": {"name": "ao_adamw_4bit", "block_size": 128}}


OPTIMIZERS = {"ao_adamw_8bit": EightBits(), "ao_adamw_4bit": FourBits()}
