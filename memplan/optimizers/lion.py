"""Lion, as bitsandbytes and DeepSpeed have it, with states of 32 and of 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..tape.events import Category
from .base import Algorithm, DeepspeedType, FieldsByName, State, full
from .bitsandbytes import EightBit, states_in_fp32

if TYPE_CHECKING:
    from ..plan.plan import Optimizer


class Lion(Algorithm):
    name = "lion"
    implementations = ("bitsandbytes",)
    trainer: ClassVar[FieldsByName] = {
        "lion_32bit": {"name": "lion"},
        "paged_lion_32bit": {"name": "lion", "paged": True},
    }
    deepspeed = DeepspeedType("Lion", kernel="fused_lion", tested=True)

    def moments(self, optimizer: Optimizer) -> int:
        return 1

    def states(self, optimizer: Optimizer, dtype: str, *, embeddings_32bit: bool) -> tuple[State, ...]:
        if optimizer.implementation == "bitsandbytes":
            return states_in_fp32(1, optimizer.paged)
        return (full("exp_avg", Category.OPTIMIZER_STATES, dtype),)

    def assumptions(self, optimizer: Optimizer) -> tuple[str, ...]:
        return ("Lion of bitsandbytes, whose states are fp32 whatever the parameters' dtype",)


class Lion8bit(EightBit):
    name = "lion8bit"
    bitsandbytes = "Lion8bit"
    states_per_parameter = 1
    trainer: ClassVar[FieldsByName] = {
        "lion_8bit": {"name": "lion8bit", "block_size": 256},
        "paged_lion_8bit": {"name": "lion8bit", "block_size": 256, "paged": True},
    }


OPTIMIZERS = {"lion": Lion(), "lion8bit": Lion8bit()}
