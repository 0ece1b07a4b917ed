"""Adam and AdamW of PyTorch (``torch/optim/adam.py``, ``_init_group``), apex and bitsandbytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..layers.autograd import Recorder
from ..tape.events import Category
from .base import STEP, Algorithm, DeepspeedType, FieldsByName, Parameters, State, Steps, full, like
from .bitsandbytes import EightBit, states_in_fp32

if TYPE_CHECKING:
    from ..plan.plan import Optimizer


FOREACH = 80
"""Bytes of fp32 that PyTorch's ``foreach`` and ``for-loop`` Adam move for each parameter, kernel by kernel: decay 8,
``lerp_`` 12, ``mul_`` and ``addcmul_`` 24, ``sqrt``, division and addition 20, ``addcdiv_`` 16."""


FOREACH_ISSUE, FUSED_ISSUE, BITSANDBYTES_ISSUE = 11_500, {2: 8_600, 4: 9_800}, 10_000
"""Femtoseconds a parameter on an H200 (torch 2.11, bitsandbytes 0.50, 26 November 2026): ``foreach`` in bf16 in steps
of Llama 3 and GPT-2 XL (in fp32 it is as fast as the memory), ``fused`` alone by the parameter's bytes
(``benchmarks/measured_kernels_h200.json``), and ``kOptimizer32bit2State`` on an embedding's."""


def adam_for_loop(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """``_single_tensor_adam``: the square root and its quotient, beside the quotient of the parameter before."""
    grad = denominator = None
    for parameter in parameters:
        del grad
        grad = like(r, parameter, dtype, "decayed_gradient") if decay else None
        shape = parameter.shape
        denominator = r.in_turn((shape, dtype, "exp_avg_sq_sqrt"), (shape, dtype, "denominator"))
    del grad, denominator


def adamw_for_loop(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """Decay is in place."""
    adam_for_loop(r, parameters, dtype, False)


def adam_foreach(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """``_multi_tensor_adam``: decay copies all gradients, and the copies end before the square roots appear."""
    grads = [like(r, parameter, dtype, "decayed_gradient") for parameter in parameters] if decay else []
    del grads
    roots = [like(r, parameter, dtype, "exp_avg_sq_sqrt") for parameter in parameters]
    del roots


def adamw_foreach(r: Recorder, parameters: Parameters, dtype: str, decay: bool) -> None:
    """Decay is in place."""
    adam_foreach(r, parameters, dtype, False)


class Adam(Algorithm):
    name = "adam"
    implementations = ("foreach", "for-loop", "fused", "apex", "bitsandbytes")
    steps: ClassVar[Steps] = {"for-loop": adam_for_loop, "foreach": adam_foreach}
    precision_aware = True
    in_8_bits = "adam8bit"
    torch = "Adam"
    deepspeed = DeepspeedType("Adam", kernel="fused_adam", torch_switch="torch_adam", decoupled="adamw", tested=True)
    megatron = "adam"
    torchtitan = "Adam"

    def moments(self, optimizer: Optimizer) -> int:
        return 2

    def states(self, optimizer: Optimizer, dtype: str, *, embeddings_32bit: bool) -> tuple[State, ...]:
        if optimizer.implementation == "bitsandbytes":
            return states_in_fp32(2, optimizer.paged)
        kept = Category.OPTIMIZER_STATES
        states = (full("exp_avg", kept, dtype), full("exp_avg_sq", kept, dtype))
        return (STEP, *states) if optimizer.implementation == "fused" else states

    def bytes_moved(self, optimizer: Optimizer, main: int, gradient: int) -> float:
        if optimizer.implementation in ("foreach", "for-loop"):
            return FOREACH * main / 4
        return super().bytes_moved(optimizer, main, gradient)

    def issue(self, optimizer: Optimizer, main: int) -> int:
        own = {"foreach": FOREACH_ISSUE, "fused": FUSED_ISSUE[max(2, main)], "bitsandbytes": BITSANDBYTES_ISSUE}
        return own.get(optimizer.implementation or "", 0)

    def assumptions(self, optimizer: Optimizer) -> tuple[str, ...]:
        if optimizer.implementation == "bitsandbytes":
            return ("32-bit Adam of bitsandbytes, whose states are fp32 whatever the parameters' dtype",)
        return self.decay_assumptions(optimizer)

    def decay_assumptions(self, optimizer: Optimizer) -> tuple[str, ...]:
        """How weights decay."""
        decay = "with" if optimizer.weight_decay else "without"
        return (f"Adam {decay} weight decay (with it, each gradient is added to in a copy) and without amsgrad",)


class AdamW(Adam):
    name = "adamw"
    steps: ClassVar[Steps] = {"for-loop": adamw_for_loop, "foreach": adamw_foreach}
    decays = True
    torch = "AdamW"
    trainer: ClassVar[FieldsByName] = {
        "adamw_torch": {"name": "adamw", "implementation": "foreach"},
        "adamw_torch_fused": {"name": "adamw", "implementation": "fused"},
        "paged_adamw_32bit": {"name": "adamw", "implementation": "bitsandbytes", "paged": True},
    }
    classes: ClassVar[FieldsByName] = {
        "FusedAdam": {"name": "adamw", "implementation": "apex"},
        "adamw_apex_fused": {"name": "adamw", "implementation": "apex"},
        "PagedAdamW32bit": {"name": "adamw", "implementation": "bitsandbytes", "paged": True},
    }
    deepspeed = DeepspeedType("AdamW", kernel="fused_adam", torch_switch="torch_adam", tested=True)
    torchtitan = "AdamW"

    def decay_assumptions(self, optimizer: Optimizer) -> tuple[str, ...]:
        return ("AdamW decays weights in place; without amsgrad",)


class Adam8bit(EightBit):
    name = "adam8bit"
    bitsandbytes = "AdamW8bit"
    states_per_parameter = 2
    megatron = "adam"
    trainer: ClassVar[FieldsByName] = {
        "adamw_bnb_8bit": {"name": "adam8bit", "block_size": 256},
        "adamw_8bit": {"name": "adam8bit", "block_size": 256},
        "paged_adamw_8bit": {"name": "adam8bit", "block_size": 256, "paged": True},
    }


OPTIMIZERS = {"adam": Adam(), "adamw": AdamW(), "adam8bit": Adam8bit()}
