"""Bytes that memory-bound operators read and write, forward and backward, for each element of what they work on.

Counted from the code: a kernel reads every operand once and writes every result once. ``e`` is the size of an element
of activations. Whose code it is decides how many kernels an operation is.
"""

from __future__ import annotations

from typing import NamedTuple

from .shape import Shape


class Moved(NamedTuple):
    """Bytes per element, and kernels."""

    forward: float
    backward: float
    kernels: int = 1
    backward_kernels: int = 1


NOTHING = Moved(0.0, 0.0, 0, 0)

MASK = 1
"""Bytes of an element of a dropout mask."""


def norm(shape: Shape) -> Moved:
    """Per feature of a hidden state. A kernel that knows the operation reads and writes once; backward reads the
    gradient and the input for each of its two results. transformers' and torchtitan's RMSNorm is Python in fp32:
    cast, square, mean, multiply, cast, multiply (``LlamaRMSNorm.forward``)."""
    e = shape.element
    if shape.spec.norm == "rmsnorm" and shape.code in ("transformers", "torchtitan"):
        casts = 2 * (e + 4) if e < 4 else 0
        return Moved(casts + 20 + 2 * e, 2 * casts + 44 + 5 * e, 6, 12)
    return Moved(2 * e, 5 * e, 1, 2)


def residual(shape: Shape) -> Moved:
    """Dropout of a block's output and the sum with the residual; backward sums the two gradients that meet."""
    e, drops = shape.element, shape.spec.hidden_dropout > 0
    if shape.fused_residual:
        return Moved(3 * e + (MASK if drops else 0), 3 * e + (2 * e + MASK if drops else 0), 1, 2 if drops else 1)
    dropout = 2 * e + MASK if drops else 0
    return Moved(3 * e + dropout, 3 * e + dropout, 2 if drops else 1, 2 if drops else 1)


def activation(shape: Shape) -> Moved:
    """Per feature of the MLP's inner layer."""
    e, kind = shape.element, shape.spec.activation
    if shape.spec.gated:
        return Moved(3 * e, 5 * e) if shape.fused_activation else Moved(5 * e, 9 * e, 2, 3)
    if shape.fused_activation or kind in ("gelu", "relu"):
        return Moved(2 * e, 3 * e)
    return Moved(18 * e, 27 * e, 8, 10)


def rotary(shape: Shape) -> Moved:
    """Per feature of queries and keys."""
    e = shape.element
    if shape.spec.positions != "rotary":
        return NOTHING
    if shape.fused_rope:
        return Moved(2 * e, 2 * e)
    if shape.code == "torchtitan":
        return Moved(2 * (e + 4) + 8, 2 * (e + 4) + 8, 3, 3)
    return Moved(10 * e, 10 * e, 5, 5)


def scores(shape: Shape) -> Moved:
    """Per score of attention that keeps them: scale, mask, softmax, dropout, without the two products."""
    e, drops = shape.element, shape.spec.attention_dropout > 0
    dropout = 2 * e + MASK if drops else 0
    # ``baddbmm`` copies its broadcast first argument into the result, which the product then reads.
    alibi = 2 * e if shape.spec.positions == "alibi" else 0
    if shape.code in ("megatron", "transformer-engine"):
        return Moved(2 * e + dropout + alibi, 3 * e + dropout, 2 if drops else 1, 2 if drops else 1)
    casts = 2 * (e + 4) if e < 4 else 0
    return Moved(4 * e + 8 + casts + dropout, 2 * e + 12 + casts + dropout, 5, 5)


def copies(shape: Shape) -> Moved:
    """Per feature of the attention's output: the context made contiguous, and its gradient; backward joins the
    gradients of queries, keys and values into one tensor."""
    e = shape.element
    if shape.code == "transformer-engine" and shape.flash:
        return NOTHING
    return Moved(2 * e, 8 * e if shape.code == "megatron" else 2 * e, 1, 2)


def bias_gradient(shape: Shape) -> Moved:
    """Per feature of a linear layer's output: a reduction reads the gradient once more."""
    return Moved(0.0, float(shape.element), 0, 1)


def cross_entropy(shape: Shape) -> Moved:
    """Per logit on a rank, without the products."""
    e = shape.element
    cast = e + 4 if e < 4 else 0
    if shape.loss in ("liger", "cut"):
        return Moved(3 * e, e) if shape.loss == "liger" else NOTHING
    if shape.fused_loss == "te":
        return Moved(3 * e, 2 * e)
    if shape.fused_loss == "native":
        return Moved(cast + 4 + 12, 8 + cast, 3, 2)
    if shape.code in ("megatron", "transformer-engine") or shape.loss == "vocab-parallel":
        # max; subtract; exp; sum; divide. Backward: copy of softmax, times the loss's gradient, cast.
        return Moved(cast + 4 + 8 + 8 + 4 + 8, 8 + 8 + cast, 6, 3)
    return Moved(cast + 8 + 8, 4 + 12 + 8 + cast, 3, 4)
