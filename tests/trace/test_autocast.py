"""Autocast in traces, and fp16's ``GradScaler``: beside the estimate, for every family that has a recipe."""

from __future__ import annotations

import pytest
import torch

from memplan.families import family as family_of
from memplan.tape.events import Category, Hold, rounded
from memplan.trace.autocast import Scaler, cuda_autocast, cuda_lists
from memplan.trace.recording import FORWARD
from memplan.trace.step import traced_step

from .equality import assert_equal
from .test_step import FAMILIES, SCALARS, model_flags, of

SETTINGS: dict[str, dict[str, str]] = {
    "bf16": {"dtype": "bf16", "attention": "eager", "gbs": "4"},
    "fp16-recomputed": {
        "dtype": "fp16",
        "attention": "eager",
        "recompute": "full",
        "mbs": "3",
        "seq": "37",
        "gbs": "6",
    },
    "flash": {"dtype": "bf16", "attention": "flash", "gbs": "2"},
    "fp16-flash": {"dtype": "fp16", "attention": "flash", "gbs": "4"},
    "bf16-parameters": {"dtype": "bf16", "attention": "eager", "autocast-parameters": "bf16", "mbs": "1"},
    "ddp": {"dtype": "bf16", "attention": "eager", "framework": "ddp", "gpus": "4", "gbs": "16"},
    "ddp-views-recomputed": {
        **{"dtype": "fp16", "attention": "flash", "framework": "ddp", "gpus": "4", "gbs": "16", "recompute": "full"},
        **{"gradient-as-bucket-view": "true", "ddp-gradient-sync": "false"},
    },
}
EVERYWHERE = ("llama", "gpt2")
CASES = [
    pytest.param(family, setting, marks=[] if family in EVERYWHERE or turn == at % 7 else [pytest.mark.slow])
    for at, family in enumerate(FAMILIES)
    for turn, (setting, flags) in enumerate(SETTINGS.items())
    if family in EVERYWHERE or turn in (at % 7, (at + 3) % 7)
    if flags["attention"] == "eager" or not family_of(family).no_flash
    if "recompute" not in flags or not family_of(family).returns_weights
]


@pytest.mark.parametrize(("family", "setting"), CASES)
def test_trace_equals_estimate(family: str, setting: str) -> None:
    flags = SETTINGS[setting]
    scaled = rounded(4) if flags["dtype"] == "fp16" else 0  # the loss before it is scaled, and after
    assert_equal(*of(**(model_flags(family) | flags), autocast="true"), scalars=SCALARS + scaled)


def test_states_are_fp32_and_weights_are_cast_once() -> None:
    """Tied words are cast for the head; each copy is there once, and none is left between steps."""
    job, _ = of(**model_flags("gpt2"), autocast="true", dtype="bf16", attention="eager")
    assert (job.dtype, job.autocast) == ("fp32", "bf16")
    traced = traced_step(job)
    assert traced.setup.net_by[Category.PARAMETERS] >= 4 * traced.outline.parameters
    forward = [
        event
        for event, place in zip(traced.recording.events, traced.recording.places, strict=True)
        if place.phase == FORWARD and isinstance(event, Hold) and event.dtype == "bfloat16"
    ]
    assert len([event for event in forward if event.shape == (1003, 64)]) == 1


def test_scaler_on_fake_tensors_keeps_what_the_real_one_keeps() -> None:
    """Two numbers on the device; every step is applied."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), Scaler()
    weight.grad = torch.full_like(weight, float("inf"))
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not weight.isfinite().all(), "the real one would have skipped it"


def test_lists_are_cuda_s_and_end() -> None:
    """CUDA runs softmax in fp32 and leaves ``interpolate`` and others to their kernels; the CPU's lists differ."""
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    with cuda_lists(), cuda_autocast("bf16"):
        assert torch.softmax(x, -1).dtype == torch.float32
        assert torch.nn.functional.linear(x.float(), x.float()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.softmax(x, -1).dtype == torch.bfloat16
