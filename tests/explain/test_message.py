"""PyTorch's messages of every release that worded them differently; the texts are those of CUDACachingAllocator.cpp."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memplan.allocator.memory import printed
from memplan.explain.message import OutOfMemory, parse, size_of
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.report.out_of_memory import out_of_memory

GIB = 1 << 30


def gib(size: int | None) -> float | None:
    return None if size is None else round(size / GIB, 2)


def figures(message: OutOfMemory) -> list[float | None]:
    """Capacity, free, allocated, reserved, of the process."""
    sizes = (message.capacity, message.free, message.allocated, message.reserved, message.in_process)
    return [gib(size) for size in sizes]


def test_up_to_1_4_the_cache_is_what_is_not_allocated() -> None:
    message = parse(
        "CUDA out of memory. Tried to allocate 198.00 MiB (GPU 0; 5.93 GiB total capacity; 4.64 GiB already allocated; "
        "54.94 MiB free; 233.05 MiB cached)"
    )
    assert figures(message) == [5.93, 0.05, 4.64, 4.87, None]
    assert message.tried is not None
    assert message.tried.text == "198.00 MiB"
    assert message.gpu == 0


def test_from_1_5_on_what_is_reserved() -> None:
    message = parse(
        "CUDA out of memory. Tried to allocate 3.82 GiB (GPU 2; 15.78 GiB total capacity; 7.34 GiB already allocated; "
        "1.65 GiB free; 12.04 GiB reserved in total by PyTorch)"
    )
    assert figures(message) == [15.78, 1.65, 7.34, 12.04, None]
    assert gib(message.unallocated) == 4.70


def test_from_2_1_on_processes_and_pools() -> None:
    message = parse(
        "CUDA out of memory. Tried to allocate 29.39 GiB. GPU 0 has a total capacity of 139.81 GiB of which 19.41 GiB "
        "is free. Process 1990324 has 3.23 GiB memory in use. Including non-PyTorch memory, this process has "
        "117.07 GiB memory in use. Of the allocated memory 92.06 GiB is allocated by PyTorch, with 80.00 MiB allocated "
        "in private pools (e.g., CUDA Graphs), and 20.79 GiB is reserved by PyTorch but unallocated. If reserved but "
        "unallocated "
        "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )
    assert figures(message) == [139.81, 19.41, 92.06, 112.85, 117.07]
    assert [(one.pid, gib(one.size)) for one in message.others] == [(1990324, 3.23)]
    assert message.private == 80 << 20


def test_in_a_container_the_process_is_one_of_those_listed() -> None:
    message = parse(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacty of 14.58 GiB of which 635.56 MiB "
        "is free. Process 26469 has 13.96 GiB memory in use. Of the allocated memory 11.23 GiB is allocated by "
        "PyTorch, and 2.51 GiB is reserved by PyTorch but unallocated."
    )
    assert gib(message.in_process) == 13.96
    assert not message.others


def test_others_than_pytorch() -> None:
    assert (
        parse("Cuda failure 2 'out of memory'", "include/alloc.h:103 NCCL WARN Cuda failure 2 'out of memory'").who
        == "nccl"
    )
    assert parse("CUDA error: out of memory").who == "driver"
    assert parse("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`").who == "cublas"
    host = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes. Error code 12"
    assert parse(host).who == "host"
    assert parse("HIP out of memory. Tried to allocate 20.00 MiB (GPU 0; 64.00 GiB total capacity;").who == "pytorch"


@given(st.integers(1, 1 << 48))
def test_a_size_stands_for_what_pytorch_prints_so(size: int) -> None:
    number, unit = printed(size).split(" ")
    assert size_of(number, unit).is_printed_of(size)


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_and_for_nothing_that_it_prints_otherwise(one: int, other: int) -> None:
    if printed(one) != printed(other):
        number, unit = printed(one).split(" ")
        near = size_of(number, unit)
        assert not near.is_printed_of(other) or abs(one - other) <= near.most - near.least + 1


def test_the_message_that_estimate_prints_is_read_back() -> None:
    from memplan.estimate import estimate

    plan: Plan = read_plan(None, {"model": "llama-2-7b", "framework": "single", "gpu": "a100-40gb", "mbs": "1"}).plan
    estimated = estimate(plan)
    ((stage, failure),) = [one for one in estimated.failures if one[1].moment == "steady"]
    message = parse(out_of_memory(estimated, stage, failure))
    assert message.tried is not None
    assert message.tried.is_printed_of(failure.tried)
    assert message.allocated is not None
    assert abs(message.allocated - failure.allocated) < 1 << 24
    assert message.capacity is not None
    assert abs(message.capacity - (estimated.capacity or 0)) < 1 << 24
