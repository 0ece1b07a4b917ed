"""StarCoder 2 (``models/starcoder2/modeling_starcoder2.py``): Llama's attention between GPT-2's norms and MLP, with
biases everywhere, dropout behind the embedding and behind each block, and one window for all layers. Megatron-Core's
GPT is that with options (NeMo, ``collections/llm/gpt/model/starcoder2.py``, ``Starcoder2Config``)."""

from __future__ import annotations

from ..layers.coverage import LLAMA, reads
from ..plan.releases import LIBRARIES
from ..values import replace
from .base import Config, Submodules, key
from .gpt2 import gpt2_mlp
from .gpt_neox import neox_embedding
from .llama import KEYS_BUT_BIASES, LLAMA_FAMILY, SUBMODULES

BIASES = key("use_bias", default=True)

STARCODER2 = replace(
    LLAMA_FAMILY,
    name="starcoder2",
    since=LIBRARIES["transformers"].newest,
    dropout_functions=("attention_dropout", "hidden_dropout", "embedding_dropout"),
    config=Config(
        keys={
            **KEYS_BUT_BIASES,
            "kv_heads": key("num_key_value_heads", default=2),
            "positions_max": key("max_position_embeddings", default=4096),
            "sliding_window": key("sliding_window", default=None),
            **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), BIASES),
            "tied_embeddings": key("tie_word_embeddings", default=True),
            "embedding_dropout": key("embedding_dropout", default=0.0),
            "hidden_dropout": key("residual_dropout", default=0.0),
        },
        constants={"norm": "layernorm", "positions": "rotary"},
        activation=key("hidden_act", default="gelu_pytorch_tanh"),
        activations=("gelu", "gelu_new", "gelu_pytorch_tanh"),
    ),
    covers={
        **reads(LLAMA, "embedding_dropout", "hidden_dropout"),
        "norm": ("layernorm",),
        "activation": ("gelu", "gelu_new"),
        "qk_norm": (False,),
    },
    kernels=(),
    mlp=gpt2_mlp,
    embedding=neox_embedding,
    linear_layers={
        **{name: LLAMA_FAMILY.linear_layers[name] for name in ("query", "key", "value", "attention_output")},
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
    lora_targets=None,
    registered=("query", "key", "value", "attention_output", "up", "down", "attention_norm", "mlp_norm"),
    submodules={
        **SUBMODULES,
        "layer": Submodules(
            before_forward={"attention_norm": 1, "query": 1, "up": 1},
            after_forward={"up": 1},
            before_backward={"down": 2, "attention_output": 1},
            after_backward={"down": 1},
            not_recomputed="attention_norm",
        ),
    },
)

FAMILIES = {"starcoder2": STARCODER2}
