"""ERNIE 4.5 (``models/ernie4_5/modeling_ernie4_5.py``): Llama's layer, whose positions turn neighbours, in fp32."""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import LLAMA
from ..layers.huggingface import Shared, rotate_half
from ..plan.releases import LIBRARIES
from ..values import replace
from .base import Config, key
from .glm4 import interleaved
from .llama import CONSTANTS, KEYS_BUT_BIASES, LLAMA_FAMILY, SILU


def turned(r: Recorder, x: Tensor, cos: Tensor, sin: Tensor, name: str) -> Tensor:
    """``(x.float() * cos) + (rotate_half(x).float() * sin)``."""
    kept = ops.multiply(r, ops.cast(r, x, "fp32", f"{name}_fp32"), cos, f"{name}_cos")
    half = ops.multiply(r, ops.cast(r, rotate_half(r, x, name), "fp32", f"{name}_half_fp32"), sin, f"{name}_sin")
    return ops.add(r, kept, half, f"{name}_turned")


def rotary(r: Recorder, q: Tensor, k: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb``: by tables in fp32, both before either is cast back."""
    cos, sin = shared.tables
    cos = interleaved(r, cos, "cos")
    sin = interleaved(r, sin, "sin")
    q_embed = turned(r, q, cos, sin, "query")
    k_embed = turned(r, k, cos, sin, "key")
    return ops.cast(r, q_embed, q.dtype, "query_rotary"), ops.cast(r, k_embed, k.dtype, "key_rotary")


ERNIE4_5 = replace(
    LLAMA_FAMILY,
    name="ernie4_5",
    config=Config(
        keys={
            **{name: given for name, given in KEYS_BUT_BIASES.items() if name != "attention_dropout"},
            **dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), key("use_bias", default=False)),
            "kv_heads": key("num_key_value_heads", default=2),
            "head_dim": key("head_dim", default=128),
            "positions_max": key("max_position_embeddings", default=131_072),
            "tied_embeddings": key("tie_word_embeddings", default=True),
        },
        constants={**CONSTANTS, "attention_dropout": 0.0},
        activation=SILU,
        activations=("silu", "swish"),
    ),
    covers={**LLAMA, "qk_norm": (False,), "sliding_window": (None,), "attention_dropout": (0.0,)},
    kernels=(),
    rotary=rotary,
    rotary_keeps_layout=True,
    wide_tables=True,
    megatron_core=None,
    lora_targets=None,
    since=LIBRARIES["transformers"].newest,
)

FAMILIES = {"ernie4_5": ERNIE4_5}
