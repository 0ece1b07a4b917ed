"""The step of an optimizer over whole parameters, and what a loss scaler and the Trainer put around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ...layers.module import Parameter
from ...optimizers.steps import step_temporaries
from ...plan.plan import Optimizer
from ...tape.events import Category, Hold, Stretch, rounded
from ...tape.program import drop_all
from . import trainer

SCALER = (
    Hold(0, rounded(4), Category.BUFFERS, "loss_scale", (), "fp32"),
    Hold(0, rounded(4), Category.BUFFERS, "growth_tracker", (), "int32"),
)
"""What ``torch.amp.GradScaler`` keeps, which fp16 autocast comes with (``torch/amp/grad_scaler.py``)."""

FOUND_INF = Hold(10**9, rounded(4), Category.TEMPORARIES, "found_inf", (), "fp32")
"""From ``unscale_`` to ``update``; gradients are unscaled in place."""

TakesStep = Callable[[Optimizer, Sequence[Parameter], str], list[Hold]]
"""What the step over parameters of one dtype takes."""

Groups = tuple[tuple[tuple[Parameter, ...], int], ...]
"""Parameters of each module of a device, and how many such modules follow one another."""


@lru_cache(maxsize=128)
def registered(groups: Groups) -> Groups:
    """As the model registers them: the table of words first, also where the head, which shares it, lists it."""
    word = tuple(one for parameters, _ in groups for one in parameters if one.name == "word.weight")
    rest = ((tuple(one for one in parameters if one.name != "word.weight"), count) for parameters, count in groups)
    return ((word, 1), *((parameters, count) for parameters, count in rest if parameters))


def tensors_of(groups: Groups) -> list[Parameter]:
    return [parameter for parameters, count in groups for _ in range(count) for parameter in parameters]


@lru_cache(maxsize=128)
def optimizer_step(groups: Groups, optimizer: Optimizer, dtype: str) -> Stretch:
    """The step over all parameters, whatever the batch."""
    return Stretch(drop_all(of_each_dtype(optimizer, tensors_of(groups), dtype, step_temporaries), 1))


def of_each_dtype(optimizer: Optimizer, parameters: list[Parameter], dtype: str, step: TakesStep) -> list[Hold]:
    """What the step over parameters of several dtypes takes, one dtype after another: tensors in variables of the loop
    last until the next dtype's are there (``optim/adam.py``, ``_multi_tensor_adam``)."""
    by_dtype: dict[str, list[Parameter]] = {}
    for one in parameters:
        by_dtype.setdefault(one.dtype or dtype, []).append(one)
    return [hold for own, those in by_dtype.items() for hold in step(optimizer, those, own)]


@lru_cache(maxsize=128)
def trainer_step(groups: Groups, optimizer: Optimizer, dtype: str, kernel_workspaces: bool) -> tuple[Stretch, int]:
    """The same behind the clipping of gradients, and how many events those are."""
    parameters = tensors_of(groups)
    clipped = trainer.clipping(parameters, dtype, kernel_workspaces=kernel_workspaces)
    begin = 1 + sum(isinstance(event, Hold) for event in clipped)
    step = drop_all(of_each_dtype(optimizer, parameters, dtype, trainer.step_by_groups), begin)
    return Stretch((*clipped, *step)), len(clipped)
