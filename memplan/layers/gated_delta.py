"""flash-linear-attention's gated delta rule and convolution (0.5 and 0.6: ``ops/gated_delta_rule/chunk.py``,
``chunk_fwd.py``, ``wy_fast.py``, ``ops/common/chunk_delta_h.py``, ``chunk_o.py``, ``modules/conv/triton/ops.py``,
``l2norm.py``): what their autograd functions allocate and save, whichever framework calls them.

The convolution is made again in backward. The rule saves what it reads, sums of decays and each chunk's inverse; its
states and values are made again. Packed sequences (``cu_seqlens``) have the same tensors as a batch of as many: chunks
begin with each of them.

Shapes: b sequences of s tokens; on this rank: k key heads of d features, v value heads of e features, m channels of
the convolution, c chunks of 64 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..values import dataclass
from . import ops
from .autograd import Gradients, Recorder, Shape, Tensor, size_of
from .work import Operator, Product, Scan, Stream

CHUNK = 64
"""Tokens that the rule takes at once."""
KERNEL = 64
"""Tokens of which a program of the convolution's backward sums weights' gradients (``CausalConv1dFunction``)."""


@dataclass(frozen=True)
class Sizes:
    """Of one layer on one rank."""

    b: int
    s: int
    k: int
    v: int
    d: int
    e: int
    kernel: int

    @property
    def m(self) -> int:
        return 2 * self.k * self.d + self.v * self.e

    @property
    def features(self) -> int:
        """Of the input projection: queries, keys, values, the gate, and two numbers of each value head."""
        return self.m + self.v * self.e + 2 * self.v

    @property
    def c(self) -> int:
        return -(-self.s // CHUNK)

    @property
    def channels(self) -> Shape:
        return self.b, self.s, self.m

    @property
    def joined(self) -> Shape:
        """Queries and keys before they are repeated for each value head,"""
        return self.b, self.s, 2 * self.k, self.d

    @property
    def keys(self) -> Shape:
        """and one of them behind that."""
        return self.b, self.s, self.v, self.d

    @property
    def groups(self) -> Shape:
        """One of them where it is not repeated."""
        return self.b, self.s, self.k, self.d

    @property
    def values(self) -> Shape:
        return self.b, self.s, self.v, self.e

    @property
    def heads(self) -> Shape:
        """A number of each head for each token."""
        return self.b, self.s, self.v

    @property
    def states(self) -> Shape:
        return self.b, self.c, self.v, self.d, self.e


def convolution(
    r: Recorder, x: Tensor, weight: Tensor, at: Sizes, *, channels: Shape | None = None, name: str = "convolution"
) -> Tensor:
    """``CausalConv1dFunction``: saves its input; its output without the activation is made again. Gradients of weights
    are summed in fp32, those of 64 tokens first. ``channels``: (b, s, m), if it is not that of queries, keys and values
    together."""
    like = channels or at.channels
    m, dtype, size = like[-1], x.dtype, size_of(like, x.dtype)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        again = r.empty(like, dtype, f"{name}_again")
        grad = r.empty(like, dtype, f"grad_{name}_input")
        parts = r.empty((at.b * -(-at.s // KERNEL), m, at.kernel), "fp32", f"grad_{name}_parts")
        total = r.empty((m, at.kernel), "fp32", f"grad_{name}_fp32")
        narrow = r.empty((m, 1, at.kernel), dtype, f"grad_{name}_weight")
        del total, parts, again
        return [grad, narrow]

    done = Operator((Stream(2 * size),), (Stream(6 * size, 4),))
    return r.output((x, weight), (x, weight), backward, like, dtype, name, work=done)


def channels_convolution(r: Recorder, x: Tensor, weight: Tensor, at: Sizes) -> Tensor:
    """``CausalConv1dFn`` of causal_conv1d 1.6 (``causal_conv1d_interface.py``, ``cpp_functions.py``), of channels that
    lie one after the other: saves its input and a view of the weight; the weight's gradient is summed in fp32, by
    atomic additions, unless PyTorch is told to be deterministic (``csrc/causal_conv1d.cpp``)."""
    dtype, kernel, own = x.dtype, (at.m, at.kernel), weight.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        grad = r.empty(at.channels, dtype, "grad_convolution_input")
        total = r.empty(kernel, "fp32", "grad_convolution_fp32")
        if own != "fp32":
            total = r.empty(kernel, own, "grad_convolution_weight")
        return [grad, total.view(at.m, 1, at.kernel)]

    size = size_of(at.channels, dtype)
    done = Operator((Stream(2 * size),), (Stream(3 * size, 2),))
    return r.output((x, weight), (x, weight), backward, at.channels, dtype, "convolution", work=done)


def decay(r: Recorder, a: Tensor, log: Tensor, bias: Tensor) -> Tensor:
    """``-exp(A_log) softplus(a + dt_bias)`` in fp32: ``exp`` saves its result, ``softplus`` its input."""
    wide = partial(ops.cast, r, dtype="fp32")
    rates = ops.scale(r, ops.elementwise(r, "rates", (wide(log, name="A_log_fp32"),), saves_output=True), "rates_less")
    steps = ops.add(r, wide(a, name="delta_a_fp32"), bias, "delta_a_biased")
    steps = ops.elementwise(r, "delta_a_softplus", (steps,), (steps,))
    return ops.multiply(r, rates, steps, "decay")


# -- the rule ----------------------------------------------------------------------------------------------


def rule(r: Recorder, read: Sequence[Tensor], at: Sizes) -> Tensor:
    """``ChunkGatedDeltaRuleFunction``, without a first and a last state: saves what it reads, with sums of decays in
    place of these, and the inverse of each chunk."""
    q, k, v, _, beta = read
    dtype = q.dtype
    out, sums, inverse = _made(r, at, dtype)
    return out.by(
        r.node(
            read,
            (q, k, v, sums, beta, inverse),
            lambda r, gradients: rule_backward(r, at, dtype),
            work=work_of(at, dtype),
        )
    )


def _made(r: Recorder, at: Sizes, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """``chunk_gated_delta_rule_fwd``: its result, sums of decays, and each chunk's inverse."""
    sums = r.empty(at.heads, "fp32", "decay_sums")
    inverse = r.empty((*at.heads, CHUNK), dtype, "inverse")
    variables = _states(r, at, dtype)
    out = r.empty(at.values, dtype, "rule")
    variables.clear()
    return out, sums, inverse


def rule_of_normed(r: Recorder, read: Sequence[Tensor], at: Sizes, *, strided: bool = False) -> Tensor:
    """``rule`` of queries and keys (b, s, k, d) that are normed within it (``use_qk_l2norm_in_kernel``): it saves
    these, and their reciprocal norms. Where values have more heads, each is that of several of them.

    ``strided``: queries, keys and values are views of parts of rows, which are copied first (``input_guard``); copies
    of queries and keys are arguments until forward returns.
    """
    q, k, v, _, beta = read
    dtype = q.dtype
    copies = [r.empty(x.shape, dtype, f"{n}_copied") for x, n in zip((q, k), ("query", "key"), strict=True) if strided]
    v = r.empty(v.shape, dtype, "value_copied") if strided else v
    q, q_norms = _normed(r, at, dtype, "query")
    k, k_norms = _normed(r, at, dtype, "key")
    out, sums, inverse = _made(r, at, dtype)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        made = rule_backward(r, at, dtype, grouped=at.k < at.v)
        for slot, name in enumerate(("query", "key")):
            made[slot] = r.empty(at.groups, dtype, f"grad_{name}_unnormed")
        return made

    saved = (q, q_norms, k, k_norms, v, sums, beta, inverse)
    norms = Stream(4 * size_of(at.groups, dtype), 2)
    laid = (Stream(2 * sum(size_of(x.shape, dtype) for x in read[:3]), 3),) if strided else ()
    done = work_of(at, dtype).after((*laid, norms), ()).then((), (norms,))
    node = r.node(read, saved, backward, work=done)
    copies.clear()
    return out.by(node)


def _normed(r: Recorder, at: Sizes, dtype: str, name: str) -> tuple[Tensor, Tensor]:
    """``l2norm_fwd``."""
    return r.empty(at.groups, dtype, f"{name}_normed"), r.empty(at.groups[:3], "fp32", f"{name}_norms")


def _states(r: Recorder, at: Sizes, dtype: str) -> list[Tensor]:
    """``recompute_w_u_fwd`` and ``chunk_gated_delta_rule_fwd_h``: keys and values in each chunk's own terms, states
    before chunks, and values without what these hold already."""
    sizes = {"chunk_keys": at.keys, "chunk_values": at.values, "states": at.states, "values_new": at.values}
    return [r.empty(size, dtype, name) for name, size in sizes.items()]


def rule_backward(r: Recorder, at: Sizes, dtype: str, *, grouped: bool = False) -> list[Tensor | None]:
    """``chunk_gated_delta_rule_bwd``. On Hopper and later a program takes 128 features of a key, on Ampere 64,
    each with a part of the decays' gradient. ``grouped``: queries and keys are not repeated for each value head, and
    gradients of several heads are summed."""
    variables = _states(r, at, dtype)
    within = [r.empty(at.values, dtype, "grad_values_within")]
    variables.append(r.empty(at.states, dtype, "grad_states"))
    within.append(r.empty(at.values, dtype, "grad_values_new"))
    del within[0]
    grad_q, grad_k = (r.empty(at.keys, dtype, f"grad_{name}") for name in ("query", "key"))
    parts = [r.empty((-(-at.d // 128), *at.heads), "fp32", "grad_decay_parts")]
    variables.append(r.empty(at.keys, dtype, "grad_chunk_keys"))
    if grouped:
        grad_q = r.empty(at.groups, dtype, "grad_query_summed")
        grad_k = r.empty(at.groups, dtype, "grad_key_summed")
    decay = r.empty(at.heads, "fp32", "grad_decay")
    parts.clear()
    more = r.empty(at.keys, dtype, "grad_key_of_inverse")
    grad_v = r.empty(at.values, dtype, "grad_value")
    of_inverse = r.empty(at.heads, "fp32", "grad_decay_of_inverse")
    grad_beta = r.empty(at.heads, dtype, "grad_beta")
    if grouped:
        more = r.empty(at.groups, dtype, "grad_key_of_inverse_summed")
    within.clear()
    back = r.empty(at.heads, "fp32", "grad_decay_summed")
    del decay, more, of_inverse
    variables.clear()
    return [grad_q, grad_k, grad_v, back, grad_beta]


def work_of(at: Sizes, dtype: str) -> Operator:
    """Products of chunks: of keys with keys, their inverse with keys and values; with states, that chunks are taken one
    after the other for; of queries with keys, states and values. In backward the states again, and two products for
    each of these. The inverse itself, of triangles of 16, is left out."""
    heads, e, d, v = at.b * at.c * at.v, size_of((1,), dtype), at.d, at.e
    keys, values, states = size_of(at.keys, dtype), size_of(at.values, dtype), size_of(at.states, dtype)

    def products(*sizes: tuple[int, int, int]) -> list[Scan]:
        return [Scan(Product(m, n, k, heads, e)) for m, n, k in sizes]

    square = CHUNK, CHUNK
    again = products((CHUNK, d, CHUNK), (CHUNK, v, CHUNK), (CHUNK, v, d), (d, v, CHUNK))
    forward = [*products((*square, d)), *again, *products((CHUNK, v, d), (*square, d), (CHUNK, v, CHUNK))]
    within = products((*square, d), (CHUNK, v, CHUNK))
    of_states = products((CHUNK, v, d), (d, v, CHUNK), (d, v, CHUNK))
    of_chunk = products((*square, v), (*square, d), *[(CHUNK, d, v)] * 3, *[(CHUNK, d, CHUNK)] * 2)
    of_inverse = products(
        (*square, d), (*square, v), *[(*square, CHUNK)] * 2, (CHUNK, v, CHUNK), *[(CHUNK, d, CHUNK)] * 3
    )
    read = Scan(Stream(4 * keys + 5 * values + 3 * states, 5))
    back = Scan(Stream(16 * keys + 16 * values + 8 * states, 10))
    return Operator((*forward, read), (*again, *within, *of_states, *of_chunk, *of_inverse, back))
