"""Falcon 7B (``models/falcon/modeling_falcon.py``): attention and MLP side by side behind one norm.

One key head. The larger Falcons' ``new_decoder_architecture`` and ALiBi are other code.
"""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Gradients, Recorder, Shape, Tensor, incoming, size_of
from ..layers.coverage import GPT2
from ..layers.ends import Embedded
from ..layers.gradients import fresh
from ..layers.huggingface import (
    Heads,
    LayerShape,
    Shared,
    activation,
    layer_norm,
    linear,
    product,
    repeated,
    rotary,
    weights_before,
)
from ..layers.work import Operator, Stream, looked_up
from ..plan.spec import ModelSpec
from .base import HEAD, NO_BIASES, NORM, PLAIN_ROTARY, Config, Family, ModuleNames, Submodules, key
from .llama import llama_embedding


def taken(r: Recorder, x: Tensor, shape: Shape, name: str) -> Tensor:
    """``x[..., [i], :]``: a copy; the index is a tensor, which is saved.

    The gradient is put into zeros of the size of ``x``, in place (``TensorAdvancedIndexing.cpp``, ``index_backward``).
    """
    index = r.empty((1,), "int64", f"{name}_index")

    return r.output((x,), (index,), fresh(x, f"grad_{name}"), shape, x.dtype, name, work=looked_up(shape, x.dtype))


def divided_in_place(r: Recorder, x: Tensor) -> Tensor:
    """``x /= c``."""
    shape, dtype = x.shape, x.dtype
    work = Operator((Stream(2 * size_of(shape, dtype)),))
    node = r.node((x,), (), fresh(x, "grad_scores_divided"), work=work)
    return Tensor(x.storage, shape, dtype, node)


def added_in_place(r: Recorder, x: Tensor, y: Tensor) -> Tensor:
    """``x += y``."""

    def backward(r: Recorder, gradients: Gradients) -> Gradients:
        gradient = incoming(gradients)
        return [gradient, gradient.alias()]

    work = Operator((Stream(3 * size_of(x.shape, x.dtype)),))
    return Tensor(x.storage, x.shape, x.dtype, r.node((x, y), (), backward, work=work))


def with_one_head(r: Recorder, x: Heads, y: Tensor, names: tuple[str, str], shape: Shape, name: str) -> Tensor:
    """``matmul`` with the one key head, which it expands itself, behind autocast's casts."""
    cast_x, cast_y = ops.entering(r, "matmul", x.tensor, y, name=f"{name}_operand")
    heads = repeated(r, Heads(cast_y, True), x.tensor.shape[1], names[1])
    return product(r, Heads(cast_x, x.transposed), heads, names, shape, name)


def falcon_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """``FalconAttention.forward``, eager; no dropout of the probabilities."""
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim
    qkv = linear(r, hidden, "qkv", spec.qkv_features, spec.attention_bias)
    q = ops.slice_last(r, qkv, a * d, "query").view(b, a, s, d)
    k = taken(r, qkv, (b, 1, s, d), "key")
    v = taken(r, qkv, (b, 1, s, d), "value")
    q, k = rotary(r, q, k, shared)
    weights = with_one_head(r, Heads(q, True), k, ("query", "key"), (b, a, s, s), "scores")
    weights = divided_in_place(r, weights)
    weights = ops.softmax(r, ops.add_constant(r, weights, "scores_masked", shared.mask), "probabilities")
    out = with_one_head(r, Heads(weights, False), v, ("", "value"), (b, a, s, d), "context")
    if b > 1:
        out = ops.copied_gradient(r, out, "context")
    out = ops.contiguous(r, out, (b, s, a * d), "context_contiguous")
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    return out, weights


def falcon_mlp(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Tensor:
    hidden = activation(r, linear(r, hidden, "up", spec.ffn, spec.mlp_bias), spec)
    hidden = linear(r, hidden, "down", spec.hidden, spec.mlp_bias)
    return hidden  # noqa: RET504 - the variable ends its tensor's life


def falcon_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``FalconDecoderLayer.forward``."""
    _before = weights_before(r, shape)
    spec = shape.spec
    residual = hidden
    normed = layer_norm(r, hidden, "attention_norm")
    attended, _ = falcon_attention(r, normed, shared, shape)
    fed = falcon_mlp(r, normed, spec)
    fed = added_in_place(r, fed, attended)
    dropped = ops.dropout(r, fed, spec.hidden_dropout, "blocks_dropout")
    return ops.add(r, residual, dropped, "residual")


def falcon_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``FalconModel.forward`` up to the first layer: its mask is made without looking at positions."""
    return llama_embedding(r, shape, packed=False)


FALCON = Family(
    "falcon",
    dropout_functions=("hidden_dropout",),
    config=Config(
        keys={
            "layers": key("num_hidden_layers", "n_layer"),
            "hidden": key("hidden_size", "n_embed"),
            "heads": key("num_attention_heads", "n_head"),
            "ffn": key("ffn_hidden_size", default=None),
            "vocab": key("vocab_size"),
            "positions_max": key("max_position_embeddings", default=2048),
            "tied_embeddings": key("tie_word_embeddings", default=True),
            "hidden_dropout": key("hidden_dropout", default=0.0),
        },
        constants={
            "norm": "layernorm",
            "positions": "rotary",
            "blocks": "parallel_one_norm",
            "kv_heads": 1,
            **NO_BIASES,
            "embedding_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        activation=key("activation", default="gelu"),
        activations=("gelu",),
        refused={
            **PLAIN_ROTARY,
            "alibi": False,
            "new_decoder_architecture": False,
            "num_ln_in_parallel_attn": None,
            "attention_dropout": 0.0,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
        },
    ),
    covers={
        **GPT2,
        "positions": ("rotary",),
        "blocks": ("parallel_one_norm",),
        "activation": ("gelu",),
        "kv_heads": (1,),
        "attention_bias": (False,),
        "attention_output_bias": (False,),
        "mlp_bias": (False,),
        "embedding_dropout": (0.0,),
        "attention_dropout": (0.0,),
    },
    layer=falcon_layer,
    embedding=falcon_embedding,
    heads_fill_hidden=True,
    returns_weights=True,
    no_package="its own class around the package's kernel is not modelled",
    no_flash="transformers hands a mask to sdpa, and PyTorch leaves its flash kernel",
    no_4bit="transformers replaces Linear itself only, and Falcon's layers are of a class of their own",
    no_zero3="its linear layers multiply by weight.T, a view that autograd keeps, and with it every gathered weight "
    "from forward until backward; stages 0 to 2 are",
    modules=ModuleNames(
        ("transformer.word_embeddings", "transformer.rotary_emb"),
        "transformer.h",
        ("transformer.ln_f",),
        ("lm_head",),
    ),
    linear_layers={
        "qkv": "self_attention.query_key_value",
        "attention_output": "self_attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    lora_targets=("query_key_value",),
    registered=("qkv", "attention_output", "up", "down", "attention_norm"),
    submodules={
        "embedding": Submodules(before_forward={"word": 2}, at={"position_ids_fp32": 1}),
        "layer": Submodules(
            before_forward={"attention_norm": 1, "qkv": 1, "up": 1},
            after_forward={"up": 1},
            before_backward={"down": 2, "attention_output": 1},
            after_backward={"down": 1},
        ),
        "final_norm": NORM,
        "head": HEAD,
    },
)

FAMILIES = {"falcon": FALCON}
