"""The fit of a plan whose architecture has no recipe: found on disk and kept in memory, or learnt in a process of its
own, checked and kept.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..families import family
from ..frameworks import framework, frameworks
from ..layers.module import Options
from ..plan.checks import framework_sections, listed
from ..plan.errors import PlanError, wrong_at
from ..plan.fields import Kind, PlanField, plan_fields
from ..plan.library import LEARNED, learned_models
from ..plan.lora import ALL_LINEAR
from ..plan.models import load_spec
from ..plan.plan import Batch, Optimizer, Plan, ResolvedPlan
from ..plan.releases import parsed
from ..plan.resolve import resolve
from ..plan.traced_spec import NO_LENGTH, STAND_IN, TracedSpec, layers_name
from ..tape.program import Program, fold_program
from ..values import dataclass
from . import cache
from .chunks import AnyFit
from .fit import Born, Fit
from .framework import job_of_plan
from .job import MOST_MICROBATCHES, Job
from .ranks import TRACED_RANK, at_rank, lacks_rank, names_all, of_any_rank

if TYPE_CHECKING:
    from .run import Steps

OPTIONAL = frozenset({"b", "s", "optimizer", "implementation", "momentum", "weight_decay", "microbatches"})
"""Fields of a job that change nothing of forward and backward."""
NAMES = frozenset({"_name_or_path", "transformers_version"})
"""Keys of a configuration that change no model."""
DEVIATIONS = ("casts", "gathers")
"""Fields that the settings of a job have where they are true: what a framework does to modules."""
SECTIONS = ("precision", "recompute", "lora", "quantisation", "frozen", "trainer")
"""Of a plan: with ``attention`` what its settings depend on; what is not modelled of the others was refused."""
ALWAYS_TOLD = ("--dtype", "--attention")
TRACED = ("transformers", "torch")
"""Libraries whose code a trace runs; a fit says of which release."""

SHIPS_IN = "bf16 with flash attention, with --recompute full or without"
"""What fits that ship are of (``VARIANTS`` in ``benchmarks/learned.py``)."""

Settings = dict[str, Any]


def job_of(plan: ResolvedPlan) -> Job:
    """The step of one device; ``PlanError`` where the plan asks for what is not traced."""
    spec, running = plan.model, framework(plan.framework).running
    assert isinstance(spec, TracedSpec)
    plan = running.learnt_alone(plan)
    update = {
        "model": load_spec(STAND_IN),
        "framework": "single",
        "optimizer": Optimizer(name="adamw", implementation="foreach", weight_decay=0.01),
    }
    config = {name: value for name, value in spec.config.items() if name not in NAMES}
    job = job_of_plan(plan.model_copy(update=update), config)
    # Without autocast the Trainer's loop changes no event of forward and backward.
    at_once = MOST_MICROBATCHES if job.trainer is not None and job.autocast is not None else None
    tuned = job.tuned and of_any_rank(job.tuned)
    casts, gathers = running.learnt_casts(plan), running.learnt_gathers(plan)
    return replace(job, trainer=at_once, tuned=tuned, casts=casts, gathers=gathers)


def settings_of(job: Job, layers: int | None) -> Settings:
    """What tells one fit from another; ``layers`` where it is of so many alone."""
    data = {name: value for name, value in job.to_json().items() if name not in OPTIONAL}
    for deviation in DEVIATIONS:
        if not data[deviation]:
            del data[deviation]
    name = layers_name(job.config)
    data["config"] = {key: value for key, value in job.config.items() if key != name}
    return {**data, "layers": layers if name is not None else None}


def kept_as(job: Job, fit: Fit) -> Settings:
    """Under which settings ``fit`` is stored: of any number of layers, if others were verified, too."""
    return settings_of(job, None if fit.extends else fit.layers)


def fit_of(plan: ResolvedPlan) -> Fit:
    """What was learnt of the plan's architecture; ``PlanError`` where nothing was."""
    spec = plan.model
    assert isinstance(spec, TracedSpec)
    sections = (plan.precision, plan.recompute, plan.loss, plan.lora, plan.quantisation, plan.frozen, plan.trainer)
    versions = {name: version for name, version in plan.versions.items() if name not in TRACED}
    running = framework(plan.framework).running
    deviates = running.learnt_casts(plan), running.learnt_gathers(plan)
    key = (spec.digest, plan.attention, plan.code, plan.framework, *deviates, *versions.items(), *sections)
    found = _FOUND.get(key)
    if found is None:
        found = _FOUND[key] = _read(plan.model_copy(update={"versions": versions}), spec)
    _check_versions(plan, found)
    return found


def learnt_programs(plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
    """The one program of a plan of a ``TracedSpec``; ``PlanError`` where nothing was learnt of it, or not this."""
    fit = checked_fit(plan)
    return (framework(plan.framework).running.learnt_program(plan, fit, options),)


def checked_fit(plan: ResolvedPlan) -> Fit:
    """What was learnt of the plan's architecture and serves its framework; ``PlanError`` where nothing was, or does."""
    running = framework(plan.framework).running
    running.check_learnt(plan)
    fit = fit_of(plan)
    check_framework(plan, running.lacks(plan, fit))
    return fit


def takers(plan: ResolvedPlan) -> list[str]:
    """Frameworks under which the plan's architecture is known: all that learn, but for those that what was learnt of it
    does not serve."""
    found = []
    for one in frameworks():
        if one.running.learns:
            there = plan.model_copy(update={"framework": one.name})
            try:
                lacks = one.running.lacks(there, fit_of(there))
            except PlanError:  # nothing was learnt yet
                lacks = ""
            found += [] if lacks else [one.name]
    return found


def check_framework(plan: ResolvedPlan, lacks: str) -> None:
    """``PlanError`` with what takes the plan's architecture where its own framework lacks something."""
    if lacks:
        raise plan.wrong("framework", f"must be {listed(takers(plan))}: {lacks} (model_type {plan.model.family})")


def _check_versions(plan: ResolvedPlan, fit: Fit) -> None:
    """``PlanError`` where the plan names other releases than were traced."""
    for name in TRACED:
        named, made = plan.versions.get(name), str(getattr(fit, name)).partition("+")[0]
        if named is not None and parsed(made)[: len(parsed(named))] != parsed(named):
            problem = f"must be {made}, whose code was traced: this architecture has no recipe"
            raise PlanError(f"versions.{name}", named, problem)


_FOUND: dict[tuple[object, ...], Fit] = {}
"""Fits of this process."""


def forget() -> None:
    """Fits are read again."""
    _FOUND.clear()


def _read(plan: ResolvedPlan, spec: TracedSpec) -> Fit:
    job = job_of(plan)
    asked = [settings_of(one, layers) for one in _jobs(job) for layers in (None, spec.layers)]
    for settings in asked:
        fit: Fit | None = cache.load(settings)
        if fit is not None:
            return at_rank(replace(fit, casts="casts" in settings), plan.lora.rank)
    if job.tuned is not None and job.tuned.rank is not None and plan.lora.targets != (ALL_LINEAR,):
        every = plan.model_copy(update={"lora": plan.lora.model_copy(update={"targets": (ALL_LINEAR,)})})
        with suppress(PlanError):
            fit = _read(every, spec)
            if names_all(fit, plan.lora.targets or ()):
                return fit
    made = next(filter(None, map(cache.others, asked)), "")
    why = f"; what was learnt of it was of {made}" if made else ""
    learn = " ".join(["memplan trace --learn --model", shlex.quote(spec.source), *advised(plan)])
    needs = " and ".join(["torch", *job.packages])
    if spec.source in learned_models():
        targets = shipped_targets(asked[0]) if job.tuned is not None else []
        adapted = f", and with LoRA of any rank on {listed(targets)}" if targets else ""
        problem = f"ships learned in {SHIPS_IN}{adapted}; it is not known in {_told(plan)}{why}: `{learn}` "
        problem += f"(needs {needs})"
    else:
        reason = spec.reason.partition("; known are")[0]
        problem = f"{reason}; nothing was learnt of it for {_told(plan)}{why}: `{learn}` traces it once (needs {needs})"
    raise wrong_at(spec.source, problem)


def shipped_targets(settings: Settings) -> list[str]:
    """Linear layers on which the model of ``settings`` ships with adapters, as ``--lora-targets`` names them."""
    paths = LEARNED.glob(f"*/{cache.together_path('', settings).name}")
    known = (one["settings"]["tuned"]["targets"] for path in paths for one in cache.shipped_together(path).values())
    return sorted({",".join(one) for one in known})


def _jobs(job: Job) -> tuple[Job, ...]:
    """Whose fits serve ``job``, the best first: where layers need cast nothing, casting changes nothing."""
    return (job, replace(job, casts=False)) if job.casts else (job,)


def _told(plan: ResolvedPlan) -> str:
    """The settings that a fit is looked for under: dtype and attention, and whatever is not the default."""
    others = [word.removeprefix("--") for word in _differing(plan) if word.partition("=")[0] not in ALWAYS_TOLD]
    told = [plan.precision.dtype, f"{plan.attention} attention", *(one.replace("=", " ") for one in others)]
    told += [f"{plan.model.layers} layers"] if isinstance(plan.model, TracedSpec) and plan.model.changed else []
    gathers = framework(plan.framework).running.learnt_gathers(plan)
    return ", ".join([*told, f"zero {plan.layout.zero}"] if gathers else told)


def advised(plan: ResolvedPlan) -> tuple[str, ...]:
    """Flags of ``memplan trace --learn`` that lead to the fit which ``plan`` asks for."""
    spec = plan.model
    assert isinstance(spec, TracedSpec)
    words = [word for flag in _differing(plan) for word in flag.split("=", 1)]
    words += ["--layers", str(spec.layers)] if spec.changed else []
    words += ["--seq", str(plan.batch.seq)] if spec.positions_max == NO_LENGTH else []
    if framework(plan.framework).running.learnt_gathers(plan):
        words += ["--framework", plan.framework, "--zero", str(plan.layout.zero)]
    return tuple(words)


def _differing(plan: ResolvedPlan) -> tuple[str, ...]:
    """Flags, as ``--dtype=fp32`` or ``--autocast``, of the fields that tell the plan's fit from the default's: of all
    that are not the default those without which it would be another."""
    plan = framework(plan.framework).running.learnt_alone(plan)
    asked = settings_of(replace(job_of(plan), casts=False, gathers=False), None)
    fields = [field for field in plan_fields().values() if field.section in SECTIONS or field.path == "attention"]
    given = [field for field in fields if field.flag and _value(plan, field) not in (None, field.default)]
    needed = list(given)
    for field in given:
        fewer = [one for one in needed if one is not field]
        if _settings_with(plan, fewer) == asked:
            needed = fewer
    return tuple(_flag(plan, field) for field in needed)


def _settings_with(plan: ResolvedPlan, fields: Sequence[PlanField]) -> Settings | None:
    """The settings of the default plan of the same model with ``fields`` as in ``plan``; nothing where it is none."""
    update: dict[str, Any] = {"model": plan.model, "batch": Batch(seq=plan.batch.seq)}
    for name in SECTIONS:
        values = {field.name: _value(plan, field) for field in fields if field.section == name}
        update[name] = type(getattr(plan, name))(**values)
    update["attention"] = plan.attention if any(field.path == "attention" for field in fields) else None
    try:
        return settings_of(job_of(resolve(Plan(**update))), None)
    except PlanError:
        return None


def _value(plan: ResolvedPlan, field: PlanField) -> Any:
    return getattr(getattr(plan, field.section) if field.section else plan, field.name)


def _flag(plan: ResolvedPlan, field: PlanField) -> str:
    value = _value(plan, field)
    if field.kind is Kind.SWITCH:
        return field.flag if value else f"--no-{field.flag[2:]}"
    return f"{field.flag}={','.join(map(str, value)) if isinstance(value, list | tuple) else value}"


@lru_cache(maxsize=256)
def _operators(fit: Fit) -> frozenset[str]:
    changes = (one for piece in fit.pieces for kind in piece.kinds for part in kind.passes for one in part)
    return frozenset(one.operator for one in changes if isinstance(one, Born))


def assumptions(plan: ResolvedPlan) -> tuple[str, ...]:
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


LONGEST = 4096
"""Tokens up to which an architecture is traced that names no longest sequence."""
IMAGE_STEP = 128
"""A multiple of every step between lengths."""
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


def learned(plan: ResolvedPlan, report: Steps = lambda done, of: None) -> Learned:
    """What traces of the resolved plan's architecture come to, kept for later; ``report`` is told how many there were.
    ``LackingError`` without torch or
    transformers; ``PlanError`` where it cannot be traced, or written as polynomials."""
    spec = plan.model
    if not isinstance(spec, TracedSpec):
        needless = "has a recipe: memplan estimate needs no trace of it; memplan trace shows that both agree"
        missing = family(spec.family).no_transformers
        raise PlanError("model", spec.name, f"is not learnt: {missing}" if missing else needless)
    framework(plan.framework).running.check_learnt(plan)
    cache.folder()  # before tracing, which takes long, is in vain
    job = job_of(plan)
    fit, traces = fit_by_traces(job, plan, longest_of(plan), spec.source, report)
    path = cache.store(kept_as(job, fit), fit)
    forget()
    return Learned(fit, traces, path)


def longest_of(plan: ResolvedPlan) -> int:
    """The longest sequence to trace: that of the model, and that of the plan if it is longer. An image's patches are
    in the middle of a range, though traces at any of its lengths are of the same images."""
    spec, asked = plan.model, plan.batch.seq or 1
    if spec.patches is not None:
        return -(-spec.patches // IMAGE_STEP) * IMAGE_STEP
    named = spec.positions_max if spec.positions_max != NO_LENGTH else max(LONGEST, asked)
    return max(named, asked)


def fit_by_traces(
    job: Job, plan: ResolvedPlan, longest: int, name: str, report: Steps = lambda done, of: None
) -> tuple[Fit, int]:
    """The fit and how many steps were traced for it; compared with one of them under ``plan``."""
    from .run import answer_of

    answer = answer_of("learned", job, {"longest": longest}, name, report)
    fit = AnyFit.from_json(answer["fit"])
    if job.tuned is not None and job.tuned.rank is not None and (of := lacks_rank(fit)):
        raise PlanError("model", name, f"cannot be learnt with adapters: {TRACED_RANK} divides a dimension of {of}")
    _compare(plan, fit, answer["point"], answer["points"], name)
    return fit, int(answer["traces"])


def _compare(plan: ResolvedPlan, fit: Fit, point: tuple[int, int], traced: Mapping[str, int], name: str) -> None:
    """What polynomials and rules come to is what was traced with all layers and AdamW, at named points."""
    b, s = point
    update: dict[str, Any] = {
        "framework": "single",
        "batch": plan.batch.model_copy(update={"mbs": b, "seq": s, "gbs": 2 * b, "accumulation": None}),
        "layout": type(plan.layout)(dp=1),
        "hardware": plan.hardware.model_copy(update={"gpus": 1}),
        "optimizer": Optimizer(name="adamw", implementation="foreach", weight_decay=0.01),
    }
    plan = framework(plan.framework).running.learnt_alone(plan)
    others = set(framework_sections()) - set(framework("single").supports.sections)
    update |= {name: type(getattr(plan, name))() for name in others}
    alone = resolve(plan.model_copy(update=update))
    folded = fold_program(framework(alone.framework).running.learnt_program(alone, fit, Options()))
    for point_name, field in NAMED.items():
        ours, found = int(getattr(folded, field)), traced[point_name]
        if ours != found:
            at = f"{point_name} at b = {b}, s = {s}"
            raise PlanError("model", name, f"cannot be estimated from traces: {at} is {found:,} bytes, not {ours:,}")
