"""OPT (``models/opt/modeling_opt.py``) with its norms before each block."""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import GPT2, reads
from ..layers.ends import Embedded, causal_mask, word_embeddings
from ..layers.huggingface import Heads, LayerShape, Shared, activation, attention, layer_norm, linear
from .base import HEAD, Config, Family, ModuleNames, Submodules, key


def opt_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """``OPTAttention.forward``: queries are scaled before the product, and scores by 1 behind it."""
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim

    def copied(x: Tensor, name: str, when: bool) -> Tensor:
        return ops.copied_gradient(r, x, name) if when and not shape.fused else x

    q = ops.scale(r, linear(r, hidden, "query", a * d, spec.attention_bias), "query_scaled")
    q = copied(q, "query", a > 1).view(b, a, s, d)
    strided = b > 1 and not shape.fused
    k = linear(r, hidden, "key", a * d, spec.attention_bias, strided=strided).view(b, a, s, d)
    v = copied(linear(r, hidden, "value", a * d, spec.attention_bias), "value", a > 1).view(b, a, s, d)
    out, weights = attention(r, Heads(q, True), Heads(k, True), Heads(v, True), shared, shape)
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    return out, weights


def opt_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``OPTDecoderLayer.forward``, whose second half is over rows of all sequences at once."""
    spec = shape.spec
    residual = hidden
    hidden = layer_norm(r, hidden, "attention_norm")
    hidden, _ = opt_attention(r, hidden, shared, shape)
    hidden = ops.dropout(r, hidden, spec.hidden_dropout, "attention_output_dropout")
    hidden = ops.add(r, residual, hidden, "residual_attention").view(shape.b * shape.s, spec.hidden)
    residual = hidden
    hidden = layer_norm(r, hidden, "mlp_norm")
    hidden = linear(r, hidden, "up", spec.ffn, spec.mlp_bias)
    hidden = activation(r, hidden, spec)
    hidden = linear(r, hidden, "down", spec.hidden, spec.mlp_bias)
    hidden = ops.dropout(r, hidden, spec.hidden_dropout, "mlp_dropout")
    hidden = ops.add(r, residual, hidden, "residual_mlp").view(shape.b, shape.s, spec.hidden)
    return hidden  # noqa: RET504 - the variable ends its tensor's life


def opt_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``OPTDecoder.forward`` up to the first layer: positions are counted from a mask of ones, (b, s)."""
    spec, b, s = shape.spec, shape.b, shape.s
    inputs_embeds = r.embedded(word_embeddings(r, shape))
    ones = r.empty((b, s), "fp32", "attention_mask")
    position_ids = counted_positions(r, b, s)
    mask = causal_mask(r, shape, packed=False)
    table = r.parameter("position.weight", (spec.position_offset + spec.positions_max, spec.hidden), shape.dtype)
    pos_embeds = ops.embedding(r, table, r.empty((b, s), "int64", "position_ids_offset"), "position_embeddings")
    hidden = ops.add(r, inputs_embeds, pos_embeds, "embedding_sum")
    return Embedded(hidden, Shared(mask, position_ids=position_ids), [inputs_embeds, ones, pos_embeds])


def counted_positions(r: Recorder, b: int, s: int) -> Tensor:
    """``(cumsum(mask) * mask - 1).long()``."""
    counted = r.empty((b, s), "fp32", "positions_counted")
    fp32 = r.in_turn(((b, s), "fp32", "positions_masked"), ((b, s), "fp32", "positions_fp32"))
    position_ids = r.empty((b, s), "int64", "position_ids")
    del fp32, counted
    return position_ids


OPT = Family(
    "opt",
    dropout_functions=("attention_dropout", "hidden_dropout"),
    config=Config(
        keys={
            "layers": key("num_hidden_layers"),
            "hidden": key("hidden_size"),
            "heads": key("num_attention_heads"),
            "ffn": key("ffn_dim"),
            "vocab": key("vocab_size"),
            "positions_max": key("max_position_embeddings", default=2048),
            "attention_bias": key("enable_bias", default=True),
            "attention_output_bias": key("enable_bias", default=True),
            "mlp_bias": key("enable_bias", default=True),
            "tied_embeddings": key("tie_word_embeddings", default=True),
            "attention_dropout": key("attention_dropout", default=0.0),
            "hidden_dropout": key("dropout", default=0.1),
        },
        constants={"norm": "layernorm", "positions": "learned", "position_offset": 2, "embedding_dropout": 0.0},
        activation=key("activation_function", default="relu"),
        activations=("relu", "gelu", "gelu_new", "gelu_pytorch_tanh"),
        refused={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
            "layerdrop": 0,
        },
    ),
    covers={
        **reads(GPT2, "position_offset"),
        "activation": ("gelu", "gelu_new", "relu"),
        "embedding_dropout": (0.0,),
    },
    layer=opt_layer,
    embedding=opt_embedding,
    multi_head=True,
    heads_fill_hidden=True,
    positions_of_each=True,
    modules=ModuleNames(
        ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
        "model.decoder.layers",
        ("model.decoder.final_layer_norm",),
        ("lm_head",),
    ),
    linear_layers={
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "attention_output": "self_attn.out_proj",
        "up": "fc1",
        "down": "fc2",
    },
    lora_targets=("q_proj", "v_proj"),
    registered=("key", "value", "query", "attention_output", "attention_norm", "up", "down", "mlp_norm"),
    norm_before_layers=True,
    submodules={
        "embedding": Submodules(before_forward={"word": 3}),
        "layer": Submodules(
            before_forward={"attention_norm": 1, "query": 1},
            after_forward={"up": 1},
            before_backward={"down": 1, "attention_output": 1},
            after_backward={"down": 1},
            not_recomputed="attention_norm",
        ),
        "final_norm": Submodules(before_backward={"final_norm": 2}),
        "head": HEAD,
    },
)

FAMILIES = {"opt": OPT}
