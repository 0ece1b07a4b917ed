"""Why memory ran out, as far as the message's own figures and its traceback tell: each cause with what helps."""

from __future__ import annotations

from collections.abc import Iterator

from ..allocator.memory import printed
from ..result import Notice
from .clues import Clues
from .log import Reported
from .message import OutOfMemory

RESERVE = 5 << 29
"""Bytes of contexts, NCCL and libraries that a process may hold beside PyTorch's without anything being wrong."""


def causes(reported: Reported, clues: Clues) -> tuple[Notice, ...]:
    """All that are seen, the strongest first."""
    message = reported.message
    found = [*_who(message), *_figures(message), *_moment(reported, clues)]
    return tuple(Notice(code, text) for code, text in found)


Told = Iterator[tuple[str, str]]


_OF_LIBRARIES = {
    "nccl": (
        "nccl",
        "NCCL, not PyTorch's allocator, found no memory: it cannot use the memory that the allocator keeps in its "
        "cache; leave more memory free (--headroom), or NCCL_BUFFSIZE and fewer communicators",
    ),
    "cublas": (
        "libraries",
        "cuBLAS, cuDNN or another library found no memory for its handle or workspace: the GPU was full, and it cannot "
        "use the allocator's cache; leave 1 GiB more free",
    ),
    "handle": (
        "libraries",
        "cuBLAS, cuDNN or another library got no handle: most often the GPU was full, and it cannot use the "
        "allocator's cache (leave 1 GiB more free); otherwise the driver is too old, or an earlier kernel failed "
        "(CUDA_LAUNCH_BLOCKING=1 shows which)",
    ),
    "shared": (
        "shared-memory",
        "the container's /dev/shm is full, through which workers of data loaders pass batches: make it larger (docker "
        "--shm-size or --ipc=host, in Kubernetes an emptyDir of medium Memory), or use fewer workers (num_workers) and "
        "prefetch less",
    ),
    "driver": (
        "driver",
        "the driver refused, without saying how much was asked: another process holds the GPU, or a library outside "
        "PyTorch asked; nvidia-smi shows who has it",
    ),
}
"""What is to be told, by who found no memory, where the message says nothing more."""


def _who(message: OutOfMemory) -> Told:
    if message.who in _OF_LIBRARIES:
        yield _OF_LIBRARIES[message.who]
    elif message.of_host:
        had = f"; the process had {printed(message.resident)} of it" if message.resident is not None else ""
        sure = f"the host's memory, not the GPU's, ran out{had}"
        if message.who == "killed":
            sure = (
                "signal 9 ended a process (exit code -9, 137 in a container): most often Linux, because the host's "
                "memory, not the GPU's, ran out (dmesg has 'Out of memory: Killed process' then), else a limit of the "
                "job's or somebody"
            )
        yield (
            "host-memory",
            f"{sure}. Every rank that loads the whole model, offloaded states, pinned buffers and data loaders' "
            "workers take it: load on the meta device or in one process (low_cpu_mem_usage, "
            "cpu_ram_efficient_loading), use fewer workers, or ask for more memory (--mem, the container's limit, "
            "/dev/shm)",
        )


def _figures(message: OutOfMemory) -> Told:
    request = message.request
    if request is None:
        return
    if message.capacity is not None and message.tried is not None and message.tried.least > message.capacity:
        yield (
            "more-than-the-gpu",
            (
                f"{printed(request)} is more than the GPU has ({printed(message.capacity)}): no free memory would "
                "help; the tensor itself must be smaller (sequence, micro-batch, a kernel that does not make it)"
            ),
        )
        return
    yield from _others(message)
    yield from _pieces(message, request)
    if message.private is not None and message.private >= request:
        yield (
            "private-pools",
            (
                f"private pools of CUDA graphs hold {printed(message.private)}, which nothing else may use: capture "
                "fewer shapes, or run without graphs"
            ),
        )
    if message.allowed is not None and message.capacity is None:
        yield (
            "memory-fraction",
            (
                f"the process may take {printed(message.allowed)} of the memory that CPU and GPU share "
                "(PYTORCH_MPS_HIGH_WATERMARK_RATIO), and that is in use"
            ),
        )
    if message.allowed is not None and message.capacity is not None and message.allowed < message.capacity:
        yield (
            "memory-fraction",
            (
                f"the process may take {printed(message.allowed)} of {printed(message.capacity)}: a memory fraction is "
                "set (set_per_process_memory_fraction, per_process_memory_fraction)"
            ),
        )
    if request <= 20 << 20 and not message.of_host:
        yield (
            "small-request",
            (
                "the GPU was full to the last MiB: any small tensor would have failed, so which one did says little; "
                "look at what fills the memory"
            ),
        )


def _others(message: OutOfMemory) -> Told:
    total = sum(one.size for one in message.others)
    if message.others and total >= 64 << 20:
        names = ", ".join(
            f"process {one.pid} {printed(one.size)}" for one in sorted(message.others, key=lambda one: -one.size)[:3]
        )
        more = f" and {len(message.others) - 3} more" if len(message.others) > 3 else ""
        enough = message.request is not None and message.free is not None and message.free + total >= message.request
        yield (
            "another-process",
            (
                f"another process has memory of this GPU: {names}{more}"
                + (f", {printed(total)} together" if len(message.others) > 1 else "")
                + ("; without it this request fits" if enough else "")
                + ": end it (nvidia-smi), or give each rank its own GPU (LOCAL_RANK, CUDA_VISIBLE_DEVICES)"
            ),
        )
    if None in (message.capacity, message.free, message.reserved) or message.others:
        return
    assert message.capacity is not None
    assert message.free is not None
    assert message.reserved is not None
    outside = message.capacity - message.free - (message.in_process or message.reserved)
    if outside > RESERVE:
        yield (
            "unaccounted",
            (
                f"{printed(outside)} of the GPU are in use and not PyTorch's: another process, or CUDA's context and "
                "NCCL, which take more than usual; nvidia-smi shows which process"
            ),
        )


def _pieces(message: OutOfMemory, request: int) -> Told:
    unallocated, free = message.unallocated, message.free
    if unallocated is None:
        return
    if unallocated >= request:
        yield (
            "fragmentation",
            (
                f"{printed(unallocated)} were reserved and not in use, more than the {printed(request)} that it asked "
                "for, but in pieces: fragmentation. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins them"
            ),
        )
    elif free is not None and free + unallocated >= request:
        yield (
            "partly-fragmentation",
            (
                f"{printed(free)} free and {printed(unallocated)} reserved and not in use would have been enough in "
                "one piece: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may end it"
            ),
        )
    elif free is not None:
        yield (
            "full",
            (
                f"{printed(request - free - unallocated)} were missing even if nothing lay in pieces ({printed(free)} "
                f"free, {printed(unallocated)} reserved and not in use)"
            ),
        )


_MOMENTS = {
    "evaluation": (
        "evaluation",
        "evaluation asked, not training: its batch may be larger, and the Trainer keeps every batch's logits on the "
        "GPU; a smaller per_device_eval_batch_size, eval_accumulation_steps or prediction_loss_only ends it",
    ),
    "checkpoint": (
        "checkpoint",
        "saving a checkpoint asked, not training: the whole model, or copies of parameters, were gathered on the GPU; "
        "offload_to_cpu and rank0_only with a full state dict (FSDP), a sharded state dict, or "
        "stage3_gather_16bit_weights_on_model_save false (DeepSpeed) need less; plans have no such moment",
    ),
    "initialisation": (
        "initialisation",
        "the job was still being built (flat copies of parameters, main parameters, optimizer states): nothing was "
        "trained yet, and a smaller batch ends nothing; shard further, offload, or keep states in fewer bits",
    ),
    "loading": (
        "loading",
        "the job was still loading or building the model: nothing was trained yet; load on the meta device or the "
        "host, shard while loading, or load in fewer bits",
    ),
    "step": (
        "optimizer-step",
        "an optimizer step asked: forward and backward had fitted. In the first one the optimizer's states appear, and "
        "PyTorch's foreach step copies them for all parameters at once; states in 8 bits, sharded (ZeRO, FSDP) or "
        "offloaded, and fused=True, need less",
    ),
}


def _moment(reported: Reported, clues: Clues) -> Told:
    if clues.phase in _MOMENTS:
        yield _MOMENTS[clues.phase]
    elif reported.steps and reported.message.of_host:
        yield (
            "later",
            (
                f"{reported.steps:,} steps were done before it: memory of the host grew (data that every worker keeps, "
                "tensors that are logged, a checkpoint that is gathered)"
            ),
        )
    elif reported.steps:
        yield (
            "later",
            (
                f"{reported.steps:,} steps were done before it: longer sequences in a batch, evaluation, a checkpoint, "
                "or memory in ever smaller pieces"
            ),
        )
