"""OLMo 3 (``models/olmo3/modeling_olmo3.py``): EXAONE 4's layer with one norm over all heads of queries and one over
all of keys, positions that are applied in fp32, and windows in three of four layers."""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import LLAMA, reads
from ..layers.ends import Embedded, word_embeddings
from ..layers.huggingface import Heads, LayerShape, Shared, attention, linear, rotary_one
from ..values import replace
from .base import Config, key
from .exaone4 import EXAONE4
from .gemma2 import of_both_kinds
from .gpt_oss import norm
from .llama import CONSTANTS, KEYS, NORMED_FIRST, SILU, projected


def rotary(r: Recorder, q: Tensor, k: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb``: by tables in fp32, both before either is cast back."""
    q_embed = rotary_one(r, q, shared, "query", "turned")
    k_embed = rotary_one(r, k, shared, "key", "turned")
    return ops.cast(r, q_embed, q.dtype, "query_rotary"), ops.cast(r, k_embed, k.dtype, "key_rotary")


def own_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """``Olmo3Attention.forward``."""
    q, k, v = projected(r, hidden, shape)
    q, k = rotary(r, q, k, shared)
    out, weights = attention(r, Heads(q, True), Heads(k, True), Heads(v, True), shared, shape)
    out = linear(r, out, "attention_output", shape.spec.hidden, shape.spec.attention_output_bias)
    return out, weights


def embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``Olmo3Model.forward`` up to the first layer."""
    return of_both_kinds(r, shape, r.embedded(word_embeddings(r, shape)))


OLMO3 = replace(
    EXAONE4,
    name="olmo3",
    config=Config(
        keys={
            **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
            "attention_output_bias": KEYS["attention_bias"],
            "sliding_window": key("sliding_window", default=4096),
            "full_interval": key("layer_types", default=4),
        },
        constants={**CONSTANTS, "mlp_bias": False, "norm_place": "post", "qk_norm": True, "qk_norm_over": "heads"},
        activation=SILU,
        activations=("silu", "swish"),
    ),
    covers={
        **reads(LLAMA, "qk_norm_over", "full_interval"),
        "mlp_bias": (False,),
        "norm_place": ("post",),
        "qk_norm": (True,),
        "qk_norm_over": ("heads",),
    },
    needs=("full_interval",),
    embedding=embedding,
    norm=norm,
    projecting=NORMED_FIRST,
    attention=own_attention,
    wide_tables=True,
)

FAMILIES = {"olmo3": OLMO3}
