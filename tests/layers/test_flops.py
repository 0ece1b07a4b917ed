"""FLOPs and parameters of whole models, as the time of a step counts them, against PyTorch's own counter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from memplan.frameworks import framework
from memplan.layers.module import Passes
from memplan.layers.work import Scan
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.time.shape import elements, model_flops, needed_of

from ..oracle.training_step import _model
from .test_against_transformers import IN_EVERY_SHAPE, config_of

B, S = 2, 16
OF_TWO_KINDS = (
    "qwen3_moe-unnormed-tied-dense",
    "llama4_text-dense-unnormed-dropout",
    "qwen3_next-unnormed-dense-tied",
    "deepseek_v3-moonlight-dropout",
)
"""Layers with an MLP between those with experts; of Llama 4 and Qwen 3 Next three kinds of layers."""
UNDER_MEGATRON = frozenset({
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "phi3", "starcoder2", "mixtral", "qwen3_moe", "olmoe", "gpt_oss",
    "qwen2_moe", "dots1",
    "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2", "qwen3_5", "qwen3_5_moe", "qwen3_next",
    *("qwen3_moe-unnormed-tied-dense", "qwen3_next-unnormed-dense-tied", "deepseek_v3-moonlight-dropout"),
})  # fmt: skip


def grouped(one: list[int], other: list[int], *_: Any, **__: Any) -> int:
    """Of ``aten::_grouped_mm``, which PyTorch's counter leaves out: (n, k) by (e, k, m), or (k, n) by (n, m)."""
    return 2 * one[0] * one[1] * other[-1]


def counted(config: Any) -> tuple[int, int]:
    """FLOPs of a step of real modules, forward and backward, but of gated delta nets' kernels, which are stand-ins; and
    parameters."""
    model = _model(config, "bf16", "eager")
    for parameter in model.parameters():
        parameter.data.zero_()
    ids, own = torch.zeros((B, S), dtype=torch.int64), {torch.ops.aten._grouped_mm: grouped}
    with FlopCounterMode(display=False, custom_mapping=own) as flops:
        model(input_ids=ids, labels=ids).loss.backward()
    return flops.get_total_flops(), sum(one.numel() for one in model.parameters())


def plan_of(folder: Path, name: str, **own: str) -> ResolvedPlan:
    """Of the same model in framework ``name``, with two micro-batches a step."""
    sizes = {"model": str(folder), "gpu": "h100-80gb", "gpus": "1", "mbs": str(B), "accumulation": "2", "seq": str(S)}
    return resolve(read_plan(None, {**sizes, **own, "framework": name, "dtype": "bf16"}).plan)


def planned(given: ResolvedPlan) -> tuple[float, int]:
    """FLOPs and parameters of a plan; of fused attention without scores that backward computes again."""
    time = framework(given.framework).time
    entries, ((work,),) = time.entries(given), time.stages(given)

    def of(passes: Passes) -> float:
        scans = (times * one.flops for one, times in (*passes.forward, *passes.backward) if isinstance(one, Scan))
        return needed_of(passes) - sum(scans)

    ends = sum(map(of, (entries.embedding, entries.final_norm, entries.head)))
    layers = sum(n * of(once) for (once, _), (n, _) in zip(entries.each, work.counts, strict=False))
    return ends + layers, elements(entries, (work,)).held


@pytest.mark.parametrize("name", [*IN_EVERY_SHAPE, *OF_TWO_KINDS])
def test_flops_are_those_that_pytorch_counts(name: str, tmp_path: Path) -> None:
    """Three layers of every family of transformers, and of Megatron-Core where it has the same model; its vocabulary
    is one that Megatron pads to itself. Where a latent query has no lower rank, Megatron-Core's recipe has one more
    norm's weight a layer than transformers. MFU's FLOPs are those of all modules, but of gated delta nets, whose rule
    counts, and of Llama 4, whose every expert multiplies every token."""
    config = config_of(name)
    config.vocab_size = 1024
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    expected = counted(config)
    kernels = {"delta-kernel": "fla"} if "linear_num_value_heads" in config else {}
    made = plan_of(tmp_path, "single", attention="eager", **kernels)
    assert planned(made) == expected
    if not made.model.linear_interval and made.model.family != "llama4_text":
        assert model_flops(made) == pytest.approx(2 * expected[0], rel=1e-12)
    if name in UNDER_MEGATRON:
        flops, held = planned(plan_of(tmp_path, "megatron"))
        norms = 3 * config.hidden_size if "q_lora_rank" in config and config.q_lora_rank is None else 0
        assert (flops, held) == (pytest.approx(expected[0], rel=1e-12), expected[1] + norms)
