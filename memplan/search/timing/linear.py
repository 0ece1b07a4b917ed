"""Seconds of a linear layer, whose weight is trained, frozen, kept in 4 bits, or has an adapter beside it."""

from __future__ import annotations

from . import operators
from .matmul import matmul, streamed
from .rates import Rates
from .seconds import Seconds, streams
from .shape import ITEMSIZE, Shape

FOUR_BITS = 0.5
"""Bytes of a weight in 4 bits; its scales are a 32nd of that and left out."""

CASTS = 12
"""Bytes that autocast moves for each weight: fp32 read, 16 bits written, and the same for its gradient."""


def linear(
    shape: Shape,
    rates: Rates,
    inputs: int,
    outputs: int,
    name: str = "",
    bias: bool = False,
    tokens: int | None = None,
) -> Seconds:
    """A product with a weight; backward has two, for the gradients of input and weight, and adds up the latter. Beside
    LoRA's adapters no weight has a gradient; what is kept in 4 bits is turned into 16 for each pass."""
    m, e = shape.tokens if tokens is None else tokens, shape.element
    forward = matmul(rates, m, outputs, inputs, 1, e)
    backward = matmul(rates, m, inputs, outputs, 1, e)
    if shape.quantised and name:
        unpacked = streamed(rates, (FOUR_BITS + e) * inputs * outputs)
        forward, backward = forward + unpacked, backward + unpacked
    if shape.casts:
        backward += streamed(rates, float(CASTS * inputs * outputs), 2)
    if shape.rank:
        frozen = Seconds(forward, backward, 0.0, 0.0, 1, 1)
        return frozen + adapter(shape, rates, inputs, outputs, m) if name in shape.adapted else frozen
    backward += weight_gradient(shape, rates, inputs, outputs, m)
    sums = streams(rates, operators.bias_gradient(shape), m * outputs) if bias else Seconds()
    return Seconds(forward, backward, 0.0, 0.0, 1, 2 if shape.fused_accumulation else 3) + sums


def weight_gradient(shape: Shape, rates: Rates, inputs: int, outputs: int, tokens: int) -> float:
    """The product, and the sum with what earlier micro-batches left."""
    e, kept = shape.element, ITEMSIZE[shape.gradients]
    if shape.fused_accumulation:
        return matmul(rates, outputs, inputs, tokens, 1, e, 2 * kept)
    product = matmul(rates, outputs, inputs, tokens, 1, e)
    sums = shape.accumulates or shape.gradients != shape.dtype
    return product + (streamed(rates, (e + 2 * kept) * inputs * outputs) if sums else 0.0)


def adapter(shape: Shape, rates: Rates, inputs: int, outputs: int, tokens: int) -> Seconds:
    """peft's LoRA layer: the input in the adapter's dtype, down to its rank and up again, scaled, added to the result
    and cast back (``tuners/lora/layer.py``, ``Linear.forward``); backward moves each of these twice."""
    e, a, r = shape.element, ITEMSIZE[shape.adapter], shape.rank
    cast = e + a if a != e else 0
    moved = float(tokens * (cast * inputs + (2 * a + e + 2 * a + cast) * outputs))
    forward = matmul(rates, tokens, r, inputs, 1, a) + matmul(rates, tokens, outputs, r, 1, a)
    backward = forward + matmul(rates, inputs, r, tokens, 1, a) + matmul(rates, r, outputs, tokens, 1, a)
    return Seconds(forward + streamed(rates, moved, 4), backward + streamed(rates, 2 * moved, 8), 0.0, 0.0, 6, 12)
