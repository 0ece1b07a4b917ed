"""The kernels that PyTorch's ``scaled_dot_product_attention`` takes on CUDA without a mask: flash attention's, and the
memory-efficient one in fp32 (``sdp_utils.cpp``, ``check_tensor_dtype``) and where values have heads of another size
(``check_head_dim_size_flash``), which the other does not run.

Shapes: b micro-batch, a heads, s sequence, d features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tape.events import Category
from . import ops
from .autograd import Gradients, Recorder, Tensor
from .flash_kernels import Call, Release, inside
from .work import Operator, attention

ROWS = 32
"""What the log-sum-exp's rows are rounded up to (``kAlignLSE``)."""


def _work(q: Tensor, k: Tensor, causal: bool) -> Operator:
    b, a, s, d = q.shape
    return attention((b, s, a, d), k.shape[1], s, q.dtype, causal=causal)


SECOND = Release()


def allocates(r: Recorder, release: Release, call: Call) -> None:
    """What the backward kernel of flash-attention needs meanwhile."""
    made = [r.empty(shape, dtype, name, Category.WORKSPACES) for name, shape, dtype in inside(release, call)]
    del made


def flash_attention(
    r: Recorder,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    name: str = "attention",
    *,
    causal: bool = True,
    release: Release = SECOND,
) -> Tensor:
    """``_scaled_dot_product_flash_attention`` on (b, a, s, d): saves q, k, v, output and log-sum-exp.

    The log-sum-exp is (b, a, s) fp32; two scalars hold the random state. Backward makes the three
    gradients. For what it allocates inside see ``flash_kernels``.
    """
    q, k, v = ops.entering(r, "scaled_dot_product_attention", q, k, v, name=f"{name}_input")
    b, a, s, _ = q.shape
    whole, heads = q.shape, k.shape[1]
    out = r.empty(q.shape, q.dtype, name)
    logsumexp = r.empty((b, a, s), "fp32", f"{name}_logsumexp")
    seed = r.empty((2,), "int64", f"{name}_rng_state")
    offset = r.empty((), "int64", f"{name}_rng_unused")
    shapes, dtype = (q.shape, k.shape, v.shape), q.dtype
    needed = [tensor.node is not None for tensor in (q, k, v)]

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        made = [r.empty(shape, dtype, f"grad_{part}") for part, shape in zip("qkv", shapes, strict=True)]
        if r.kernel_workspaces:
            allocates(r, release, Call(whole, heads, dtype, causal))
        return [gradient if one else None for gradient, one in zip(made, needed, strict=True)]

    out.node = r.node((q, k, v), (k, q, v, logsumexp, out, seed, offset), backward, work=_work(q, k, causal))
    del offset, seed, logsumexp
    return out


def efficient_attention(
    r: Recorder, q: Tensor, k: Tensor, v: Tensor, name: str = "attention", *, causal: bool = True
) -> Tensor:
    """``_scaled_dot_product_efficient_attention`` on (b, a, s, d), with values of a width of their own: saves q, k, v,
    output and log-sum-exp. cuDNN's, which PyTorch prefers on Hopper and Blackwell for heads of 192 with values of 128
    (``check_cudnn_tensor_shapes``), saves tensors of the same sizes.

    The log-sum-exp is (b, a, s) fp32, s rounded up to 32, and there in training alone; two scalars hold the random
    state (on the host, unless a CUDA graph is captured; counted as others are). Backward makes the three gradients. For
    what it allocates inside see ``_inside``.
    """
    q, k, v = ops.entering(r, "scaled_dot_product_attention", q, k, v, name=f"{name}_input")
    b, a, s, d = q.shape
    dtype = q.dtype
    out = r.empty(v.shape, dtype, name)
    rows = -(-s // ROWS) * ROWS if any(one.node is not None for one in (q, k, v)) else 0
    logsumexp = r.empty((b, a, rows), "fp32", f"{name}_logsumexp")
    seed, offset = (r.empty((), "int64", f"{name}_rng_{part}") for part in ("seed", "offset"))
    shapes, whole, width = (q.shape, k.shape, v.shape), q.shape, v.shape[-1]

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        made = [r.empty(shape, dtype, f"grad_{part}") for part, shape in zip("qkv", shapes, strict=True)]
        if r.kernel_workspaces:
            (_inside if dtype == "fp32" else _inside_16_bits)(r, whole, width)
        return made

    work = attention((b, s, a, d), a, s, dtype, causal=causal, values=width)
    out.node = r.node((q, k, v), (k, q, v, logsumexp, out, offset, seed), backward, work=work)
    del offset, seed, logsumexp
    return out


def _inside_16_bits(r: Recorder, shape: Sequence[int], width: int) -> None:
    """As ``_inside``, by kernels that sum the product of output and gradient themselves (``kKernelComputesDelta``), in
    tiles of 64 × 64 up to 64 features, 128 × 128 up to 128, and 128 × 64 beyond, where gradients of keys and values
    have room in the workspace, too, for each part into which keys are split (``workspace_elements_gk``, ``_gv``; 200
    parts of all heads at most)."""
    b, a, s, d = shape
    widest = max(d, width)
    rows, columns = (64, 64) if widest <= 64 else (128, 128) if widest <= 128 else (128, 64)
    delta = r.empty((b, a, s), "fp32", "delta", Category.WORKSPACES)
    of_each = -(-s // rows) * -(-d // columns) * (rows * columns + 4)
    if widest > 128:
        splits = max(1, min(-(-s // columns), 200 // (b * a)))
        of_each += splits * columns * sum(-(-size // rows) * rows for size in (d, width))
    workspace = r.empty((b, a, of_each), "fp32", "gradient_tiles", Category.WORKSPACES)
    del workspace, delta


def _inside(r: Recorder, shape: Sequence[int], width: int) -> None:
    """``_efficient_attention_backward`` (``attention_backward.cu``) of queries ``shape`` and values ``width`` wide: the
    product of output and gradient, summed over its features, then a workspace for the gradient of q, tile by tile, each
    with 4 words besides.

    ``mem_eff_attention/kernel_backward.h``, ``workspace_elements_gq``; ``kernels/cutlassB.h`` for sm80 and later: tiles
    of 64 × 64, or of 128 × 64 where there are more than 64 features.
    """
    b, a, s, d = shape
    rows, columns = (128, 64) if max(d, width) > 64 else (64, 64)
    workspaces = Category.WORKSPACES
    product = r.empty((b, s, a, width), "fp32", "output_times_gradient", workspaces)
    summed = r.empty((b, s, a), "fp32", "delta_transposed", workspaces)
    delta = r.empty((b, a, s), "fp32", "delta", workspaces)
    del product, summed
    tiles = -(-s // rows) * -(-d // columns)
    workspace = r.empty((b, a, tiles, rows * columns + 4), "fp32", "grad_q_tiles", workspaces)
    del workspace, delta
