"""What transformers' gated delta nets run where flash-linear-attention and causal-conv1d are not installed
(``models/qwen3_5/modeling_qwen3_5.py``, ``models/qwen3_next/modeling_qwen3_next.py``: ``causal_conv1d_fn``,
``torch_chunk_gated_delta_rule``, ``l2norm``): PyTorch's operators, in fp32, chunk by chunk. Most of the memory is in
matrices of each chunk's tokens with one another, of which autograd keeps five for a head, and in backward in what
fills a whole tensor for each chunk.

Variables of the rule live until it returns, and so do those here. Shapes: b sequences of s tokens, s' with padding to
whole chunks; v heads of values of e features, of keys of d features; m channels of the convolution, c chunks of 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..tape.events import Category
from . import ops, selecting
from .autograd import Gradients, Recorder, Shape, Tensor, Unsummed, incoming
from .gated_delta import CHUNK, Sizes
from .gradients import by_way_of, fresh, needed, viewed
from .work import Operator, Product, Stream, size_of

FP32 = "fp32"
LEAST_BATCHED = 9
"""Systems of equations that one call of cuBLAS solves together (``BatchLinearAlgebra.cpp``,
``triangular_solve_kernel``): fewer are solved one by one."""


def convolution(r: Recorder, x: Tensor, weight: Tensor, at: Sizes) -> Tensor:
    """``causal_conv1d_fn``, of channels (b, s, m): ``F.conv1d`` of a token more on both sides for each under the
    kernel but one, of which the first s are taken, and silu.

    CUDA's own kernel runs in bf16 and fp32 (``Convolution.cpp``, ``use_cudnn_depthwise``: cuDNN's in fp16 alone). It
    takes a copy of rows of channels, in forward and again in backward (``_convolution``, ``convolution_backward``:
    ``input.contiguous()``), and makes the weight's gradient first (``DepthwiseConv2d.cu``)."""
    dtype = x.dtype
    x = ops.cast(r, x, weight.dtype, "channels_cast")
    made = _padded_convolution(r, x, weight, at)
    del x
    made = _part(r, made, (at.b, at.m, at.s), "convolution")
    made = ops.elementwise(r, "convolution_silu", (made,), (made,))
    return ops.cast(r, made, dtype, "convolution_cast").view(*at.channels)


def _padded_convolution(r: Recorder, x: Tensor, weight: Tensor, at: Sizes) -> Tensor:
    """``F.conv1d``, (b, m, s + k - 1) with k tokens under the kernel. The weight is a view, which autocast's cache does
    not keep."""
    x, weight = ops.entering(r, "conv1d", x, ops.alias(r, weight), name="convolution_input")
    rows, dtype, size = (at.b, at.m, at.s), x.dtype, size_of(at.channels, x.dtype)
    named = (x, "grad_convolution_input"), (weight, "grad_convolution_weight")
    gradients_of = needed(*named, last_first=r.accumulates_in_place)

    def laid_out(r: Recorder) -> Tensor | None:
        return r.empty(rows, dtype, "convolution_rows", Category.WORKSPACES) if r.kernel_workspaces else None

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        _rows = laid_out(r)
        return gradients_of(r, gradients)

    done = Operator((Stream(4 * size, 2),), (Stream(7 * size, 3),))
    node = r.node((x, weight), (x, weight), backward, work=done)
    _rows = laid_out(r)
    return r.empty((*rows[:2], at.s + at.kernel - 1), dtype, "convolution").by(node)


def rule(r: Recorder, read: Sequence[Tensor], at: Sizes) -> Tensor:
    """``torch_chunk_gated_delta_rule`` of queries and keys (b, s, k, d), values (b, s, v, e), decays and steps
    (b, s, v), without a first state: (b, s, v, e)."""
    q, k, v, decay, beta = read
    dtype, full = q.dtype, (at.b, at.v, at.c * CHUNK)
    chunks = (at.b, at.v, at.c, CHUNK)
    if at.k != at.v:
        q = _repeated(r, q, at, "query")
        k = _repeated(r, k, at, "key")
    given = [(q, "query"), (k, "key"), (v, "value"), (beta, "beta")]
    wide = [ops.cast(r, _by_head(x), FP32, f"{name}_fp32") for x, name in given]
    decay = _by_head(decay)
    given.clear()
    beta, v, k, q = wide.pop(), wide.pop(), wide.pop(), wide.pop()
    q = _normed(r, q, "query")
    k = _normed(r, k, "key")
    q = ops.scale(r, q, "query_scaled")
    q, k, v = (_padded(r, x, full, name) for x, name in ((q, "query"), (k, "key"), (v, "value")))
    beta, decay = (_padded(r, x, full, name) for x, name in ((beta, "beta"), (decay, "decay")))
    v_beta = ops.multiply(r, v, _seen(r, beta, (*full, 1)), "value_by_beta")
    k_beta = ops.multiply(r, k, _seen(r, beta, (*full, 1)), "key_by_beta")
    q, k = _seen(r, q, (*chunks, at.d)), _seen(r, k, (*chunks, at.d))
    k_beta = _chunked(r, k_beta, (*chunks, at.d), "key_by_beta")
    v_beta = _chunked(r, v_beta, (*chunks, at.e), "value_by_beta")
    decay = decay.view(*chunks)
    above = r.in_turn(((CHUNK, CHUNK), "bool", "ones"), ((CHUNK, CHUNK), "bool", "above_diagonal"))
    sums = _summed(r, decay)
    pairs = _differences(r, sums)
    pairs = ops.elementwise(r, "pairs_masked", (pairs,), (above,))
    pairs = ops.elementwise(r, "pairs_decay", (pairs,), saves_output=True)
    square = (*chunks, CHUNK)
    system = ops.multiply(r, _product(r, k_beta, _turned(r, k), square, "keys_with_keys"), pairs, "system")
    scores = ops.multiply(r, _product(r, q, _turned(r, k), square, "queries_with_keys"), pairs, "scores")
    decayed = _decayed(r, k_beta, _exponential(r, sums, "key_by_beta"), "key_by_beta")
    values = _solved(r, system, v_beta, "values_new")
    keys = _solved(r, system, decayed, "keys_new")
    state = r.empty((at.b, at.v, at.d, at.e), FP32, "state")
    out = r.empty(values.shape, FP32, "rule_chunks")
    q = _decayed(r, q, _exponential(r, sums, "query"), "query")
    k = _decayed(r, k, _exponential(r, _to_the_last(r, sums), "key"), "key")
    last = _exponential(r, _part(r, sums, chunks[:3], "decay_sums_last"), "chunk")
    last = _seen(r, last, (*chunks[:3], 1, 1))
    for _ in range(at.c):
        new = ops.add(r, _chunk(r, values), _read(r, _chunk(r, keys), state, at), "values_less", negated=True)
        between = _read(r, _chunk(r, q), state, at)
        out = selecting.written(r, out, [ops.add(r, between, _within(r, _chunk(r, scores), new, at))], "chunk")
        state = ops.add(r, ops.multiply(r, state, _chunk(r, last), "state_decayed"), _update(r, k, new, at), "state")
    del state
    out = ops.contiguous(r, out, (*full, at.e), "rule_padded") if at.c > 1 else out.view(*full, at.e)
    if at.s < full[2]:
        out = _part(r, out, (at.b, at.v, at.s, at.e), "rule_padded")
    return ops.cast(r, out, dtype, "rule").view(*at.values)


def gradients_laid_out(r: Recorder, q: Tensor, k: Tensor, v: Tensor, at: Sizes) -> list[Tensor]:
    """Queries, keys and values whose gradients ``rule`` gives head by head, and which are copied to be seen token by
    token, as those of sums for several value heads, and of keys and values of one chunk (``_chunked``), are already."""
    each, several = at.k > 1 and at.k == at.v, at.c > 1
    copied = each, each and several, at.v > 1 and several
    named = zip((q, k, v), ("query", "key", "value"), copied, strict=True)
    return [ops.copied_gradient(r, x, name) if copies else x for x, name, copies in named]


# -- one chunk of every head ----------------------------------------------------------------------------------


def _chunk(r: Recorder, x: Tensor) -> Tensor:
    """``x[:, :, i]``."""
    return _part(r, x, (*x.shape[:2], *x.shape[3:]), "chunk")


def _read(r: Recorder, x: Tensor, state: Tensor, at: Sizes) -> Tensor:
    """What keys or queries (b, v, 64, d) read from the state."""
    return _product(r, x, state, (at.b, at.v, CHUNK, at.e), "chunk_read")


def _within(r: Recorder, scores: Tensor, new: Tensor, at: Sizes) -> Tensor:
    return _product(r, scores, new, (at.b, at.v, CHUNK, at.e), "chunk_within")


def _update(r: Recorder, k: Tensor, new: Tensor, at: Sizes) -> Tensor:
    return _product(r, _turned(r, _chunk(r, k)), new, (at.b, at.v, at.d, at.e), "state_update")


# -- operators ----------------------------------------------------------------------------------------------


def _by_head(x: Tensor) -> Tensor:
    b, s, heads, *features = x.shape
    return x.view(b, heads, s, *features)


def _turned(r: Recorder, x: Tensor) -> Tensor:
    *batch, rows, columns = x.shape
    return _seen(r, x, (*batch, columns, rows))


def _seen(r: Recorder, x: Tensor, shape: Shape) -> Tensor:
    """A view that is a node of its own: gradients of its readers are summed there first."""
    return Tensor(x.storage, shape, x.dtype, r.node((x,), (), viewed(x)))


def _chunked(r: Recorder, x: Tensor, shape: Shape, name: str) -> Tensor:
    """A view in chunks, whose gradient, laid out column by column (``_solved``), is copied if they are several."""
    return (ops.copied_gradient(r, x, name).view if shape[2] > 1 else x.view)(*shape)


def _part(r: Recorder, x: Tensor, shape: Shape, name: str) -> Tensor:
    """A view of a part (a slice, or one of a dimension), whose backward fills zeros of the whole size."""
    return Tensor(x.storage, shape, x.dtype, r.node((x,), (), fresh(x, f"grad_{name}_whole")))


def _repeated(r: Recorder, x: Tensor, at: Sizes, name: str) -> Tensor:
    """``repeat_interleave``: a copy for every value head, whose gradients are summed."""
    return r.output((x,), (), fresh(x, f"grad_{name}_sum"), at.keys, x.dtype, f"{name}_repeated")


def _normed(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``l2norm``."""
    total = selecting.sum_last(r, ops.multiply(r, x, x, f"{name}_square"), f"{name}_squares")
    total = ops.add_constant(r, total, f"{name}_eps")
    inverse = ops.rsqrt(r, total, f"{name}_norm")
    del total
    return ops.multiply(r, x, inverse, f"{name}_normed")


def _padded(r: Recorder, x: Tensor, full: Shape, name: str) -> Tensor:
    """``F.pad`` to whole chunks: a copy, also where there is nothing to add."""
    return ops.elementwise(r, f"{name}_padded", (x,), shape=(*full, *x.shape[3:]))


def _summed(r: Recorder, decay: Tensor) -> Tensor:
    """``cumsum``, whose backward turns the gradient, sums and turns it back."""
    like = decay.shape, FP32
    names = ("grad_decay_turned", "grad_decay_sums", "grad_decay")
    return r.output((decay,), (), by_way_of(*((*like, name) for name in names)), *like, "decay_sums")


def _differences(r: Recorder, sums: Tensor) -> Tensor:
    """``sums.unsqueeze(4) - sums.unsqueeze(3)``."""
    rows, columns = (*sums.shape, 1), (*sums.shape[:3], 1, CHUNK)
    full = (*sums.shape, CHUNK)
    pair = _seen(r, sums, rows), _seen(r, sums, columns)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        negated = r.empty(full, FP32, "grad_pairs_negated")
        return [Unsummed(incoming(gradients), rows, "grad_rows"), Unsummed(negated, columns, "grad_columns")]

    return r.empty(full, FP32, "pairs").by(r.node(pair, (), backward))


def _to_the_last(r: Recorder, sums: Tensor) -> Tensor:
    """``sums[..., -1:] - sums``."""
    shape, one = sums.shape, (*sums.shape[:3], 1)
    last = _part(r, sums, one, "decay_sums_end")

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | Unsummed | None]:
        negated = r.empty(shape, FP32, "grad_decay_sums_negated")
        return [Unsummed(incoming(gradients), one, "grad_decay_sums_end"), negated]

    return r.empty(shape, FP32, "decay_to_end").by(r.node((last, sums), (), backward))


def _exponential(r: Recorder, x: Tensor, name: str) -> Tensor:
    return ops.elementwise(r, f"{name}_decay", (x,), saves_output=True)


def _decayed(r: Recorder, x: Tensor, factor: Tensor, name: str) -> Tensor:
    """``x * factor.unsqueeze(-1)``."""
    return ops.multiply(r, x, _seen(r, factor, (*factor.shape, 1)), f"{name}_decayed")


def _product(r: Recorder, x: Tensor, y: Tensor, shape: Shape, name: str) -> Tensor:
    """``x @ y`` of more than three dimensions, as products of views of three."""
    x, y = ops.entering(r, "matmul", x, y, name=f"{name}_operand")  # before its views
    x, y = _seen(r, x, x.shape), _seen(r, y, y.shape)
    return ops.matmul(r, x, y, shape, name)


def _solved(r: Recorder, system: Tensor, y: Tensor, name: str) -> Tensor:
    """``linalg.solve_triangular(system, y)``: saves the system and its result; backward solves it turned, and
    multiplies gradient and result for the system's (``FunctionsManual.cpp``, ``linalg_solve_triangular_backward``).
    cuBLAS is handed an address for each matrix, of the systems and of the results
    (``BatchLinearAlgebraLib.cpp``, ``apply_triangular_solve_batched``)."""
    square, shape, needs_system = system.shape, y.shape, system.node is not None
    batch, columns = prod(shape[:3]), shape[-1]

    def addresses(r: Recorder) -> None:
        if r.kernel_workspaces and batch >= LEAST_BATCHED:
            _both = [r.empty((batch,), "int64", f"{name}_addresses", Category.WORKSPACES) for _ in range(2)]

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad_y = r.empty(shape, FP32, f"grad_{name}")
        addresses(r)
        made = [(square, FP32, f"grad_{name}_{one}") for one in ("product", "negated", "system")]
        return [r.in_turn(*made) if needs_system else None, grad_y]

    out = r.empty(shape, FP32, name)
    addresses(r)
    solve, product = Product(CHUNK, columns, CHUNK, batch, 4), Product(CHUNK, CHUNK, columns, batch, 4)
    passes = Stream(4 * size_of(square, FP32), 2)
    done = Operator((solve,), (solve, *((product, passes) if needs_system else ())))
    return out.by(r.node((system, y), (system, out), backward, work=done))
