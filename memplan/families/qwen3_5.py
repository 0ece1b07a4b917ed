"""Qwen 3.5 without its vision tower: gated delta nets, every fourth layer gated attention, dense or with experts.
torchtitan has its code (``torchtitan/models/qwen3_5``), and Megatron-Core such layers
(``--experimental-attention-variant gated_delta_net``); of transformers' (``models/qwen3_5``, ``models/qwen3_5_moe``) no
recipe covers them.

What a configuration says of layers that predict further tokens (``mtp_num_hidden_layers``) is left out, as
transformers' classes leave their weights out (``_keys_to_ignore_on_load_unexpected``)."""

from __future__ import annotations

from ..layers.coverage import CORE_GPT
from .base import Config, Family, key
from .llama import SILU
from .qwen3_next import DELTA, GATED

OTHER_CODE = ", and with --framework fsdp --fsdp-code torchtitan"
SAID = {"attn_output_gate": True}
"""What ``config.json`` says, and no class reads: attention always has its gate."""

QWEN3_5 = Family(
    "qwen3_5",
    megatron_core=CORE_GPT,
    other_code=OTHER_CODE,
    config=Config(
        keys={**DELTA, "kv_heads": key("num_key_value_heads", default=4)},
        constants=GATED,
        activation=SILU,
        activations=("silu", "swish"),
        refused=SAID,
        model_type="qwen3_5_text",
    ),
)

QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    megatron_core=CORE_GPT,
    other_code=OTHER_CODE,
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
        },
        constants={**GATED, "shared_expert_gate": True},
        activation=SILU,
        activations=("silu", "swish"),
        refused=SAID | {"norm_topk_prob": True},
        model_type="qwen3_5_moe_text",
    ),
)
"""No layer has an MLP alone; ``Qwen3_5MoeTopKRouter`` always norms the chosen scores."""

FAMILIES = {one.name: one for one in (QWEN3_5, QWEN3_5_MOE)}
