"""BLOOM: Megatron's GPT with ALiBi; transformers' own code has no recipe."""

from __future__ import annotations

from ..layers.coverage import MEGATRON_GPT
from .base import Config, Family, key

FAMILIES = {
    "bloom": Family(
        "bloom",
        config=Config(
            keys={
                "layers": key("n_layer", "num_hidden_layers"),
                "hidden": key("n_embed", "hidden_size"),
                "heads": key("n_head", "num_attention_heads"),
                "vocab": key("vocab_size"),
                "positions_max": key("seq_length", default=2048),
                "tied_embeddings": key("tie_word_embeddings", default=True),
                "attention_dropout": key("attention_dropout", default=0.0),
                "hidden_dropout": key("hidden_dropout", default=0.0),
            },
            constants={
                "norm": "layernorm",
                "positions": "alibi",
                "activation": "gelu",
                "embedding_norm": True,
                "embedding_dropout": 0.0,
            },
        ),
        multi_head=True,
        heads_fill_hidden=True,
        megatron=MEGATRON_GPT,
    )
}
