"""Gemma 4 (``models/gemma4/modeling_gemma4.py``, ``models/gemma4_unified``), the part that reads text: Gemma 3's layer
with norms of values, and a number by which each layer multiplies its output. Every sixth layer, which sees all tokens,
has heads of its own, and may have no projection of values.

Models with embeddings of each layer and shared keys and values (E2B, E4B) are not modelled."""

from __future__ import annotations

from ..layers import experts, ops, selecting, work
from ..layers.autograd import Recorder, Tensor, size_of
from ..layers.coverage import MIXTURE, Allowed, reads
from ..layers.huggingface import Heads, LayerShape, Shared, attention, linear, norm, rotary_one, softmax_fp32
from ..plan.releases import LIBRARIES
from ..plan.spec import ModelSpec
from ..tape.events import Category
from ..values import replace
from .base import key
from .gemma2 import GEMMA2, attended, gemma2_layer
from .gemma3 import CONFIG as OF_GEMMA3
from .llama import laid_out, llama_mlp, projection


def without_weight(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``Gemma4RMSNorm._norm`` in fp32: ``x * (mean(x ** 2) + eps) ** -0.5``."""
    hidden = ops.cast(r, x, "fp32", f"{name}_fp32")
    variance = ops.mean_last(r, ops.power(r, hidden, f"{name}_square"), f"{name}_variance")
    mean_squared = ops.add_constant(r, variance, f"{name}_eps")
    del variance
    return ops.multiply(r, hidden, ops.power(r, mean_squared, f"{name}_rstd"), f"{name}_normed")


def gemma4_norm(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``Gemma4RMSNorm.forward``: multiplied by the weight in fp32, then cast."""
    weight = r.parameter(f"{name}.weight", (x.shape[-1],), x.dtype)
    output = without_weight(r, x, name)
    output = ops.multiply(r, output, ops.cast(r, weight, "fp32", f"{name}_weight_fp32"), f"{name}_scaled")
    return ops.cast(r, output, x.dtype, name)


def value_norm(r: Recorder, x: Tensor) -> Tensor:
    """By ``v_norm``, a module without a weight."""
    (x,) = r.entered("value_norm", x)
    output = without_weight(r, x, "value_norm")
    return r.left("value_norm", ops.cast(r, output, x.dtype, "value_norm"))


def projected(r: Recorder, hidden: Tensor, name: str, heads: int, shape: LayerShape, *, values: bool = False) -> Tensor:
    """As (b, s, a, d). ``values``: as these are, whose gradient comes as attention gives it."""
    x = projection(r, hidden, name, heads, shape)
    x = laid_out(r, x, "value", heads, shape) if values else x
    return x.view(shape.b, shape.s, heads, shape.spec.head_dim)


def gemma4_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """``Gemma4TextAttention.forward``: queries are done with before there are keys."""
    spec = shape.spec
    q = projected(r, hidden, "query", spec.heads, shape)
    q = norm(r, q, spec, "query_norm")
    q = rotary_one(r, q, shared, "query")
    own = not (shape.full and spec.keys_as_values)
    k = projected(r, hidden, "key", spec.kv_heads, shape, values=not own)
    v = projected(r, hidden, "value", spec.kv_heads, shape, values=True) if own else k
    k = norm(r, k, spec, "key_norm")
    k = rotary_one(r, k, shared, "key")
    v = value_norm(r, v)
    queries, keys, values = (Heads(x.view(shape.b, x.shape[2], shape.s, spec.head_dim), True) for x in (q, k, v))
    out, weights = attention(r, queries, keys, values, shared, shape)
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    return out, weights


def router(r: Recorder, hidden: Tensor, spec: ModelSpec) -> experts.Routed:
    """``Gemma4TextRouter.forward``: features are normed and scaled; the chosen weights are normed and scaled by
    expert."""
    hidden = ops.cast(r, without_weight(r, hidden, "router_norm"), hidden.dtype, "router_norm")
    scale = r.parameter("router_scale.weight", (spec.hidden,), hidden.dtype)
    hidden = ops.scale(r, ops.multiply(r, hidden, scale, "router_scaled"), "router_scaled_root")
    logits = experts.logits_of(r, hidden, spec)
    probabilities = softmax_fp32(r, logits, "router")
    weights, indices = selecting.top_k(r, probabilities, spec.expert_top_k, "chosen")
    weights = experts.normed(r, weights)
    scales = r.parameter("router_expert_scale.weight", (spec.experts,), hidden.dtype)
    weights = ops.multiply(r, weights, selecting.gathered(r, scales, indices, "chosen_scales"), "chosen_scaled")
    del hidden, logits
    return probabilities, weights, indices


def mixed_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """A layer with experts."""
    spec = shape.spec
    hidden, _given = attended(r, hidden, shared, shape)
    residual = hidden
    hidden = norm(r, hidden, spec, "mlp_norm")
    hidden = llama_mlp(r, hidden, spec)
    alone = norm(r, hidden, spec, "mlp_alone_norm")
    flat = ops.alias(r, residual)
    flat = flat.alias(shape.b * shape.s, spec.hidden)
    _given, weights, indices = experts.routed(r, flat, spec, router)  # whose probabilities end attention's weights
    beside = norm(r, flat, spec, "experts_norm")
    beside = experts.by_experts(r, beside, indices, weights, shape, experts.gated)
    beside = beside.view(*residual.shape)
    beside = norm(r, beside, spec, "experts_output_norm")
    hidden = ops.add(r, alone, beside, "mlp_and_experts")
    hidden = norm(r, hidden, spec, "mlp_output_norm")
    hidden = ops.add(r, residual, hidden, "residual_mlp")
    hidden = scaled_in_place(r, hidden, shape)
    del _given, alone, residual, flat, weights, indices, beside
    return hidden


def gemma4_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``Gemma4TextDecoderLayer.forward``."""
    if shape.mixture:
        return mixed_layer(r, hidden, shared, shape)
    hidden = gemma2_layer(r, hidden, shared, shape)
    return scaled_in_place(r, hidden, shape)


def scaled_in_place(r: Recorder, hidden: Tensor, shape: LayerShape) -> Tensor:
    """``hidden_states *= self.layer_scalar``, a buffer (1,) in the dtype of stored parameters."""
    scalar = r.outside((1,), shape.stored or shape.dtype, Category.BUFFERS)
    r.ran(work.Stream(2.0 * size_of(hidden.shape, hidden.dtype)))
    like = hidden.shape, scalar.dtype if scalar.dtype == "fp32" else hidden.dtype
    node = r.node((hidden, scalar), (scalar,), lambda r, gradients: [r.empty(*like, "grad_layer_scaled"), None])
    return Tensor(hidden.storage, hidden.shape, hidden.dtype, node)


EXPERTS = {
    "mixed": key("enable_moe_block", default=False),
    "experts": key("num_experts", default=None),
    "expert_top_k": key("top_k_experts", default=None),
    "expert_ffn": key("moe_intermediate_size", default=None),
}

CONFIG = replace(
    OF_GEMMA3,
    keys={
        **OF_GEMMA3.keys,
        "layers": key("num_hidden_layers", default=30),
        "full_head_dim": key("global_head_dim", default=512),
        "full_kv_heads": key("num_global_key_value_heads", default=None),
        "keys_as_values": key("attention_k_eq_v", default=False),
        "vocab": key("vocab_size", default=262_144),
        "sliding_window": key("sliding_window", default=512),
        "full_interval": key("layer_types", default=6),
    },
    refused={
        "num_kv_shared_layers": 0,
        "use_bidirectional_attention": "vision",
        "rope_parameters.sliding_attention.rope_type": "default",
        "rope_parameters.full_attention.rope_type": "proportional",
    },
    wanted={"hidden_size_per_layer_input": (0,)},
)

SUBMODULES = GEMMA2.submodules or {}
OF_ROUTER = ("router_scale", "router_expert_scale")
"""The router's own parameters, which ``parameters()`` has before its linear layer's, and ``fully_shard`` behind it
(``_get_managed_modules``)."""
OF_EXPERTS = (
    *("router", *OF_ROUTER, "experts"),
    *("mlp_alone_norm", "experts_output_norm", "experts_norm"),
)

COVERED: Allowed = {
    **reads(MIXTURE, "logit_softcap", "full_interval", "full_head_dim", "full_kv_heads", "keys_as_values"),
    "norm_place": ("both",),
    "activation": ("geglu",),
    "qk_norm": (True,),
    "mlp_bias": (False,),
    "embedding_scale": (True,),
    "router_score_first": (False,),
    "dense_layers": ((),),
}

GEMMA4_TEXT = replace(
    GEMMA2,
    name="gemma4_text",
    config=replace(CONFIG, keys={**CONFIG.keys, **EXPERTS}),
    covers=COVERED,
    mlp_beside_experts=True,
    experts_in="",
    no_zero3_of_experts="its router, which has parameters beside its linear layer's, has not been compared with "
    "DeepSpeed's engine",
    needs=("full_interval", "full_head_dim", "full_kv_heads"),
    layer=gemma4_layer,
    attention=gemma4_attention,
    norm=gemma4_norm,
    kernels=(),
    no_flash="",
    lora_targets=None,
    scales_layers=True,
    classifies=False,
    since=LIBRARIES["transformers"].newest,
    submodules={
        **SUBMODULES,
        "layer": replace(SUBMODULES["layer"], parts=("value_norm",), own=OF_ROUTER, own_before="router"),
    },
    registered=(
        "query",
        "query_norm",
        "key_norm",
        "key",
        "value",
        "attention_output",
        *GEMMA2.registered[4:],
        *OF_EXPERTS,
    ),
)

GEMMA4_UNIFIED_TEXT = replace(
    GEMMA4_TEXT,
    name="gemma4_unified_text",
    config=replace(
        CONFIG,
        keys={
            **CONFIG.keys,
            "positions_max": key("max_position_embeddings", default=262_144),
            "sliding_window": key("sliding_window", default=1024),
        },
        wanted={},
    ),
    covers={**COVERED, "experts": (0,)},
    mlp_beside_experts=False,
    no_zero3_of_experts="",
)
"""``Gemma4UnifiedTextDecoderLayer`` is the same without experts and embeddings of each layer."""

FAMILIES = {one.name: one for one in (GEMMA4_TEXT, GEMMA4_UNIFIED_TEXT)}
