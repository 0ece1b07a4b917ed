"""A rank's iterations on a GPU with nothing looking on but the allocator's own statistics."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from ..records.readings import Moment
from ..trace.recording import ITERATION
from ..trace.step import Training, Watch
from ..trace.surroundings import Surroundings
from ..values import dataclass

if TYPE_CHECKING:
    from ..trace.worker import AnyTraining


PASSES = "passes"
"""A pipeline's, of all micro-batches, which cannot be told apart without a synchronisation in its schedule."""


@dataclass
class Clean:
    """What the allocator said, in bytes."""

    allocated: int = 0
    reserved: int = 0
    static: int = 0
    workspaces: int = 0
    context: int | None = None
    device_bytes: int | None = None
    nccl: int | None = None
    moments: list[Moment] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class _Phases(Watch):
    """Reads peaks between phases, which costs a synchronisation each."""

    def __init__(self) -> None:
        self.phase = ""
        self.peaks: dict[str, Moment] = {}

    def begins(self, phase: str, microbatch: int) -> None:
        self.ends()
        self.phase = PASSES if phase == ITERATION else phase

    def ends(self) -> None:
        moment = _moment(self.phase)
        before = self.peaks.get(self.phase)
        if self.phase:
            self.peaks[self.phase] = moment if before is None else _larger(before, moment)


def _larger(one: Moment, other: Moment) -> Moment:
    return one if (one.allocated or 0) >= (other.allocated or 0) else other


def _moment(name: str) -> Moment:
    """Peaks since the last call, and what is allocated now."""
    torch.cuda.synchronize()
    moment = Moment(
        name=name,
        allocated=torch.cuda.max_memory_allocated(),
        reserved=torch.cuda.max_memory_reserved(),
        end=torch.cuda.memory_allocated(),
    )
    torch.cuda.reset_peak_memory_stats()
    return moment


def measured(
    built: AbstractContextManager[Any],
    within: Surroundings,
    steps: int,
    local: int,
    used: Callable[[], int | None],
    says: Callable[[str], None],
    *,
    communicates: bool,
    gives_back: bool,
) -> Clean:
    """``steps`` timed iterations behind ``within.warmup`` of what ``built`` gives, as ``training_of`` does, on the
    ``local``-th device. ``used`` is what all of that has in use, from the driver, before this process has a context,
    too; ``communicates``: whether there will be communicators; ``gives_back``: the cache is emptied when the model is
    made, where a tied head's own weight would stay, which no checkpoint has."""
    clean = Clean()
    before = used()  # choosing another device than the first makes a context there (CUDA 12)
    torch.cuda.set_device(local)
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.empty(1, device="cuda")
    clean.context = _beyond(before, used)
    torch.cuda.reset_peak_memory_stats()
    says("building the model")
    with built as training:
        if gives_back:
            torch.cuda.empty_cache()
        clean.moments.append(_moment("initialisation"))
        _warm_up(training, within, says)
        _iterations(clean, training, steps, says)
        says("reading each phase")
        phases = _Phases()
        _moment("")
        training.iterate(phases)
        phases.ends()
        clean.moments += phases.peaks.values()
        evaluate = getattr(training, "evaluate", None)
        if evaluate is not None:
            says("evaluating")
            with torch.no_grad():
                evaluate()
            clean.moments.append(_moment("evaluation"))
        clean.workspaces = _workspaces()
        clean.device_bytes = _difference(used(), before)
        beyond = _beyond(before, used)
        if not communicates:  # kernels have been loaded since
            clean.context = beyond
        elif beyond is not None and clean.context is not None:
            clean.nccl = beyond - clean.context
        del training, evaluate
    gc.collect()
    torch.cuda.empty_cache()
    return clean


def _warm_up(training: AnyTraining, within: Surroundings, says: Callable[[str], None]) -> None:
    """Until the optimizer has its states, and a reducer its last buckets."""
    numbers = count(1)

    def iterate() -> None:
        says(f"warm-up {next(numbers)}")
        training.iterate(Watch())

    if isinstance(training, Training):
        training.replica.settle(iterate, within.warmup)
        return
    for _ in range(within.warmup):
        iterate()


def _iterations(clean: Clean, training: AnyTraining, steps: int, says: Callable[[str], None]) -> None:
    gc.collect()
    _moment("")
    clean.static = torch.cuda.memory_allocated()
    for number in range(steps):
        says(f"iteration {number + 1} of {steps}")
        began = time.perf_counter()
        training.iterate(Watch())
        torch.cuda.synchronize()
        clean.seconds.append(time.perf_counter() - began)
    moment = _moment(ITERATION)
    assert moment.allocated is not None
    assert moment.reserved is not None
    clean.allocated, clean.reserved = moment.allocated, moment.reserved
    clean.moments.append(moment)


def _difference(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one - other


def _beyond(before: int | None, used: Callable[[], int | None]) -> int | None:
    """What the process has of the device besides the allocator's segments."""
    torch.cuda.synchronize()
    own = _difference(used(), before)
    return None if own is None else own - torch.cuda.memory_reserved()


def _workspaces() -> int:
    """cuBLAS's, which the allocator gives, and which end when they are cleared."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()
