"""Ministral 3 (``models/ministral3/modular_ministral3.py``), which is the text of Mistral 3 since December 2025, of
Devstral 2 and of Mistral Medium 3.5, too: Mistral's layer, whose queries are scaled by their positions."""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.huggingface import Shared
from ..values import replace
from .base import NO_BIASES, Config, key
from .llama import CONSTANTS, KEYS_BUT_BIASES, MISTRAL, SILU


def scaled_queries(r: Recorder, q: Tensor, shared: Shared) -> Tensor:
    """``query_states * get_llama_4_attn_scale(…)``: ``1 + beta * log(1 + floor(positions / n))``, cast."""
    assert shared.position_ids is not None
    scales = ops.cast(r, shared.position_ids, "fp32", "scales_divided")
    for name in ("floor", "shifted", "log", "scaled", "above_one"):
        scales = ops.add_constant(r, scales, f"scales_{name}")
    scales = ops.cast(r, scales.view(1, 1, scales.shape[-1], 1), q.dtype, "scales")
    return ops.multiply(r, q, scales, "query_scaled")


MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    since=(5, 0),
    as_llama_since=(),
    kernels=(),
    scaled_queries=scaled_queries,
    config=Config(
        keys={
            **KEYS_BUT_BIASES,
            "kv_heads": key("num_key_value_heads", default=8),
            "head_dim": key("head_dim", default=128),
            "positions_max": key("max_position_embeddings", default=262_144),
            "sliding_window": key("sliding_window", default=None),
        },
        constants={**CONSTANTS, **NO_BIASES},
        activation=SILU,
        activations=("silu", "swish"),
        published_in=("fp8",),
    ),
    megatron_core=None,
    no_megatron_core="Megatron-Core scales no layer's queries by their positions",
    lora_targets=None,
)

FAMILIES = {"ministral3": MINISTRAL3}
