"""A step of real tensors on a CPU beside the same one of fake tensors: as much is held, and values are values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from memplan.estimate import estimate
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.trace.framework import job_of_plan
from memplan.trace.recording import BACKWARD, FORWARD, OPTIMIZER
from memplan.trace.step import traced_step
from memplan.trace.surroundings import Surroundings
from memplan.validate.worker import footprint_of

from .test_step import SMALL, model_flags, of

FLAGS = {**model_flags("llama"), "dtype": "fp32", "attention": "eager"}
SCALARS = 4096
"""Bytes of what transformers reads from positions and masks, whose values fake tensors have not."""


TUNED: dict[str, dict[str, str]] = {
    "adapters": {"lora-rank": "4"},
    "adapters-recomputed": {"lora-rank": "4", "recompute": "full"},
    "frozen": {"freeze-layers": "2", "freeze-embedding": "true"},
    "8-bit": {"optimizer": "adam8bit"},
    "8-bit-adapters": {"optimizer": "lion8bit", "lora-rank": "64", "embeddings-32bit": "false"},
    "4-bit": {"lora-rank": "4", "dtype": "bf16", "quantisation": "nf4"},
    "4-bit-double": {"lora-rank": "4", "dtype": "bf16", "quantisation": "fp4", "double-quantisation": "true"},
}


@pytest.mark.parametrize("tuning", TUNED)
def test_a_tuned_step_of_real_tensors(tuning: str) -> None:
    """Adapters learn, what is frozen or quantised keeps its values, and as much is held as of fake tensors."""
    if "bit" in tuning:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    torch.set_num_threads(1)
    losses: list[float] = []
    job, program = of(**{**FLAGS, **TUNED[tuning]})
    within = Surroundings(fake=False, warmup=3, lost=lambda loss: losses.append(float(loss)))
    real, fake = traced_step(job, within=within), traced_step(job)
    here, there = footprint_of(real, program), footprint_of(fake, program)
    assert here.static == pytest.approx(there.static, abs=SCALARS)
    assert here.peak == pytest.approx(there.peak, abs=SCALARS)
    (estimated,) = estimate(read_plan(None, {**SMALL, **FLAGS, **TUNED[tuning]}).plan).stages
    assert here.peak == pytest.approx(estimated.requested, abs=2 * SCALARS)
    assert losses[0] == pytest.approx(math.log(job.config["vocab_size"]), rel=0.1)
    assert losses[-1] < losses[0]


def test_offloaded_shards_of_real_tensors() -> None:
    """On a CPU, where as much is held as without: what is on the host and what on the device is one."""
    torch.set_num_threads(1)
    losses: list[float] = []
    job = job_of_plan(resolve(read_plan(None, {**SMALL, **FLAGS, "framework": "fsdp", "gpus": "2"}).plan))
    assert job.fsdp is not None
    within = Surroundings(fake=False, warmup=2, lost=lambda loss: losses.append(float(loss)))
    plain = traced_step(job, within=within)
    offloaded = traced_step(replace(job, fsdp=replace(job.fsdp, offload=True)), within=within)
    assert offloaded.setup.net == pytest.approx(plain.setup.net, abs=SCALARS)
    assert len(losses) == 6 * job.microbatches


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "opt"])
def test_a_step_of_real_tensors(family: str, recompute: str) -> None:
    """With eager attention in fp32, where a CPU's kernels save what CUDA's do."""
    torch.set_num_threads(1)
    losses: list[float] = []
    job, _ = of(**model_flags(family), dtype="fp32", attention="eager", recompute=recompute)
    within = Surroundings(fake=False, warmup=3, lost=lambda loss: losses.append(float(loss)))
    real, fake = traced_step(job, within=within), traced_step(job)
    assert real.setup.net == fake.setup.net
    for phase in (FORWARD, BACKWARD, OPTIMIZER):
        here, there = real.recording.of(0, phase), fake.recording.of(0, phase)
        assert here.net == pytest.approx(there.net, abs=SCALARS)
        assert here.peak == pytest.approx(there.peak, abs=SCALARS)
    assert len(losses) == 4 * job.microbatches
    assert losses[0] == pytest.approx(math.log(job.config["vocab_size"]), rel=0.1)
    assert losses[-1] < losses[0]
