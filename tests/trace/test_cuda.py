"""With a GPU: the same job traced on fake CUDA tensors, where nothing is put in CUDA's place."""

from __future__ import annotations

import pytest
import torch

from memplan.tape.events import Hold
from memplan.trace.recording import BACKWARD, FORWARD, OPTIMIZER, Recording
from memplan.trace.step import traced_step
from memplan.trace.surroundings import Surroundings

from .test_step import model_flags, of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: fake CUDA tensors abort without"),
]
SETTINGS: dict[str, dict[str, str]] = {
    "fp32": {"dtype": "fp32", "attention": "eager"},
    "fp16": {"dtype": "fp16", "attention": "eager"},
    "bf16-flash": {"dtype": "bf16", "attention": "flash"},
    "recomputed": {"dtype": "bf16", "attention": "eager", "recompute": "full"},
    "fused": {"dtype": "bf16", "attention": "eager", "optimizer-implementation": "fused"},
}


def sizes(recording: Recording, phase: str) -> list[int]:
    """Signed, in order."""
    zipped = zip(recording.events, recording.places, strict=True)
    return [e.bytes if isinstance(e, Hold) else -e.bytes for e, place in zipped if place.phase == phase]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "gpt_neox", "opt"])
def test_events_on_fake_cuda_tensors(family: str, setting: str) -> None:
    job, _ = of(**model_flags(family), **SETTINGS[setting])
    here, there = traced_step(job).recording, traced_step(job, within=Surroundings(device="cuda")).recording
    for phase in ("", FORWARD, BACKWARD, OPTIMIZER):
        assert sizes(here, phase) == sizes(there, phase), phase
