"""From what a user gives to a job, and to the program that its trace stands beside."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..layers.coverage import TRANSFORMERS
from ..layers.module import Options
from ..plan import traced_spec
from ..plan.errors import ABSENT, Origin, PlanError
from ..plan.fields import by_flag
from ..plan.plan import Plan
from ..plan.read import Flags, ReadPlan, read_plan
from ..plan.resolve import resolve
from ..plan.text import is_folder, is_there, path_of, read_text
from ..program import Program
from .job import Job, job_of_plan
from .torchtitan_job import check_stage, is_torchtitan, job_of_torchtitan

STAND_IN = {"model": traced_spec.STAND_IN, "positions-max": str(2**31)}
"""Takes the place of an architecture without a recipe while the rest of a plan is read."""
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


@dataclass(frozen=True, slots=True)
class Planned:
    """A job, its plan, and the program of its recipe."""

    job: Job
    name: str
    plan: Plan | None
    """``None`` where the architecture has no recipe."""
    program: Program | None
    reason: str = ""
    """Why there is no recipe."""


def planned(source: str | None, flags: Flags, stage: int = 0) -> Planned:
    """The job of the plan in ``source`` with ``flags`` over it, of the first rank of ``stage``. An architecture that is
    read from a ``config.json`` (``--model``) need not be one that memplan has a recipe for."""
    flags = {"framework": "single", **flags} if source is None else flags
    path = _config_path(flags)
    try:
        read = read_plan(source, flags)
    except PlanError as error:
        if path is None or source is not None or not _is_about(error, path):
            raise
        check_stage(stage, 1)
        return _without_recipe(path, flags, error)
    torchtitan = is_torchtitan(read.plan)
    if not torchtitan:
        check_stage(stage, 1)
    if path is not None and not torchtitan and read.plan.model.family not in TRANSFORMERS:
        problem = "has no recipe of transformers' code"
        return _without_recipe(path, flags, PlanError("model.family", read.plan.model.family, problem))
    try:
        return _of_torchtitan(read, stage) if torchtitan else _with_recipe(read)
    except PlanError as error:
        raise error.located(read.origins) from None


def _with_recipe(read: ReadPlan) -> Planned:
    from ..estimate import programs_of

    plan = resolve(read.plan)
    job = job_of_plan(plan)
    (program,) = programs_of(plan, Options())
    return Planned(job, plan.model.name, plan, program)


def _of_torchtitan(read: ReadPlan, stage: int) -> Planned:
    from ..estimate import programs_of

    plan = resolve(read.plan)
    programs = programs_of(plan, Options())
    return Planned(job_of_torchtitan(plan, stage), plan.model.name, plan, programs[stage])


def _config_path(flags: Flags) -> Path | None:
    given = flags.get("model")
    if not isinstance(given, str):
        return None
    path = path_of(given)
    path = path / "config.json" if is_folder(path) else path
    return path if path.suffix == ".json" and is_there(path) else None


def _is_about(error: PlanError, path: Path) -> bool:
    return error.origin is not None and error.origin.source == str(path) and error.problem != "no such file"


def _without_recipe(path: Path, flags: Flags, error: PlanError) -> Planned:
    config = _config(path, error)
    rest = {name: value for name, value in flags.items() if name not in ("model", "layers")}
    for name in rest:
        if by_flag()[name].section == "model":
            problem = f"changes an architecture with a recipe, which this one has not ({error.field}); change {path}"
            raise PlanError("", ABSENT, problem, origin=Origin(f"--{name}"))
    if "lora-rank" in rest and "lora-targets" not in rest:
        problem = f"is needed: peft's targets are those of a family, which {path} is not (--lora-targets q_proj,v_proj)"
        raise PlanError("lora.targets", ABSENT, problem)
    if "seq" not in rest:
        length = next((config[name] for name in _LENGTHS if isinstance(config.get(name), int)), None)
        if length is None:
            raise PlanError("batch.seq", ABSENT, "is needed: the configuration names no longest sequence")
        rest["seq"] = str(length)
    if "layers" in flags:
        name = next((name for name in _LAYERS if name in config), _LAYERS[0])
        config[name] = read_plan(None, {**STAND_IN, "layers": flags["layers"]}).plan.model.layers
    read = read_plan(None, {**STAND_IN, **rest})
    try:
        job = job_of_plan(resolve(read.plan), config)
    except PlanError as wrong:
        raise wrong.located(read.origins) from None
    reason = str(PlanError(error.field, error.value, error.problem))
    return Planned(job, str(path), None, None, reason)


def _config(path: Path, error: PlanError) -> dict[str, Any]:
    """The configuration as it is written; ``error`` where it is none."""
    try:
        config = json.loads(read_text(path, "model"))
    except ValueError:
        raise error from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise PlanError("model_type", ABSENT, "is missing: transformers needs it", origin=Origin(str(path)))
    return config
