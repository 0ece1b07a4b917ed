"""SGD of PyTorch (``torch/optim/sgd.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..layers.autograd import Recorder
from ..tape.events import Category
from .base import Algorithm, DeepspeedType, FieldsByName, Parameters, State, Steps, full, like

if TYPE_CHECKING:
    from ..plan.plan import Optimizer


def sgd_for_loop(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """``_single_tensor_sgd``: a decayed gradient ends when the next parameter's takes its variable."""
    grad = None
    for parameter in parameters:
        del grad
        grad = like(r, parameter, dtype, "decayed_gradient") if decay else None
    del grad


def sgd_foreach(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """``_multi_tensor_sgd``: decay copies all gradients."""
    grads = [like(r, parameter, dtype, "decayed_gradient") for parameter in parameters] if decay else []
    del grads


class Sgd(Algorithm):
    name = "sgd"
    implementations = ("foreach", "for-loop", "fused")
    steps: ClassVar[Steps] = {"for-loop": sgd_for_loop, "foreach": sgd_foreach}
    has_momentum = True
    torch = "SGD"
    trainer: ClassVar[FieldsByName] = {"sgd": {"name": "sgd", "implementation": "foreach"}}
    deepspeed = DeepspeedType("SGD")
    megatron = "sgd"

    def moments(self, optimizer: Optimizer) -> int:
        return 1 if optimizer.momentum else 0

    def states(self, optimizer: Optimizer, dtype: str, *, embeddings_32bit: bool) -> tuple[State, ...]:
        return (full("momentum_buffer", Category.OPTIMIZER_STATES, dtype),) if optimizer.momentum else ()

    def assumptions(self, optimizer: Optimizer) -> tuple[str, ...]:
        momentum = "with momentum (one state)" if optimizer.momentum else "without momentum (no state)"
        decay = "with" if optimizer.weight_decay else "without"
        return (f"SGD {momentum} and {decay} weight decay (which adds a copy of the gradients); no Nesterov",)


OPTIMIZERS = {"sgd": Sgd()}
