"""Adafactor of PyTorch (``torch/optim/_adafactor.py``) and of transformers (``optimization.py``)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from ..layers.autograd import Recorder, Tensor
from ..layers.module import Parameter, hold_bytes
from ..tape.events import Category, rounded
from .base import Algorithm, DeepspeedType, FieldsByName, Parameters, State, Steps, like, number

if TYPE_CHECKING:
    from ..plan.plan import Optimizer


def adafactor_for_loop(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """``_single_tensor_adafactor``: the estimated variance becomes the update in place, under two names."""
    update = estimate = row_mean = col_mean = squared = None
    for parameter in parameters:
        number(r, dtype, "norm")
        if len(parameter.shape) > 1:
            row_mean = r.empty((*parameter.shape[:-1], 1), dtype, "row_mean")
            col_mean = r.empty((*parameter.shape[:-2], 1, parameter.shape[-1]), dtype, "col_mean")
            estimate = like(r, parameter, dtype, "var_estimate")
            r.empty((*parameter.shape[:-2], 1, 1), dtype, "row_var_mean")
        else:
            squared = like(r, parameter, dtype, "grad_squared")
            estimate = like(r, parameter, dtype, "var_estimate")
        update = estimate
        number(r, dtype, "update_norm")
    del row_mean, col_mean, squared, update, estimate


def adafactor_foreach(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """``_multi_tensor_adafactor``: matrices and vectors are two groups; the updates of the first one live on
    until the second one's take their variable."""
    is_matrix = [len(parameter.shape) > 1 for parameter in parameters]
    updates: list[Tensor] = []
    estimates: list[Tensor] = []
    for matrices in dict.fromkeys(is_matrix):
        group = [parameter for parameter, matrix in zip(parameters, is_matrix, strict=True) if matrix == matrices]
        for _ in group:
            number(r, dtype, "norm")
        if matrices:
            means = [r.empty((*p.shape[:-1], 1), dtype, "row_mean") for p in group]
            del means
            means = [r.empty((*p.shape[:-2], 1, p.shape[-1]), dtype, "col_mean") for p in group]
            del means
            estimates = [like(r, parameter, dtype, "var_estimate") for parameter in group]
            means = [r.empty((*p.shape[:-2], 1, 1), dtype, "row_var_mean") for p in group]
            del means
        else:
            squared = [like(r, parameter, dtype, "grad_squared") for parameter in group]
            del squared
            estimates = [like(r, parameter, dtype, "var_estimate") for parameter in group]
        updates = estimates
        for _ in group:
            number(r, dtype, "update_norm")
    del updates, estimates


def adafactor_transformers(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """``Adafactor.step`` without first moment and ``scale_parameter`` (the Trainer's choice): one parameter at a
    time in fp32, gradient and parameter cast if they are not, and every variable held until it is taken anew."""
    grad = data = update = None
    for parameter in parameters:
        shape, factored = parameter.shape, len(parameter.shape) > 1
        del grad
        grad = like(r, parameter, "fp32", "gradient_fp32") if dtype != "fp32" else None
        del data
        data = like(r, parameter, "fp32", "parameter_fp32") if dtype != "fp32" else None
        norm = number(r, "fp32", "norm")
        number(r, "fp32", "rms_of_state")  # takes the place of the state's
        del norm
        update = r.in_turn((shape, "fp32", "gradient_squared"), (shape, "fp32", "gradient_squared_eps"))
        if factored:
            for mean_shape in (shape[:-1], (*shape[:-2], shape[-1])):
                r.empty(mean_shape, "fp32", "mean_of_squares")
            rows = r.in_turn(((*shape[:-2], 1), "fp32", "mean_of_rows"), (shape[:-1], "fp32", "row_factor"))
            columns = r.empty((*shape[:-2], 1, shape[-1]), "fp32", "column_factor")
            product = like(r, parameter, "fp32", "update")
            del rows, columns
            update = product
            del product
        else:
            update = like(r, parameter, "fp32", "update")
        r.in_turn(((), "fp32", "update_norm"), ((), "fp32", "update_rms"), ((), "fp32", "update_clip"))
        like(r, parameter, "fp32", "negative_update")
    del grad, data, update


class Adafactor(Algorithm):
    """Without first moment."""

    name = "adafactor"
    implementations = ("transformers", "for-loop", "foreach")
    steps: ClassVar[Steps] = {
        "for-loop": adafactor_for_loop,
        "foreach": adafactor_foreach,
        "transformers": adafactor_transformers,
    }
    torch = "Adafactor"
    torch_default = "for-loop"
    trainer: ClassVar[FieldsByName] = {"adafactor": {"name": "adafactor", "implementation": "transformers"}}
    deepspeed = DeepspeedType("Adafactor", offloads=False)

    def moments(self, optimizer: Optimizer) -> int:
        return 0

    def states(self, optimizer: Optimizer, dtype: str, *, embeddings_32bit: bool) -> tuple[State, ...]:
        in_fp32 = optimizer.implementation == "transformers"
        return adafactor_states("fp32" if in_fp32 else dtype, optimizer.implementation)

    def assumptions(self, optimizer: Optimizer) -> tuple[str, ...]:
        return (
            "Adafactor without first moment; transformers' (implementation transformers) as the Trainer calls it: "
            "scale_parameter=False, fp32 states, one parameter at a time in fp32",
        )


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


OPTIMIZERS = {"adafactor": Adafactor()}
