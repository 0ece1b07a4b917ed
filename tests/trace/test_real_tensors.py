"""A step of real tensors on a CPU beside the same one of fake tensors: as much is held, and values are values."""

from __future__ import annotations

import math

import pytest
import torch

from memplan.trace.recording import BACKWARD, FORWARD, OPTIMIZER
from memplan.trace.step import traced_step
from memplan.trace.surroundings import Surroundings

from .test_step import model_flags, of

SCALARS = 4096
"""Bytes of what transformers reads from positions and masks, whose values fake tensors have not."""


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
