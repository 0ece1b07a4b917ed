"""What CUDA and its libraries take of a GPU, one after another in one process: the context by the driver, workspaces by
the allocator, and kernels by how much the driver's figure grows when a library is used for the first time.

    python -m benchmarks.campaign.libraries
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from memplan.device import facts
from memplan.validate.devices import devices, gpu_of, visible

from .readings import Reading, answer


class Use(NamedTuple):
    """A library's first use."""

    name: str
    what: Callable[[], object]
    takes: int | None
    """Bytes that the allocator should have handed out for good; ``None``: not known."""


class Device(NamedTuple):
    """What is asked of it. Bytes."""

    used: Callable[[], int]
    """Of all processes, by the driver."""
    allocated: Callable[[], int]
    reserved: Callable[[], int]
    synchronize: Callable[[], object]


def used() -> int:
    return visible(devices(), os.environ)[0].used


def measured(
    start: Callable[[], object], uses: Callable[[], list[Use]], context: int | None, device: Device
) -> Iterator[Reading]:
    """``start`` makes the context; ``uses`` come after it, and one that fails is left out."""
    before = device.used()
    start()
    device.synchronize()
    beside = device.used() - before - device.reserved()
    yield Reading("context, bare", "bytes", beside, context)
    for use in uses():
        held = device.allocated()
        try:
            use.what()
            device.synchronize()
        except RuntimeError as error:  # one library must not cost the others
            print(f"{use.name}: {error}", file=sys.stderr)
            continue
        yield Reading(f"{use.name}, workspace", "bytes", device.allocated() - held, use.takes)
        now = device.used() - before - device.reserved()
        yield Reading(f"{use.name}, beside the allocator", "bytes", now - beside, None)
        beside = now
    yield Reading("context, with all kernels", "bytes", beside, None)


def main() -> int:
    import torch

    shown = visible(devices(), os.environ)[0]
    version: Any = tuple(int(part) for part in torch.__version__.split(".")[:2])
    gpu = gpu_of(shown.name, shown.total)
    known = None if gpu is None else facts.cuda_context(gpu, os.environ, version)
    device = Device(used, torch.cuda.memory_allocated, torch.cuda.memory_reserved, torch.cuda.synchronize)
    kept: list[torch.Tensor] = []

    def start() -> None:
        torch.cuda.init()
        kept.append(torch.empty(1, device="cuda"))

    def uses() -> list[Use]:
        capability = torch.cuda.get_device_capability()
        published = facts.cublas_workspaces(capability, os.environ, version)
        sizes = {fact.name: fact.bytes for fact in published if fact.held}
        return list(uses_of(torch, sizes))

    found = list(measured(start, uses, None if known is None else known.bytes, device))
    print(json.dumps(answer(found, f"{shown.name}, torch {torch.__version__}, driver {shown.driver}")))
    return 0


def uses_of(torch: Any, sizes: dict[str, int]) -> Iterator[Use]:
    """Each with operands that are made before, and results that end at once."""
    matrix = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    single = torch.randn(1024, 1024, device="cuda")
    bias = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    picture = torch.randn(1, 16, 64, 64, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(16, 16, 3, 3, device="cuda", dtype=torch.bfloat16)
    heads = torch.randn(1, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaf = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    functional = torch.nn.functional
    backends = torch.nn.attention.SDPBackend

    def attended(backend: Any, given: Any) -> None:
        with torch.nn.attention.sdpa_kernel(backend):
            functional.scaled_dot_product_attention(given, given, given, is_causal=True).sum().backward()
        given.grad = None

    def backward() -> None:
        (leaf @ matrix).sum().backward()
        leaf.grad = None

    cublas, cublaslt = sizes.get("cublas_workspace", 0), sizes.get("cublaslt_workspace", 0)
    yield Use("element-wise", lambda: torch.add(matrix, 1), 0)
    yield Use("cuBLAS, bf16", lambda: matrix @ matrix, cublas)
    yield Use("cuBLAS, fp32", lambda: single @ single, 0)
    yield Use("cuBLASLt, a bias fused", lambda: torch.addmm(bias, matrix, matrix), cublaslt)
    yield Use("cuBLAS of autograd's thread", backward, cublas)
    yield Use("cuDNN, a convolution", lambda: functional.conv2d(picture, weights), 0)
    yield Use("flash attention", lambda: attended(backends.FLASH_ATTENTION, heads), 0)
    yield Use("memory-efficient attention", lambda: attended(backends.EFFICIENT_ATTENTION, heads), 0)
    yield Use("cuDNN's attention", lambda: attended(backends.CUDNN_ATTENTION, heads), 0)
    yield Use("sort", lambda: torch.sort(single.flatten()), 0)


if __name__ == "__main__":
    raise SystemExit(main())
