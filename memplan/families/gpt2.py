"""GPT-2 (``models/gpt2/modeling_gpt2.py``) of transformers 5.x, and of October 2020.

Megatron's GPT runs as GPT-2 in transformers.
"""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import CORE_GPT, GPT2, MEGATRON_GPT
from ..layers.ends import Embedded, causal_mask, positions, word_embeddings
from ..layers.gradients import fresh
from ..layers.huggingface import Heads, LayerShape, Shared, activation, attention, batched, layer_norm, linear, product
from ..plan.spec import ModelSpec
from ..values import replace
from . import family
from .base import HEAD, NORM, Config, Family, ModuleNames, Submodules, key


def gpt2_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim
    qkv = linear(r, hidden, "qkv", spec.qkv_features, spec.attention_bias, conv1d=True)
    q, k, v = ops.split(r, qkv, [(b, a, s, d)] * 3, "qkv")
    del qkv
    if not shape.fused:
        q, v = ops.copied_gradient(r, q, "query"), ops.copied_gradient(r, v, "value")
    out, weights = attention(r, Heads(q, True), Heads(k, True), Heads(v, True), shared, shape)
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias, conv1d=True)
    out = ops.dropout(r, out, spec.hidden_dropout, "attention_output_dropout")
    return out, weights


def gpt2_mlp(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Tensor:
    conv1d = family(spec.family).conv1d
    hidden = linear(r, hidden, "up", spec.ffn, spec.mlp_bias, conv1d=conv1d)
    hidden = activation(r, hidden, spec)
    hidden = linear(r, hidden, "down", spec.hidden, spec.mlp_bias, conv1d=conv1d)
    hidden = ops.dropout(r, hidden, spec.hidden_dropout, "mlp_dropout")
    return hidden  # noqa: RET504


def gpt2_layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``GPT2Block.forward``."""
    residual = hidden
    hidden = layer_norm(r, hidden, "attention_norm")
    attended, _ = (family(shape.spec.family).attention or gpt2_attention)(r, hidden, shared, shape)
    hidden = ops.add(r, attended, residual, "residual_attention")
    residual = hidden
    hidden = layer_norm(r, hidden, "mlp_norm")
    fed = gpt2_mlp(r, hidden, shape.spec)
    hidden = ops.add(r, residual, fed, "residual_mlp")
    return hidden  # noqa: RET504


def position_ids_are_shared(r: Recorder) -> bool:
    """GPT-2's model keeps them in a variable and hands them to its layers; a table that is trained saves them."""
    return r.tuning is not None and not r.tuning.trains("position.weight")


def gpt2_embedding(r: Recorder, shape: LayerShape, *, makes_mask: bool = True) -> Embedded:
    """``GPT2Model.forward`` up to the first block; in 2020 each block had the mask as a buffer instead."""
    spec = shape.spec
    inputs_embeds = r.embedded(word_embeddings(r, shape))
    position_ids = positions(r, shape.s)
    table = r.parameter("position.weight", (spec.positions_max, spec.hidden), shape.dtype)
    position_embeds = ops.embedding(r, table, position_ids, "position_embeddings")
    hidden = ops.add(r, inputs_embeds, position_embeds, "embedding_sum")
    mask = causal_mask(r, shape) if makes_mask else None
    hidden = ops.dropout(r, hidden, spec.embedding_dropout, "embedding_dropout")
    shared = Shared(mask, position_ids=position_ids if position_ids_are_shared(r) else None)
    return Embedded(hidden, shared, [inputs_embeds, position_embeds])


# -- of October 2020, on PyTorch 1.6 ----------------------------------------------------------------
#
# It differs from today's in what
# it keeps: PyTorch 1.6 saved the dividend of ``w / sqrt(d)`` although only a divisor's gradient needs
# it, ``where`` keeps the mask as a bool copy, and with ``use_cache`` the keys and values of every block
# stay with the model's output.
#
# How keys and values stay is inferred from the readings of the thread that this recipe reproduces
# (huggingface/transformers, "Almost Have Model Parallelism Working on GPT2 Fine-Tuning"): as views of
# the fused projection, whose storage then stays beside the contiguous copies that ``bmm`` saved.


def divide(r: Recorder, x: Tensor) -> Tensor:
    """``w / (float(v.size(-1)) ** 0.5)``: ``DivBackward0`` of PyTorch 1.6 saved its dividend."""
    return ops.elementwise(r, "scores_scaled", (x,), (x,))


def where_masked(r: Recorder, x: Tensor, s: int) -> Tensor:
    """``torch.where(mask.bool(), w, masked_bias)``: saves the condition, (1, 1, s, s) bool."""
    condition = r.empty((1, 1, s, s), "bool", "mask_bool")
    shape, dtype = x.shape, x.dtype

    return r.output(
        (x,),
        (condition,),
        fresh(x, "grad_scores_masked"),
        shape,
        dtype,
        "scores_masked",
    )


def attention_2020(r: Recorder, hidden: Tensor, shape: LayerShape) -> Tensor:
    """``Attention.forward`` and ``_attn``."""
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim
    qkv = linear(r, hidden, "qkv", spec.qkv_features, spec.attention_bias)
    q, k, v = ops.split(r, qkv, [(b, a, s, d)] * 3, "qkv", keeps=True)
    del qkv
    scores = (b, a, s, s)
    w = product(r, Heads(q, True), Heads(k, True), ("query", "key"), scores, "scores")
    w = divide(r, w)
    w = where_masked(r, w, s)
    w = ops.softmax(r, w, "probabilities")
    w = ops.dropout(r, w, spec.attention_dropout, "attention_dropout")
    out = ops.matmul(r, w, batched(r, Heads(v, True), "value"), (b, a, s, d), "context")
    del w
    out = ops.contiguous(r, out, (b, s, a * d), "context_contiguous")
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    out = ops.dropout(r, out, spec.hidden_dropout, "attention_output_dropout")
    return out  # noqa: RET504 - the variables end their tensors' lives


def gpt2_layer_2020(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``Block.forward``."""
    normed = layer_norm(r, hidden, "attention_norm")
    attended = attention_2020(r, normed, shape)
    del normed
    hidden = ops.add(r, attended, hidden, "residual_attention")
    normed = layer_norm(r, hidden, "mlp_norm")
    fed = gpt2_mlp(r, normed, shape.spec)
    del normed
    hidden = ops.add(r, hidden, fed, "residual_mlp")
    return hidden  # noqa: RET504


def gpt2_embedding_2020(r: Recorder, shape: LayerShape) -> Embedded:
    """``GPT2Model.forward`` up to the first block; the mask is a buffer of every block."""
    return gpt2_embedding(r, shape, makes_mask=False)


GPT2_FAMILY = Family(
    "gpt2",
    dropout_functions=(),
    config=Config(
        keys={
            "layers": key("n_layer", "num_hidden_layers"),
            "hidden": key("n_embd", "hidden_size"),
            "heads": key("n_head", "num_attention_heads"),
            "ffn": key("n_inner", default=None),
            "vocab": key("vocab_size"),
            "positions_max": key("n_positions", "max_position_embeddings", default=1024),
            "tied_embeddings": key("tie_word_embeddings", default=True),
            "embedding_dropout": key("embd_pdrop", default=0.1),
            "attention_dropout": key("attn_pdrop", default=0.1),
            "hidden_dropout": key("resid_pdrop", default=0.1),
        },
        constants={"norm": "layernorm", "positions": "learned"},
        activation=key("activation_function", default="gelu_new"),
        activations=("gelu", "gelu_new", "gelu_pytorch_tanh"),
        refused={
            "add_cross_attention": False,
            "reorder_and_upcast_attn": False,
            "scale_attn_weights": True,
        },
    ),
    covers=GPT2,
    layer=gpt2_layer,
    embedding=gpt2_embedding,
    padded=True,
    older=(gpt2_layer_2020, gpt2_embedding_2020),
    multi_head=True,
    heads_fill_hidden=True,
    softmax_in_dtype=True,
    casts_probabilities=True,
    takes_positions=position_ids_are_shared,
    conv1d=True,
    megatron=MEGATRON_GPT,
    megatron_core=CORE_GPT,
    modules=ModuleNames(("transformer.wte", "transformer.wpe"), "transformer.h", ("transformer.ln_f",), ("lm_head",)),
    linear_layers={"qkv": "attn.c_attn", "attention_output": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
    lora_targets=("c_attn",),
    submodules={
        "embedding": Submodules(
            before_forward={"word": 2}, after_forward={"position": 1}, before_backward={"position": 1}
        ),
        "layer": Submodules(
            before_forward={"attention_norm": 1, "qkv": 1, "up": 1},
            after_forward={"attention_output": 1, "up": 1, "down": 1},
            before_backward={"down": 3, "attention_output": 2},
            after_backward={"down": 1},
            not_recomputed="attention_norm",
        ),
        "final_norm": NORM,
        "head": HEAD,
    },
)

GPT = replace(GPT2_FAMILY, name="gpt", config=None, older=None, submodules=None)

FAMILIES = {"gpt2": GPT2_FAMILY, "gpt": GPT}
