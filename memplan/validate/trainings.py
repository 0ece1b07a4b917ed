"""A job's model on its rank, with its optimizer, before the first iteration; nothing looks on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from ..trace.ddp import Replica, answered
from ..trace.job import Job
from ..trace.ranks import rank_of
from ..trace.step import Training, environment, sharded_model
from ..trace.surroundings import Surroundings

if TYPE_CHECKING:
    from ..trace.torchtitan_pipeline import PipelineTraining
    from ..trace.torchtitan_step import TitanTraining

    AnyTraining: TypeAlias = Training | TitanTraining | PipelineTraining


@contextmanager
def training_of(job: Job, within: Surroundings) -> Iterator[AnyTraining]:
    """The job's model on its rank. torchtitan's is imported where it runs: it needs a newer torch than others do."""
    if job.torchtitan is not None:
        from .torchtitan_trainings import torchtitan_training_of

        with torchtitan_training_of(job, job.torchtitan, within) as training:
            yield training
        return
    with environment(within), rank_of(job, within) as mesh, within.tensors(), answered(job, within):
        model, _ = sharded_model(job, mesh, within)
        yield Training(job, Replica(job, model), within)
