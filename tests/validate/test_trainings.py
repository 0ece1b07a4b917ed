"""A job's model before its first iteration: nothing looks on, and nothing is anywhere but where a training has it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memplan.plan.read import read_plan
from memplan.trace.job import Job
from memplan.trace.step import Training, Watch
from memplan.trace.surroundings import Surroundings
from memplan.trace.worker import training_of
from memplan.validate.native import native

GPT = "model=gpt2 layers=1 seq=32 vocab=512 dtype=fp32 attention=eager"
LLAMA = "model=llama-3-8b layers=2 vocab=512 hidden=64 ffn=128 heads=4 kv-heads=2 seq=32"
TITAN = f"{LLAMA} framework=fsdp fsdp-code=torchtitan"
CASES = {
    "single": f"{GPT} framework=single",
    "ddp": f"{GPT} framework=ddp gpus=2",
    "zero1": f"{GPT} framework=ddp zero=1 gpus=2",
    "fsdp": f"{LLAMA} framework=fsdp gpus=2 dtype=fp32 attention=eager",
    "torchtitan": f"{TITAN} gpus=2",
    "pipeline": f"{TITAN} pp=2 gpus=2 gbs=2",
}


def job_of(case: str) -> Job:
    return native(read_plan(None, dict(word.split("=") for word in CASES[case].split())).plan).job(0)


@pytest.mark.parametrize("case", CASES)
def test_no_mode_sees_operators(case: str) -> None:
    """One that does keeps autograd from working in place, and so changes what is measured."""
    seen: list[int] = []

    class Looking(Watch):
        def begins(self, phase: str, microbatch: int) -> None:
            seen.append(len(_get_current_dispatch_mode_stack()))

    with training_of(job_of(case), Surroundings(fake=False, device="cpu", alone=True)) as training:
        training.iterate(Looking())
        training.iterate(Watch())
        if isinstance(training, Training):
            with torch.no_grad():
                training.evaluate()
    assert seen
    assert not any(seen)


def test_counters_of_optimizer_steps_are_on_the_host() -> None:
    """As PyTorch has them where a training names no default device; on a device each is read back in every step."""
    within = Surroundings(fake=False, device="meta")
    with within.tensors():
        parameter = torch.nn.Parameter(torch.empty(4))
        optimizer = torch.optim.AdamW([parameter], foreach=True)
        parameter.grad = torch.empty(4)
        with within.iteration():
            optimizer.step()
    state = optimizer.state[parameter]
    assert (state["exp_avg"].device.type, state["step"].device.type) == ("meta", "cpu")


def test_cudnns_attention_is_off_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch prefers it to flash on Hopper and later; what the user's process has is as before."""
    monkeypatch.setattr(torch, "device", lambda name: nullcontext())
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with Surroundings(fake=False, device="cuda").tensors():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_evaluation_has_no_dropout() -> None:
    with training_of(job_of("single"), Surroundings(fake=False)) as training:
        assert isinstance(training, Training)
        assert training.replica.inner.training
        with torch.no_grad():
            training.evaluate()
        assert not training.replica.inner.training


def test_a_rank_that_fails_does_not_wait_for_others() -> None:
    """The orderly end of NCCL's communicators takes all ranks, and those are waiting for this one. Modules of
    torchtitan's code, which import what torch 2.13 has, are not loaded for others, which run on torch 2.6."""
    code = """
import sys
import torch.distributed as dist
import memplan.validate.clean
from memplan.trace.surroundings import Surroundings
try:
    with Surroundings(fake=False, alone=False).group(0, 1):
        raise RuntimeError
except RuntimeError:
    print(dist.is_initialized())
dist.destroy_process_group()
with Surroundings(fake=False, alone=False).group(0, 1):
    pass
print(dist.is_initialized())
print([name for name in sys.modules if 'torchtitan_p' in name])
"""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "True\nFalse\n[]\n", done.stderr
