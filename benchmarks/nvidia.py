"""NVIDIA's published training throughput beside predicted steps: ``nvidia_throughput.jsonl`` of the measured runs.

Sizes, batch and tokens a second are the row's; what its table does not say is from the performance recipes of that
release of Megatron-Bridge, in ``nvidia_recipes.jsonl``, each with its file. What a recipe has that is not modelled is
named there, and the row is timed without it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measured import plan_of, read_rows  # noqa: E402
from memplan.frameworks.megatron.memory_rules import CHAIN  # noqa: E402
from memplan.plan.errors import PlanError  # noqa: E402
from memplan.plan.plan import Plan  # noqa: E402

Row = Mapping[str, Any]

NAME = "nvidia_throughput.jsonl"
RECIPES = Path(__file__).with_name("nvidia_recipes.jsonl")

FURTHER = {"mtp_layers": 2, "mtp_pattern": "*E", "mtp_shared": "true"}
"""Of Nemotron 3's recipes: one pair of layers predicts two further tokens, one after the other."""

UNFUSED = {"moe_router_fusion": "false"}
"""Of Nemotron 3's recipes for GB200 and GB300 (``recipes/nemotronh/h100/nemotron_3_nano.py``; Super's leave the
default), which ``perf_recipes`` turn on for Ultra and H100 alone."""

DEEPSEEK = {"model": "deepseek-v3", "router_dtype": "fp32"}
"""``moe_router_dtype`` of its provider (v0.2.0) or bridge (``models/deepseek/deepseek_v3_bridge.py``, later)."""

MODELS = {
    "LLAMA3_8B": {"model": "llama-3-8b"},
    "LLAMA3_70B": {"model": "llama-3-70b"},
    "LLAMA3.1_405B": {"model": "llama-3-405b"},
    "DeepSeekV3": {**DEEPSEEK, "mtp_layers": 1},
    "DeepSeekV3 (w/ MTP)": {**DEEPSEEK, "mtp_layers": 1},
    "DeepSeekV3 (w/o MTP)": DEEPSEEK,
    "Qwen3_30B_a3B": {"model": "qwen3-30b-a3b"},
    "Qwen3_235B_a22B": {"model": "qwen3-235b-a22b"},
    "GPT OSS 120B": {"model": "gpt-oss-120b", "bias_dropout_fusion": "false", "router_balancing": "none"},
    "Nemotron_3_Nano": {"model": "nemotron-3-nano-30b-a3b", **UNFUSED},
    "Nemotron_3_5_Lightning": {"model": "nemotron-3-nano-30b-a3b", **FURTHER, **UNFUSED},
    "Nemotron_3_Super": {"model": "nemotron-3-super-120b-a12b", **FURTHER, **UNFUSED},
}
"""Of a table, as plans name them."""

PRECISIONS = {
    "BF16": {},
    **{name: {"fp8": "tensorwise", "fp8_parameters": "true"} for name in ("FP8", "FP8-CS", "FP8-CS (FP8-MX)")},
    "FP8-MX": {"fp8": "mxfp8", "fp8_parameters": "true"},
    "MXFP8": {"fp8": "mxfp8", "fp8_parameters": "true"},
    "NVFP4": {"fp4": "nvfp4"},
}
"""Of linear layers' products, and parameters in 8 bits, as every preset but NVFP4's has them (``fp8_param_gather`` of
``training/mixed_precision.py``); of two in a row the first, as its tokens."""

COMMON = {
    "framework": "megatron", "dtype": "bf16", "zero": 1, "gradients": "bf16", "overlap_grad_reduce": "true",
    "cross_entropy_fusion": "te", "check_for_nan": "false",
}  # fmt: skip
"""Of every recipe (``set_common_perf_overrides``, ``_benchmark_common``)."""

STATES = {
    "precision_aware_optimizer": "true", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16",
    "optimizer_fp8_recipe": "tensorwise",
}  # fmt: skip
"""Of DeepSeek V3's (``recipes/deepseek/deepseek_v3.py``; the recipe is ``MixedPrecisionConfig``'s default)."""


ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}
"""Of every run since 26.06 (``PERF_ENV_VARS`` at v0.5.0, ``env_vars`` of recipes at v0.6.0). Without it DeepSeek-V3's
experts in MXFP8 leave 20 GiB of cache: their saved inputs, of a byte an element, cut free segments of outputs in 16
bits, of which the other half is too small for the next one."""
SINCE = "26.06"

VERSIONS = {
    "25.11": ((2, 9), "0.16"), "26.02": ((2, 12), "0.16"), "26.04": ((2, 14), "0.17"), "26.06": ((2, 16), "0.18"),
    "26.08": ((2, 17), "0.19"),
}  # fmt: skip
"""Of Transformer Engine (``uv.lock``) and Megatron-Core (``package_info.py`` of its submodule) in Megatron-Bridge
v0.2.0, v0.3.0, v0.4.0, v0.5.0 and v0.6.0. Transformer Engine 2.18, which memplan takes otherwise, writes the logits'
gradient into an fp32 tensor of its own, 20 GiB of Nemotron 3.5 Lightning's two micro-batches of tokens."""
OLDEST_LOW, OLDEST_LOW_ATTENTION = (2, 14), (2, 18)
"""Transformer Engine before them is not modelled in 8 or 4 bits, and with attention in them: such rows take these."""

KEYS = ("release", "model", "system", "Precision", "task")
"""What tells a recipe from another, as a row names it; a recipe of every task names none."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a release's recipe adds to a row."""

    flags: dict[str, object]
    missing: tuple[str, ...]
    """What it has that is not modelled."""
    source: str
    beside: bool = False
    """Tokens are exchanged beside computation (``moe_a2a_overlap``)."""


@cache
def recipes() -> tuple[Row, ...]:
    return tuple(read_rows(RECIPES))


def recipe_of(row: Row) -> Recipe:
    """The one that names the row's release, model, system and precision, and its task, if any."""
    (one,) = (one for one in recipes() if all(row[name] in one.get(name, (row[name],)) for name in KEYS))
    return Recipe(one["flags"], tuple(one["missing"]), one["source"], bool(one.get("beside")))


def plan_of_row(row: Row) -> Plan:
    """The plan of a row. ``PlanError`` for what is not modelled."""
    if row["model"] == "Nemotron_3_Ultra":
        problem = (
            "is not modelled: parameters in MXFP8 that Megatron-FSDP shards beside multi-token prediction, and what a "
            "chain of experts saves on the host"
        )
        raise PlanError("model", row["model"], problem)
    gpu = gpu_of(row)
    sizes = {name: int(row[key]) for name, key in SIZES.items() if row.get(key, "n/a") not in ("n/a", "0")}
    flags: dict[str, object] = {
        **COMMON,
        **MODELS[row["model"]],
        **PRECISIONS[row["Precision"]],
        **sizes,
        "gpu": gpu,
        "gpus_per_node": 4 if gpu.startswith("gb") else 8,
    }
    if sizes["tp"] > 1:
        flags["sequence_parallel"] = "true"
    if row["model"].startswith("DeepSeek"):
        flags |= STATES
    if not row["model"].startswith("LLAMA"):
        flags = {"moe_router_fusion": "true", **flags, "etp": 1, "megatron_core": VERSIONS[row["release"][:5]][1]}
    recipe = recipe_of(row)
    flags["te_version"] = ".".join(map(str, _transformer_engine(row, recipe)))
    beside = {"moe_overlap_exchange": "true"} if recipe.beside else {}
    plan = plan_of(None, **flags | recipe.flags | beside)
    chain = {CHAIN: "1"} if plan.megatron.fuses_operations else {}
    return plan.model_copy(update={"environment": {**ENVIRONMENT, **chain}}) if row["release"] >= SINCE else plan


def _transformer_engine(row: Row, recipe: Recipe) -> tuple[int, int]:
    version = VERSIONS[row["release"][:5]][0]
    if "fp8_dot_product_attention" in recipe.flags:
        return max(version, OLDEST_LOW_ATTENTION)
    return max(version, OLDEST_LOW) if PRECISIONS[row["Precision"]] else version


SIZES = {
    "gpus": "#-GPUs", "gbs": "GBS", "mbs": "MBS", "seq": "Sequence Length", "tp": "TP", "pp": "PP", "cp": "CP",
    "vpp": "VP", "ep": "EP",
}  # fmt: skip


def gpu_of(row: Row) -> str:
    """As plans name it."""
    name = str(row["system"]).removeprefix("DGX-").lower()
    return "h100-80gb" if name == "h100" else name


def seconds_of(row: Row) -> float:
    """Of a step, from tokens a second and GPU; of two precisions the first."""
    rate = float(str(row["Tokens / sec / GPU"]).split()[0])
    return int(row["GBS"]) * int(row["Sequence Length"]) / (rate * int(row["#-GPUs"]))


def short(row: Row) -> str:
    """A row's name in a table."""
    return " ".join(str(row[name]) for name in ("release", "model", "system", "#-GPUs", "Precision"))


__all__ = ["NAME", "gpu_of", "plan_of_row", "recipe_of", "seconds_of", "short"]
