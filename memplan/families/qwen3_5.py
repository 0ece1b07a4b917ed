"""Qwen 3.5 without its vision tower: gated delta nets, every fourth layer gated attention, dense or with experts.
torchtitan has its code (``torchtitan/models/qwen3_5``), and Megatron-Core such layers
(``--experimental-attention-variant gated_delta_net``); of transformers' no recipe covers them."""

from __future__ import annotations

from ..layers.coverage import CORE_GPT
from .base import Family

NO_RECIPE = "its layers in transformers have no recipe: --framework fsdp --fsdp-code torchtitan"

FAMILIES = {
    name: Family(name, megatron_core=CORE_GPT, no_transformers=NO_RECIPE) for name in ("qwen3_5", "qwen3_5_moe")
}
