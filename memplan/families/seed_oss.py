"""Seed-OSS (``models/seed_oss/modeling_seed_oss.py``): Llama's layer with a dropout behind attention and MLP."""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import LLAMA, reads
from ..layers.huggingface import LayerShape, Shared, rms_norm
from ..plan.releases import LIBRARIES
from ..plan.spec import ModelSpec
from ..values import replace
from .base import Config, key
from .llama import CONSTANTS, KEYS, LLAMA_FAMILY, SILU, llama_attention, llama_mlp


def mlp(r: Recorder, x: Tensor, spec: ModelSpec) -> Tensor:
    """``SeedOssMLP.forward``."""
    down = llama_mlp(r, x, spec)
    down = ops.dropout(r, down, spec.hidden_dropout, "mlp_dropout")
    return down  # noqa: RET504 - the variable ends its tensor's life


def layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``SeedOssDecoderLayer.forward``."""
    spec = shape.spec
    residual = hidden
    hidden = rms_norm(r, hidden, "attention_norm")
    hidden, _ = llama_attention(r, hidden, shared, shape)
    hidden = ops.add(r, residual, hidden, "residual_attention")
    residual = hidden
    hidden = rms_norm(r, hidden, "mlp_norm")
    hidden = mlp(r, hidden, spec)
    hidden = ops.add(r, residual, hidden, "residual_mlp")
    return hidden  # noqa: RET504 - the variable ends its tensor's life


SEED_OSS = replace(
    LLAMA_FAMILY,
    name="seed_oss",
    kernels=(),
    since=LIBRARIES["transformers"].newest,
    dropout_functions=("attention_dropout", "hidden_dropout"),
    config=Config(
        keys={
            **KEYS,
            "kv_heads": key("num_key_value_heads", default=8),
            "head_dim": key("head_dim", default=128),
            "positions_max": key("max_position_embeddings", default=524_288),
            "attention_bias": key("attention_bias", default=True),
            "attention_output_bias": key("attention_out_bias", default=False),
            "attention_dropout": key("attention_dropout", default=0.1),
            "hidden_dropout": key("residual_dropout", default=0.1),
        },
        constants={name: value for name, value in CONSTANTS.items() if name != "hidden_dropout"},
        activation=SILU,
        activations=("silu", "swish"),
    ),
    covers={**reads(LLAMA, "hidden_dropout"), "qk_norm": (False,), "sliding_window": (None,)},
    layer=layer,
    megatron_core=None,
    lora_targets=None,
)

FAMILIES = {"seed_oss": SEED_OSS}
