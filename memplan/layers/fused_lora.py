"""Unsloth's functions for LoRA on 4-bit weights, as fms-acceleration has them: queries, keys and values in one, the
attention's output in another.

foundation-model-stack/fms-acceleration, ``plugins/fused-ops-and-kernels``, ``fused_ops/unsloth_lora``: ``utils.py``
(``fast_dequantize``, ``matmul_lora``), ``bnb/fast_lora.py``, ``gptq/fast_lora.py`` (``LoRA_QKV``, ``LoRA_W``). A
function runs without a graph inside, so that sums are in place; it saves its input and, of each adapter, what dropout
left of it. Backward writes the gradient of bitsandbytes' queries, keys and values over that input.
Shapes: x (…, k), weight (n, k), rank r, t tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

from ..values import dataclass
from . import ops, work
from .autograd import Gradients, Recorder, Shape, Tensor

if TYPE_CHECKING:
    from .tuning import Adapters, Layer, Packed

Dequantise = Callable[[Recorder, int, int, str], Tensor]
"""A weight of n outputs and k inputs, with a name."""


@dataclass(frozen=True, slots=True)
class Functions:
    """Those for weights of one library."""

    dequantise: Dequantise
    overwrites: bool
    """The gradient of the input of queries, keys and values is written over the input."""
    ahead: bool
    """All weights of a function are dequantised before the first product, and end with the function."""
    issue: work.Issue = work.Issue(0)
    """Of the kernel that dequantises an element."""


def projected(
    r: Recorder, x: Tensor, layers: Sequence[Layer], adapters: Adapters, packed: Packed, functions: Functions
) -> list[Tensor]:
    """Outputs of ``layers``, which have one input."""
    k, shape, dtype = x.shape[-1], x.shape, x.dtype
    pairs: list[Tensor] = []
    for layer in layers:
        r.quantised(f"{layer.name}.weight", (layer.n, k), packed)
        a = r.parameter(f"{layer.name}.lora_A.weight", (adapters.rank, k), dtype)
        pairs += [a, r.parameter(f"{layer.name}.lora_B.weight", (layer.n, adapters.rank), dtype)]
    weights = [functions.dequantise(r, one.n, k, one.name) for one in layers] if functions.ahead else []
    outputs, dropped = [], []
    for layer in layers:
        out, left = forward(r, x, layer, adapters, None if functions.ahead else functions.dequantise)
        outputs.append(out)
        dropped.append(left)
        del out, left
    while weights:
        del weights[0]  # as a function lets go of its variables: in the order in which it gave them values

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        given = Tensor(r.unpacked[0], shape, dtype)
        of_adapters = [one for layer in layers for one in gradients_of_pair(r, layer, k, shape, adapters, dtype)]
        total = None
        for layer in layers:
            weight = functions.dequantise(r, layer.n, k, layer.name)
            if total is None:
                over = functions.overwrites and len(layers) > 1
                total = given.view(*shape) if over else r.empty(shape, dtype, f"grad_{layer.name}_input")
            else:
                r.empty(shape, dtype, f"grad_{layer.name}_input")
            del weight
            through_adapter(r, layer, k, shape, adapters, dtype)
        assert total is not None
        return [total.view(*shape), *of_adapters]

    done = work_of(prod(shape[:-1]), k, layers, adapters, dtype, functions)
    node = r.node((x, *pairs), (x, *dropped), backward, outputs=len(layers), work=done)
    dropped.clear()
    return [Tensor(out.storage, out.shape, out.dtype, node, slot) for slot, out in enumerate(outputs)]


def work_of(
    tokens: int, k: int, layers: Sequence[Layer], adapters: Adapters, dtype: str, functions: Functions
) -> work.Operator:
    """Products of ``LoRA_QKV`` and ``LoRA_W``, and passes over hidden states, beside which adapters are nothing."""
    e, rank = work.ITEMSIZE[dtype], adapters.rank
    forward: list[work.Kernel] = []
    back: list[work.Kernel] = []
    for at, layer in enumerate(layers):
        n = layer.n
        unpacked = work.Stream((0.5 + e) * n * k, issue=functions.issue.of(n * k))
        product, of_input, _ = work.products(tokens, n, k, dtype)
        down, of_dropped, of_a = work.products(tokens, rank, k, dtype)
        up, of_low, of_b = work.products(tokens, n, rank, dtype)
        dropped = work.Stream((2 * e + 1) * tokens * k, issue=work.DROPOUT.of(tokens * k))
        forward += [unpacked, product, *([dropped] if adapters.dropout else []), down, up]
        forward.append(work.Stream(3 * e * tokens * n))  # out += XA @ (s * B)
        back += [of_low, of_a, down, of_b, unpacked, of_input, of_low, of_dropped]
        passes = (e + 1) + (2 * e + 1) + 3 * e + (3 * e if at else 0)  # X != 0, what it lets through, sums into dX
        back.append(work.Stream(passes * tokens * k, 4 if at else 3))
    return work.Operator(forward, back)


def forward(
    r: Recorder, x: Tensor, layer: Layer, adapters: Adapters, dequantise: Dequantise | None
) -> tuple[Tensor, Tensor]:
    """``matmul_lora``: the output, and what dropout left of x."""
    tokens, n, k, dtype = prod(x.shape[:-1]), layer.n, x.shape[-1], x.dtype
    weight = dequantise(r, n, k, layer.name) if dequantise is not None else None
    out = r.empty((*x.shape[:-1], n), dtype, layer.name)
    del weight
    left = Tensor(x.storage, x.shape, dtype)
    if adapters.dropout:
        left, mask = ops.native_dropout(r, x.shape, dtype, f"{layer.name}_lora_dropout")
        del mask
    low = low_rank(r, layer, (adapters.rank, k), tokens, adapters, dtype)
    scaled = scaled_matrix(r, layer, (adapters.rank, n), adapters, dtype)
    product = r.empty((tokens, n), dtype, f"{layer.name}_lora")
    del low, scaled, product
    return out, left


def low_rank(r: Recorder, layer: Layer, matrix: Shape, tokens: int, adapters: Adapters, dtype: str) -> Tensor:
    """(t, r): the product with an adapter's matrix, cast to the dtype of what it meets."""
    cast = cast_matrix(r, layer, matrix, adapters, dtype)
    low = r.empty((tokens, adapters.rank), dtype, f"{layer.name}_low_rank")
    del cast
    return low


def cast_matrix(r: Recorder, layer: Layer, matrix: Shape, adapters: Adapters, dtype: str) -> Tensor | None:
    return r.empty(matrix, dtype, f"{layer.name}_lora_cast") if adapters.dtype != dtype else None


def scaled_matrix(r: Recorder, layer: Layer, matrix: Shape, adapters: Adapters, dtype: str) -> Tensor:
    """``s * B.to(dtype)``."""
    cast = cast_matrix(r, layer, matrix, adapters, dtype)
    scaled = r.empty(matrix, dtype, f"{layer.name}_lora_scaled")
    del cast
    return scaled


def gradients_of_pair(r: Recorder, layer: Layer, k: int, shape: Shape, adapters: Adapters, dtype: str) -> list[Tensor]:
    """Of both matrices, (r, k) and (n, r): ``d_A = X.t() @ (dY @ B.t())``, ``d_B = (A.t() @ X.t()) @ dY``."""
    tokens, rank = prod(shape[:-1]), adapters.rank
    low = low_rank(r, layer, (layer.n, rank), tokens, adapters, dtype)
    of_a = r.empty((k, rank), dtype, f"grad_{layer.name}_lora_a")
    del low
    low = low_rank(r, layer, (rank, k), tokens, adapters, dtype)
    of_b = r.empty((rank, layer.n), dtype, f"grad_{layer.name}_lora_b")
    del low
    return [of_a.view(rank, k), of_b.view(layer.n, rank)]


def through_adapter(r: Recorder, layer: Layer, k: int, shape: Shape, adapters: Adapters, dtype: str) -> None:
    """``dX += (X != 0) * (dY @ B @ (s * A))``: where dropout left something."""
    kept = r.empty(shape, "bool", f"{layer.name}_lora_kept")
    low = low_rank(r, layer, (layer.n, adapters.rank), prod(shape[:-1]), adapters, dtype)
    scaled = scaled_matrix(r, layer, (adapters.rank, k), adapters, dtype)
    product = r.empty(shape, dtype, f"grad_{layer.name}_lora_input")
    del low, scaled
    masked = r.empty(shape, dtype, f"grad_{layer.name}_lora_kept")
    del kept, product, masked
