"""A rank's iterations on a GPU with nothing looking on but the allocator's own statistics."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..trace.ddp import Replica, reducing
from ..trace.job import Job
from ..trace.pipelining import PassPlaces
from ..trace.ranks import rank_of
from ..trace.recording import ITERATION, Recording
from ..trace.step import Training, Watch, environment, sharded_model
from ..trace.surroundings import Surroundings
from ..trace.torchtitan_parallel import layer_numbers, made
from ..trace.torchtitan_pipeline import PipelineTraining, openings, stages_of
from ..trace.torchtitan_settings import Part, Torchtitan
from ..trace.torchtitan_step import TitanTraining, inner, with_tensors
from ..trace.torchtitan_step import rank_of as titan_rank_of
from .codes.deepspeed import EngineJob
from .codes.deepspeed_engine import EngineTraining, engine_of
from .readings import Moment

AnyTraining = Training | TitanTraining | PipelineTraining | EngineTraining


@contextmanager
def training_of(job: Job, within: Surroundings) -> Iterator[AnyTraining]:
    """The job's model on its rank, with its optimizer, before the first iteration."""
    settings = job.torchtitan
    if isinstance(job, EngineJob):
        with engine_of(job, within) as engine:
            yield engine
    elif settings is None:
        with environment(within), rank_of(job, within) as mesh, within.tensors(), reducing(job, None, within) as mode:
            model, _ = sharded_model(job, mesh, within)
            yield Training(job, Replica(job, model, mode), within)
    elif settings.stages is None:
        yield from _whole(job, settings, within)
    else:
        with stages_of(job, settings, settings.stages, within) as (mesh, models), within.tensors():
            for part in models:
                with_tensors(part, within)
            places = PassPlaces(models, openings(settings.stages), Recording())
            yield PipelineTraining(job, settings.stages, models, mesh, places, within)


def _whole(job: Job, settings: Torchtitan, within: Surroundings) -> Iterator[TitanTraining]:
    with titan_rank_of(job, settings, within) as mesh, within.tensors():
        tensor = mesh["tp"] if settings.tensor > 1 else None
        whole = Part(0, settings.layers, first=True, last=True)
        model = made(job, settings, whole, layer_numbers(), inner(job, mesh), tensor)
        with_tensors(model, within)
        yield TitanTraining(job, settings, model, within)


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

    def __init__(self, clean: Clean) -> None:
        self.clean, self.phase = clean, ""
        self.peaks: dict[str, Moment] = {}

    def begins(self, phase: str, microbatch: int) -> None:
        self.ends()
        self.phase = phase

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
    job: Job, within: Surroundings, steps: int, used: Callable[[], int | None], says: Callable[[str], None]
) -> Clean:
    """``steps`` timed iterations behind ``within.warmup``. ``used`` is what the whole device has in use, from the
    driver, before this process has a context, too."""
    clean = Clean()
    before = used()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.empty(1, device="cuda")
    clean.context = _beyond(before, used)
    torch.cuda.reset_peak_memory_stats()
    says("building the model")
    with training_of(job, within) as training:
        clean.moments.append(_moment("initialisation"))
        for number in range(within.warmup):
            says(f"warm-up {number + 1} of {within.warmup}")
            training.iterate(Watch())
        _iterations(clean, training, steps, says)
        says("reading each phase")
        phases = _Phases(clean)
        _moment("")
        training.iterate(phases)
        phases.ends()
        clean.moments += phases.peaks.values()
        if not isinstance(training, PipelineTraining):
            says("evaluating")
            with torch.no_grad():
                training.evaluate()
            clean.moments.append(_moment("evaluation"))
        clean.workspaces = _workspaces()
        clean.device_bytes = _difference(used(), before)
        beyond = _beyond(before, used)
        if beyond is not None and clean.context is not None and not within.alone:
            clean.nccl = beyond - clean.context
        del training
    gc.collect()
    torch.cuda.empty_cache()
    return clean


def _iterations(clean: Clean, training: Any, steps: int, says: Callable[[str], None]) -> None:
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
