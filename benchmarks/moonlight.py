"""Moonlight-16B trained by Megatron-Bridge on eight H100: the recipe's settings, and the peak that it logged.

Settings are those of ``src/megatron/bridge/recipes/moonlight/h100/moonlight_16b.py``
(``moonlight_16b_pretrain_8gpu_h100_bf16_config``), of ``models/deepseek/deepseek_v3_bridge.py`` and of
``recipes/utils/environment_utils.py`` at the commit that each row names; Transformer Engine as ``uv.lock`` pins it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import memplan

from .comparison import Comparison, Table

Row = Mapping[str, Any]

GB = 10**9
PEAK, SAVED = "peak allocated", "saved by recompute"
LIMIT = 0.01
NOISE = 0.05 * GB
"""Of the difference between two rows; a reading is good to 0.015."""


def plan_of(row: Row, imbalance: str = "balanced") -> memplan.Plan:
    """The plan of one row."""
    parallel = row["parallel"]
    plan: dict[str, Any] = {
        "model": {"base": "moonlight-16b", "router_dtype": "fp32"},
        "framework": "megatron",
        "torch": "2.11",
        "hardware": {"gpu": "h100-80gb", "gpus": row["gpus"]},
        "layout": {"tp": parallel["tp"], "ep": parallel["ep"], "etp": 1, "dp": parallel["dp"], "zero": 1,
                   "sequence_parallel": True},
        "batch": {"mbs": row["micro_batch_size"], "gbs": row["global_batch_size"], "seq": row["sequence_length"]},
        "precision": {"dtype": "bf16", "gradients": "bf16"},
        "optimizer": {"name": "adamw", "precision_aware": True, "exp_avg": "bf16", "exp_avg_sq": "bf16",
                      "fp8_recipe": "tensorwise"},
        "megatron": {"transformer_engine": "2.17.1", "cross_entropy_fusion": "te", "rope_fusion": False,
                     "overlap_grad_reduce": True, "overlap_param_gather": True, "attention_mask_in_dataloader": False},
        "experts": {"dispatcher": "alltoall", "grouped_gemm": True, "permute_fusion": True,
                    "shared_expert_overlap": True, "imbalance": imbalance},
        "environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    }  # fmt: skip
    if row["recompute_modules"]:
        plan["recompute"] = {"mode": "selective", "modules": row["recompute_modules"]}
    return memplan.read_plan(plan)


def peak(row: Row, imbalance: str = "balanced") -> int:
    """Bytes that are allocated at most."""
    found = memplan.estimate(plan_of(row, imbalance)).to_dict()["stages"][-1]["allocated_bytes"]
    assert isinstance(found, int)
    return found


def table(rows: Sequence[Row]) -> Table:
    """Each row's peak, where routing is between balanced and 1.1, and what recompute saves."""
    compared = tuple(_compared(rows))
    return Table(
        "megatron_bridge_moonlight.jsonl",
        "peak allocated by Moonlight-16B under Megatron-Bridge, and the difference that recomputed modules make",
        "NVIDIA-NeMo/Megatron-Bridge at 600d069b, recipe moonlight_16b; Transformer Engine 2.17.1",
        f"{100 * LIMIT:.0f} % of the range from balanced routing to 1.1 (peak), 0.05 GB (difference)",
        compared,
        (),
        (
            "Routing is not the cause: an untrained Moonlight, simulated layer by layer on the same mock tokens, sends "
            "every rank of experts between 0.9 and 1.1 of the mean.",
            "MixedPrecisionConfig.setup copies its fp8_recipe, tensorwise by default, into the optimizer's settings, "
            "though no product is in 8 bits (mixed_precision.py). OptimizerConfig's "
            "use_precision_aware_optimizer_no_fp8_or_ds_fp8 is then false, so that Megatron-Core keeps whole fp32 main "
            "parameters and, in the step, fp32 copies of the gradients. With mla_up_proj recomputed the step is the "
            "peak, which routing does not change.",
            "Of 686 MiB that the step's peak lacks, and 728 that the forward pass' does, no cause is known. What was "
            "read at these commits does not have them: logits (640 MiB) are there once, as Transformer Engine's "
            "parallel_cross_entropy writes gradients into them; of weights' dummy gradients there is one for each "
            "shape (417 MiB, counted); the vocabulary is the tokenizer's 163,840, which 1,280 x tp divides; FusedAdam"
            " reads moments in bf16 as they are; buckets of 2^27 parameters (CommOverlapConfig) change 0.02 MiB; no "
            "mask of attention is made; without a name for a module Megatron-Core recomputes core attention (3.4 MiB "
            "less); what dispatchers keep is counted (42 MiB); Triton's autotuner (256 MiB) runs in the first "
            "iteration, which has no states; Bridge's loop sets gradients of the step to none before the next forward"
            " pass.",
            "Queries have no rank of their own, and are normed in their projection (mla_qk_norm_config.py).",
        ),
    )


def _compared(rows: Sequence[Row]) -> Iterator[Comparison]:
    estimates: list[int] = []
    for row in rows:
        measured = round(row["peak_allocated_gb"] * GB)
        least, most = peak(row), peak(row, "1.1")
        estimates.append(least)
        within = (1 - LIMIT) * least <= measured <= (1 + LIMIT) * most
        cause = "" if within else "about 0.7 GB in every row alike: not explained"
        yield Comparison(row["id"], PEAK, measured, least, within, cause)
    first, *others = zip(rows, estimates, strict=True)
    for row, estimate in others:
        measured = round((first[0]["peak_allocated_gb"] - row["peak_allocated_gb"]) * GB)
        saved = first[1] - estimate
        within = abs(saved - measured) <= NOISE
        cause = f"{(saved - measured) / 27 / 2**20:.1f} MiB of each layer: not explained"
        yield Comparison(row["id"], SAVED, measured, saved, within, "" if within else cause)
