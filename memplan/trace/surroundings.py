"""Where a step runs: on fake tensors or on real ones, and alone or among processes of a group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.rendezvous import rendezvous

from ..values import dataclass
from .substitutions import cuda_behaviour, cuda_behaviour_of_real

_groups = count()
"""Numbers of the process groups of this process: each has keys of its own."""


@cache
def meeting() -> tuple[Any, int, int]:
    """Where the processes of a run meet, as its launcher says in the environment: the store, this rank, and how many
    there are."""
    store, rank, ranks = next(iter(rendezvous("env://")))
    return store, rank, ranks


BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """As a trace has them, if nothing is said: fake tensors, of which a CPU-only PyTorch makes what CUDA would."""

    fake: bool = True
    device: str = "cpu"
    """The type of the device."""
    alone: bool = True
    """This process plays a rank, and others are of torch's fake process group; else there is a process for every
    rank, started by torch's elastic launcher."""
    warmup: int = 1
    """Iterations before the one that is followed, of real tensors."""
    seconds: float = 600.0
    """After which a collective that has not ended is an error."""
    lost: Callable[[torch.Tensor], None] | None = None
    """Is given the loss of every micro-batch, where the rank has it."""
    begins: Callable[[], None] | None = None
    """Is called when an iteration of a training begins."""

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Around an iteration of a training. What real code makes there without naming a device is on the host, as in
        any training: counters of optimizer steps, which would else be read back one by one."""
        if self.begins is not None:
            self.begins()
        with torch.device("cpu") if not self.fake and self.device != "cpu" else nullcontext():
            yield

    @contextmanager
    def tensors(self) -> Iterator[None]:
        """What is made is made on ``device``, and behaves as on a GPU where it is fake and there is none."""
        if not self.fake:
            own = cuda_behaviour_of_real if self.device == "cpu" else without_cudnn_attention
            with torch.device(self.device), own():
                yield
            return
        as_on_a_gpu = torch.device(self.device) if self.device == "cuda" else cuda_behaviour()
        with FakeTensorMode(allow_non_fake_inputs=True), as_on_a_gpu:
            yield

    @contextmanager
    def group(self, rank: int, ranks: int) -> Iterator[None]:
        """The process group of all ranks; ``rank`` is the one that a process which is alone plays."""
        if self.alone:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        else:
            more: dict[str, Any] = {}
            if self.device == "cuda":
                more["device_id"] = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            store, rank, ranks = meeting()
            named = torch._C._distributed_c10d.PrefixStore(f"group/{next(_groups)}", store)
            dist.init_process_group(
                BACKENDS[self.device],
                store=named,
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=self.seconds),
                **more,
            )
        ended_well = False
        try:
            yield
            ended_well = True
        finally:
            if ended_well or self.alone:  # others may be waiting for this rank, and NCCL's orderly end waits for them
                dist.destroy_process_group()


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """``scaled_dot_product_attention`` takes the flash kernel, as a plan with ``flash`` says: on Hopper and later
    PyTorch would choose cuDNN's before it (``sdp_utils.cpp``, ``check_prefer_cudnn_attention``)."""
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


FAKE = Surroundings()
