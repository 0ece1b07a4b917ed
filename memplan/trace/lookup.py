"""From a plan of an architecture without a recipe to its fit on disk, in memory once it was read."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..plan.errors import ABSENT, Origin, PlanError
from ..plan.models import load_spec
from ..plan.plan import Optimizer, Plan
from ..plan.traced_spec import STAND_IN, TracedSpec, layers_name
from . import cache
from .fit import Born, Fit
from .job import Job, job_of_plan

OPTIONAL = frozenset({"b", "s", "optimizer", "implementation", "momentum", "weight_decay", "microbatches"})
"""Fields of a job that change nothing of forward and backward."""
NAMES = frozenset({"_name_or_path", "transformers_version"})
"""Keys of a configuration that change no model."""

Settings = dict[str, Any]


def job_of(plan: Plan) -> Job:
    """The step of one rank by itself; ``PlanError`` where the plan asks for what is not traced."""
    assert isinstance(plan.model, TracedSpec)
    update = {
        "model": load_spec(STAND_IN),
        "framework": "single",
        "optimizer": Optimizer(name="adamw", implementation="foreach", weight_decay=0.01),
    }
    config = {name: value for name, value in plan.model.config.items() if name not in NAMES}
    return job_of_plan(plan.model_copy(update=update), config)


def settings_of(job: Job, layers: int | None) -> Settings:
    """What tells one fit from another; ``layers`` where it is of so many alone."""
    data = {name: value for name, value in job.to_json().items() if name not in OPTIONAL}
    name = layers_name(job.config)
    data["config"] = {key: value for key, value in job.config.items() if key != name}
    return {**data, "layers": layers if name is not None else None}


def kept_as(job: Job, fit: Fit) -> Settings:
    """Under which settings ``fit`` is stored: of any number of layers, if others were verified, too."""
    return settings_of(job, None if fit.extends else fit.layers)


def fit_of(plan: Plan) -> Fit:
    """What was learnt of the plan's architecture; ``PlanError`` where nothing was."""
    spec = plan.model
    assert isinstance(spec, TracedSpec)
    sections = (plan.precision, plan.recompute, plan.loss, plan.lora, plan.quantisation, plan.frozen, plan.trainer)
    key = (spec.digest, plan.attention, plan.code, plan.framework, *sections)
    found = _FOUND.get(key)
    if found is None:
        found = _FOUND[key] = _read(plan, spec)
    return found


_FOUND: dict[tuple[object, ...], Fit] = {}
"""Fits of this process."""


def forget() -> None:
    """Fits are read again."""
    _FOUND.clear()


def _read(plan: Plan, spec: TracedSpec) -> Fit:
    job = job_of(plan)
    asked = [settings_of(job, None), settings_of(job, spec.layers)]
    for settings in asked:
        fit = cache.load(settings)
        if fit is not None:
            return fit
    made = next(filter(None, map(cache.others, asked)), "")
    why = f"; what was learnt of it was of {made}" if made else ""
    learn = f"memplan trace --learn --model {spec.source}{_flags(plan)}"
    problem = f"{spec.reason}; nothing was learnt of it for {_told(plan)}{why}: `{learn}` traces it once (needs torch)"
    raise PlanError("", ABSENT, problem, origin=Origin(spec.source))


def _told(plan: Plan) -> str:
    recompute = ", recompute full" if plan.recompute.mode == "full" else ""
    return f"{plan.precision.dtype}, {plan.attention} attention{recompute}"


def _flags(plan: Plan) -> str:
    """Flags of ``memplan trace`` for what is not the default."""
    flags = f" --dtype {plan.precision.dtype}" if plan.precision.dtype != "bf16" else ""
    default = "eager" if plan.precision.dtype == "fp32" else "flash"
    flags += f" --attention {plan.attention}" if plan.attention != default else ""
    flags += " --recompute full" if plan.recompute.mode == "full" else ""
    flags += " --autocast" if plan.precision.autocast else ""
    spec = plan.model
    assert isinstance(spec, TracedSpec)
    flags += f" --layers {spec.layers}" if spec.changed else ""
    if spec.positions_max > 2**30:
        flags += f" --seq {plan.batch.seq}"
    return flags


@lru_cache(maxsize=256)
def _operators(fit: Fit) -> frozenset[str]:
    changes = (one for piece in fit.pieces for kind in piece.kinds for part in kind.passes for one in part)
    return frozenset(one.operator for one in changes if isinstance(one, Born))


def assumptions(plan: Plan) -> tuple[str, ...]:
    """What is taken for granted of the plan's traces."""
    fit = fit_of(plan)
    domains = "; ".join(str(one.domain) for one in fit.pieces)
    layers = f", {', '.join(map(str, fit.verified))} layers" if fit.layers else ""
    lines = [
        f"from a trace of transformers {fit.transformers} on torch {fit.torch}: no recipe ({plan.model.source}); sizes "
        f"are polynomials in b and s, verified for {domains}{layers}",
        "optimizer states and step follow memplan's rules over the traced parameters",
    ]
    if any("efficient_attention_backward" in name for name in _operators(fit)):
        lines.append("what the memory-efficient attention kernel allocates inside is not counted")
    if any("_grouped_mm" in name for name in _operators(fit)):
        lines.append("experts run as one grouped product, whose tensors are as large whichever experts tokens go to")
    return tuple(lines)
