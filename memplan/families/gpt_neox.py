"""GPT-NeoX (``models/gpt_neox/modeling_gpt_neox.py``): attention and MLP side by side, or in turn."""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import GPT2, reads
from ..layers.ends import Embedded, rotary_tables
from ..layers.huggingface import (
    Heads,
    LayerShape,
    Shared,
    activation,
    attention,
    halves,
    layer_norm,
    linear,
    rotary_one,
)
from ..plan.spec import ModelSpec
from ..values import replace
from .base import HEAD, NORM, PLAIN_ROTARY, Config, Family, ModuleNames, Submodules, key
from .gptj import gptj_embedding


def neox_rotary(r: Recorder, q: Tensor, k: Tensor, shared: Shared, n: int) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb``: the first ``n`` features of each head turned, of queries and of keys, then the rest
    appended to both."""
    q_rot, q_pass = halves(r, q, n, "query")
    k_rot, k_pass = halves(r, k, n, "key")
    q_out = rotary_one(r, q_rot, shared, "query")
    k_out = rotary_one(r, k_rot, shared, "key")
    q_out = ops.cat_last(r, q_out, q_pass, "query_whole")
    k_out = ops.cat_last(r, k_out, k_pass, "key_whole")
    return q_out, k_out


def neox_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """``GPTNeoXAttention.forward``: heads are transposed, then cut into queries, keys and values."""
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim
    qkv = linear(r, hidden, "qkv", spec.qkv_features, spec.attention_bias)
    qkv = ops.copied_gradient(r, qkv, "qkv").view(b, a, s, 3 * d)
    q, k, v = ops.split(r, qkv, [(b, a, s, d)] * 3, "qkv")
    q, k = neox_rotary(r, q, k, shared, spec.rotary_features)
    out, weights = attention(r, Heads(q, False), Heads(k, False), Heads(v, True), shared, shape)
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    return out, weights


def neox_mlp(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Tensor:
    hidden = linear(r, hidden, "up", spec.ffn, spec.mlp_bias)
    hidden = activation(r, hidden, spec)
    hidden = linear(r, hidden, "down", spec.hidden, spec.mlp_bias)
    return hidden  # noqa: RET504 - the variable ends its tensor's life


def neox_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``GPTNeoXLayer.forward``."""
    spec = shape.spec
    normed = layer_norm(r, hidden, "attention_norm")
    attended, _ = neox_attention(r, normed, shared, shape)
    del normed
    attended = ops.dropout(r, attended, spec.hidden_dropout, "attention_output_dropout")
    if spec.blocks == "sequential":
        attended = ops.add(r, attended, hidden, "residual_attention")
    normed = layer_norm(r, attended if spec.blocks == "sequential" else hidden, "mlp_norm")
    fed = neox_mlp(r, normed, spec)
    del normed
    fed = ops.dropout(r, fed, spec.hidden_dropout, "mlp_dropout")
    if spec.blocks == "sequential":
        hidden = ops.add(r, fed, attended, "residual_mlp")
    else:
        hidden = ops.add(r, ops.add(r, fed, attended, "blocks_sum"), hidden, "residual")
    return hidden


def neox_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``GPTNeoXModel.forward`` up to the first layer."""
    embedded = gptj_embedding(r, shape)
    cos, sin = rotary_tables(r, shape)
    return replace(embedded, shared=replace(embedded.shared, cos=cos, sin=sin))


NEOX = Family(
    "gpt_neox",
    config=Config(
        keys={
            "layers": key("num_hidden_layers"),
            "hidden": key("hidden_size"),
            "heads": key("num_attention_heads"),
            "ffn": key("intermediate_size"),
            "vocab": key("vocab_size"),
            "positions_max": key("max_position_embeddings", default=2048),
            "rotary_fraction": key("rope_parameters.partial_rotary_factor", "rotary_pct", default=0.25),
            "attention_bias": key("attention_bias", default=True),
            "attention_output_bias": key("attention_bias", default=True),
            "tied_embeddings": key("tie_word_embeddings", default=False),
            "embedding_dropout": key("hidden_dropout", default=0.0),
            "attention_dropout": key("attention_dropout", default=0.0),
            "hidden_dropout": key("hidden_dropout", default=0.0),
            "blocks": key("use_parallel_residual", default=True),
        },
        constants={"norm": "layernorm", "positions": "rotary"},
        activation=key("hidden_act", default="gelu"),
        activations=("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu"),
        refused=PLAIN_ROTARY,
    ),
    covers={
        **reads(GPT2, "rotary_fraction"),
        "positions": ("rotary",),
        "activation": ("gelu", "gelu_new", "gelu_fast", "relu"),
        "blocks": ("sequential", "parallel"),
        "mlp_bias": (True,),
    },
    layer=neox_layer,
    embedding=neox_embedding,
    padded=True,
    multi_head=True,
    heads_fill_hidden=True,
    modules=ModuleNames(
        ("gpt_neox.embed_in", "gpt_neox.rotary_emb"),
        "gpt_neox.layers",
        ("gpt_neox.final_layer_norm",),
        ("lm_head",),
    ),
    linear_layers={
        "qkv": "attention.query_key_value",
        "attention_output": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    lora_targets=("query_key_value",),
    registered=("attention_norm", "mlp_norm", "qkv", "attention_output", "up", "down"),
    submodules={
        "embedding": Submodules(before_forward={"word": 2}, at={"position_ids_fp32": 2}),
        "layer": Submodules(
            before_forward={"attention_norm": 1, "qkv": 1, "mlp_norm": 1, "up": 1},
            after_forward={"up": 1},
            at={"blocks_sum": 1, "residual_mlp": 1},
            before_backward={"down": 3, "attention_output": 2},
            after_backward={"down": 1},
            not_recomputed="attention_norm",
        ),
        "final_norm": NORM,
        "head": HEAD,
    },
)

FAMILIES = {"gpt_neox": NEOX}
