"""What messages of several libraries say of memory that ran out."""

from __future__ import annotations

import pytest

from memplan.explain.message import parse
from memplan.validate.failing import is_full

MIB, GIB = 2**20, 2**30
CACHING = (
    "CUDA out of memory. Tried to allocate 1.25 GiB. GPU 1 has a total capacity of 93.02 GiB of which 1.18 GiB is "
    "free. Including non-PyTorch memory, this process has 91.82 GiB memory in use. Of the allocated memory 90.63 GiB "
    "is allocated by PyTorch, and 120.54 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
    "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
GRAPHS = CACHING.replace("PyTorch, and", "PyTorch, with 8.00 MiB allocated in private pools (e.g., CUDA Graphs), and")
CPU = "alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes."


def sizes(message: str) -> tuple[int | None, int | None, int | None]:
    """What a rank's failure says: the request, what was allocated, and reserved."""
    said = parse(message)
    return said.request, said.allocated, said.reserved


@pytest.mark.parametrize("message", [CACHING, GRAPHS])
def test_the_caching_allocator_says_what_it_had(message: str) -> None:
    """PyTorch 2.6's message, of a run that somebody reported."""
    allocated = round(90.63 * GIB)
    assert is_full(message)
    assert sizes(message) == (round(1.25 * GIB), allocated, allocated + round(120.54 * MIB))


def test_the_cpus_says_the_request_alone() -> None:
    assert is_full(CPU)
    assert sizes(CPU) == (400, None, None)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
    ],
)
def test_libraries_run_out_of_memory_too(message: str) -> None:
    assert is_full(message)
    assert sizes(message) == (None, None, None)


@pytest.mark.parametrize("message", ["CUDA error: an illegal memory access was encountered", "mat1 and mat2 shapes"])
def test_other_errors_are_others(message: str) -> None:
    assert not is_full(message)
