"""PyTorch's memory-efficient attention: the kernel that ``scaled_dot_product_attention`` takes in fp32 on CUDA, which
flash attention's does not run in (``sdp_utils.cpp``, ``check_tensor_dtype``).

Shapes: b micro-batch, a heads, s sequence, d features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tape import Category
from .autograd import Gradients, Recorder, Tensor

HEAD_MULTIPLE = 4
"""Features of an fp32 head: rows are of whole words of 16 bytes (``check_head_dim_size_mem_efficient``)."""

ROWS = 32
"""What the log-sum-exp's rows are rounded up to (``kAlignLSE``)."""


def efficient_attention(r: Recorder, q: Tensor, k: Tensor, v: Tensor, name: str = "attention") -> Tensor:
    """``_scaled_dot_product_efficient_attention`` on (b, a, s, d) in fp32: saves q, k, v, output and log-sum-exp.

    The log-sum-exp is (b, a, s) fp32, s rounded up to 32, and there in training alone; two scalars hold the random
    state (on the host, unless a CUDA graph is captured; counted as others are). Backward makes the three gradients. For
    what it allocates inside see ``_inside``.
    """
    b, a, s, _ = q.shape
    dtype = q.dtype
    out = r.empty(q.shape, dtype, name)
    rows = -(-s // ROWS) * ROWS if r.grad_enabled else 0
    logsumexp = r.empty((b, a, rows), "fp32", f"{name}_logsumexp")
    seed, offset = (r.empty((), "int64", f"{name}_rng_{part}") for part in ("seed", "offset"))
    shapes, whole = (q.shape, k.shape, v.shape), q.shape

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        made = [r.empty(shape, dtype, f"grad_{part}") for part, shape in zip("qkv", shapes, strict=True)]
        if r.kernel_workspaces:
            _inside(r, whole)
        return made

    out.node = r.node((q, k, v), (k, q, v, logsumexp, out, offset, seed), backward)
    del offset, seed, logsumexp
    return out


def _inside(r: Recorder, shape: Sequence[int]) -> None:
    """``_efficient_attention_backward`` (``attention_backward.cu``): the product of output and gradient, summed over d,
    then a workspace for the gradient of q, tile by tile, each with 4 words besides.

    ``mem_eff_attention/kernel_backward.h``, ``workspace_elements_gq``; ``kernels/cutlassB.h`` for sm80 and later: tiles
    of 64 × 64, or of 128 × 64 where d > 64.
    """
    b, a, s, d = shape
    rows, columns = (128, 64) if d > 64 else (64, 64)
    workspaces = Category.WORKSPACES
    product = r.empty((b, s, a, d), "fp32", "output_times_gradient", workspaces)
    summed = r.empty((b, s, a), "fp32", "delta_transposed", workspaces)
    delta = r.empty((b, a, s), "fp32", "delta", workspaces)
    del product, summed
    tiles = -(-s // rows) * -(-d // columns)
    workspace = r.empty((b, a, tiles, rows * columns + 4), "fp32", "grad_q_tiles", workspaces)
    del workspace, delta
