"""What PyTorch prints where a request fails."""

from __future__ import annotations

from ..allocator.memory import printed
from ..device.gpus import runtime_of
from ..result import Estimate, Failure, StageEstimate


def out_of_memory(estimate: Estimate, stage: StageEstimate, failure: Failure) -> str:
    """The message of ``torch.OutOfMemoryError`` on the stage's first rank, up to its advice, as PyTorch 2.6 and later
    write it (``CUDACachingAllocator.cpp``, ``DeviceCachingAllocator::malloc`` and ``reportProcessMemoryInfo``).

    What the plan leaves as headroom counts as taken by somebody else, and outside PyTorch lies the least that may: the
    request fails even so.
    """
    capacity = estimate.capacity or 0
    outside = 0 if stage.device_range is None or stage.reserved is None else stage.device_range[0] - stage.reserved
    free = max(capacity - estimate.headroom - outside - failure.reserved, 0)
    gpu = stage.ranks[0] % estimate.plan.hardware.gpus_per_node if stage.ranks else 0
    platform, _ = runtime_of(estimate.plan.hardware.gpu)
    return (
        f"{platform} out of memory. Tried to allocate {printed(failure.tried)}. GPU {gpu} has a total capacity of "
        f"{printed(capacity)} of which {printed(free)} is free. Including non-PyTorch memory, this process has "
        f"{printed(failure.reserved + outside)} memory in use. Of the allocated memory {printed(failure.allocated)} is "
        f"allocated by PyTorch, and {printed(failure.reserved - failure.allocated)} is reserved by PyTorch but "
        "unallocated."
    )
