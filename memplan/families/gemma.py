"""Gemma (``models/gemma/modeling_gemma.py``), the first one, and CodeGemma: Llama's layer with Gemma's norm and a gated
GELU, behind an embedding that multiplies its output (``GemmaTextScaledWordEmbedding``)."""

from __future__ import annotations

from ..layers.autograd import Recorder
from ..layers.coverage import LLAMA
from ..layers.ends import Embedded, causal_mask, positions, rotary_tables, word_embeddings
from ..layers.huggingface import LayerShape, Shared
from ..plan.releases import LIBRARIES
from ..values import replace
from .base import PLAIN_ROTARY, Config, key
from .gemma2 import gemma_norm, scaled
from .llama import CONSTANTS, KEYS, LLAMA_FAMILY


def embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``GemmaModel.forward`` up to the first layer."""
    inputs_embeds = r.embedded(scaled(r, word_embeddings(r, shape), shape))
    position_ids = positions(r, shape.s)
    mask = causal_mask(r, shape)
    cos, sin = rotary_tables(r, shape)
    return Embedded(inputs_embeds, Shared(mask, cos, sin, position_ids))


GEMMA = replace(
    LLAMA_FAMILY,
    name="gemma",
    config=Config(
        keys={
            **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
            "attention_output_bias": KEYS["attention_bias"],
            "kv_heads": key("num_key_value_heads", default=16),
            "head_dim": key("head_dim", default=256),
            "positions_max": key("max_position_embeddings", default=8192),
            "tied_embeddings": key("tie_word_embeddings", default=True),
        },
        constants={**CONSTANTS, "mlp_bias": False, "embedding_scale": True},
        activation=key("hidden_act", default="gelu_pytorch_tanh"),
        activations=("gelu_pytorch_tanh", "gelu"),
        gated_gelu=True,
        refused={**PLAIN_ROTARY, "use_bidirectional_attention": False},
    ),
    covers={
        **LLAMA,
        "activation": ("geglu",),
        "qk_norm": (False,),
        "mlp_bias": (False,),
        "sliding_window": (None,),
        "embedding_scale": (True,),
    },
    kernels=(),
    embedding=embedding,
    norm=gemma_norm,
    scale_in_embedding=True,
    megatron_core=None,
    since=LIBRARIES["transformers"].newest,
)

FAMILIES = {"gemma": GEMMA}
