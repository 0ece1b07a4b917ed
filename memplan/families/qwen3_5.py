"""Qwen 3.5 without its vision tower (``models/qwen3_5/modeling_qwen3_5.py``, ``models/qwen3_5_moe``): gated delta nets,
every fourth layer gated attention, dense or with experts. torchtitan has its code, too (``torchtitan/models/qwen3_5``),
and Megatron-Core such layers (``--experimental-attention-variant gated_delta_net``).

What a configuration says of layers that predict further tokens (``mtp_num_hidden_layers``) is left out, as
transformers' classes leave their weights out (``_keys_to_ignore_on_load_unexpected``)."""

from __future__ import annotations

from functools import partial

from ..layers import ops
from ..layers.autograd import Recorder, Tensor
from ..layers.delta_net import each_projected
from ..layers.huggingface import LayerShape
from ..values import replace
from .base import ROUTER_LOSS, Config, key
from .llama import LLAMA_FAMILY, SILU
from .qwen3_next import (
    COVERED_MIXTURE,
    DELTA,
    GATED,
    GATED_DELTA,
    MIXTURE_REST,
    NET,
    OPENED,
    REGISTERED,
    REST,
    embedding,
    mixed,
    mixture,
)

OTHER_CODE = ", and with --framework fsdp --fsdp-code torchtitan"
SAID = {"attn_output_gate": True}
"""What ``config.json`` says, and no class reads: attention always has its gate."""


def tables(r: Recorder, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """``Qwen3_5TextRotaryEmbedding.forward``: angles by each of three positions (of text, height and width of every
    sequence), (3, b, s, d / 2), of which one part of the features takes each (``recomposition_frequencies``). The
    positions that layers are handed are the text's."""
    angles, whole = (3, shape.b, shape.s, shape.turned // 2), (shape.b, shape.s, shape.turned)

    def scaled(name: str) -> Tensor:
        return ops.scale(r, r.empty(angles, "fp32", f"{name}_unscaled"), f"{name}_fp32")

    _frequencies = r.in_turn(((*angles[:3], 1), "fp32", "position_ids_fp32"), (angles, "fp32", "rotary_frequencies"))
    cos = scaled("cos")
    sin = scaled("sin")
    sin = r.empty(whole, "fp32", "sin_recomposed")
    cos = r.empty(whole, "fp32", "cos_recomposed")
    narrow = ops.cast(r, cos, shape.dtype, "cos"), ops.cast(r, sin, shape.dtype, "sin")
    del cos, sin
    return narrow


OF_NET = {
    "delta_output": f"{NET}.out_proj",
    "delta_qkv": f"{NET}.in_proj_qkv",
    "delta_gate": f"{NET}.in_proj_z",
    "delta_b": f"{NET}.in_proj_b",
    "delta_a": f"{NET}.in_proj_a",
}

QWEN3_5 = replace(
    GATED_DELTA,
    name="qwen3_5",
    other_code=OTHER_CODE,
    attention=partial(mixed, projecting=each_projected),
    embedding=partial(embedding, tables=tables),
    tables_of_each=True,
    assumptions=(
        "only the text part: no images, no vision tower, and no layers that predict further tokens, whose weights "
        "transformers' text model leaves out (_keys_to_ignore_on_load_unexpected)",
    ),
    linear_layers={**LLAMA_FAMILY.linear_layers, **OF_NET},
    registered=(*REGISTERED, "delta_norm", *OF_NET, *REST),
    config=Config(
        keys={**DELTA, "kv_heads": key("num_key_value_heads", default=4)},
        constants=GATED,
        activation=SILU,
        activations=("silu", "swish"),
        refused=SAID,
        model_type="qwen3_5_text",
    ),
)

QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    covers=COVERED_MIXTURE,
    mixture=mixture,
    classifies=False,
    linear_layers={**QWEN3_5.linear_layers, **OPENED},
    registered=(*REGISTERED, "delta_norm", *OF_NET, *MIXTURE_REST),
    config=Config(
        keys={
            **DELTA,
            "kv_heads": key("num_key_value_heads", default=2),
            "ffn": key("moe_intermediate_size", default=512),
            "experts": key("num_experts", default=256),
            "expert_top_k": key("num_experts_per_tok", default=8),
            "expert_ffn": key("moe_intermediate_size", default=512),
            "shared_expert_ffn": key("shared_expert_intermediate_size", default=512),
            "router_aux_loss": key("router_aux_loss_coef", default=0.001),
            **ROUTER_LOSS,
        },
        constants={**GATED, "shared_expert_gate": True},
        activation=SILU,
        activations=("silu", "swish"),
        refused={**SAID, "norm_topk_prob": True},
        model_type="qwen3_5_moe_text",
    ),
)
"""No layer has an MLP alone; ``Qwen3_5MoeTopKRouter`` always norms the chosen scores."""

FAMILIES = {one.name: one for one in (QWEN3_5, QWEN3_5_MOE)}
