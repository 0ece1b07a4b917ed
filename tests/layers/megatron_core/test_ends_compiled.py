"""What Inductor allocates for Megatron-Core's native fused cross entropy, read from the code that it generates.

The buffers that are planned before kernels are chosen are the same on the CPU, where this runs.
"""

from __future__ import annotations

import re
import shutil
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, simplefilter

import pytest
import torch

from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.megatron_core.losses import native_cross_entropy
from memplan.layers.module import Interface, Options, Run, build
from memplan.tape.events import Category, Hold

with catch_warnings():
    simplefilter("ignore")
    pytest.importorskip("megatron.core.fusions.fused_cross_entropy", exc_type=ImportError)
    from megatron.core.fusions import fused_cross_entropy as fused

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
]

S, B, V = 8, 2, 512


def whole_buffers(function: Any, *arguments: Any) -> list[str]:
    """dtypes of the buffers of s b v elements that the code of the compiled function makes. No C++ is compiled: it is
    stopped once the code is written, and which vector instructions a kernel may have is not tried out."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    written: list[str] = []

    def stop(code: str) -> None:
        written.append(code)
        raise InterruptedError

    torch.compiler.reset()
    stopped = patch.object(GraphLowering, "save_output_code", stop)
    with torch.no_grad(), config.patch({"cpp.vec_isa_ok": False}), stopped, pytest.raises(TorchDynamoException):
        function(*arguments)
    made = re.findall(r"empty_strided_cpu\(\(([\d, ]+)\), \([\d, ]*\), torch\.(\w+)\)", written[0])
    sizes = [(torch.Size(int(n) for n in size.split(",") if n.strip()), dtype) for size, dtype in made]
    return [dtype for size, dtype in sizes if size.numel() == S * B * V]


def test_logits_sized_buffers() -> None:
    """One fp32 copy forward; another and the bf16 gradient backward."""
    logits = torch.zeros((S, B, V), dtype=torch.bfloat16)
    target = torch.zeros((S, B), dtype=torch.int64)
    assert whole_buffers(fused.calculate_logits_max, logits) == ["float32"]
    wide, maximum = logits.float(), torch.zeros((S, B))
    assert whole_buffers(fused.calculate_predicted_logits, wide, target, maximum, 0, V) == []
    assert whole_buffers(fused.calculate_cross_entropy_loss, wide, torch.ones((2 * S, B))) == []
    outside, flat = torch.zeros((S, B), dtype=torch.bool), target.view(-1)
    found = whole_buffers(fused.calculate_gradients, wide, maximum, outside, flat)
    assert found == ["float32", "bfloat16"]

    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(native_cross_entropy(r, x, 1))

    made = build("loss", recipe, Interface((S, B, V), "bf16"), Options())
    assert dtypes(made.first.forward) == ["fp32"]
    assert dtypes(made.first.backward) == ["fp32", "bf16"]


def dtypes(tape: Any) -> list[str]:
    return [event.dtype for event in tape if isinstance(event, Hold) and event.category is Category.LOGITS]
