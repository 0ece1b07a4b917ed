"""Learns the architecture of a plan: traces it in a process of its own, checks what came of it, and keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..layers.module import Options
from ..plan.errors import PlanError
from ..plan.plan import Optimizer, Plan
from ..plan.resolve import resolve
from ..plan.traced_spec import NO_LENGTH, TracedSpec
from ..program import fold_program
from . import cache
from .fit import Fit
from .job import Job
from .lookup import forget, job_of, kept_as
from .programs import check, program_of
from .run import answer_of

LONGEST = 4096
"""Tokens up to which an architecture is traced that names no longest sequence."""
NAMED = {
    "between steps": "static",
    "after the first forward": "after_forward",
    "peak of forward and backward": "backward_peak",
    "peak of the step": "step_peak",
}
"""Points of a trace, and fields of a fold."""


@dataclass(frozen=True)
class Learned:
    fit: Fit
    traces: int
    """Steps that were traced."""
    path: Path
    """Where it is kept."""


def learned(plan: Plan) -> Learned:
    """What traces of the resolved plan's architecture come to, kept for later. ``LackingError`` without torch or
    transformers; ``PlanError`` where it cannot be traced, or written as polynomials."""
    spec = plan.model
    if not isinstance(spec, TracedSpec):
        problem = "has a recipe: memplan estimate needs no trace of it; memplan trace shows that both agree"
        raise PlanError("model", spec.name, problem)
    check(plan)
    cache.folder()  # before tracing, which takes long, is in vain
    job = job_of(plan)
    fit, traces = fit_by_traces(job, plan, longest_of(plan), spec.source)
    path = cache.store(kept_as(job, fit), fit)
    forget()
    return Learned(fit, traces, path)


def longest_of(plan: Plan) -> int:
    """The longest sequence to trace: that of the model, and that of the plan if it is longer."""
    spec, asked = plan.model, plan.batch.seq or 1
    named = spec.positions_max if spec.positions_max != NO_LENGTH else max(LONGEST, asked)
    return max(named, asked)


def fit_by_traces(job: Job, plan: Plan, longest: int, name: str) -> tuple[Fit, int]:
    """The fit and how many steps were traced for it; compared with one of them under ``plan``."""
    answer = answer_of("learn_worker", job, {"job": job.to_json(), "longest": longest}, name)
    if "error" in answer:
        raise PlanError("model", name, answer["error"])
    fit = Fit.from_json(answer["fit"])
    _compare(plan, fit, answer["point"], answer["points"], name)
    return fit, int(answer["traces"])


def _compare(plan: Plan, fit: Fit, point: tuple[int, int], traced: Mapping[str, int], name: str) -> None:
    """What polynomials and rules come to is what was traced with all layers and AdamW, at named points."""
    b, s = point
    update: dict[str, Any] = {
        "framework": "single",
        "batch": plan.batch.model_copy(update={"mbs": b, "seq": s, "gbs": 2 * b, "accumulation": None}),
        "layout": type(plan.layout)(dp=1),
        "hardware": plan.hardware.model_copy(update={"gpus": 1}),
        "optimizer": Optimizer(name="adamw", implementation="foreach", weight_decay=0.01),
    }
    folded = fold_program(program_of(resolve(plan.model_copy(update=update)), fit, Options()))
    for point_name, field in NAMED.items():
        ours, found = int(getattr(folded, field)), traced[point_name]
        if ours != found:
            at = f"{point_name} at b = {b}, s = {s}"
            raise PlanError("model", name, f"cannot be estimated from traces: {at} is {found:,} bytes, not {ours:,}")
