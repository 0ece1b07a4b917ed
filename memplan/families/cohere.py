"""Command R and Aya (``models/cohere/modeling_cohere.py``), Command R7B and Command A (``models/cohere2/…``): attention
and Llama's MLP side by side behind one LayerNorm without a bias, logits that are scaled. Positions turn neighbouring
features, in fp32; Cohere 2 has windows, and in every fourth layer neither a window nor positions."""

from __future__ import annotations

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import LLAMA, Allowed, reads
from ..layers.huggingface import LayerShape, Shared, rotary_one
from ..plan.releases import LIBRARIES
from ..values import replace
from .base import Config, key
from .exaone4 import embedding
from .llama import ATTENTION, CONSTANTS, KEYS, LLAMA_FAMILY, NORMED_LAST, SILU, llama_attention, llama_mlp


def squared(r: Recorder, hidden: Tensor, mean: Tensor, name: str) -> Tensor:
    """``(hidden_states - mean).pow(2)``."""
    return ops.power(r, ops.add(r, hidden, mean, f"{name}_deviation", negated=True), f"{name}_square")


def normed(r: Recorder, hidden: Tensor, mean: Tensor, variance: Tensor, name: str) -> Tensor:
    """``(hidden_states - mean) * torch.rsqrt(variance + eps)``."""
    left = ops.add(r, hidden, mean, f"{name}_centred", negated=True)
    right = ops.rsqrt(r, ops.add_constant(r, variance, f"{name}_eps"), f"{name}_rstd")
    return ops.multiply(r, left, right, f"{name}_normed")


def norm(r: Recorder, x: Tensor, name: str) -> Tensor:
    """``CohereLayerNorm.forward``, of hidden states (b, s, h) or heads (b, s, a, d), in fp32 by Python operators."""
    weight, dtype = r.parameter(f"{name}.weight", x.shape[2:], x.dtype), x.dtype
    hidden = ops.cast(r, x, "fp32", f"{name}_fp32")
    mean = ops.mean_last(r, hidden, f"{name}_mean")
    variance = ops.mean_last(r, squared(r, hidden, mean, name), f"{name}_variance")
    hidden = normed(r, hidden, mean, variance, name)
    hidden = ops.multiply(r, ops.cast(r, weight, "fp32", f"{name}_weight_fp32"), hidden, f"{name}_scaled")
    return ops.cast(r, hidden, dtype, name)


def rotary(r: Recorder, q: Tensor, k: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb``: every second feature and its neighbour, both in fp32 before either is cast back."""
    dtype = q.dtype
    q = ops.cast(r, q, "fp32", "query_fp32")
    k = ops.cast(r, k, "fp32", "key_fp32")
    q_embed = rotary_one(r, q, shared, "query", "turned")
    k_embed = rotary_one(r, k, shared, "key", "turned")
    return ops.cast(r, q_embed, dtype, "query_rotary"), ops.cast(r, k_embed, dtype, "key_rotary")


def layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``CohereDecoderLayer.forward``."""
    residual = hidden
    hidden = norm(r, hidden, "attention_norm")
    attended, _ = llama_attention(r, hidden, shared, shape)
    fed = llama_mlp(r, hidden, shape.spec)
    hidden = ops.add(r, ops.add(r, residual, attended, "residual_attention"), fed, "residual_mlp")
    return hidden  # noqa: RET504 - the variable ends its tensor's life


KEYS_OF_COHERE = {
    **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
    "attention_output_bias": KEYS["attention_bias"],
    "positions_max": key("max_position_embeddings", default=8192),
    "tied_embeddings": key("tie_word_embeddings", default=True),
}

CONFIG = Config(
    keys={**KEYS_OF_COHERE, "qk_norm": key("use_qk_norm", default=False)},
    constants={
        **CONSTANTS,
        "norm": "layernorm_without_bias",
        "blocks": "parallel_one_norm",
        "qk_norm_over": "each_head",
        "logit_scale": True,
        "mlp_bias": False,
    },
    activation=SILU,
    activations=("silu", "swish"),
)
COVERED: Allowed = {
    **LLAMA,
    "norm": ("layernorm_without_bias",),
    "blocks": ("parallel_one_norm",),
    "qk_norm_over": ("each_head",),
    "logit_scale": (True,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
}

COHERE = replace(
    LLAMA_FAMILY,
    name="cohere",
    config=CONFIG,
    covers=COVERED,
    classifies=False,
    kernels=(),
    layer=layer,
    norm=norm,
    projecting=NORMED_LAST,
    rotary=rotary,
    rotary_keeps_layout=True,
    megatron_core=None,
    lora_targets=None,
    registered=(*ATTENTION, "gate", "up", "down", "attention_norm"),
    no_zero3="its blocks side by side have not been compared with DeepSpeed's engine",
    since=LIBRARIES["transformers"].newest,
)

COHERE2 = replace(
    COHERE,
    name="cohere2",
    config=replace(
        CONFIG,
        constants={**CONFIG.constants, "qk_norm": False, "qk_norm_over": "head"},
        keys={
            **{name: key for name, key in KEYS_OF_COHERE.items() if name != "head_dim"},
            "sliding_window": key("sliding_window", default=4096),
            "nope_interval": key("layer_types", default=None),
        },
    ),
    covers={
        **reads(COVERED, "sliding_window", "nope_interval"),
        "qk_norm": (False,),
        "qk_norm_over": ("head",),
    },
    needs=("sliding_window", "nope_interval"),
    heads_fill_hidden=True,
    projecting=None,
    embedding=embedding,
)

FAMILIES = {"cohere": COHERE, "cohere2": COHERE2}
