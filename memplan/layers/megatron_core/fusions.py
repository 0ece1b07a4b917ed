"""Megatron-Core's fused element-wise functions, and what runs with the fusions switched off.

``megatron/core/fusions/`` and ``jit.py``: since PyTorch 2.2 the fuser is ``torch.compile``, so one kernel
writes each result. What such a function saves is decided by AOTAutograd's minimum-cut partitioner: of
bias-dropout-add only the dropout mask (one byte an element), of the rest their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import ops
from ..autograd import Backward, Gradients, Recorder, Shape, Tensor, Unsummed
from .shape import CoreShape


def bias_dropout_add(
    r: Recorder, x: Tensor, bias: Tensor | None, residual: Tensor, name: str, shape: CoreShape
) -> Tensor:
    """``get_bias_dropout_add`` in training: ``residual + dropout(x + bias)``, in the dtype of the residual.

    ``TransformerLayer`` runs it with gradients enabled even in a forward pass that is recomputed later
    (``bias_dropout_add_exec_handler``), so that its mask lives until the region's output has a new node.
    """
    enabled, r.grad_enabled = r.grad_enabled, r.grad_enabled or residual.node is not None
    function = _fused_bias_dropout_add if shape.bias_dropout_fusion else _unfused_bias_dropout_add
    out = function(r, x, bias, residual, name, shape.spec.hidden_dropout)
    r.grad_enabled = enabled
    return out


def _fused_bias_dropout_add(
    r: Recorder, x: Tensor, bias: Tensor | None, residual: Tensor, name: str, p: float
) -> Tensor:
    """``bias_dropout_add_fused_train`` as Inductor compiles it: saves the mask alone.

    A seed is drawn into a tensor of its own. The gradient of the residual is the incoming one itself;
    without dropout in the same dtype that of ``x`` is, too.
    """
    seed = [r.empty((1,), "int64", f"{name}_seed")] if p > 0 else []
    mask = [r.empty(x.shape, "bool", f"{name}_mask")] if p > 0 else []
    out = r.empty(residual.shape, residual.dtype, f"{name}_residual")
    seed.clear()
    shape, dtype, has_bias = x.shape, x.dtype, bias is not None
    passes = p == 0 and x.dtype == residual.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        gradient = gradients[0]
        assert gradient is not None
        grad = gradient.alias(*shape) if passes else r.empty(shape, dtype, f"grad_{name}_dropout")
        grad_bias = [r.empty(shape[-1:], dtype, f"grad_{name}_bias")] if has_bias else []
        return [grad, *grad_bias, gradient]

    inputs = (x, residual) if bias is None else (x, bias, residual)
    out.node = r.node(inputs, mask, backward)
    return out


def _unfused_bias_dropout_add(
    r: Recorder, x: Tensor, bias: Tensor | None, residual: Tensor, name: str, p: float
) -> Tensor:
    """``bias_dropout_add_unfused``: three operators."""
    x = ops.cast(r, x, residual.dtype, f"{name}_cast")
    if bias is not None:
        bias = ops.cast(r, bias, residual.dtype, f"{name}_bias_cast")
        x = ops.add(r, x, bias, f"{name}_bias")
    out = ops.dropout(r, x, p, f"{name}_dropout")
    out = ops.add(r, residual, out, f"{name}_residual")
    return out  # noqa: RET504


def bias_gelu(r: Recorder, x: Tensor, bias: Tensor, name: str) -> Tensor:
    """``GeLUFunction``: saves input and bias; both receive one gradient, summed for the bias."""
    shape, dtype, bias_shape = x.shape, x.dtype, bias.shape
    node = r.node((x, bias), (x, bias), _same_for_bias(shape, dtype, bias_shape, name))
    out = r.empty(shape, dtype, f"{name}_gelu")
    out.node = node
    return out


def bias_swiglu(r: Recorder, x: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """``BiasSwiGLUFunction`` or ``SwiGLUFunction`` on (s, b, 2 f): saves input and bias, gives (s, b, f)."""
    shape, dtype = x.shape, x.dtype
    if bias is None:
        node = r.node((x,), (x,), lambda r, gradients: [r.empty(shape, dtype, f"grad_{name}_swiglu")])
    else:
        node = r.node((x, bias), (x, bias), _same_for_bias(shape, dtype, bias.shape, name))
    out = r.empty((*shape[:-1], shape[-1] // 2), dtype, f"{name}_swiglu")
    out.node = node
    return out


def _same_for_bias(shape: Shape, dtype: str, bias: Shape, name: str) -> Backward:
    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        grad = r.empty(shape, dtype, f"grad_{name}_activation")
        gradients.clear()  # a Python function's incoming gradients end before the engine sums
        return [grad, Unsummed(grad.alias(), bias, f"grad_{name}_bias")]

    return backward


def gelu(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``F.gelu``, or ``openai_gelu`` compiled (``transformer/utils.py``): saves its input."""
    return ops.elementwise(r, f"{name}_gelu", (x,), (x,))


def swiglu(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``MLP.forward.glu``: ``silu(gate) * (linear + offset)``, with a copy of ``linear`` though the offset is 0."""
    half = (*x.shape[:-1], x.shape[-1] // 2)
    gate, linear = ops.split(r, x, [half, half], f"{name}_chunk")
    activated = ops.elementwise(r, f"{name}_silu", (gate,), (gate,))
    offset = ops.add_constant(r, linear, f"{name}_offset")
    return ops.multiply(r, activated, offset, f"{name}_swiglu")
