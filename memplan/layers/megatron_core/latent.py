"""``megatron/core/transformer/multi_latent_attention.py``, ``MLASelfAttention.forward``: queries, keys and values by
way of a lower rank, and one rotated key for all heads (``fusions/fused_mla_yarn_rope_apply.py``, ``rope_utils.py``).

Shapes: s sequence, b micro-batch, a heads on this rank, n features of a head without rotation, p with, v of a value;
the rest of a shape is a shard of the sequence under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...tape.events import Category, Hold
from ...values import replace
from .. import ops
from ..autograd import Recorder, Shape, Tensor, size_of
from ..coverage import applying
from ..gradients import each, fresh
from ..module import hold_bytes
from ..recompute import recomputed_reentrant
from ..work import Exchange, Operator, Stream
from . import adapters, offload, te, te_attention
from .ends import keep_mask
from .grouped import without_output
from .mappings import moved, own_rows
from .shape import CoreShape

NAME = "self_attention"
DOWN = f"{NAME}.linear_qkv_down_proj"
"""Of ``FusedMLASelfAttention``, for queries, keys and values together."""
Q, Q_DOWN, Q_UP = f"{NAME}.linear_q_proj", f"{NAME}.linear_q_down_proj", f"{NAME}.linear_q_up_proj"
KV_DOWN, KV_UP = f"{NAME}.linear_kv_down_proj", f"{NAME}.linear_kv_up_proj"
PROJECTION = f"{NAME}.linear_proj"

CACHED_TABLES = 32
"""Tables of angles that ``YarnRotaryEmbedding.forward`` keeps, of all layers together (``lru_cache``)."""
TABLE_ROWS = 4096
"""``original_max_position_embeddings``: rows of the cosines and sines that a layer begins with, those of a rank's
context-parallel chunks (``get_pos_emb_on_this_cp_rank``)."""

NORMED_QUERIES_SINCE = (0, 20)
"""Megatron-Core whose queries without a rank of their own are normed in the projection, a second time after the
layer's norm (``mla_qk_norm_config.py``, ``_resolve_mla_qk_layernorm``, since commit 4464d1c1)."""


TURNED = ("rotary", "learned", "none")
"""Positions of embeddings, beside which latent attention turns parts of heads of its own accord (``rope_type``)."""


def uncovered(shape: CoreShape) -> Iterator[str]:
    """What this recipe does not cover of ``shape``."""
    if not shape.spec.latent_kv_rank:
        if shape.joint_latent_down:
            yield "one projection to the ranks of latent attention without it"
        return
    yield from applying(
        (shape.implementation == "local", "latent attention in local layers; that of Transformer Engine is covered"),
        (
            shape.spec.positions not in TURNED or shape.rotary_interleaved,
            "latent attention with other positions than rotary ones",
        ),
        (shape.spec.attention_bias, "biases of latent attention's queries, keys and values"),
        (
            shape.joint_latent_down and not shape.spec.latent_q_rank,
            "one projection of queries, keys and values that have no rank of their own, which Megatron-Core refuses",
        ),
    )
    ranks = shape.spec.latent_q_rank, shape.spec.latent_kv_rank + shape.spec.rope_head_dim
    if shape.joint_latent_down and any(rank % shape.t for rank in ranks):
        yield "one projection of queries, keys and values whose ranks tensor-parallel ranks do not divide"
    if shape.t > 1 and not shape.sequence_parallel:
        yield "latent attention with tensor parallelism but no sequence parallelism (--sequence-parallel)"


def weights(shape: CoreShape) -> dict[str, Shape]:
    """Weights on this rank, in the order in which modules register."""
    spec, t = shape.spec, shape.t
    h, a, n, p, v = spec.hidden, spec.heads // t, spec.nope_head_dim, spec.rope_head_dim, spec.value_head_dim
    q, kv = spec.latent_q_rank, spec.latent_kv_rank
    if shape.joint_latent_down:
        ups = {Q_UP: (a * (n + p), q), KV_UP: (a * (n + v), kv)}
        return {PROJECTION: (h, a * v), DOWN: ((q + kv + p) // t, h), **ups}
    queries = {Q_DOWN: (q, h), Q_UP: (a * (n + p), q)} if q else {Q: (a * (n + p), h)}
    return {PROJECTION: (h, a * v), **queries, KV_DOWN: (kv + p, h), KV_UP: (a * (n + v), kv)}


def whole(shape: CoreShape, name: str) -> Shape:
    """Outputs and inputs of one of them on all ranks together."""
    return weights(replace(shape, t=1))[name]


def dummy_gradients(shape: CoreShape) -> frozenset[Shape]:
    """Shapes of the static stand-ins for weight gradients."""
    return frozenset(weights(shape).values()) if shape.gradient_fusion else frozenset()


def tables(shape: CoreShape, layers: int) -> list[Hold]:
    """What ``YarnRotaryEmbedding`` of every layer keeps: cosines and sines in the layer's dtype, which fused kernels
    take for the sequence at hand, and, of the last layers, angles in fp32."""
    rows = shape.s if shape.rope_fusion else TABLE_ROWS // shape.cp
    p = shape.spec.rope_head_dim
    cosines = hold_bytes((rows, 1, 1, p), shape.dtype)
    angles = hold_bytes((shape.s, 1, 1, p), "fp32")
    found = [
        Hold(0, cosines, Category.BUFFERS, f"rotary_{part}", (rows, 1, 1, p), shape.dtype) for part in ("cos", "sin")
    ]
    inverse = Hold(0, hold_bytes((p // 2,), "fp32"), Category.BUFFERS, "rotary_inverse_frequencies", (p // 2,), "fp32")
    table = Hold(0, angles, Category.BUFFERS, "rotary_angles", (shape.s, 1, 1, p), "fp32")
    return (found + [inverse] * 3) * layers + [table] * min(layers, CACHED_TABLES)


def attention(r: Recorder, hidden: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor | None]:
    """The normed (s, b, h) to (s, b, h) and the bias that is not added yet."""
    for name, size in weights(shape).items():
        r.parameter(f"{name}.weight", size, shape.dtype, low=shape.within(name).low)
        if adapters.adapts(r, name):
            outputs, inputs = whole(shape, name)
            adapters.parameters(r, name, outputs, inputs, shape, columns=name != PROJECTION)
    discard = None
    with offload.group(r, hidden, "qkv_linear", shape) as (hidden, commit):
        compressed = (_down_together if shape.joint_latent_down else _down)(r, hidden, shape)
        if "mla_up_proj" in shape.recompute_modules:
            (q, k, v), discard = without_output(r, compressed, lambda r, x, y, z: _up(r, x, y, z, shape))
        else:
            q, k, v = _up(r, *compressed, shape)
    held = compressed[:2] if shape.joint_latent_down else compressed  # ``get_query_key_value_tensors`` returns it
    del compressed
    commit([hidden])
    if "core_attn" in shape.recompute_modules:
        context = recomputed_reentrant(r, lambda r, q, k, v: te_attention.core_attention(r, q, k, v, shape), (q, k, v))
        keep_mask(r, shape)
    else:
        with offload.group(r, q, "core_attn", shape) as (q, commit):
            context = te_attention.core_attention(r, q, k, v, shape)
        commit([q, k, v])
    if discard is not None:
        discard(r, context)
    del held
    original, bias = shape.saves_original, shape.spec.attention_output_bias
    with offload.group(r, context, "attn_proj", shape) as (context, commit):
        out = adapters.row_linear(r, context, PROJECTION, shape, bias=bias, original=original)
    commit([context])
    return out


def _down(r: Recorder, hidden: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor, Tensor]:
    """``_qkv_down_projection``: queries of their rank (or the hidden state), keys and values of theirs, and the key
    that is rotated, gathered along the sequence."""
    spec = shape.spec
    q_rank, kv_rank, p = spec.latent_q_rank, spec.latent_kv_rank, spec.rope_head_dim
    queries, original = hidden, "layernorm" in shape.recompute_modules
    if q_rank:
        queries = adapters.duplicated(r, hidden, Q_DOWN, q_rank, shape, original=original)
    both = adapters.duplicated(r, hidden, KV_DOWN, kv_rank + p, shape, original=original)
    lead = both.shape[:-1]
    keys, rotated = ops.split(r, both, [(*lead, kv_rank), (*lead, p)], "kv_compressed")
    if shape.sequence_parallel:
        rotated = moved(r, rotated, shape.s, "all-gather", ("rotated_key_gathered", "grad_rotated_key_scattered"))
    return queries, keys, rotated


def _down_together(r: Recorder, hidden: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor, Tensor]:
    """``FusedMLASelfAttention._qkv_down_projection``, of the hidden state before its norm. Each tensor-parallel rank
    has a part of all features of the whole sequence: parts are put together, and of those that are projected further a
    rank takes its tokens, queries as a view, keys and values as a copy."""
    spec, t = shape.spec, shape.t
    q, kv, p = spec.latent_q_rank, spec.latent_kv_rank, spec.rope_head_dim
    n = (q + kv + p) // t
    joint, _ = te.norm_column_linear(r, hidden, DOWN, f"{DOWN}.layer_norm", n, shape, bias=False, skip_bias=False)
    lead = joint.shape[:-1]
    queries, both = ops.split(r, joint, [(*lead, q // t), (*lead, (kv + p) // t)], "latent_compressed")
    del joint
    if t == 1:
        keys, rotated = ops.split(r, both, [(*lead, kv), (*lead, p)], "kv_compressed")
        return queries, keys, rotated
    queries = _own_tokens(r, _together(r, queries, "q_compressed", shape), "q_compressed", shape, copies=False)
    both = _together(r, both, "kv_compressed", shape)
    lead = both.shape[:-1]
    keys, rotated = ops.split(r, both, [(*lead, kv), (*lead, p)], "kv_compressed")
    return queries, _own_tokens(r, keys, "kv_compressed", shape, copies=True), rotated


def _together(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> Tensor:
    """``gather_from_tensor_model_parallel_region`` of a slice, which is copied first: parts are received one behind the
    other, then put side by side; of the gradient a rank copies its part."""
    like, dtype, whole = x.shape, x.dtype, (*x.shape[:-1], shape.t * x.shape[-1])

    received = r.empty((shape.t * like[0], *like[1:]), dtype, f"{name}_received", Category.COMMUNICATION_BUFFERS)
    r.empty(like, dtype, f"{name}_sent", Category.COMMUNICATION_BUFFERS)
    joined = r.empty(whole, dtype, f"{name}_together")
    del received
    work = Operator(
        (Exchange("all-gather", size_of(whole, dtype)), Stream(2 * size_of(whole, dtype))),
        (Stream(2 * size_of(like, dtype)),),
    )
    return joined.by(r.node((x,), (), fresh(x, f"grad_{name}_part"), work=work))


def _own_tokens(r: Recorder, x: Tensor, name: str, shape: CoreShape, *, copies: bool) -> Tensor:
    """``scatter_to_sequence_parallel_region``: tokens of this rank, with copies where ``x`` is a slice of features;
    their gradients are gathered."""
    part = (x.shape[0] // shape.t, *x.shape[1:])
    if not copies:
        return own_rows(r, x, part, f"grad_{name}_gathered")
    done = Operator((Stream(2 * size_of(part, x.dtype)),), (Exchange("all-gather", size_of(x.shape, x.dtype)),))
    gradient = fresh(x, f"grad_{name}_gathered", Category.COMMUNICATION_BUFFERS)
    return r.output((x,), (), gradient, part, x.dtype, f"{name}_own", work=done)


def _up(r: Recorder, queries: Tensor, keys: Tensor, rotated: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor, Tensor]:
    """``qkv_up_proj_and_rope_apply``: q and k (s, b, a, n + p), v (s, b, a, v), each contiguous."""
    spec, s, b = shape.spec, shape.s, shape.b
    sizes = weights(shape)
    a, n, p, v = spec.heads // shape.t, spec.nope_head_dim, spec.rope_head_dim, spec.value_head_dim
    q_name = Q_UP if spec.latent_q_rank else Q
    q_normed = spec.qk_norm and (bool(spec.latent_q_rank) or shape.core >= NORMED_QUERIES_SINCE)
    if shape.joint_latent_down and shape.t == 1:  # ``prepare_forward``: linear layers copy a slice of features
        queries = ops.contiguous(r, queries, queries.shape, "q_compressed_contiguous")
    q = _projected(r, queries, q_name, sizes[q_name][0], shape, normed=q_normed)
    copied = shape.joint_latent_down and shape.t > 1
    contiguous = keys if copied else ops.contiguous(r, keys, keys.shape, "kv_compressed_contiguous")
    kv = _projected(r, contiguous, KV_UP, sizes[KV_UP][0], shape, normed=spec.qk_norm)
    del contiguous
    q, kv, rotated = q.view(s, b, a, n + p), kv.view(s, b, a, n + v), rotated.view(s, b, 1, p)
    if shape.rope_fusion:
        q = Tensor(q.storage, q.shape, q.dtype, r.node((q,), (), lambda r, gradients: gradients))  # in place
        k, value = _split_at_once(r, kv, rotated, shape)
        return q, k, value
    plain, turned = ops.split(r, q, [(s, b, a, n), (s, b, a, p)], "query_parts")
    own, value = ops.split(r, kv, [(s, b, a, n), (s, b, a, v)], "kv_parts")
    turned = _rotary(r, turned, "query", shape)
    rotated = _rotary(r, rotated, "key", shape)
    query = ops.cat_last(r, plain, turned, "query")
    spread = ops.expanded(r, rotated, (s, b, a, p), "rotated_key_spread", copies=False)
    key = ops.cat_last(r, own, spread, "key")
    return query, key, ops.contiguous(r, value, (s, b, a, v), "value")


def _projected(r: Recorder, x: Tensor, name: str, n: int, shape: CoreShape, *, normed: bool) -> Tensor:
    norm_name = f"{name}.layer_norm" if normed else ""
    return adapters.column_linear(r, x, name, norm_name, n, shape, bias=False, skip_bias=False)[0]


def _split_at_once(r: Recorder, kv: Tensor, rotated: Tensor, shape: CoreShape) -> tuple[Tensor, Tensor]:
    """``fused_mla_rope_kv_split``: key and value in fresh tensors; saves the tables alone."""
    (s, b, a, _), spec, dtype = kv.shape, shape.spec, kv.dtype
    key = r.empty((s, b, a, spec.nope_head_dim + spec.rope_head_dim), dtype, "key")
    value = r.empty((s, b, a, spec.value_head_dim), dtype, "value")
    backward = each((kv.shape, dtype, "grad_kv"), (rotated.shape, dtype, "grad_rotated_key"))
    node = r.node((kv, rotated), (), backward, outputs=2)
    key.node, value.node, value.slot = node, node, 1
    return key, value


def _rotary(r: Recorder, x: Tensor, name: str, shape: CoreShape) -> Tensor:
    """``_apply_rotary_pos_emb_bshd`` on (s, b, heads, p): neighbours are put apart first."""
    half = (*x.shape[:-1], x.shape[-1] // 2)
    even, odd = (ops.slice_last(r, x, half[-1], f"{name}_{part}") for part in ("even", "odd"))
    apart = ops.cat_last(r, even, odd, f"{name}_apart")
    del even, odd
    cos, sin = (table(r, f"{name}_{part}", shape, shape.spec.rope_head_dim) for part in ("cos", "sin"))
    plain = ops.elementwise(r, f"{name}_times_cos", (apart,), (cos,))
    first, second = ops.split(r, apart, [half, half], f"{name}_chunk")
    turned = ops.cat_last(r, ops.scale(r, second, f"{name}_negated"), first, f"{name}_rotated")
    del first, second
    turned = ops.elementwise(r, f"{name}_times_sin", (turned,), (sin,))
    return ops.add(r, plain, turned, f"{name}_embedded")


def table(r: Recorder, name: str, shape: CoreShape, features: int) -> Tensor:
    """Cosines or sines (s, 1, 1, p) of the ``features`` that turn: taken in fp32, scaled and cast to the dtype of the
    queries."""
    size = (shape.s, 1, 1, features)
    return r.in_turn((size, "fp32", f"{name}_fp32"), (size, "fp32", f"{name}_scaled"), (size, shape.dtype, name))
