"""What an optimizer keeps for every parameter. Sizes in bytes, per tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from ..layers.module import Parameter
from ..tape.events import Category, Hold, rounded
from ..values import dataclass

if TYPE_CHECKING:
    from ..plan.plan import Optimizer

EMBEDDINGS = ("word.weight", "position.weight", "token_type.weight")
"""Parameters of embedding modules, as the recipes name them."""


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


STEP = State("step", Category.OPTIMIZER_STATES, lambda _: rounded(4))
"""The step count of a fused optimizer, one fp32 number for each parameter."""


def optimizer_states(optimizer: Optimizer, dtype: str, *, embeddings_32bit: bool) -> tuple[State, ...]:
    """States of ``optimizer`` on the device, over parameters of ``dtype``."""
    return optimizer.algorithm.states(optimizer, dtype, embeddings_32bit=embeddings_32bit)
