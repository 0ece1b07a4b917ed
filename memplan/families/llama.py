"""Llama (``models/llama/modeling_llama.py``) and families with its layer: Mistral, Qwen 2, Qwen 3 with head norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import CORE_GPT, LLAMA
from ..layers.ends import Embedded, causal_mask, positions, rotary_tables, word_embeddings
from ..layers.huggingface import (
    Heads,
    LayerShape,
    Shared,
    activation,
    attention,
    eager_rms_norm,
    linear,
    rms_norm,
    rotary,
)
from ..layers.tuning import Layer as Linear
from ..layers.tuning import fused
from ..plan.node import Scalar
from ..plan.releases import ATTENTION_FUNCTIONS, SUMMED_POSITIONS
from ..plan.spec import ModelSpec
from . import family
from .base import HEAD, NO_BIASES, NORM, Config, Family, ModuleNames, Submodules, key

KEYS = {
    "layers": key("num_hidden_layers"),
    "hidden": key("hidden_size"),
    "heads": key("num_attention_heads"),
    "kv_heads": key("num_key_value_heads", default=None),
    "head_dim": key("head_dim", default=None),
    "ffn": key("intermediate_size"),
    "vocab": key("vocab_size"),
    "positions_max": key("max_position_embeddings", default=2048),
    "attention_bias": key("attention_bias", default=False),
    "mlp_bias": key("mlp_bias", default=False),
    "tied_embeddings": key("tie_word_embeddings", default=False),
    "attention_dropout": key("attention_dropout", default=0.0),
}
CONSTANTS: Mapping[str, Scalar] = {
    "norm": "rmsnorm",
    "positions": "rotary",
    "embedding_dropout": 0.0,
    "hidden_dropout": 0.0,
}
KEYS_BUT_BIASES = {name: key for name, key in KEYS.items() if not name.endswith("_bias")}
SILU = key("hidden_act", default="silu")

ATTENTION = ("query", "key", "value", "attention_output", "query_norm", "key_norm")

SUBMODULES = {
    "embedding": Submodules(before_forward={"word": 2}, at={"position_ids_fp32": 1}),
    "layer": Submodules(
        before_forward={"attention_norm": 1, "query": 1, "gate": 1},
        after_forward={"gate": 1},
        before_backward={"down": 2, "attention_output": 1},
        after_backward={"up": 1},
        not_recomputed="attention_norm",
    ),
    "final_norm": NORM,
    "head": HEAD,
}


def llama_projection(r: Recorder, hidden: Tensor, name: str, heads: int, shape: LayerShape) -> Tensor:
    """A projection as (b, a, s, d)."""
    return as_heads(r, projection(r, hidden, name, heads, shape), name, heads, shape)


def projection(r: Recorder, hidden: Tensor, name: str, heads: int, shape: LayerShape) -> Tensor:
    return linear(r, hidden, name, heads * shape.spec.head_dim, shape.spec.attention_bias)


def head_by_head(shape: LayerShape) -> dict[str, bool]:
    """Which gradients attention hands back in a layout that a view of all heads has to copy."""
    queries, others = (not shape.flash or copied for copied in (shape.lays_out_queries, shape.lays_out))
    return {"query": queries, "key": others, "value": others}


def fused_projections(r: Recorder, hidden: Tensor, shape: LayerShape) -> list[Tensor]:
    """Queries, keys and values by one function of Unsloth, which runs in the place of the first layer."""
    spec = shape.spec
    heads = {"query": spec.heads, "key": spec.kv_heads, "value": spec.kv_heads}
    layers = [Linear(name, count * spec.head_dim, False, False) for name, count in heads.items()]
    made = fused(r, hidden, *layers)
    return [as_heads(r, made.pop(0), name, count, shape) for name, count in heads.items()]


def as_heads(r: Recorder, x: Tensor, name: str, heads: int, shape: LayerShape) -> Tensor:
    """(b, s, a d) as (b, a, s, d); queries and keys of Qwen 3 are normed per head."""
    spec, b, s, d = shape.spec, shape.b, shape.s, shape.spec.head_dim
    copied = head_by_head(shape)["value"] if name == "value" else not turns_in_place(r)
    if heads > 1 and copied:
        x = ops.copied_gradient(r, x, name)
    if name != "value" and spec.qk_norm:
        return eager_rms_norm(r, x.view(b, s, heads, d), f"{name}_norm").view(b, heads, s, d)
    return x.view(b, heads, s, d)


def turns_in_place(r: Recorder) -> bool:
    """A kernel turns queries and keys."""
    return r.kernels is not None and r.kernels.rope is not None


def turned(r: Recorder, q: Tensor, k: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """Queries and keys by their positions; older layers make the tables themselves."""
    if shared.cos is None:
        cos, sin = rotary_tables(r, shape)
        shared = replace(shared, cos=cos, sin=sin)
    if r.kernels is None or r.kernels.rope is None:
        return rotary(r, q, k, shared)
    assert shared.cos is not None
    assert shared.sin is not None
    copied = head_by_head(shape)
    return r.kernels.rope(r, q, k, (shared.cos, shared.sin), (copied["query"], copied["key"]))


def llama_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    spec = shape.spec
    if r.tuning is not None and r.tuning.fused:
        q, k, v = fused_projections(r, hidden, shape)
    elif shape.transformers >= ATTENTION_FUNCTIONS:
        q = llama_projection(r, hidden, "query", spec.heads, shape)
        k = llama_projection(r, hidden, "key", spec.kv_heads, shape)
        v = llama_projection(r, hidden, "value", spec.kv_heads, shape)
    else:
        q = projection(r, hidden, "query", spec.heads, shape)
        k = projection(r, hidden, "key", spec.kv_heads, shape)
        v = projection(r, hidden, "value", spec.kv_heads, shape)
        q = as_heads(r, q, "query", spec.heads, shape)
        k = as_heads(r, k, "key", spec.kv_heads, shape)
        v = as_heads(r, v, "value", spec.kv_heads, shape)
    q, k = turned(r, q, k, shared, shape)
    out, weights = attention(r, Heads(q, True), Heads(k, True), Heads(v, True), shared, shape)
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    return out, weights


def llama_mlp(r: Recorder, x: Tensor, spec: ModelSpec) -> Tensor:
    return linear(r, gated(r, x, spec), "down", spec.hidden, spec.mlp_bias)


def feed_forward(r: Recorder, x: Tensor, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """The layer's experts, with logits that it is given, or its MLP."""
    mixture = family(shape.spec.family).mixture if shape.mixture else None
    return (llama_mlp(r, x, shape.spec), None) if mixture is None else mixture(r, x, shape)


def gated(r: Recorder, x: Tensor, spec: ModelSpec) -> Tensor:
    """``act_fn(gate_proj(x)) * up_proj(x)``."""
    if r.kernels is not None and r.kernels.gated is not None:
        gate = linear(r, x, "gate", spec.ffn, spec.mlp_bias)
        return r.kernels.gated(r, gate, linear(r, x, "up", spec.ffn, spec.mlp_bias))
    gate = activation(r, linear(r, x, "gate", spec.ffn, spec.mlp_bias), spec)
    up = linear(r, x, "up", spec.ffn, spec.mlp_bias)
    return ops.multiply(r, gate, up, "gated")


def llama_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``LlamaDecoderLayer.forward``."""
    residual = hidden
    hidden = rms_norm(r, hidden, "attention_norm")
    hidden, _ = llama_attention(r, hidden, shared, shape)
    hidden = ops.add(r, residual, hidden, "residual_attention")
    residual = hidden
    hidden = rms_norm(r, hidden, "mlp_norm")
    hidden, logits = feed_forward(r, hidden, shape)
    hidden = ops.add(r, residual, hidden, "residual_mlp")
    del residual, logits
    return hidden


def llama_embedding(r: Recorder, shape: LayerShape, *, packed: bool = True) -> Embedded:
    """``LlamaModel.forward`` up to the first layer. ``packed``: its mask looks for packed rows."""
    inputs_embeds = r.embedded(word_embeddings(r, shape))
    position_ids = positions(r, shape.s, summed=shape.transformers >= SUMMED_POSITIONS)
    mask = causal_mask(r, shape, packed=packed)
    if shape.older:
        return Embedded(inputs_embeds, Shared(mask, position_ids=position_ids))
    cos, sin = rotary_tables(r, shape)
    return Embedded(inputs_embeds, Shared(mask, cos, sin, position_ids))


LLAMA_FAMILY = Family(
    "llama",
    config=Config(
        keys={**KEYS, "attention_output_bias": KEYS["attention_bias"]},
        constants=CONSTANTS,
        activation=SILU,
        activations=("silu", "swish"),
    ),
    covers=LLAMA,
    kernels=("liger", "unsloth"),
    layer=llama_layer,
    embedding=llama_embedding,
    megatron_core=CORE_GPT,
    modules=ModuleNames(("model.embed_tokens", "model.rotary_emb"), "model.layers", ("model.norm",), ("lm_head",)),
    linear_layers={
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "attention_output": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
    lora_targets=("q_proj", "v_proj"),
    since=(4, 45),
    registered=(*ATTENTION, "gate", "up", "down", "attention_norm", "mlp_norm"),
    submodules=SUBMODULES,
)

MISTRAL = replace(
    LLAMA_FAMILY,
    name="mistral",
    since=(4, 45),
    as_llama_since=ATTENTION_FUNCTIONS,
    config=Config(
        keys={
            **KEYS_BUT_BIASES,
            "kv_heads": key("num_key_value_heads", default=8),
            "positions_max": key("max_position_embeddings", default=131_072),
            "sliding_window": key("sliding_window", default=4096),
        },
        constants={**CONSTANTS, **NO_BIASES},
        activation=SILU,
        activations=("silu", "swish"),
    ),
)

QWEN2 = replace(
    LLAMA_FAMILY,
    name="qwen2",
    kernels=("liger",),
    since=(4, 48),
    config=Config(
        keys={
            **KEYS_BUT_BIASES,
            "kv_heads": key("num_key_value_heads", default=32),
            "positions_max": key("max_position_embeddings", default=32_768),
        },
        constants={
            **CONSTANTS,
            **NO_BIASES,
            "attention_bias": True,
        },
        activation=SILU,
        activations=("silu", "swish"),
        refused={"use_sliding_window": False},
    ),
    megatron_core=None,
)

QWEN3 = replace(
    LLAMA_FAMILY,
    name="qwen3",
    kernels=("liger",),
    since=(4, 51),
    config=Config(
        keys={
            **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
            "attention_output_bias": KEYS["attention_bias"],
            "kv_heads": key("num_key_value_heads", default=32),
            "head_dim": key("head_dim", default=128),
            "positions_max": key("max_position_embeddings", default=32_768),
        },
        constants={**CONSTANTS, "mlp_bias": False, "qk_norm": True},
        activation=SILU,
        activations=("silu", "swish"),
        refused={"use_sliding_window": False},
    ),
)

FAMILIES = {"llama": LLAMA_FAMILY, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}
