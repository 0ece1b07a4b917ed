"""A rank whose iteration is followed by PyTorch's own MemTracker, and then by memplan's, in the same processes.

Both see operators as modes do, and so both keep autograd from summing gradients in place: memplan's is told to.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from memplan.records.readings import Moment
from memplan.trace.step import Training, Watch, traced_step
from memplan.trace.surroundings import Surroundings
from memplan.trace.torchtitan_step import traced_torchtitan
from memplan.trace.worker import training_of
from memplan.validate.run_files import TASK, Telling
from memplan.validate.worker import Rank, Task, footprint_of

TIMES = 3
"""Iterations that are tracked: gloo's threads let go of what they send when they come to it, late at times."""


def externals(training: Any) -> list[Any]:
    """What is there before an iteration."""
    if isinstance(training, Training):
        optimizer = getattr(training.optimizer, "optim", training.optimizer)  # a ZeroRedundancyOptimizer's own part
        return [training.replica.inner, optimizer, *training.inputs.values()]
    models = getattr(training, "models", None) or [training.model]
    optimizers = getattr(training, "optimizers", None) or [training.optimizer]
    buffers = [buffer for model in models for buffer in model.buffers()]
    return [*models, *optimizers, *buffers, training.tokens, training.labels]


def forget_before(part: Any, tracker: Callable[[], Any]) -> None:
    """Of modules that run for one micro-batch after the other the tracker keeps no statistics."""
    forward = part.forward_one_chunk

    def forgetting(*args: Any, **kwargs: Any) -> Any:
        tracker().reset_mod_stats()
        return forward(*args, **kwargs)

    part.forward_one_chunk = forgetting


@contextmanager
def tracked(job: Any, within: Surroundings, peaks: list[int]) -> Iterator[None]:
    trackers: list[Any] = []
    with training_of(job, within) as training:
        for _ in range(within.warmup):
            training.iterate(Watch())
        gc.freeze()
        gc.enable()
        for part in getattr(training, "parts", ()):
            forget_before(part, lambda: trackers[-1])
        for _ in range(TIMES):
            gc.collect()
            tracker: Any = MemTracker()
            trackers.append(tracker)
            tracker.track_external(*externals(training))
            with tracker, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                training.iterate(Watch())
            (snapshot,) = tracker.get_tracker_snapshot("peak").values()
            peaks.append(int(snapshot["Total"]))
        yield


def main(folder: Path, rank: int) -> int:
    """The reading is a worker's own; its moments are two: what MemTracker saw, and memplan without sums in place."""
    gc.disable()
    task = Task.model_validate_json((folder / TASK).read_bytes())
    telling = Telling(folder, rank)
    own = Rank(task, rank, telling)
    job, within = own.job(), Surroundings(fake=False, alone=False, warmup=1, seconds=task.seconds)
    peaks: list[int] = []
    with tracked(job, within, peaks):
        pass
    trace = traced_torchtitan if job.torchtitan is not None else traced_step
    found = footprint_of(trace(job, sums_in_place=False, within=within), None)
    moments = (Moment(name="tracker", requested=min(peaks)), Moment(name="beside", requested=found.peak))
    telling.result(own.reading().model_copy(update={"moments": moments}))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2])))
