"""Gemma 3 (``models/gemma3/modeling_gemma3.py``), the part that reads text: Gemma 2's layer without its cap of scores,
with norms of queries and keys, and of every sixth layer, which sees all tokens, rotary positions of its own."""

from __future__ import annotations

from ..layers.coverage import LLAMA, reads
from ..plan.releases import LIBRARIES
from ..values import replace
from .base import Config, key
from .gemma2 import GEMMA2
from .llama import ATTENTION, CONSTANTS, KEYS, NORMED_LAST

CONFIG = Config(
    keys={
        **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
        "layers": key("num_hidden_layers", default=26),
        "heads": key("num_attention_heads", default=8),
        "kv_heads": key("num_key_value_heads", default=4),
        "head_dim": key("head_dim", default=256),
        "vocab": key("vocab_size", default=262_208),
        "attention_output_bias": KEYS["attention_bias"],
        "positions_max": key("max_position_embeddings", default=131_072),
        "sliding_window": key("sliding_window", default=4096),
        "full_interval": key("sliding_window_pattern", default=6),
        "tied_embeddings": key("tie_word_embeddings", default=True),
        "logit_softcap": key("final_logit_softcapping", default=None),
    },
    constants={
        **CONSTANTS,
        "mlp_bias": False,
        "norm_place": "both",
        "qk_norm": True,
        "embedding_scale": True,
    },
    activation=key("hidden_activation", default="gelu_pytorch_tanh"),
    activations=("gelu_pytorch_tanh", "gelu"),
    gated_gelu=True,
    refused={"attn_logit_softcapping": None, "use_bidirectional_attention": False},
)

GEMMA3_TEXT = replace(
    GEMMA2,
    name="gemma3_text",
    config=CONFIG,
    covers={
        **reads(LLAMA, "logit_softcap", "full_interval"),
        "norm_place": ("both",),
        "activation": ("geglu",),
        "qk_norm": (True,),
        "mlp_bias": (False,),
        "embedding_scale": (True,),
    },
    needs=("full_interval",),
    projecting=NORMED_LAST,
    no_flash="",
    since=LIBRARIES["transformers"].newest,
    registered=(*ATTENTION, *GEMMA2.registered[4:]),
)
"""Scores have no cap, though its configuration could say one: ``Gemma3Attention`` hands none on."""

FAMILIES = {"gemma3_text": GEMMA3_TEXT}
