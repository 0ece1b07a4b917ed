"""Layers of torchtitan's gpt-oss as its main branch has them in August 2026 (commit b5bcd76): attention sinks, windows
in every second layer, experts with biases and a clamped gate, rows of experts without padding.

``torchtitan/models/gpt_oss/model.py`` (``Attention``, ``apply_attention_sink_rescale``), ``gpt_oss/moe.py``
(``GptOssGroupedExperts``, ``swiglu``), ``models/common/attention.py`` (``FusedQKVLinear``, ``VarlenAttention``),
``models/common/rope.py`` (``CosSinRoPE``), ``models/common/moe.py`` (``TokenChoiceTopKRouter``, ``MoE``),
``models/common/token_dispatcher.py`` (``LocalTokenDispatcher``). Shapes: n = b s tokens of a micro-batch, k experts of
a token, N = n k rows, E experts, h hidden, f an expert's inner width, a heads, g heads of keys, d features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..plan.spec import ModelSpec
from ..tape.events import Category
from . import ops, selecting
from .autograd import Gradients, Recorder, Tensor, incoming, size_of
from .experts import grouped_product
from .fused_attention import Call, Release, allocates
from .gradients import fresh
from .huggingface import LayerShape, Shared as Tables, linear, rotary_one
from .low_linear import LowLinear
from .tensor_parallel import tagged
from .titan_moe import (
    grouped as plain_grouped,
    normalises,
    of_best_groups,
    permuted,
    put,
    scored,
    top_k,
    unpermuted,
    with_zeros,
)
from .torchtitan import Policy
from .work import Exchange, Operator, Stream, attention as attention_work

BLOCK = 128
"""Rows of a block of flash attention 3 with heads of 64 features."""
GATE_UP, DOWN = "experts.mlp1", "experts.mlp2"


# -- attention --------------------------------------------------------------------------------------


def attention(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    """``Attention.forward`` of (n, h)."""
    spec = shape.spec
    q, k, v = queries_keys_values(r, x, spec, policy)
    q, k = rotary(r, q, k)
    out = inner_attention(r, q, k, v, shape, policy)
    return projected(r, out.view(x.shape[0], spec.heads * spec.head_dim), spec, policy)


def queries_keys_values(r: Recorder, x: Tensor, spec: ModelSpec, policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
    """``FusedQKVLinear.forward``: one product, of which each part is copied."""
    n, a, g, d = x.shape[0], spec.heads, spec.kv_heads, spec.head_dim
    features = (a + 2 * g) * d
    if spec.attention_bias:
        both = policy.run(r, lambda r: linear(r, x, "qkv", features, True))
    else:
        both = policy.linear(r, x, "qkv", features)
    both = both.view(n, g, a // g + 2, d)
    q, k, v = ops.split(r, both, [(n, g, a // g, d), (n, g, 1, d), (n, g, 1, d)], "query_key_value")
    q = ops.contiguous(r, q, (n, a, d), "query")
    k = ops.contiguous(r, k, (n, g, d), "key")
    v = ops.contiguous(r, v, (n, g, d), "value")
    return q, k, v


def rotary(r: Recorder, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """``CosSinRoPE.forward``: rows of the layer's own table by positions, and everything in fp32."""
    n, dtype, d = q.shape[0], q.dtype, q.shape[-1]
    checked(r, n)
    rows = r.empty((n, 2 * d), "fp32", "rope_rows")
    half = Tensor(rows.storage, (n, 1, d), "fp32")
    tables = Tables(cos=half, sin=half)
    q = ops.cast(r, q, "fp32", "query_fp32")
    k = ops.cast(r, k, "fp32", "key_fp32")
    q_out = rotary_one(r, q, tables, "query")
    k_out = rotary_one(r, k, tables, "key")
    q_cast = ops.cast(r, q_out, dtype, "query_rotary_cast")
    return q_cast, ops.cast(r, k_out, dtype, "key_rotary_cast")


def checked(r: Recorder, n: int) -> None:
    """``_maybe_check_max_pos``."""
    _all = r.in_turn(((n,), "bool", "positions_below"), ((), "bool", "positions_all_below"))


def inner_attention(r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: LayerShape, policy: Policy) -> Tensor:
    """``VarlenAttention.forward``, and ``apply_attention_sink_rescale`` of what it gives."""
    parts: list[Tensor] = []
    whole = of_all_ranks(r, k, v, shape)

    def kernel(r: Recorder) -> Tensor:
        out, logsumexp = varlen_attention(r, q, whole[0], whole[1], shape)
        parts.append(logsumexp)
        return out

    out = policy.run(r, kernel)
    (logsumexp,) = parts
    return rescaled(r, out, logsumexp, shape.spec)


def of_all_ranks(r: Recorder, k: Tensor, v: Tensor, shape: LayerShape) -> list[Tensor]:
    """Keys and values that attention reads: with context parallelism those of all ranks."""
    if shape.context == 1:
        return [k, v]
    return [gathered(r, one, shape.context, name) for one, name in ((k, "key"), (v, "value"))]


def gathered(r: Recorder, x: Tensor, ranks: int, name: str) -> Tensor:
    """Keys or values of all ranks of context parallelism in one tensor, (ranks n, g, d), whose gradient is summed and
    scattered (``set_gqa_inner_attention_local_map``; ``_AllGatherShard`` of spmd_types 0.3.1, ``_collectives.py``)."""
    (n, *rest), dtype = x.shape, x.dtype
    whole = (ranks * n, *rest)
    out = r.empty(whole, dtype, f"{name}_gathered")
    size = size_of(whole, dtype)
    work = Operator((Exchange("all-gather", size, "cp"),), (Exchange("reduce-scatter", size, "cp"),))
    return out.by(
        r.node((x,), (), lambda r, gradients: [r.empty((n, *rest), dtype, f"grad_{name}_scattered")], work=work)
    )


def varlen_attention(
    r: Recorder, q: Tensor, k: Tensor, v: Tensor, shape: LayerShape, *, alone: bool = False
) -> tuple[Tensor, Tensor]:
    """``torch_attn::_varlen_attn`` (``torch/nn/attention/varlen.py``): flash attention of packed sequences (n, a, d):
    saves q, k, v, output, log-sum-exp, (a, n) fp32, and two numbers of the random state; the gradient of the
    log-sum-exp is not used. The kernel is flash attention 3 (``get_cuda_flash_attention_impl``), inside of which
    backward has a block's rows more for every sequence (``hopper/flash_api.cpp``, ``mha_bwd``,
    ``total_q_padded_rounded``); documents that are packed are counted as one a sequence. ``alone``: nobody reads the
    log-sum-exp, whose gradient is zeros then.
    """
    (n, a, d), g, dtype = q.shape, k.shape[1], q.dtype
    shapes = (q.shape, k.shape, v.shape)
    out = r.empty((n, a, v.shape[-1]), dtype, "attention")
    logsumexp = r.empty((a, n), "fp32", "attention_logsumexp")
    state = r.empty((2,), "int64", "attention_rng_state")

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        zeros = r.empty((a, n), "fp32", "grad_logsumexp") if alone else None
        unused = r.empty((2,), "int64", "grad_rng_state")
        made = [r.empty(one, dtype, f"grad_{part}") for part, one in zip("qkv", shapes, strict=True)]
        if r.kernel_workspaces:
            allocates(r, Release(3), Call((1, a, n + shape.b * BLOCK, d), g, dtype))
        del unused, zeros
        return [*made]

    width = v.shape[-1] if v.shape[-1] != d else 0
    work = attention_work((shape.b, shape.s, a, d), g, shape.s * shape.context, dtype, causal=True, values=width)
    node = r.node((q, k, v), (q, k, v, out, logsumexp, state), backward, outputs=2, work=work)
    return Tensor(out.storage, out.shape, dtype, node, 0), Tensor(logsumexp.storage, (n, a), "fp32", node, 1)


def rescaled(r: Recorder, out: Tensor, logsumexp: Tensor, spec: ModelSpec) -> Tensor:
    """``out * sigmoid(lse - sinks)``."""
    n, a = logsumexp.shape
    sinks = r.parameter("sinks.logits", (a,), out.dtype)
    less = ops.add(r, logsumexp, sinks.view(1, a), "logsumexp_less_sinks", negated=True)
    scale = ops.elementwise(r, "sink_scale", (less,), saves_output=True).view(n, a, 1)
    del less
    return ops.multiply(r, out, ops.cast(r, scale, out.dtype, "sink_scale_cast"), "attention_rescaled")


def projected(r: Recorder, x: Tensor, spec: ModelSpec, policy: Policy) -> Tensor:
    """``ScaledBiasRowwiseLinear.forward``, whose bias is divided by the number of tensor-parallel ranks."""
    weight = r.parameter("attention_output.weight", (spec.hidden, x.shape[-1]), x.dtype)
    bias = ops.scale(r, r.parameter("attention_output.bias", (spec.hidden,), x.dtype), "output_bias_scaled")
    return policy.run(r, lambda r: ops.linear(r, x, weight, bias, name="attention_output"))


# -- experts ----------------------------------------------------------------------------------------


Shared = Callable[[Recorder, Tensor, LayerShape, Policy], Tensor]
"""Experts that take every token."""


def mixture(r: Recorder, x: Tensor, shape: LayerShape, policy: Policy, shared: Shared | None = None) -> Tensor:
    """``MoE.forward`` of (n, h)."""
    spec, n = shape.spec, x.shape[0]
    top, chosen, _scores = router(r, x, spec, policy)
    _map = r.empty((n, spec.experts), "bool", "routing_map")
    counts = r.empty((spec.experts,), "int64", "rows_of_expert")
    low = policy.low if policy.low is not None and policy.low.rows else None
    if shape.expert_ranks > 1:
        out = exchanged_experts(r, x, top, chosen, shape, low)
    elif low is not None:
        out = padded_experts(r, x, top, chosen, spec, low)
    else:
        out = routed_experts(r, x, top, chosen, counts, spec)
    return out if shared is None else ops.add(r, out, shared(r, x, shape, policy), "experts_and_shared")


def router(r: Recorder, x: Tensor, spec: ModelSpec, policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
    """``TokenChoiceTopKRouter.forward``, whose gate runs in fp32 (``torch.autocast``)."""
    scores = scored(r, gate_of(r, x, spec, policy), spec)
    choice = ops.add_constant(r, scores, "scores_for_choice")
    if spec.router_groups:
        choice = of_best_groups(r, choice, spec, policy)
    _values, chosen = top_k(r, choice, spec.expert_top_k, "chosen", policy)
    top = selecting.gathered(r, scores, chosen, "top_scores")
    if normalises(spec):
        total = ops.add_constant(r, selecting.sum_last(r, top, "top_scores_sum"), "top_scores_denominator")
        top = selecting.divided(r, top, total, "top_scores_normed")
    top = ops.scale(r, top, "top_scores_scaled")
    return top, chosen, scores


def gate_of(r: Recorder, x: Tensor, spec: ModelSpec, policy: Policy) -> Tensor:
    """``F.linear`` of input, weight and bias, if it has one, in fp32; selective recompute keeps the sum with a bias."""
    stored = r.parameter("router.weight", (spec.experts, spec.hidden), x.dtype)
    bias = None
    if spec.mlp_bias:
        bias = ops.cast(r, r.parameter("router.bias", (spec.experts,), x.dtype), "fp32", "router_bias_fp32")
    weight = ops.cast(r, stored, "fp32", "router_fp32")
    wide = ops.cast(r, x, "fp32", "router_input_fp32")
    product = partial(ops.linear, x=wide, weight=weight, bias=bias, name="router_logits")
    return product(r) if bias is None else policy.run(r, product)


def routed_experts(r: Recorder, x: Tensor, top: Tensor, chosen: Tensor, counts: Tensor, spec: ModelSpec) -> Tensor:
    """``RoutedExperts.forward`` without expert parallelism."""
    rows, tokens, scores = dispatched(r, x, top, chosen)
    out = grouped(r, rows, counts, spec)
    return combined(r, x, out, tokens, scores)


def padded_experts(r: Recorder, x: Tensor, top: Tensor, chosen: Tensor, spec: ModelSpec, low: LowLinear) -> Tensor:
    """The same with ``TorchAOTokenDispatcher``, whose rows are padded for products in fewer than 16 bits."""
    rows, counts, places, tokens, scores = padded_rows(r, x, top, chosen, spec, low)
    out = plain_grouped(r, rows, counts, spec, low.grouped)
    given = unpermuted(r, out, places, tokens.shape[0])
    zeros = r.empty(x.shape, x.dtype, "experts_zeros")
    given = weighed(r, given, scores)
    return scattered_sum(r, zeros, tokens, given)


def padded_rows(
    r: Recorder, x: Tensor, top: Tensor, chosen: Tensor, spec: ModelSpec, low: LowLinear
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``dispatch``, as of ``exchanged_rows``."""
    routed, tokens, scores = dispatched(r, x, top, chosen)
    rows, places, counts = permuted(r, routed, 1, spec.experts, low.rows)
    return rows, counts, places, tokens, scores


def exchanged_experts(
    r: Recorder, x: Tensor, top: Tensor, chosen: Tensor, shape: LayerShape, low: LowLinear | None = None
) -> Tensor:
    """``RoutedExperts.forward`` with ``AllToAllTokenDispatcher``, or ``TorchAOTokenDispatcher`` for products in fewer
    than 16 bits: as many rows come as go."""
    rows, counts, places, tokens, scores = exchanged_rows(r, x, top, chosen, shape, low)
    if low is None:
        out = grouped(r, rows, counts, shape.spec)
    else:
        out = plain_grouped(r, rows, counts, shape.spec, low.grouped)
    return returned(r, x, out, places, tokens, scores, shape.expert_ranks)


def exchanged_rows(
    r: Recorder, x: Tensor, top: Tensor, chosen: Tensor, shape: LayerShape, low: LowLinear | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``dispatch``: rows by expert, how many each has, their places, and of those that were sent token and score."""
    ranks, e = shape.expert_ranks, shape.spec.experts // shape.expert_ranks
    routed, tokens, scores = dispatched(r, x, top, chosen)
    every = exchanged_counts(r, ranks, e)
    for name in ("rows_to_ranks", "rows_from_ranks"):
        r.empty((ranks,), "int64", name)
    received = exchanged(r, routed, ranks, "rows_exchanged")
    if low is None:
        rows, places, counts = expert_major(r, received, ranks, e)
    else:
        rows, places, counts = permuted(r, received, ranks, e, low.rows)
    del every
    return rows, counts, places, tokens, scores


def exchanged_counts(r: Recorder, ranks: int, e: int) -> Tensor:
    """``_AllToAllStack.forward``."""
    pieces = [r.empty((e,), "int64", "counts_received") for _ in range(ranks)]
    made = r.empty((ranks, e), "int64", "counts_of_ranks")
    pieces.clear()
    return made


def exchanged(r: Recorder, x: Tensor, ranks: int, name: str) -> Tensor:
    """``_AllToAllUneven`` of spmd_types 0.3.1 (``_collectives.py``): a tensor from every rank, and then all in one; in
    backward, too."""
    shape, dtype = x.shape, x.dtype

    def moved(r: Recorder, name: str) -> Tensor:
        pieces = [r.empty((shape[0] // ranks, *shape[1:]), dtype, f"{name}_received") for _ in range(ranks)]
        made = r.empty(shape, dtype, name)
        pieces.clear()
        return made

    size = size_of(shape, dtype)
    one_way = (Exchange("all-to-all", size, "ep"), Stream(2 * size))
    out = moved(r, name)
    work = Operator(one_way, one_way)
    return out.by(r.node((x,), (), lambda r, gradients: [moved(r, f"grad_{name}")], work=work))


def expert_major(r: Recorder, x: Tensor, ranks: int, e: int) -> tuple[Tensor, Tensor, Tensor]:
    """``_permute``: rows by expert, which row went where, and how many each expert here has."""
    every, rows = (ranks * e,), x.shape[0]
    begins = r.in_turn((every, "int64", "segment_ends"), (every, "int64", "segment_begins"))
    lengths = r.empty((e, ranks), "int64", "segment_lengths")
    starts = r.empty((e, ranks), "int64", "segment_starts")
    del begins
    numbers = r.empty(every, "int64", "segment_numbers")
    of_row = r.empty((rows,), "int64", "row_numbers_repeated")
    segments = r.empty((rows,), "int64", "segment_of_row")
    del of_row, numbers
    begins = r.in_turn((every, "int64", "expert_ends"), (every, "int64", "expert_begins"))
    started = r.empty((rows,), "int64", "start_of_row")
    numbered = r.empty((rows,), "int64", "row_numbers")
    summed = r.empty((rows,), "int64", "start_and_row")
    del started, numbered
    less = r.empty((rows,), "int64", "begin_of_row")
    places = r.empty((rows,), "int64", "permuted_indices")
    del summed, less
    counts = r.empty((e,), "int64", "rows_of_local_expert")
    made = selecting.gathered(r, x, places, "rows_by_expert")
    del starts, lengths, segments, begins
    return made, places, counts


def returned(r: Recorder, x: Tensor, out: Tensor, places: Tensor, tokens: Tensor, scores: Tensor, ranks: int) -> Tensor:
    """``combine``: rows where they came from, sent back, weighed and added up."""
    if places.shape[0] == tokens.shape[0]:
        rows = put(r, r.empty(out.shape, out.dtype, "rows_unpermuted"), places, out, "rows_unpermuted")
    else:  # with padding
        rows = unpermuted(r, out, places, tokens.shape[0])
    rows = exchanged(r, rows, ranks, "experts_exchanged")
    zeros = r.empty(x.shape, x.dtype, "experts_zeros")
    rows = weighed(r, rows, scores)
    return scattered_sum(r, zeros, tokens, rows)


def dispatched(r: Recorder, x: Tensor, top: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``LocalTokenDispatcher.dispatch``: rows by expert, the token of each, and its score."""
    rows = (chosen.shape[0] * chosen.shape[1],)
    order = r.in_turn((rows, "int64", "experts_sorted"), (rows, "int64", "row_order"))
    scores = selecting.gathered(r, top.view(*rows), order, "row_scores")
    order = r.empty(rows, "int64", "token_of_row")
    return selecting.gathered(r, x, order, "rows"), order, scores


def grouped(r: Recorder, x: Tensor, counts: Tensor, spec: ModelSpec) -> Tensor:
    """``GptOssGroupedExperts.forward`` of (N, h), or ``GroupedExperts.forward``: what is in its variables ends when it
    returns."""
    if not spec.mlp_bias:
        return plain_grouped(r, x, counts, spec)
    e, f, h, dtype = counts.shape[0], spec.expert_ffn, spec.hidden, x.dtype
    sizes = {f"{GATE_UP}.weight": (e, 2 * f, h), f"{GATE_UP}.bias": (e, 2 * f)}
    sizes |= {f"{DOWN}.weight": (e, h, f), f"{DOWN}.bias": (e, h)}
    gate_up, gate_up_bias, down, down_bias = (
        r.parameter(name, size, dtype, expert=True) for name, size in sizes.items()
    )
    offsets = r.empty((e,), "int32", "expert_offsets")
    _slack, _counts = rows_counted(r, e)
    out = grouped_product(r, x, gate_up, offsets, "experts_gate_up")
    of_first, rows_of_first = bias_rows(r, gate_up_bias, x.shape[0], "gate_up_bias")
    out = ops.add(r, out, rows_of_first, "experts_gate_up_biased")
    inner = clamped_gate(r, out, f)
    made = grouped_product(r, inner, down, offsets, "experts_down")
    of_second, rows_of_second = bias_rows(r, down_bias, x.shape[0], "down_bias")
    result = ops.add(r, made, rows_of_second, "experts_down_biased")
    del of_first, of_second
    return result


def rows_counted(r: Recorder, e: int) -> tuple[Tensor, Tensor]:
    """``tail_slack`` and ``num_tokens_per_expert_long``."""
    slack = r.in_turn(((), "int32", "rows_left"), ((1,), "int64", "rows_left_int64"))
    return slack, r.empty((e + 1,), "int64", "rows_of_expert_and_left")


def bias_rows(r: Recorder, bias: Tensor, rows: int, name: str) -> tuple[Tensor, Tensor]:
    """``cat([bias, zeros]).repeat_interleave(…)``: each row's bias, by an index that is saved."""
    both = with_zeros(r, bias)
    indices = r.empty((rows,), "int64", f"{name}_of_row")
    return both, chosen_rows(r, both, indices, bias.shape[0], name)


def chosen_rows(r: Recorder, x: Tensor, indices: Tensor, kept: int, name: str) -> Tensor:
    """``index_select`` of rows: saves the index; of the gradient, which all rows have, the first ``kept`` are used."""
    shape, dtype = x.shape, x.dtype
    of = tagged(f"grad_{name}_rows", kept)

    return r.output((x,), (indices,), fresh(x, of), (indices.shape[0], shape[1]), dtype, f"{name}_rows")


def clamped_gate(r: Recorder, x: Tensor, f: int) -> Tensor:
    """``swiglu``: every second feature is the gate's; ``addcmul`` adds one to the other."""
    gate = ops.slice_last(r, x, f, "gate")
    up = ops.slice_last(r, x, f, "up")
    gate = selecting.clamped(r, gate, "gate_clamped", bounds=1)
    up = selecting.clamped(r, up, "up_clamped", bounds=2)
    inner = ops.elementwise(r, "gate_sigmoid", (ops.scale(r, gate, "gate_scaled"),), saves_output=True)
    gated = ops.multiply(r, gate, inner, "gated")
    del inner
    return added_product(r, gated, up)


def added_product(r: Recorder, x: Tensor, y: Tensor) -> Tensor:
    """``addcmul(x, x, y)``: saves both; each factor is multiplied with the value, 1, before the gradient is."""
    shape, dtype = x.shape, x.dtype

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        def of(part: str) -> Tensor:
            return r.in_turn((shape, dtype, f"gated_up_{part}_valued"), (shape, dtype, f"grad_gated_up_{part}"))

        first = of("first")
        return [incoming(gradients).alias(), first, of("second")]

    return r.output((x, x, y), (x, y), backward, shape, dtype, "gated_up")


def combined(r: Recorder, x: Tensor, rows: Tensor, tokens: Tensor, scores: Tensor) -> Tensor:
    """``LocalTokenDispatcher.combine``: rows times scores in fp32, added up token by token."""
    zeros = r.empty(x.shape, x.dtype, "experts_zeros")
    rows = weighed(r, rows, scores)
    return scattered_sum(r, zeros, tokens, rows)


def weighed(r: Recorder, rows: Tensor, scores: Tensor) -> Tensor:
    made = ops.multiply(r, ops.cast(r, rows, "fp32", "rows_fp32"), scores.view(rows.shape[0], 1), "rows_weighed")
    return ops.cast(r, made, rows.dtype, "rows_weighed_cast")


def scattered_sum(r: Recorder, zeros: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """``deterministic_scatter_add`` (``torchtitan/ops/scatter_add.py``): saves the tokens; gradients are gathered.

    Its kernel runs by ``index_put_`` of whole rows, as the index is the same along them (``_scatter_via_index_put`` of
    ``aten/src/ATen/native/TensorAdvancedIndexing.cpp``, since PyTorch's pull request 156744), which sorts it: the index
    itself, the sorted, where they were, and a range, (N,) each (``index_put_with_sort_kernel`` of
    ``cuda/Indexing.cu``).
    """
    like, dtype = rows.shape, rows.dtype
    out = r.empty(zeros.shape, dtype, "experts_sum")
    if r.kernel_workspaces:
        names = ("scatter_index", "scatter_sorted", "scatter_order", "scatter_range")
        sorting = [r.empty((like[0],), "int64", name, Category.WORKSPACES) for name in names]
        del sorting
    return out.by(r.node((rows,), (tokens,), fresh(rows, "grad_rows_of_experts")))
