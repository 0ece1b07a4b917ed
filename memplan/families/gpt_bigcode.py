"""GPT BigCode (``models/gpt_bigcode/modeling_gpt_bigcode.py``): SantaCoder, StarCoder, Granite's 20B and 34B for code.

GPT-2 with one key head and plain linear layers; its mask of all positions is a buffer.
"""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import GPT2
from ..layers.ends import Embedded, causal_mask, positions, word_embeddings
from ..layers.huggingface import Heads, LayerShape, Shared, attention, linear
from ..plan.releases import SUMMED_POSITIONS, Version
from ..values import replace
from .base import ModuleNames, key
from .gpt2 import GPT2_FAMILY, position_ids_are_shared

ALONE_BEFORE: Version = (5, 23)
"""The first release that is followed after 4.48. 4.57 asks for checkpoints of layers and makes none."""


def bigcode_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """``GPTBigCodeAttention.forward``, with ``multi_query``."""
    spec, b, s, a, d = shape.spec, shape.b, shape.s, shape.spec.heads, shape.spec.head_dim
    qkv = linear(r, hidden, "qkv", spec.qkv_features, spec.attention_bias)
    if shape.transformers < ALONE_BEFORE:
        q, kv = ops.split(r, qkv, [(b, a, s, d), (b, s, 2 * d)], "qkv")
        k, v = ops.split(r, kv, [(b, 1, s, d)] * 2, "key_value")
        del kv
    else:
        q, k, v = ops.split(r, qkv, [(b, a, s, d), (b, 1, s, d), (b, 1, s, d)], "qkv")
    if not shape.fused:
        q = ops.copied_gradient(r, q, "query")
    del qkv
    out, weights = attention(r, Heads(q, True), Heads(k, True), Heads(v, True), shared, shape)
    kept = out if shape.transformers < ALONE_BEFORE else None
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    out = ops.dropout(r, out, spec.hidden_dropout, "attention_output_dropout")
    del kept
    return out, weights


def bigcode_embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``GPTBigCodeModel.forward`` up to the first block; early releases count positions first."""
    spec, alone = shape.spec, shape.transformers < ALONE_BEFORE
    position_ids = positions(r, shape.s, summed=False) if alone else None
    inputs_embeds = r.embedded(word_embeddings(r, shape))
    position_ids = position_ids or positions(r, shape.s, summed=shape.transformers >= SUMMED_POSITIONS)
    mask = causal_mask(r, shape)
    table = r.parameter("position.weight", (spec.positions_max, spec.hidden), shape.dtype)
    position_embeds = ops.embedding(r, table, position_ids, "position_embeddings")
    hidden = ops.add(r, inputs_embeds, position_embeds, "embedding_sum")
    hidden = ops.dropout(r, hidden, spec.embedding_dropout, "embedding_dropout")
    left = [position_ids] if position_ids_are_shared(r) else []
    return Embedded(hidden, Shared(mask), [inputs_embeds, position_embeds, *left])


assert GPT2_FAMILY.config is not None
GPT_BIGCODE = replace(
    GPT2_FAMILY,
    name="gpt_bigcode",
    config=replace(
        GPT2_FAMILY.config,
        constants={**GPT2_FAMILY.config.constants, "kv_heads": 1},
        activation=key("activation_function", default="gelu_pytorch_tanh"),
        refused={"add_cross_attention": False, "scale_attn_weights": True, "multi_query": True},
    ),
    covers={**GPT2, "kv_heads": (1,)},
    attention=bigcode_attention,
    embedding=bigcode_embedding,
    older=None,
    multi_head=False,
    softmax_in_dtype=False,
    casts_probabilities=False,
    conv1d=False,
    loss_alone=("fms",),
    takes_positions=lambda r: False,
    mask_buffer=True,
    no_zero3="DeepSpeed's engine gathers in another order than is modelled for GPT-2",
    modules=ModuleNames(
        ("transformer.wte", "transformer.wpe", "transformer.bias"), "transformer.h", ("transformer.ln_f",), ("lm_head",)
    ),
    since=(4, 45),
    logits_to_keep=ALONE_BEFORE,
    alone_before=ALONE_BEFORE,
    not_followed=((4, 49), ALONE_BEFORE),
    megatron=None,
    megatron_core=None,
)

FAMILIES = {"gpt_bigcode": GPT_BIGCODE}
