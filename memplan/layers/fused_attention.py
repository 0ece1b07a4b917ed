"""The kernels that PyTorch's ``scaled_dot_product_attention`` takes on CUDA: flash attention's, and where that does not
run the memory-efficient one: in fp32 (``sdp_utils.cpp``, ``check_tensor_dtype``), where values have heads of another
size (``check_head_dim_size_flash``), and with a mask (``check_for_attn_mask``), which cuDNN's takes, too; and what
flash-attention's backward kernels allocate inside, release by release.

2: ``csrc/flash_attn/flash_api.cpp``, ``mha_bwd``, which PyTorch has, too; 3: ``hopper/flash_api.cpp``, ``mha_bwd``; 4:
``flash_attn/cute/interface.py``, ``_flash_attn_bwd`` (August 2026). Each sums the gradient of the queries in fp32 in
rows and columns that fill whole blocks. Where several heads of queries share keys, 2 makes dk and dv of every head of
queries, and 3 and 4 sum those of the keys in fp32.

Shapes: b micro-batch, a heads, s sequence, d features of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..tape.events import Category
from ..values import NamedTuple
from . import ops
from .autograd import Gradients, Recorder, Shape, Tensor, size_of
from .work import Operator, Stream, attention

Tensors = Iterator[tuple[str, Shape, str]]
"""Name, shape and dtype of each."""


class Release(NamedTuple):
    """Of flash-attention."""

    number: int = 2
    major: int = 9
    """Compute capability of the GPU that 4 is compiled for, whose blocks depend on it: 9 Hopper, 10 Blackwell, 12 its
    smaller ones."""


class Call(NamedTuple):
    """One backward pass."""

    shape: Shape
    """(b, a, s, d) of the queries."""
    heads: int
    """Of keys and values, whose sequences are as long."""
    dtype: str
    causal: bool = True
    deterministic: bool = False


def inside(release: Release, call: Call) -> Tensors:
    """In the order in which they are made."""
    return {2: _second, 3: _third, 4: _fourth}[release.number](call, release.major)


def _second(call: Call, major: int) -> Tensors:
    b, a, s, d = call.shape
    rows, columns = _filled(s, 128), _filled(d, 32) if d <= 192 else 256
    yield "softmax_d", (b, a, rows), "fp32"
    yield "dq_accum", (b, a, rows, columns), "fp32"
    for name in ("dk", "dv") if call.heads < a else ():
        yield f"{name}_expanded", call.shape, call.dtype


def _third(call: Call, major: int) -> Tensors:
    """On sm90."""
    b, a, s, d = call.shape
    columns = next(size for size in (64, 96, 128, 192, 256) if size >= d)
    of_queries = _hopper_queries(columns, call.causal)
    of_keys = 128 if columns <= 128 else 96 if columns == 192 else 80
    rows, key_rows = _filled(s, of_queries), _filled(s, of_keys)
    grouped = call.heads < a
    for name in ("softmax_d", "softmax_lse_log2"):
        yield name, (b, a, rows), "fp32"
    yield "dq_accum", (b, a, rows, columns), "fp32"
    for name in ("dk_accum", "dv_accum") if grouped else ():
        yield name, (b, call.heads, key_rows, columns), "fp32"
    yield "dq_semaphore", (rows // of_queries, b, a), "int32"
    for name in ("dk_semaphore", "dv_semaphore") if grouped and call.deterministic else ():
        yield name, (key_rows // of_keys, b, call.heads), "int32"


def _fourth(call: Call, major: int) -> Tensors:
    """Heads of 256 features have a kernel of their own on Blackwell, which adds up nothing outside."""
    b, a, s, d = call.shape
    columns, grouped = _filled(d, 32), call.heads < a
    of_queries, of_keys, together = 128, 128, 2 if d >= 128 else 1  # thread blocks of a cluster
    if major == 9:
        of_queries, of_keys, together = _hopper_queries(d, call.causal), 128 if d <= 128 else 96 if d <= 192 else 64, 1
    elif major == 12:
        of_queries, of_keys, together = 64, 64, 1
    rows, key_rows = _filled(s, of_queries), _filled(s, of_keys * together)
    alone = major in (10, 11) and d == 256
    if not alone:
        yield "dq_accum", (b, a, rows, columns), "fp32"
    for name in ("dpsum", "lse_log2"):
        yield name, (b, a, rows), "fp32"
    for name in ("dk_accum", "dv_accum") if grouped and not alone else ():
        yield name, (b, call.heads, key_rows, columns), "fp32"
    if call.deterministic:
        yield "dq_semaphore", (b, a, rows // of_queries, together), "int32"
    for name in ("dk_semaphore", "dv_semaphore") if grouped and call.deterministic else ():
        yield name, (b, call.heads, key_rows // of_keys, 2), "int32"


def _hopper_queries(d: int, causal: bool) -> int:
    """Rows of a block of queries (``kBlockM_sm90``, ``_tile_size_bwd_sm90``)."""
    if d <= 64:
        return 128
    return 80 if 96 < d <= 128 and not causal else 64


def _filled(size: int, block: int) -> int:
    return -(-size // block) * block


# -- fused attention -----------------------------------------------------------------------------------


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
    mask: Tensor | None = None,
) -> Tensor:
    """``_scaled_dot_product_flash_attention`` on (b, a, s, d): saves q, k, v, output and log-sum-exp.

    The log-sum-exp is (b, a, s) fp32; two scalars hold the random state. Backward makes the three
    gradients. For what it allocates inside see ``allocates``. With a ``mask`` it is cuDNN's, which saves tensors of the
    same sizes, and the mask as scores (``scores_of``).
    """
    q, k, v = ops.entering(r, "scaled_dot_product_attention", q, k, v, name=f"{name}_input")
    bias = scores_of(r, mask, q)
    causal = causal and mask is None
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

    saved = (*bias, k, q, v, logsumexp, out, seed, offset)
    out.node = r.node((q, k, v), saved, backward, work=_after(mask, q, _work(q, k, causal)))
    del offset, seed, logsumexp, saved, bias
    return out


MASK_ROW = 8
"""Elements to a multiple of which the memory-efficient kernel's rows of scores are padded (``preprocess_mask``)."""


def scores_of(r: Recorder, mask: Tensor | None, q: Tensor, *, aligned: int = 1) -> list[Tensor]:
    """``mask``, booleans (b or 1, 1, s, keys), as what every head's scores are added to, 0 or -infinity:
    (b, 1, s, keys) in the dtype of the queries ``q`` (``attention.cpp``, ``convert_boolean_attn_mask``, from PyTorch
    2.6; before, an inverted copy of the mask is there meanwhile, which is not counted). Rows that are no multiple of
    ``aligned`` are copied into longer ones (``pad_bias``)."""
    if mask is None:
        return []
    *_, rows, keys = mask.shape
    never, zero = (r.empty((), q.dtype, name) for name in ("never", "zero"))
    bias = r.empty((q.shape[0], 1, rows, keys), q.dtype, "mask_scores")
    del zero, never
    if keys % aligned:
        bias = r.empty((*bias.shape[:-1], keys + -keys % aligned), q.dtype, "mask_scores_padded")
    return [bias]


def _after(mask: Tensor | None, q: Tensor, attended: Operator) -> Operator:
    """The kernel behind what makes the mask's scores, which reads it and writes them."""
    if mask is None:
        return attended
    b, _, s, _ = q.shape
    moved = b * size_of((s, mask.shape[-1]), "bool") + size_of((b, s, mask.shape[-1]), q.dtype)
    return attended.after((Stream(float(moved)),), ())


WIDEST_IN_REGISTERS = 128
"""Features of a head beyond which the kernel for 16 bits sums its output up in memory, in fp32 (``kernel_forward.h``,
``kNeedsOutputAccumulatorBuffer``; ``attention.cu``, ``output_accum``)."""
OF_CUDNN = (192, 128)
"""Features of keys and of values with which it may be cuDNN's kernel, of which that is not known."""


def efficient_attention(
    r: Recorder,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    name: str = "attention",
    *,
    causal: bool = True,
    mask: Tensor | None = None,
) -> Tensor:
    """``_scaled_dot_product_efficient_attention`` on (b, a, s, d), with values of a width of their own: saves q, k, v,
    output and log-sum-exp, and a ``mask`` as scores (``scores_of``). cuDNN's, which PyTorch prefers on Hopper and
    Blackwell for heads of 192 with values of 128 (``check_cudnn_tensor_shapes``), saves tensors of the same sizes.

    The log-sum-exp is (b, a, s) fp32, s rounded up to 32, and there in training alone; two scalars hold the random
    state (on the host, unless a CUDA graph is captured; counted as others are). Backward makes the three gradients. For
    what it allocates inside see ``_inside``; for what forward does, ``WIDEST_IN_REGISTERS``.
    """
    q, k, v = ops.entering(r, "scaled_dot_product_attention", q, k, v, name=f"{name}_input")
    bias = scores_of(r, mask, q, aligned=MASK_ROW)
    b, a, s, d = q.shape
    dtype = q.dtype
    out = r.empty(v.shape, dtype, name)
    rows = -(-s // ROWS) * ROWS if any(one.node is not None for one in (q, k, v)) else 0
    logsumexp = r.empty((b, a, rows), "fp32", f"{name}_logsumexp")
    seed, offset = (r.empty((), "int64", f"{name}_rng_{part}") for part in ("seed", "offset"))
    shapes, whole, width = (q.shape, k.shape, v.shape), q.shape, v.shape[-1]
    if r.kernel_workspaces and dtype != "fp32" and max(d, width) > WIDEST_IN_REGISTERS and (d, width) != OF_CUDNN:
        r.empty((b, s, a, width), "fp32", f"{name}_accumulated", Category.WORKSPACES)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        made = [r.empty(shape, dtype, f"grad_{part}") for part, shape in zip("qkv", shapes, strict=True)]
        if r.kernel_workspaces:
            (_inside if dtype == "fp32" else _inside_16_bits)(r, whole, width)
        return made

    work = attention((b, s, a, d), a, s, dtype, causal=causal and mask is None, values=width, efficient=True)
    saved = (*bias, k, q, v, logsumexp, out, offset, seed)
    out.node = r.node((q, k, v), saved, backward, work=_after(mask, q, work))
    del offset, seed, logsumexp, saved, bias
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
    r.empty((b, a, of_each), "fp32", "gradient_tiles", Category.WORKSPACES)
    del delta


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
    r.empty((b, a, tiles, rows * columns + 4), "fp32", "grad_q_tiles", workspaces)
    del delta
