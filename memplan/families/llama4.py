"""Llama 4 (``models/llama4/modeling_llama4.py``), the part that reads text: Scout and Maverick. Three layers of four
have rotary positions and see their chunk alone; experts, or every second layer's, beside a shared one.

transformers gives every expert every token, times the router's score, which is nought but for the chosen ones. Shapes:
n tokens of a micro-batch, E experts, h hidden, f an expert's inner width."""

from __future__ import annotations

from ..layers import experts, ops, selecting
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import CORE_GPT, MIXTURE, reads
from ..layers.ends import (
    Embedded,
    additive_mask,
    causal_mask,
    look_for_packed_rows,
    positions,
    rotary_tables,
    word_embeddings,
)
from ..layers.huggingface import Heads, LayerShape, Shared, activation, attention, linear
from ..layers.tuning import folded
from ..plan.releases import SUMMED_POSITIONS
from ..plan.spec import ModelSpec
from ..values import replace
from .base import Config, Family, Submodules, key
from .deepseek import complex_product
from .gemma2 import normed as rms
from .llama import ATTENTION, CONSTANTS, KEYS, LLAMA_FAMILY, SILU, laid_out, projection
from .mixtral import NO_LEAF_SHARED, SHARED_REGISTERED


def without_weight(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``Llama4TextL2Norm.forward``: ``_norm(x.float()).type_as(x)``."""
    return ops.cast(r, rms(r, ops.cast(r, x, "fp32", f"{name}_fp32"), name), x.dtype, f"{name}_cast")


def normed(r: Recorder, x: Tensor, name: str) -> Tensor:
    """By ``qk_norm``, which is a module."""
    (x,) = r.entered(name, x)
    return r.left(name, without_weight(r, x, name))


def norm(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``Llama4TextRMSNorm.forward``."""
    weight = r.parameter(f"{name}.weight", (x.shape[-1],), x.dtype)
    output = without_weight(r, x, name)
    return ops.multiply(r, output, weight, name)


# -- attention --------------------------------------------------------------------------------------


def seen_as_heads(r: Recorder, x: Tensor, name: str, heads: int, shape: LayerShape) -> Tensor:
    """(b, s, a d) as (b, s, a, d); gradients of what is turned are laid out there."""
    if not (shape.turns and name != "value"):
        x = laid_out(r, x, name, heads, shape)
    return x.view(shape.b, shape.s, heads, shape.spec.head_dim)


def rotary(r: Recorder, q: Tensor, k: Tensor, table: Tensor, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """``apply_rotary_emb``: pairs of neighbours as complex numbers, in fp32."""
    q_wide = ops.cast(r, q, "fp32", "query_fp32")
    k_wide = ops.cast(r, k, "fp32", "key_fp32")
    q_out = laid_out(r, complex_product(r, q_wide, table, "query"), "query", q.shape[2], shape)
    k_out = laid_out(r, complex_product(r, k_wide, table, "key"), "key", k.shape[2], shape)
    return ops.cast(r, q_out, q.dtype, "query_rotary"), ops.cast(r, k_out, k.dtype, "key_rotary")


def temperatures(r: Recorder, given: Tensor | None, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """``log1p(floor((positions.float() + 1) / floor_scale)) * attn_scale + 1`` as (1, s, 1, 1) fp32, and positions,
    which before 5.0 are those of the model (``cache_position``)."""
    numbers = positions(r, shape.s) if shape.transformers >= SUMMED_POSITIONS or given is None else given
    scales = ops.cast(r, numbers.view(shape.s), "fp32", "positions_fp32")
    for name in ("one", "divided", "floor", "log1p", "scaled", "shifted"):
        scales = ops.add_constant(r, scales, f"temperatures_{name}")
    return scales.view(1, shape.s, 1, 1), numbers


def llama4_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """``Llama4TextAttention.forward``: norms are of layers with positions, temperatures of the others."""
    spec, b, s = shape.spec, shape.b, shape.s
    q, k, v = (
        seen_as_heads(r, projection(r, hidden, name, heads, shape), name, heads, shape)
        for name, heads in (("query", spec.heads), ("key", spec.kv_heads), ("value", spec.kv_heads))
    )
    numbers = scales = None
    if shape.turns:
        assert shared.cos is not None
        q, k = rotary(r, q, k, shared.cos, shape)
    if shape.turns and spec.qk_norm:
        q = normed(r, q, "query_norm")
        k = normed(r, k, "key_norm")
    if not shape.turns:
        scales, numbers = temperatures(r, shared.position_ids, shape)
        q = ops.cast(r, ops.multiply(r, q, scales, "query_scaled_fp32"), q.dtype, "query_temperature")
    queries, keys, values = (Heads(x.view(b, x.shape[2], s, spec.head_dim), True) for x in (q, k, v))
    out, weights = attention(r, queries, keys, values, shared, shape)
    del queries, keys, values
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    del q, k, v, numbers, scales
    return out, weights


# -- experts ----------------------------------------------------------------------------------------


def router(r: Recorder, hidden: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """``Llama4Router.forward``: scores (n, E), nought where an expert is not chosen, and logits. bitsandbytes leaves it
    as it is (``replace_with_bnb_linear`` asks for ``nn.Linear`` itself)."""
    logits = experts.logits_of(r, hidden, spec)
    values, indices = selecting.top_k(r, logits, spec.expert_top_k, "chosen")
    scores = selecting.scattered(r, values, indices, logits.shape, "router_scores")
    scores = ops.cast(r, wide_sigmoid(r, scores), scores.dtype, "router_sigmoid_cast")
    return scores, logits


def wide_sigmoid(r: Recorder, x: Tensor) -> Tensor:
    """``sigmoid(x.float())``."""
    return ops.elementwise(r, "router_sigmoid", (ops.cast(r, x, "fp32", "router_scores_fp32"),), saves_output=True)


def every_expert(r: Recorder, x: Tensor, spec: ModelSpec) -> Tensor:
    """``Llama4TextExperts.forward`` of rows (E n, h), n for each expert."""
    e, f, h, dtype = spec.experts, spec.expert_ffn, spec.hidden, x.dtype
    (x,) = r.entered(experts.EXPERTS, x)
    n = x.shape[0] // e
    gate_up = r.parameter(experts.GATE_UP, (e, h, 2 * f), dtype)
    down = r.parameter(experts.DOWN, (e, f, h), dtype)
    adapters = experts.wrapped(r, {experts.GATE_UP: gate_up, experts.DOWN: down})
    rows = x.view(e, n, h)
    gate_up = folded(r, gate_up, adapters.get(experts.GATE_UP), experts.GATE_UP)
    both = ops.matmul(r, rows, gate_up, (e, n, 2 * f), "experts_gate_up")
    gate, up = ops.split(r, both, [(e, n, f), (e, n, f)], "gate_up")
    made = gated(r, gate, up, spec)
    down = folded(r, down, adapters.get(experts.DOWN), experts.DOWN)
    out = ops.matmul(r, made, down, (e, n, h), "experts_down")
    del made
    return r.left(experts.EXPERTS, out.view(e * n, h))


def gated(r: Recorder, gate: Tensor, up: Tensor, spec: ModelSpec) -> Tensor:
    """``up * act_fn(gate)``."""
    (gate,) = r.entered(experts.ACTIVATION, gate)
    inner = r.left(experts.ACTIVATION, activation(r, gate, spec))
    return ops.multiply(r, up, inner, "gated")


def mixture(r: Recorder, x: Tensor, shape: LayerShape) -> experts.Mixed:
    """``Llama4TextMoe.forward``."""
    spec, rows = shape.spec, (shape.b * shape.s, shape.spec.hidden)
    (x,) = r.entered(experts.MODULE, x)
    hidden = ops.alias(r, x)
    hidden = hidden.alias(*rows)
    scores, logits = routed(r, hidden, spec)
    given = selecting.repeated_rows(r, hidden, spec.experts)
    given = ops.multiply(r, given, by_expert(r, scores), "rows_weighted")
    made = every_expert(r, given, spec)
    out = experts.one_expert(r, hidden, spec, ("shared_gate", "shared_up", "shared_down"), spec.shared_expert_ffn)
    out = ops.add_in_place(r, out, selecting.sum_of_rows(r, made, spec.experts))
    del scores, given, made
    return r.left(experts.MODULE, out.view(*x.shape)), logits


def routed(r: Recorder, hidden: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    (hidden,) = r.entered(experts.ROUTER, hidden)
    scores, logits = router(r, hidden, spec)
    return r.left(experts.ROUTER, scores), logits


def by_expert(r: Recorder, scores: Tensor) -> Tensor:
    """``scores.transpose(0, 1).reshape(-1, 1)``."""
    n, e = scores.shape
    return ops.contiguous(r, scores, (e, n), "scores_by_expert").view(e * n, 1)


# -- layer and embedding ----------------------------------------------------------------------------


def layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``Llama4TextDecoderLayer.forward``: attention's weights end when the experts have given their logits."""
    residual = hidden
    hidden = norm(r, hidden, "attention_norm")
    attended, given = llama4_attention(r, hidden, shared, shape)
    hidden = ops.add(r, residual, attended, "residual_attention")
    residual = hidden
    hidden = norm(r, hidden, "mlp_norm")
    if shape.mixture:
        hidden, given = mixture(r, hidden, shape)
    else:
        hidden = experts.one_expert(r, hidden, shape.spec, ("gate", "up", "down"), shape.spec.ffn)
    hidden = ops.add(r, residual, hidden, "residual_mlp")
    del residual, attended, given
    return hidden


def chunked_mask(r: Recorder, shape: LayerShape) -> Tensor | None:
    """``create_chunked_causal_mask``, which counts what pads rows on their left."""
    b = shape.b
    look_for_packed_rows(r, b, shape.s)
    padding = r.empty((b,), "int64", "left_padding")
    mask = None if shape.flash else additive_mask(r, shape, pairs_of_chunks(r, shape))
    del padding
    return mask


def pairs_of_chunks(r: Recorder, shape: LayerShape) -> Tensor:
    """``chunked_overlay`` and what is causal, (b, 1, s, s) bool."""
    b, s = shape.b, shape.s
    pairs = (b, 1, s, s)

    def chunks(shape: tuple[int, ...], name: str) -> Tensor:
        return r.in_turn(
            ((b, 1, 1, 1), "int64", f"{name}_left_padding"),
            (shape, "int64", f"{name}_less_padding"),
            (shape, "int64", f"{name}_chunks"),
        )

    batch, head = r.empty((b,), "int64", "batch_indices"), r.empty((1,), "int64", "head_indices")
    q, k = positions(r, s), positions(r, s)
    true = r.empty((), "bool", "true")
    of_keys, of_queries = chunks((b, 1, 1, s), "key"), chunks((b, 1, s, 1), "query")
    same = r.empty(pairs, "bool", "same_chunk")
    del of_keys, of_queries
    within = r.empty(pairs, "bool", "chunk_mask_bool")
    del same, true
    before = r.empty((1, 1, s, s), "bool", "causal_mask_bool")
    allowed = r.empty(pairs, "bool", "chunked_mask_bool")
    del before, within, batch, head, q, k
    return allowed


def embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``Llama4TextModel.forward`` up to the first layer: a mask of each kind, and angles as complex numbers."""
    inputs_embeds = r.embedded(word_embeddings(r, shape))
    position_ids = positions(r, shape.s, summed=shape.transformers >= SUMMED_POSITIONS)
    full = causal_mask(r, shape)
    mask = chunked_mask(r, shape)
    table, _ = rotary_tables(r, shape)
    return Embedded(inputs_embeds, Shared(mask, table, None, position_ids, full))


FEED_FORWARD = {
    **{name: f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
    **{f"shared_{name}": f"feed_forward.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
}
"""Of dense layers, and of the expert that takes every token."""

SUBMODULES = {
    **NO_LEAF_SHARED,
    "layer": replace(
        NO_LEAF_SHARED["layer"],
        parts=(*NO_LEAF_SHARED["layer"].parts, "query_norm", "key_norm"),
        leaf="",
        products_of_leaves=True,
    ),
    "embedding": replace(NO_LEAF_SHARED["embedding"], before_forward={"word": 1}, base_begins="word"),
    "final_norm": Submodules(base_ends="final_norm"),
}
"""The norms of queries and keys, too, though they have no weights; ``Llama4TextModel.forward`` asks for the device of
the embedding's weight."""

LLAMA4_TEXT = replace(
    LLAMA_FAMILY,
    name="llama4_text",
    no_base=True,
    classifies=False,
    config=Config(
        keys={
            **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
            "attention_output_bias": KEYS["attention_bias"],
            "kv_heads": key("num_key_value_heads", default=8),
            "head_dim": key("head_dim", default=128),
            "ffn": key("intermediate_size_mlp", default=16_384),
            "positions_max": key("max_position_embeddings", default=131_072),
            "attention_chunk": key("attention_chunk_size", default=8192),
            "nope_interval": key("no_rope_layer_interval", default=4),
            "qk_norm": key("use_qk_norm", default=True),
            "experts": key("num_local_experts", default=16),
            "expert_top_k": key("num_experts_per_tok", default=1),
            "expert_ffn": key("intermediate_size", default=8192),
            "shared_expert_ffn": key("intermediate_size", default=8192),
            "expert_layers": key("moe_layers", default=None),
            "router_aux_loss": key("router_aux_loss_coef", default=0.001),
        },
        constants={
            **CONSTANTS,
            "mlp_bias": False,
            "qk_norm_over": "head_without_weight",
            "router_score": "sigmoid",
            "router_weighs_inputs": True,
        },
        activation=SILU,
        activations=("silu", "swish"),
    ),
    covers={
        **reads(
            MIXTURE,
            *("qk_norm_over", "attention_chunk", "nope_interval", "router_weighs_inputs", "router_score"),
            "shared_expert_ffn",
        ),
        "qk_norm_over": ("head_without_weight",),
        "router_weighs_inputs": (True,),
        "router_score": ("sigmoid",),
        "sliding_window": (None,),
    },
    needs=("attention_chunk", "experts"),
    layer=layer,
    embedding=embedding,
    padded=False,
    mixture=mixture,
    experts_in="feed_forward",
    norm=norm,
    tables="complex",
    softmax_in_dtype=True,
    no_package="its chunks are no windows, and transformers says that it has no such attention (_supports_flash_attn)",
    kernels=(),
    linear_layers={**{name: LLAMA_FAMILY.linear_layers[name] for name in ATTENTION[:4]}, **FEED_FORWARD},
    lora_targets=None,
    registered=(*ATTENTION, *SHARED_REGISTERED),
    since=(4, 57),
    submodules=SUBMODULES,
    megatron_core=CORE_GPT,
)

FAMILIES = {
    "llama4_text": LLAMA4_TEXT,
    "llama4": Family("llama4", config=Config(keys={}, constants={}, text_part="llama4_text")),
}
