"""PyTorch's autocast on CUDA: which operators cast their inputs, and to what.

``aten/src/ATen/autocast_mode.h`` (the ``AT_FORALL_…`` lists) and ``autocast_mode.cpp`` (``cached_cast``), torch 2.13.
Operators are called as in ``layers.ops``; one that has no policy takes its inputs as they are, and its kernel
promotes dtypes that differ. The cast of a parameter to autocast's dtype is kept until autocast ends
(``Recorder.casts``), so that a weight used twice is cast once; other casts end with the operator, unless a node saved
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from .autograd import ITEMSIZE, Accumulate, Recorder, Tensor


class Policy(Enum):
    """What autocast does to the inputs of an operator."""

    LOWER = "inputs are cast to autocast's dtype"
    FP32 = "inputs are cast to fp32"
    FP32_OUTPUT = "the output is fp32, unless the caller asks for a dtype"


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "linear": Policy.LOWER,
        "addmm": Policy.LOWER,
        "matmul": Policy.LOWER,
        "conv1d": Policy.LOWER,
        "scaled_dot_product_attention": Policy.LOWER,
        "layer_norm": Policy.FP32,
        "nll_loss": Policy.FP32,
        "mse_loss": Policy.FP32,
        "pow": Policy.FP32,
        "rsqrt": Policy.FP32,
        "softmax": Policy.FP32_OUTPUT,
        "log_softmax": Policy.FP32_OUTPUT,
        "sum": Policy.FP32_OUTPUT,
    }
)
"""Of the operators that recipes use, those that autocast knows."""


def cast_to(r: Recorder, operator: str) -> str | None:
    """The dtype to which autocast casts the inputs of ``operator``; ``None`` where it leaves them."""
    if r.autocast is None:
        return None
    return {Policy.LOWER: r.autocast, Policy.FP32: "fp32"}.get(POLICIES[operator])


def set_by_autocast(r: Recorder, operator: str) -> str | None:
    """The dtype that autocast asks ``operator`` for where its caller asks for none."""
    return "fp32" if r.autocast is not None and POLICIES[operator] is Policy.FP32_OUTPUT else None


def cached_name(x: Tensor, dtype: str) -> str | None:
    """Under which name autocast's cache keeps ``x`` cast to ``dtype``: a parameter's own, to a lower precision."""
    node = x.node
    if isinstance(node, Accumulate) and node.leaf.is_parameter and ITEMSIZE[dtype] < ITEMSIZE[x.dtype]:
        return node.leaf.name
    return None


def promoted(*dtypes: str) -> str:
    """The dtype of a result of operands in fp32 and autocast's dtype (``c10/core/ScalarType.h``, ``promoteTypes``)."""
    return "fp32" if "fp32" in dtypes else dtypes[0]
