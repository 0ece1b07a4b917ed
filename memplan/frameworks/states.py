"""What is kept for every parameter, and what an optimizer's step adds. Sizes in bytes, per tensor.

PyTorch: ``torch/optim/adam.py`` and ``adamw.py`` (``_single_tensor_adam``, ``_multi_tensor_adam``,
``_fused_adam``). apex: ``apex/optimizers/fused_adam.py``. bitsandbytes: ``optim/optimizer.py``
(``Optimizer2State.init_state``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..layers.module import Parameter
from ..plan.plan import Optimizer
from ..tape import Category, Hold, rounded

MIN_8BIT_SIZE = 4096
"""Elements below which bitsandbytes keeps 32-bit states (``min_8bit_size``)."""

QUANTISATION_MAPS = 2 * 256 * 4
"""Bytes of bitsandbytes' two maps of 256 fp32 values, shared by all parameters."""

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


def optimizer_states(optimizer: Optimizer, dtype: str, *, embeddings_32bit: bool) -> tuple[State, ...]:
    """States of ``optimizer`` over parameters of ``dtype``."""
    kept = Category.OPTIMIZER_STATES
    if optimizer.name == "sgd":
        return ()
    if optimizer.name == "adam8bit":
        assert optimizer.block_size is not None
        return eight_bit_states(optimizer.block_size, embeddings_32bit)
    states = (full("exp_avg", kept, dtype), full("exp_avg_sq", kept, dtype))
    if optimizer.implementation == "fused":
        return (STEP, *states)
    return states


STEP = State("step", Category.OPTIMIZER_STATES, lambda _: rounded(4))
"""The step count of a fused optimizer, one fp32 number for each parameter."""


@lru_cache(maxsize=64)
def eight_bit_states(block: int, embeddings_32bit: bool) -> tuple[State, ...]:
    """Two bytes a parameter and two fp32 scales a block; small tensors (and embeddings) in fp32."""

    def in_32bit(parameter: Parameter) -> bool:
        return parameter.elements < MIN_8BIT_SIZE or (embeddings_32bit and parameter.name in EMBEDDINGS)

    def state(parameter: Parameter) -> int:
        return parameter.bytes("fp32") if in_32bit(parameter) else rounded(parameter.elements)

    def scales(parameter: Parameter) -> int:
        return 0 if in_32bit(parameter) else rounded(4 * -(-parameter.elements // block))

    kept = Category.OPTIMIZER_STATES
    return (
        State("state1", kept, state),
        State("state2", kept, state),
        State("absmax1", kept, scales),
        State("absmax2", kept, scales),
    )


def step_temporaries(optimizer: Optimizer, parameters: list[Parameter], dtype: str) -> list[Hold]:
    """Tensors alive at the peak of the step itself, over parameters of ``dtype``.

    foreach Adam: ``_foreach_sqrt`` makes a list as large as all parameters. for-loop Adam: the square
    root and its quotient for one parameter at a time, beside the quotient of the one before (``worst_pair``).
    Fused, apex and 8-bit: none.
    """
    if optimizer.name not in ("adam", "adamw") or optimizer.implementation in ("fused", "apex"):
        return []
    if optimizer.implementation == "foreach":
        return [
            Hold(0, parameter.bytes(dtype), Category.TEMPORARIES, "exp_avg_sq_sqrt", parameter.shape, dtype)
            for parameter in parameters
        ]
    previous, worst = worst_pair(parameters, dtype)
    held = [] if previous is None else [("denominator_of_previous", previous)]
    return [
        Hold(0, parameter.bytes(dtype), Category.TEMPORARIES, name, parameter.shape, dtype)
        for name, parameter in (*held, ("exp_avg_sq_sqrt", worst), ("denominator", worst))
    ]


def worst_pair(parameters: Sequence[Parameter], dtype: str) -> tuple[Parameter | None, Parameter]:
    """The parameter at which for-loop Adam holds most, and the one before it, whose denominator is still
    bound to the loop's variable (``_single_tensor_adam``): max over i of d[i−1] + 2 d[i] bytes."""
    pairs = zip((None, *parameters), parameters, strict=False)
    return max(pairs, key=lambda pair: (pair[0].bytes(dtype) if pair[0] else 0) + 2 * pair[1].bytes(dtype))
