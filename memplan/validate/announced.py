"""What a validation is about to run, and about how long that takes: the first line that its user reads."""

from __future__ import annotations

import os
from math import ceil

from ..plan.errors import PlanError
from ..search.time import step_time
from ..search.time.shape import model_flops
from ..trace.job import MOST_MICROBATCHES
from .run import Prepared

STARTING = 15.0
"""Seconds in which launcher and rank import torch and transformers, and the rank builds its model, twice on a GPU; a
small model's run on a CPU takes 8 s of processor time in all."""
CORE = 1e10
"""FLOP/s of a CPU's core, assumed: fp32 products do better, 16 bits without instructions for them worse."""
ROUND = 5
"""Seconds to which a duration is rounded up."""


def announced(asked: Prepared) -> str:
    """One line; of a run on fake tensors nothing, since that is over before it is read."""
    where, ranks = asked.where, len(asked.ranks)
    if where.device == "fake":
        return ""
    plan, on = asked.native.runs, "the CPU" if where.device == "cpu" else (asked.gpu or "the GPU")
    sizes = f"{plan.framework}, {plan.precision.dtype}, mbs {plan.batch.mbs}, seq {plan.batch.seq}"
    if asked.world == "emulated":
        who = f"{ranks} of {asked.native.ranks} ranks" if ranks < asked.native.ranks else f"{ranks} ranks"
        who = f"{who}, one after another," if ranks > 1 else f"one of {asked.native.ranks} ranks"
    else:
        who = f"{ranks} ranks" if ranks > 1 else "one process"
    seconds = duration(asked)
    text = f"runs {plan.model.name} ({sizes}) as {who} on {on}: {iterations(asked)} iterations"
    return text if seconds is None else f"{text}, about {_rounded(seconds)} s"


def iterations(asked: Prepared) -> int:
    """Of each rank: on a GPU those that warm up, those that are timed, one by phases; then, as on a CPU, those that
    warm up and the one that is followed."""
    warmup = max(asked.where.warmup, asked.native.least_warmup)
    followed = warmup + 1
    return followed if asked.where.device == "cpu" else warmup + asked.where.steps + 1 + followed


def duration(asked: Prepared) -> float | None:
    """Seconds; ``None`` where the GPU's speed is not known."""
    turns = len(asked.ranks) if asked.world == "emulated" else 1
    step = _cpu_step(asked) if asked.where.device == "cpu" else _gpu_step(asked)
    return None if step is None else turns * (STARTING + iterations(asked) * step)


def _gpu_step(asked: Prepared) -> float | None:
    try:
        return step_time(asked.native.runs).total * _share(asked)
    except PlanError:
        return None


def _cpu_step(asked: Prepared) -> float:
    """Of a rank, beside others that run at once."""
    whole = model_flops(asked.native.runs) / asked.native.ranks * _share(asked)
    at_once = 1 if asked.world == "emulated" else len(asked.ranks)
    return whole * at_once / (CORE * (os.cpu_count() or 1))


def _share(asked: Prepared) -> float:
    """Of an iteration's micro-batches those that run: outside a pipeline no more than a trace has."""
    plan = asked.native.runs
    if plan.layout.pp > 1 or asked.where.code != "torch":
        return 1.0
    return min(1.0, MOST_MICROBATCHES / plan.microbatches)


def _rounded(seconds: float) -> int:
    return ROUND * ceil(seconds / ROUND)
