"""Losses that never hold all logits, on models whose parameters or gradients are sharded."""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from memplan.estimate import estimate
from memplan.frameworks.fsdp import programs as fsdp
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.result import Estimate
from memplan.tape.events import ROUND, Category, rounded
from memplan.tape.program import fold_program

from ..layers.test_against_transformers import drops_sorted, named, sizes
from ..layers.tuned_comparison import config_of
from ..oracle import fsdp as oracle, fused_losses
from ..oracle.optimizer_step import on_no_device
from ..oracle.training_step import _quiet, _unpacked
from ..oracle.tuned_step import Tune, _apply, lora

B, S = 2, 64


def reported(**flags: str) -> Estimate:
    job = {"model": "llama-3-8b", "layers": "3", "gpus": "4", "seq": "2048", "recompute": "full", "lora-rank": "8"}
    return estimate(read_plan(None, {**job, **{name.replace("_", "-"): value for name, value in flags.items()}}).plan)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("targets", ["", "q_proj,v_proj"])
def test_ligers_loss_under_fully_shard(recompute: str, targets: str, tmp_path: Path) -> None:
    """Liger's own code on the gathered weight of the head: what is held between steps, every event of forward, and the
    peak of both passes."""
    pytest.importorskip("triton")
    liger = pytest.importorskip("liger_kernel", reason="Liger is not installed: pip install liger-kernel")
    assert liger is not None
    config, loss = config_of("llama"), fused_losses.liger(fp32=False, capability=(9, 0))
    sharding = oracle.Sharding(shards=4, original="bf16" if targets else "fp32")
    tune: Tune = lora(8, tuple(targets.split(",")), 0.0, "fp32") if targets else oracle._as_it_is

    def build(mesh: Any) -> tuple[Any, oracle.Loss]:
        model = oracle.sharded_model(config, sharding, mesh, flash=True, recompute=recompute == "full", tune=tune)
        inner = model.base_model.model if targets else model
        ids = torch.randint(0, config.vocab_size, (B, S))

        def forward(input_ids: torch.Tensor, labels: torch.Tensor, **more: Any) -> Any:
            hidden = inner.model(input_ids=input_ids)[0]
            with fused_losses._without_kernels():
                return CausalLMOutputWithPast(loss=loss(hidden, inner.lm_head.weight, labels))

        inner.forward = forward
        return model, lambda: model(input_ids=ids, labels=ids).loss

    with ExitStack() as stack:
        for one in (_quiet(), _unpacked(), on_no_device(), patch.object(torch, "equal", fused_losses._equal)):
            stack.enter_context(one)
        stack.enter_context(patch.dict(os.environ, {"TRANSFORMERS_SDPA_FORCE_GQA": "1"}))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if targets:
            stack.enter_context(patch.object(torch.nn.Module, "_apply", _apply))
        steps = oracle.traced(build, sharding)
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    flags = {"model": str(tmp_path), "framework": "fsdp", "gpus": "4", "mbs": str(B), "seq": str(S), "loss": "liger"}
    flags |= {"attention": "flash", "recompute": recompute, "liger-version": "0.8.5"}
    flags |= {"lora-rank": "8", "lora-targets": targets} if targets else {}
    (program,) = fsdp.programs(resolve(read_plan(None, flags).plan), Options(accumulates_in_place=False))
    told = [
        event for span in program.spans for _ in span.names for event in named(span.module, span.module.steady.forward)
    ]
    assert drops_sorted(sizes(told)) == drops_sorted(sizes(steps.stretches[0]))
    folded, labels = fold_program(program), rounded(8 * B * S)
    assert folded.static == steps.before + labels
    assert folded.after_forward == steps.levels()[0] + labels
    assert 0 <= max(steps.peaks()[:-1]) + labels - folded.backward_peak <= 2 * ROUND


@pytest.mark.parametrize(
    "setting", [{"framework": "fsdp"}, *({"framework": "deepspeed", "zero": stage} for stage in "23")]
)
def test_a_fused_loss_holds_few_logits(setting: dict[str, str]) -> None:
    """2,048 tokens of 128,256 words: 501 MiB in bf16, and their gradient; Liger's chunks are of 64 tokens."""
    plain, fused = reported(**setting), reported(**setting, loss="liger")
    logits = 2 * 2048 * 128_256
    assert plain.stages[0].of(Category.LOGITS) >= logits
    assert fused.stages[0].of(Category.LOGITS) <= 64 * 128_256 * 2
    assert plain.stages[0].requested - fused.stages[0].requested >= logits


def test_zero_3_gathers_the_head_where_nobody_follows() -> None:
    with pytest.raises(PlanError, match="plain or liger at stage 3"):
        estimate(read_plan(None, {"model": "llama-3-8b", "framework": "deepspeed", "zero": "3", "loss": "cut"}).plan)
