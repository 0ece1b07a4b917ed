"""torchtitan's Llama on a rank, whole or in the stages of a pipeline, before the first iteration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..trace.job import Job
from ..trace.pipelining import PassPlaces
from ..trace.recording import Recording
from ..trace.surroundings import Surroundings
from ..trace.torchtitan_parallel import layer_numbers, made
from ..trace.torchtitan_pipeline import PipelineTraining, openings, stages_of
from ..trace.torchtitan_settings import Part, Torchtitan
from ..trace.torchtitan_step import TitanTraining, inner, rank_of, with_tensors


@contextmanager
def torchtitan_training_of(
    job: Job, settings: Torchtitan, within: Surroundings
) -> Iterator[TitanTraining | PipelineTraining]:
    """Models are made and sharded on ``meta``, and get their tensors, with values, on the device."""
    if settings.stages is None:
        yield from _whole(job, settings, within)
        return
    with stages_of(job, settings, settings.stages, within) as (mesh, models), within.tensors():
        for part in models:
            with_tensors(part, within)
        places = PassPlaces(models, openings(settings.stages), Recording())
        yield PipelineTraining(job, settings.stages, models, mesh, places, within)


def _whole(job: Job, settings: Torchtitan, within: Surroundings) -> Iterator[TitanTraining]:
    with rank_of(job, settings, within) as mesh, within.tensors():
        tensor = mesh["tp"] if settings.tensor > 1 else None
        whole = Part(0, settings.layers, first=True, last=True)
        model = made(job, settings, whole, layer_numbers(), inner(job, mesh), tensor)
        with_tensors(model, within)
        yield TitanTraining(job, settings, model, within)
