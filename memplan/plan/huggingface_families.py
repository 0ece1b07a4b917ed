"""How a Hugging Face ``config.json`` of each known ``model_type`` is read: keys, defaults, and what is refused.

What a configuration leaves out has the default of its class in transformers 5.23
(``models/*/configuration_*.py``); the sizes that every saved configuration carries are required, since
a default would silently be another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .node import Scalar

REQUIRED = object()
"""The default of a size that every saved configuration carries."""


@dataclass(frozen=True, slots=True)
class Key:
    """Where a spec field is found: names in order of precedence, and the class's default."""

    names: tuple[str, ...]
    default: object = REQUIRED


@dataclass(frozen=True, slots=True)
class Family:
    """How configurations of one ``model_type`` are read."""

    keys: Mapping[str, Key]
    constants: Mapping[str, Scalar]
    activation: Key | None = None
    activations: tuple[str, ...] = ()
    gated_gelu: bool = False
    """The activation is that of a gate."""
    refused: Mapping[str, Scalar] = field(default_factory=dict)
    """Settings that change the model in ways that are not modelled, with the value that is."""


def _key(*names: str, default: object = REQUIRED) -> Key:
    return Key(names, default)


_LLAMA_KEYS = {
    "layers": _key("num_hidden_layers"),
    "hidden": _key("hidden_size"),
    "heads": _key("num_attention_heads"),
    "kv_heads": _key("num_key_value_heads", default=None),
    "head_dim": _key("head_dim", default=None),
    "ffn": _key("intermediate_size"),
    "vocab": _key("vocab_size"),
    "positions_max": _key("max_position_embeddings", default=2048),
    "attention_bias": _key("attention_bias", default=False),
    "mlp_bias": _key("mlp_bias", default=False),
    "tied_embeddings": _key("tie_word_embeddings", default=False),
    "attention_dropout": _key("attention_dropout", default=0.0),
}
_LLAMA_CONSTANTS: Mapping[str, Scalar] = {
    "norm": "rmsnorm",
    "positions": "rotary",
    "embedding_dropout": 0.0,
    "hidden_dropout": 0.0,
}
_KEYS_BUT_BIASES = {name: key for name, key in _LLAMA_KEYS.items() if not name.endswith("_bias")}
_NO_BIASES: Mapping[str, Scalar] = dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), False)
_PLAIN_ROTARY: Mapping[str, Scalar] = {"rope_scaling": None, "rope_parameters.rope_type": "default"}
_SILU = _key("hidden_act", default="silu")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt2": Family(
            keys={
                "layers": _key("n_layer", "num_hidden_layers"),
                "hidden": _key("n_embd", "hidden_size"),
                "heads": _key("n_head", "num_attention_heads"),
                "ffn": _key("n_inner", default=None),
                "vocab": _key("vocab_size"),
                "positions_max": _key("n_positions", "max_position_embeddings", default=1024),
                "tied_embeddings": _key("tie_word_embeddings", default=True),
                "embedding_dropout": _key("embd_pdrop", default=0.1),
                "attention_dropout": _key("attn_pdrop", default=0.1),
                "hidden_dropout": _key("resid_pdrop", default=0.1),
            },
            constants={"norm": "layernorm", "positions": "learned"},
            activation=_key("activation_function", default="gelu_new"),
            activations=("gelu", "gelu_new", "gelu_pytorch_tanh"),
            refused={
                "add_cross_attention": False,
                "reorder_and_upcast_attn": False,
                "scale_attn_weights": True,
            },
        ),
        "bert": Family(
            keys={
                "layers": _key("num_hidden_layers"),
                "hidden": _key("hidden_size"),
                "heads": _key("num_attention_heads"),
                "ffn": _key("intermediate_size"),
                "vocab": _key("vocab_size"),
                "positions_max": _key("max_position_embeddings", default=512),
                "token_types": _key("type_vocab_size", default=2),
                "embedding_dropout": _key("hidden_dropout_prob", default=0.1),
                "attention_dropout": _key("attention_probs_dropout_prob", default=0.1),
                "hidden_dropout": _key("hidden_dropout_prob", default=0.1),
            },
            constants={
                "norm": "layernorm",
                "norm_place": "post",
                "positions": "learned",
                "causal": False,
                "embedding_norm": True,
                "final_norm": False,
                "mlm_head": True,
            },
            activation=_key("hidden_act", default="gelu"),
            activations=("gelu", "gelu_new", "gelu_pytorch_tanh"),
            refused={
                "is_decoder": False,
                "add_cross_attention": False,
                "tie_word_embeddings": True,
                "position_embedding_type": "absolute",
                "chunk_size_feed_forward": 0,
            },
        ),
        "bloom": Family(
            keys={
                "layers": _key("n_layer", "num_hidden_layers"),
                "hidden": _key("n_embed", "hidden_size"),
                "heads": _key("n_head", "num_attention_heads"),
                "vocab": _key("vocab_size"),
                "positions_max": _key("seq_length", default=2048),
                "tied_embeddings": _key("tie_word_embeddings", default=True),
                "attention_dropout": _key("attention_dropout", default=0.0),
                "hidden_dropout": _key("hidden_dropout", default=0.0),
            },
            constants={
                "norm": "layernorm",
                "positions": "alibi",
                "activation": "gelu",
                "embedding_norm": True,
                "embedding_dropout": 0.0,
            },
        ),
        "llama": Family(
            keys={**_LLAMA_KEYS, "attention_output_bias": _LLAMA_KEYS["attention_bias"]},
            constants=_LLAMA_CONSTANTS,
            activation=_SILU,
            activations=("silu", "swish"),
        ),
        "mistral": Family(
            keys={
                **_KEYS_BUT_BIASES,
                "kv_heads": _key("num_key_value_heads", default=8),
                "positions_max": _key("max_position_embeddings", default=131_072),
                "sliding_window": _key("sliding_window", default=4096),
            },
            constants={**_LLAMA_CONSTANTS, **_NO_BIASES},
            activation=_SILU,
            activations=("silu", "swish"),
        ),
        "qwen3": Family(
            keys={
                **{name: key for name, key in _LLAMA_KEYS.items() if name != "mlp_bias"},
                "attention_output_bias": _LLAMA_KEYS["attention_bias"],
                "kv_heads": _key("num_key_value_heads", default=32),
                "head_dim": _key("head_dim", default=128),
                "positions_max": _key("max_position_embeddings", default=32_768),
            },
            constants={**_LLAMA_CONSTANTS, "mlp_bias": False, "qk_norm": True},
            activation=_SILU,
            activations=("silu", "swish"),
            refused={"use_sliding_window": False},
        ),
        "qwen2": Family(
            keys={
                **_KEYS_BUT_BIASES,
                "kv_heads": _key("num_key_value_heads", default=32),
                "positions_max": _key("max_position_embeddings", default=32_768),
            },
            constants={
                **_LLAMA_CONSTANTS,
                **_NO_BIASES,
                "attention_bias": True,
            },
            activation=_SILU,
            activations=("silu", "swish"),
            refused={"use_sliding_window": False},
        ),
        "phi3": Family(
            keys={
                **_KEYS_BUT_BIASES,
                "positions_max": _key("max_position_embeddings", default=4096),
                "sliding_window": _key("sliding_window", default=None),
                "hidden_dropout": _key("resid_pdrop", default=0.0),
                "rotary_fraction": _key("rope_parameters.partial_rotary_factor", "partial_rotary_factor", default=1.0),
            },
            constants={**_LLAMA_CONSTANTS, **_NO_BIASES},
            activation=_SILU,
            activations=("silu", "swish"),
            refused=_PLAIN_ROTARY,
        ),
        "gemma2": Family(
            keys={
                **{name: key for name, key in _LLAMA_KEYS.items() if name != "mlp_bias"},
                "attention_output_bias": _LLAMA_KEYS["attention_bias"],
                "kv_heads": _key("num_key_value_heads", default=4),
                "head_dim": _key("head_dim", default=256),
                "positions_max": _key("max_position_embeddings", default=8192),
                "sliding_window": _key("sliding_window", default=4096),
                "tied_embeddings": _key("tie_word_embeddings", default=True),
                "attention_softcap": _key("attn_logit_softcapping", default=50.0),
                "logit_softcap": _key("final_logit_softcapping", default=30.0),
            },
            constants={
                **_LLAMA_CONSTANTS,
                "mlp_bias": False,
                "norm_place": "both",
                "alternating_windows": True,
                "embedding_scale": True,
            },
            activation=_key("hidden_activation", default="gelu_pytorch_tanh"),
            activations=("gelu_pytorch_tanh", "gelu"),
            gated_gelu=True,
            refused={**_PLAIN_ROTARY, "use_bidirectional_attention": False},
        ),
        "opt": Family(
            keys={
                "layers": _key("num_hidden_layers"),
                "hidden": _key("hidden_size"),
                "heads": _key("num_attention_heads"),
                "ffn": _key("ffn_dim"),
                "vocab": _key("vocab_size"),
                "positions_max": _key("max_position_embeddings", default=2048),
                "attention_bias": _key("enable_bias", default=True),
                "attention_output_bias": _key("enable_bias", default=True),
                "mlp_bias": _key("enable_bias", default=True),
                "tied_embeddings": _key("tie_word_embeddings", default=True),
                "attention_dropout": _key("attention_dropout", default=0.0),
                "hidden_dropout": _key("dropout", default=0.1),
            },
            constants={"norm": "layernorm", "positions": "learned", "position_offset": 2, "embedding_dropout": 0.0},
            activation=_key("activation_function", default="relu"),
            activations=("relu", "gelu", "gelu_new", "gelu_pytorch_tanh"),
            refused={
                "do_layer_norm_before": True,
                "_remove_final_layer_norm": False,
                "layer_norm_elementwise_affine": True,
                "layerdrop": 0,
            },
        ),
        "gpt_neox": Family(
            keys={
                "layers": _key("num_hidden_layers"),
                "hidden": _key("hidden_size"),
                "heads": _key("num_attention_heads"),
                "ffn": _key("intermediate_size"),
                "vocab": _key("vocab_size"),
                "positions_max": _key("max_position_embeddings", default=2048),
                "rotary_fraction": _key("rope_parameters.partial_rotary_factor", "rotary_pct", default=0.25),
                "attention_bias": _key("attention_bias", default=True),
                "attention_output_bias": _key("attention_bias", default=True),
                "tied_embeddings": _key("tie_word_embeddings", default=False),
                "embedding_dropout": _key("hidden_dropout", default=0.0),
                "attention_dropout": _key("attention_dropout", default=0.0),
                "hidden_dropout": _key("hidden_dropout", default=0.0),
                "blocks": _key("use_parallel_residual", default=True),
            },
            constants={"norm": "layernorm", "positions": "rotary"},
            activation=_key("hidden_act", default="gelu"),
            activations=("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu"),
            refused=_PLAIN_ROTARY,
        ),
        "gptj": Family(
            keys={
                "layers": _key("n_layer", "num_hidden_layers"),
                "hidden": _key("n_embd", "hidden_size"),
                "heads": _key("n_head", "num_attention_heads"),
                "ffn": _key("n_inner", default=None),
                "vocab": _key("vocab_size"),
                "positions_max": _key("n_positions", "max_position_embeddings", default=2048),
                "rotary_fraction": _key("rotary_dim", default=64),
                "tied_embeddings": _key("tie_word_embeddings", default=False),
                "embedding_dropout": _key("embd_pdrop", default=0.0),
                "attention_dropout": _key("attn_pdrop", default=0.0),
                "hidden_dropout": _key("resid_pdrop", default=0.0),
            },
            constants={
                "norm": "layernorm",
                "positions": "rotary",
                "blocks": "parallel_one_norm",
                "attention_bias": False,
                "attention_output_bias": False,
                "head_bias": True,
            },
            activation=_key("activation_function", default="gelu_new"),
            activations=("gelu", "gelu_new", "gelu_pytorch_tanh"),
        ),
        "falcon": Family(
            keys={
                "layers": _key("num_hidden_layers", "n_layer"),
                "hidden": _key("hidden_size", "n_embed"),
                "heads": _key("num_attention_heads", "n_head"),
                "ffn": _key("ffn_hidden_size", default=None),
                "vocab": _key("vocab_size"),
                "positions_max": _key("max_position_embeddings", default=2048),
                "tied_embeddings": _key("tie_word_embeddings", default=True),
                "hidden_dropout": _key("hidden_dropout", default=0.0),
            },
            constants={
                "norm": "layernorm",
                "positions": "rotary",
                "blocks": "parallel_one_norm",
                "kv_heads": 1,
                **_NO_BIASES,
                "embedding_dropout": 0.0,
                "attention_dropout": 0.0,
            },
            activation=_key("activation", default="gelu"),
            activations=("gelu",),
            refused={
                **_PLAIN_ROTARY,
                "alibi": False,
                "new_decoder_architecture": False,
                "multi_query": True,
                "parallel_attn": True,
                "bias": False,
            },
        ),
    }
)
"""What is known, by ``model_type``."""
