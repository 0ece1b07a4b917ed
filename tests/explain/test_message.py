"""PyTorch's messages of every release that worded them differently; the texts are those of CUDACachingAllocator.cpp."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from memplan.allocator.memory import printed
from memplan.explain import explain
from memplan.explain.message import OutOfMemory, parse, size_of
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.report.estimate import out_of_memory

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


KILLED = "Out of memory: Killed process 4242 (python) total-vm:90000000kB, anon-rss:61203400kB, file-rss:0kB"


@pytest.mark.parametrize(
    ("text", "who"),
    [
        (f"[123.4] {KILLED}, shmem-rss:0kB, UID:0", "host"),
        ("Memory cgroup out of memory: Killed process 7 (pt_main_thread) anon-rss:1024kB", "host"),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.batch.", "host"),
        ("    Reason: OOMKilled\n    Exit Code: 137", "host"),
        ("run.sh: line 3:  4242 Killed                  python train.py", "killed"),
        ("Killed", "killed"),
        ("  exitcode  : -9 (pid: 24)\n  traceback : Signal 9 (SIGKILL) received by PID 24", "killed"),
        ("[launch.py:321:main] Process 24 exits with return code = -9", "killed"),
        ("container exited: exit status 137", "killed"),
        ("Process finished with exit code 137 (interrupted by signal 9:SIGKILL)", "killed"),
    ],
)
def test_who_was_killed_for_the_hosts_memory(text: str, who: str) -> None:
    told = explain(text)
    assert told.reported.message.who == who
    assert told.reported.message.of_host
    assert [cause.code for cause in told.causes] == ["host-memory"]


@pytest.mark.parametrize(
    ("text", "who", "code"),
    [
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
            "handle",
            "libraries",
        ),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "handle", "libraries"),
        ("RuntimeError: cuFFT error: CUFFT_ALLOC_FAILED", "cublas", "libraries"),
        ("RuntimeError: HIP error: HIPBLAS_STATUS_ALLOC_FAILED", "cublas", "libraries"),
        ("This might be caused by insufficient shared memory (shm).", "shared", "shared-memory"),
        ("It is possible that dataloader's workers are out of shared memory.", "shared", "shared-memory"),
        ("worker 3 exited on signal 9", "killed", "host-memory"),
        ("DefaultCPUAllocator: can not allocate memory: you tried to allocate 12345678 bytes.", "host", "host-memory"),
        (
            "numpy.core._exceptions.MemoryError: Unable to allocate 12.0 GiB for an array with shape (3,)",
            "host",
            "host-memory",
        ),
        ("OSError: [WinError 1455] The paging file is too small for this operation", "host", "host-memory"),
        ("Error out of memory at line 380 in file /src/csrc/pythonInterface.c", "driver", "driver"),
    ],
)
def test_who_else_found_no_memory(text: str, who: str, code: str) -> None:
    told = explain(text)
    assert (told.reported.message.who, [cause.code for cause in told.causes]) == (who, [code])


def test_what_apples_allocator_says() -> None:
    """``aten/src/ATen/mps/MPSAllocator.mm``, whose GB are GiB."""
    message = parse(
        "MPS backend out of memory (MPS allocated: 17.24 GB, other allocations: 912.00 MB, max allowed: 18.13 GB). "
        "Tried to allocate 501.00 MB on private pool."
    )
    assert (message.who, message.request) == ("pytorch", 501 << 20)
    assert (message.allocated, message.allowed) == (round(17.24 * (1 << 30)), round(18.13 * (1 << 30)))


def test_the_only_process_of_a_message_that_is_cut_off_is_its_own() -> None:
    """unslothai/unsloth#465."""
    text = (
        "Tried to allocate 9.47 GiB. GPU 0 has a total capacity of 14.75 GiB of which {} GiB is free. Process 2116 has "
    )
    message = parse(text.format("3.78") + "10.95 GiB memory in use. Of th")
    assert (message.in_process, message.others) == (round(10.95 * (1 << 30)), ())
    assert len(parse(text.format("1.78") + "10.95 GiB memory in use. Of th").others) == 1


def test_a_kill_behind_another_message_is_none() -> None:
    """Launchers end the other ranks of a job whose first one ran out of the GPU's memory."""
    log = "CUDA out of memory. Tried to allocate 2.00 GiB\nexitcode: -9 (pid: 3)\nKilled\n"
    told = explain(log)
    assert (told.messages, told.reported.message.who) == (1, "pytorch")


def test_words_that_end_alike_are_no_kill() -> None:
    with pytest.raises(PlanError, match="no out-of-memory message"):
        explain("the buffer was filled\nexit code: -1\nkilled by nobody\nexit code 1379\n")


def test_what_a_plan_takes_of_the_host() -> None:
    """Llama 3's 8,030,261,248 parameters in bf16 are 14.96 GiB; what ZeRO-3 offloads is fp32 states and gradients."""
    flags = {"model": "llama-3-8b", "framework": "deepspeed", "zero": "3", "gpus": "8", "offload-optimizer": "cpu"}
    told = explain(KILLED, read_plan(None, flags).plan)
    codes = {cause.code: cause.message for cause in told.causes}
    assert "the process had 58.37 GiB of it" in codes["host-memory"]
    assert told.estimate is not None
    host = max(stage.host for stage in told.estimate.stages)
    assert f"offloads states that take {host / 2**30:.2f} GiB" in codes["host-estimate"]
    assert "in bf16 takes 14.96 GiB, 8 of a node 119.66 GiB" in codes["host-estimate"]
    told = explain("Killed", read_plan(None, {"model": "gpt2"}).plan)
    assert "the plan offloads nothing" in told.causes[-1].message


def test_what_the_asynchronous_allocator_says() -> None:
    """``PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync``; without a fraction its limit is the largest number."""
    message = parse(
        "OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory) Currently allocated : "
        "21.50 GiB Requested : 1.25 GiB Device limit : 23.65 GiB Free (according to CUDA): 20.12 MiB PyTorch limit "
        "(set by user-supplied memory fraction) : 17179869184.00 GiB"
    )
    assert (message.who, message.gpu, message.request) == ("pytorch", 0, 5 << 28)
    assert (message.allocated, message.free) == (43 << 29, round(20.12 * (1 << 20)))
    assert message.capacity == round(23.65 * (1 << 30))
