"""GPTQ's weights in the allocator: which tensors they are, and what Triton's autotuner takes beside their kernels."""

from __future__ import annotations

import pytest

from memplan.allocator.recorded import Request, record
from memplan.device.measured import NOTHING, held_workspaces
from memplan.estimate import allocator_settings, kernel_programs
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

MISTRAL = {
    "model": "mistral-7b", "layers": "2", "framework": "single", "gpu": "a100-80gb", "quantisation": "gptq",
    "dtype": "fp16", "autocast": "true", "lora-rank": "16", "lora-targets": "q_proj,k_proj,v_proj,o_proj",
    "mbs": "2", "gbs": "2", "seq": "256", "attention": "flash_attention_2", "recompute": "full",
}  # fmt: skip


class Requests:
    """Those of a run, in order."""

    def __init__(self, **flags: str) -> None:
        self.made: list[Request] = []
        self.segments: list[int] = []
        plan = resolve(read_plan(None, {**MISTRAL, **flags}).plan)
        (program,) = kernel_programs(plan)
        record(program, allocator_settings(plan), held_workspaces(plan, NOTHING), self)

    def begins(self, request: Request) -> None:
        self.made.append(request)

    def ends(self, address: int, size: int, stream: int) -> None:
        """Of no interest here."""

    def reserves(self, address: int, size: int, stream: int) -> None:
        self.segments.append(size)

    @property
    def tuned(self) -> list[Request]:
        return [one for one in self.made if one.tensor.name.startswith("tunes/")]


@pytest.mark.parametrize(("torch", "size"), [("2.4.1", 256_000_000), ("2.5.1", 256_000_000), ("2.6.0", 256 << 20)])
def test_kernels_are_tuned_once_beside_a_flushed_cache(torch: str, size: int) -> None:
    """``do_bench`` of Triton 3.0 and 3.1 makes 256 MB, Triton 3.2 256 MiB, when a weight of so many elements is first
    dequantised: 4096 x 4096, 4096 x 1024 and 4096 x 14336, in the first layer's forward pass."""
    tuned = Requests(torch=torch).tuned
    elements = [4096 * 4096, 4096 * 1024, 4096 * 14336]
    assert [one.tensor.name for one in tuned] == [f"tunes/dequant248/{n}" for n in elements]
    assert [(one.size, one.iteration, one.tensor.phase) for one in tuned] == [(size, 1, "forward")] * 3


def test_unsloths_functions_have_a_kernel_of_their_own() -> None:
    """Which the layers without adapters, the MLP's, do not use."""
    tuned = Requests(kernels="fms").tuned
    elements = {"fast_lora": [4096 * 4096, 4096 * 1024], "dequant248": [4096 * 14336]}
    assert [one.tensor.name for one in tuned] == [f"tunes/{kernel}/{n}" for kernel, of in elements.items() for n in of]


def test_a_cache_is_flushed_in_a_segment_of_its_own() -> None:
    """256 MB in whole pages of 2 MiB. The first weight lies there when the second is dequantised, so that another is
    asked for."""
    assert Requests(torch="2.4.1").segments.count(246 << 20) == 2


def test_zeros_lie_apart_from_weights() -> None:
    """A gate's numbers are 28 MiB, and so are their segments; with 0.2 MiB of zeros behind them these would be 30."""
    made = Requests()
    sizes = {"gate.weight/parameter": 28 << 20, "gate.weight/zeros": 14336 * 32 // 2}
    assert {one.tensor.name: one.size for one in made.made if one.tensor.name in sizes} == sizes
    assert made.segments.count(28 << 20) == 2 * 3
    assert 30 << 20 not in made.segments
