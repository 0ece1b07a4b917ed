"""Llama (``models/llama/modeling_llama.py``) and families with its layer: Mistral, Qwen 2, Qwen 3 with head norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
    linear,
    norm,
    repeated,
    rms_norm,
    rotary,
)
from ..layers.tuning import Layer as Linear, fused
from ..plan.errors import Scalar
from ..plan.releases import ATTENTION_FUNCTIONS, SUMMED_POSITIONS
from ..plan.spec import ModelSpec
from ..values import replace
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


def head_by_head(shape: LayerShape) -> dict[str, bool]:
    """Which gradients attention hands back in a layout that a view of all heads has to copy."""
    queries, others = (not shape.fused or copied for copied in (shape.lays_out_queries, shape.lays_out))
    return {"query": queries, "key": others, "value": others}


def projection(r: Recorder, hidden: Tensor, name: str, heads: int, shape: LayerShape) -> Tensor:
    return linear(r, hidden, name, heads * shape.spec.head_dim, shape.spec.attention_bias)


def normed(r: Recorder, x: Tensor, name: str, heads: int, shape: LayerShape) -> Tensor:
    """Queries and keys of Qwen 3 are normed per head (by Liger's kernel from 0.8.5 on), of OLMoE all heads together."""
    normed = name != "value" and shape.spec.qk_norm
    return (family(shape.spec.family).norm or rms_norm)(r, x, f"{name}_norm") if normed else x


def seen_as_heads(r: Recorder, x: Tensor, name: str, heads: int, shape: LayerShape) -> Tensor:
    """(b, s, a d) as (b, s, a, d)."""
    if name == "value" or not shape.turns:
        x = laid_out(r, x, name, heads, shape)
    elif heads > 1 and (normed_by_head(r, shape) or not turns_in_place(r)):
        x = ops.copied_gradient(r, x, name)
    return x.view(shape.b, shape.s, heads, shape.spec.head_dim)


def laid_out(r: Recorder, x: Tensor, name: str, heads: int, shape: LayerShape) -> Tensor:
    """A gradient that comes head by head is copied, to be seen otherwise; eager attention gives that of one sequence's
    keys feature by feature, which is a view of (s, a d) unless heads were repeated or it has been turned."""
    by_feature = name == "key" and not (shape.turns or shape.flash or shape.b > 1) and heads == shape.spec.heads
    return ops.copied_gradient(r, x, name) if heads > 1 and head_by_head(shape)[name] and not by_feature else x


Projecting = tuple[tuple[Callable[[Recorder, Tensor, str, int, LayerShape], Tensor], ...], ...]
"""What becomes of queries, keys and values: each tuple for all three before the next."""

EACH_AT_ONCE: Projecting = ((projection, seen_as_heads, normed),)
SEEN_LAST: Projecting = ((projection,), (seen_as_heads, normed))
NORMED_FIRST: Projecting = ((projection, normed), (seen_as_heads,))
NORMED_LAST: Projecting = ((projection, seen_as_heads), (normed,))


def projected(r: Recorder, hidden: Tensor, shape: LayerShape) -> tuple[Tensor, ...]:
    """Queries, keys and values as (b, a, s, d); by one function of Unsloth, it runs in the place of the first layer."""
    spec = shape.spec
    heads = {"query": spec.heads, "key": spec.kv_heads, "value": spec.kv_heads}
    made = dict.fromkeys(heads, hidden)
    steps = family(spec.family).projecting if shape.transformers >= ATTENTION_FUNCTIONS else SEEN_LAST
    if r.tuning is not None and r.tuning.fused:
        layers = [Linear(name, count * spec.head_dim, False, False) for name, count in heads.items()]
        made, steps = dict(zip(heads, fused(r, hidden, *layers), strict=True)), ((seen_as_heads, normed),)
    for together in steps or EACH_AT_ONCE:
        for name, count in heads.items():
            for step in together:
                made[name] = step(r, made[name], name, count, shape)
    return tuple(
        x.view(shape.b, count, shape.s, spec.head_dim) for x, count in zip(made.values(), heads.values(), strict=True)
    )


def turns_in_place(r: Recorder) -> bool:
    """A kernel turns queries and keys."""
    return r.kernels is not None and r.kernels.rope is not None


def normed_by_head(r: Recorder, shape: LayerShape) -> bool:
    """A kernel norms queries and keys behind their view by head, so that its output is laid out so."""
    by_kernel = r.kernels is not None and r.kernels.norm is not None and shape.spec.qk_norm
    return by_kernel and family(shape.spec.family).projecting is NORMED_LAST


def turned(r: Recorder, q: Tensor, k: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """Queries and keys by their positions; older layers make the tables themselves."""
    if shared.cos is None:
        cos, sin = rotary_tables(r, shape)
        shared = replace(shared, cos=cos, sin=sin)
    if r.kernels is None or r.kernels.rope is None:
        return (family(shape.spec.family).rotary or rotary)(r, q, k, shared)
    copied, by_head = head_by_head(shape), normed_by_head(r, shape)
    queries, keys = shape.spec.heads > 1, shape.spec.kv_heads > 1  # one head alone is laid out both ways
    gradients = (queries and copied["query"], keys and copied["key"])
    return r.kernels.rope(r, q, k, shared.tables, gradients, (queries and by_head, keys and by_head))


def llama_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """``LlamaAttention.forward``; StarCoder 2's has a dropout behind it, while queries, keys and values are there."""
    spec = shape.spec
    q, k, v = projected(r, hidden, shape)
    if shape.turns:
        q, k = turned(r, q, k, shared, shape)
    if (scaled := family(spec.family).scaled_queries) is not None:
        q = scaled(r, q, shared)
    seen = family(spec.family).rotary is None or family(spec.family).rotary_keeps_layout
    keys, values = Heads(k, seen), Heads(v, True)
    if shape.older:  # its variables are bound anew, ``key_states = repeat_kv(key_states, …)``
        del k, v
        keys = repeated(r, keys, spec.heads, "key")
        values = repeated(r, values, spec.heads, "value")
    out, weights = attention(r, Heads(q, seen), keys, values, shared, shape)
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    out = ops.dropout(r, out, spec.hidden_dropout, "attention_output_dropout")
    return out, weights


def llama_mlp(r: Recorder, x: Tensor, spec: ModelSpec) -> Tensor:
    return linear(r, gated(r, x, spec), "down", spec.hidden, spec.mlp_bias)


def feed_forward(r: Recorder, x: Tensor, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """The layer's experts, with logits that it is given, or its MLP."""
    own = family(shape.spec.family)
    if shape.mixture and own.mixture is not None:
        return own.mixture(r, x, shape)
    return (own.mlp or llama_mlp)(r, x, shape.spec), None


def gated(r: Recorder, x: Tensor, spec: ModelSpec) -> Tensor:
    """``act_fn(gate_proj(x)) * up_proj(x)``."""
    if r.kernels is not None and r.kernels.gated is not None:
        gate = linear(r, x, "gate", spec.ffn, spec.mlp_bias)
        return r.kernels.gated(r, gate, linear(r, x, "up", spec.ffn, spec.mlp_bias))
    gate = activation(r, linear(r, x, "gate", spec.ffn, spec.mlp_bias), spec)
    up = linear(r, x, "up", spec.ffn, spec.mlp_bias)
    return ops.multiply(r, gate, up, "gated")


def block_output(r: Recorder, x: Tensor, spec: ModelSpec, name: str) -> Tensor:
    """Granite's is multiplied by a number."""
    return ops.scale(r, x, f"{name}_scaled") if spec.residual_scale else x


def llama_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``LlamaDecoderLayer.forward``, with what the family has in place of norms, attention and MLP."""
    spec = shape.spec
    residual = hidden
    hidden = norm(r, hidden, spec, "attention_norm")
    hidden, _ = (family(spec.family).attention or llama_attention)(r, hidden, shared, shape)
    hidden = ops.add(r, residual, block_output(r, hidden, spec, "attention_output"), "residual_attention")
    residual = hidden
    hidden = norm(r, hidden, spec, "mlp_norm")
    hidden, logits = feed_forward(r, hidden, shape)
    hidden = ops.add(r, residual, block_output(r, hidden, spec, "mlp_output"), "residual_mlp")
    del residual, logits
    return hidden


def llama_embedding(r: Recorder, shape: LayerShape, *, packed: bool = True, scales_first: bool = False) -> Embedded:
    """``LlamaModel.forward`` up to the first layer. ``packed``: its mask looks for packed rows.
    ``scales_first``: before there are positions."""
    inputs_embeds = r.embedded(word_embeddings(r, shape))
    if scales_first:
        inputs_embeds = ops.scale(r, inputs_embeds, "embedding_scaled")
    position_ids = positions(r, shape.s, summed=shape.transformers >= SUMMED_POSITIONS)
    mask = causal_mask(r, shape, packed=packed)
    if shape.spec.embedding_scale and not scales_first:
        inputs_embeds = ops.scale(r, inputs_embeds, "embedding_scaled")
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
    padded=True,
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
