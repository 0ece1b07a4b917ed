"""One rank of a validation: ``python -m memplan.validate.worker FOLDER RANK``.

On a GPU twice: once with nothing looking on but the allocator, once followed operator by operator, which needs no more
memory but time. On a CPU, whose allocator keeps no statistics, followed alone.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from ..plan.errors import LackingError
from ..plan.plan import ResolvedPlan
from ..records.readings import Code, Place, RankReading, World
from ..tape.events import Category, Excursion, compose, fold
from ..tape.program import Program
from ..trace.comparison import Row, compared
from ..trace.recording import EVALUATION, Traced
from ..trace.worker import traced_job, training_of
from ..values import dataclass, replace
from .devices import devices, visible
from .failing import is_full
from .native import own_code
from .run_files import TASK, Telling

if TYPE_CHECKING:
    import torch

    from ..trace.job import Job
    from ..trace.surroundings import Surroundings
    from .clean import Clean


class Task(BaseModel):
    """A run of ``plan``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: ResolvedPlan
    """Resolved, as it runs."""
    code: Code = "torch"
    """Whose code runs it."""
    world: World
    device: Literal["cuda", "cpu"]
    warmup: int
    """Iterations before those that are measured; the first makes the optimizer's states."""
    steps: int
    """Iterations that are timed."""
    seconds: float
    """After which a collective that has not ended is an error."""
    gathers: bool = False
    """Ranks are on several machines, or were not started by this one: their readings come to the first."""


NOTABLE = 0.001
"""Part of a rank's peak by which an entry's excursion has to differ to be where measured and estimated part."""
WHOLE = "the whole model"
"""In place of an entry of the layer list."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Requested bytes of one iteration."""

    static: int
    peak: int
    breakdown: dict[str, int]
    apart: Place | None


def footprint_of(traced: Traced, program: Program | None, *, by_pass: bool = False) -> Footprint:
    """Of the iteration that ``traced`` holds; ``program`` is the estimate's for the same rank. ``by_pass``: passes are
    compared as a whole, where what happens between two entries is not always the same one's."""
    start, iteration = traced.setup, _iteration(traced)
    by = [before + during for before, during in zip(start.net_by, iteration.peak_by, strict=True)]
    peak = start.net + iteration.peak
    return Footprint(
        static=start.net,
        peak=peak,
        breakdown={category.key: by[category] for category in Category if by[category]},
        apart=_apart(traced, program, peak, by_pass),
    )


def _iteration(traced: Traced) -> Excursion:
    recording = traced.recording
    zipped = zip(recording.events, recording.places, strict=True)
    return fold(event for event, place in zipped if place.phase not in ("", EVALUATION))


def _apart(traced: Traced, program: Program | None, peak: int, by_pass: bool) -> Place | None:
    if program is None:
        return None
    rows: Iterable[Row] = compared(traced, program).rows
    rows = _whole(rows) if by_pass else rows
    return next((_place(row) for row in rows if _is_notable(row, peak)), None)


def _whole(rows: Iterable[Row]) -> Iterator[Row]:
    """One row for each pass."""
    for (microbatch, phase), own in groupby(rows, lambda row: (row.microbatch, row.phase)):
        parts = list(own)
        estimated = compose(row.estimated for row in parts if row.estimated is not None)
        yield Row(WHOLE, phase, microbatch, compose(row.traced for row in parts), estimated)


def _is_notable(row: Row, peak: int) -> bool:
    if row.estimated is None:
        return False
    furthest = max(abs(row.traced.net - row.estimated.net), abs(row.traced.peak - row.estimated.peak))
    return furthest > NOTABLE * peak


def _place(row: Row) -> Place:
    return Place(
        entry=row.entry,
        phase=row.phase,
        microbatch=row.microbatch,
        net=row.traced.net,
        peak=row.traced.peak,
        estimated_net=row.estimated.net if row.estimated is not None else None,
        estimated_peak=row.estimated.peak if row.estimated is not None else None,
    )


AUTOGRAD = "_engine_run_backward"
"""The function from which PyTorch enters its engine (``torch/autograd/graph.py``)."""


def main(arguments: list[str]) -> int:
    gc.disable()  # while torch and transformers are imported, of which nothing is garbage
    folder, rank = Path(arguments[0]), int(arguments[1])
    task = Task.model_validate_json((folder / TASK).read_bytes())
    telling = Telling(folder, rank)
    telling.says("importing torch")
    try:
        reading = Rank(task, rank, telling).reading()
    except Exception as error:
        _tell(error, telling)
        raise
    telling.result(reading)
    if task.world == "real" and task.gathers:
        _gather(telling, reading, task)
    return 0


def _tell(error: Exception, telling: Telling) -> None:
    import torch

    from ..explain.message import parse

    text = str(error).strip()
    if not isinstance(error, torch.OutOfMemoryError) and not is_full(text):
        telling.failed("error", f"{type(error).__name__}: {text.partition(chr(10))[0]}", when=_where(error))
        return
    said = parse(" ".join(text.split()))
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    telling.failed(
        "out-of-memory",
        text.partition("\n")[0],
        when=_where(error),
        allocated=torch.cuda.memory_allocated() if said.allocated is None and on_gpu else said.allocated,
        reserved=torch.cuda.memory_reserved() if said.reserved is None and on_gpu else said.reserved,
        failing=said.request,
    )


def _where(error: BaseException) -> str | None:
    """The innermost module whose code was running, by its path in the outermost; ``None`` in backward, which has no
    Python frames of modules but those that are recomputed: their path is within what is recomputed."""
    import torch

    modules: list[torch.nn.Module] = []
    phase, traceback = "forward", error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == AUTOGRAD:
            phase = "recompute in backward"
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            modules.append(owner)
        traceback = traceback.tb_next
    if not modules:
        return None
    names = {id(module): name for name, module in modules[0].named_modules()}
    named = [names[id(module)] for module in modules if names.get(id(module))]
    return f"{phase}, {named[-1]}" if named else None


class Rank:
    """What one process does."""

    def __init__(self, task: Task, rank: int, telling: Telling) -> None:
        self.task, self.rank, self.telling = task, rank, telling
        self.losses: list[float] = []
        self.local = int(os.environ.get("LOCAL_RANK", "0")) if task.world == "real" else 0
        code = own_code(task.code)
        self.native, self.code = code.layout(task.plan), code.runner()

    def reading(self) -> RankReading:
        import torch

        task, stage, clean = self.task, self.native.stage_of(self.rank), None
        if task.device == "cuda":
            gc.enable()
            clean = self._clean()
            gc.collect()
        program = self.native.program(self.rank)
        traced = self._followed(program)
        footprint = footprint_of(traced, program, by_pass=self.native.by_pass)
        name = torch.cuda.get_device_name() if task.device == "cuda" else "cpu"
        return RankReading(
            rank=self.rank,
            stage=stage,
            host=socket.gethostname(),
            device=name,
            parameters=traced.outline.parameters,
            requested=footprint.peak,
            allocated=clean.allocated if clean else None,
            reserved=clean.reserved if clean else None,
            device_bytes=clean.device_bytes if clean else None,
            static=clean.static if clean else footprint.static,
            context=clean.context if clean else None,
            nccl=clean.nccl if clean else None,
            workspaces=clean.workspaces if clean else None,
            moments=tuple(clean.moments) if clean else (),
            breakdown=footprint.breakdown,
            seconds=tuple(clean.seconds) if clean else (),
            losses=tuple(self.losses),
            apart=footprint.apart,
        )

    def _within(self, lost: Callable[[torch.Tensor], None] | None) -> Surroundings:
        from ..trace.surroundings import Surroundings

        task = self.task
        return Surroundings(
            fake=False,
            device=task.device,
            alone=task.world == "emulated",
            warmup=task.warmup,
            seconds=task.seconds,
            lost=lost,
        )

    def _clean(self) -> Clean:
        import torch

        from .clean import measured

        def says(what: str) -> None:
            total = torch.cuda.get_device_properties(self.local).total_memory
            self.telling.says(what, torch.cuda.memory_allocated(), total)

        communicates = self.task.world == "real" and self.native.ranks > 1
        within, steps, code = self._within(None), self.task.steps, self.code
        training = None if code is None else code.training_of(self.task.plan, self.rank, within)
        built, gives_back = training, False
        if built is None:
            job = self.job()
            built, gives_back = training_of(job, within), job.torchtitan is None
        return measured(
            built, within, steps, self.local, self._used, says, communicates=communicates, gives_back=gives_back
        )

    def _used(self) -> int | None:
        """Bytes of the device that any process has in use; ``None`` where the driver does not say."""
        try:
            return visible(devices(), os.environ)[self.local].used
        except (LackingError, IndexError):
            return None

    def job(self) -> Job:
        job = self.native.job(self.rank)
        return job if job.ddp is None else replace(job, ddp=replace(job.ddp, rank=self.rank))

    def _followed(self, program: Program) -> Traced:
        """Losses are of what ranks compute together: where one plays all of them, they mean nothing."""
        self.telling.says("building the model, to follow it")
        numbers = count(1)

        def begins() -> None:
            number = next(numbers)
            if number == 1:
                gc.freeze()  # what was imported is not looked through each time
                gc.enable()
            self.telling.says(f"followed iteration {number} of {self.task.warmup + 1}")

        is_whole = self.task.world == "real" or self.native.ranks == 1
        lost = (lambda loss: self.losses.append(float(loss))) if is_whole else None
        within = replace(self._within(lost), begins=begins)
        if self.code is not None:
            return self.code.followed(self.task.plan, self.rank, program, within)
        return traced_job(self.job(), within)


def _gather(telling: Telling, reading: RankReading, task: Task) -> None:
    """Readings of all ranks come to the first one, whose machine tells the user."""
    from ..trace.surroundings import meeting

    store, rank, ranks = meeting()
    store.set(f"reading/{rank}", reading.model_dump_json())
    if rank:
        store.get("readings")
        return
    for other in range(1, ranks):
        store.wait([f"reading/{other}"], timedelta(seconds=task.seconds))
        telling.result(RankReading.model_validate_json(store.get(f"reading/{other}")))
    store.set("readings", "all")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
