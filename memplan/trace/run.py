"""From what a user gives to a job, to its trace in a process of its own (whatever becomes of that is a result or one
line), and to the program that the trace stands beside.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Thread
from typing import Any

from ..families import family
from ..frameworks import framework
from ..layers.module import Options
from ..plan import traced_spec
from ..plan.errors import ABSENT, LackingError, Origin, PlanError, wrong_at
from ..plan.fields import by_flag
from ..plan.models import model_path
from ..plan.plan import ResolvedPlan
from ..plan.read import Flags, ReadPlan, read_plan
from ..plan.resolve import resolve
from ..plan.spec import MOST_LAYERS
from ..plan.text import is_folder, is_there, read_text
from ..tape.program import Program
from ..values import dataclass
from .framework import job_of_plan
from .job import Job, check_stage
from .recording import Traced
from .worker import PROGRESS

LEAST = {
    "torch": (2, 6),
    "transformers": (5, 0),
    "peft": (0, 18),
    "bitsandbytes": (0, 50),
    "accelerate": (1, 0),
    "deepspeed": (0, 19),
}
"""Oldest releases that a trace, or a validation, runs on."""
ALWAYS = ("torch", "transformers")
LEAST_OF_TORCHTITAN = (2, 11)
"""And one of torchtitan's code, which follows ``DTensor`` from within."""
LEAST_OF_4_BIT_SHARDS = (2, 13)
"""Of ``fully_shard`` over 4-bit weights in ``uint8``: 2.11 makes each shard a parameter with a gradient before it takes
that away (``FSDPParam._init_sharded_param``), which integers cannot have."""
LEAST_OF_PIPELINES = (2, 13)
"""Whose stages know shapes as those that are followed do."""


def traced(job: Job, model: str) -> Traced:
    """The trace of ``job``. ``LackingError`` without torch, transformers or what the job needs besides;
    ``PlanError`` of ``model``, its name, where the model's code cannot run on fake tensors."""
    return Traced.from_json(answer_of("traced", job, {}, model))


def needed(job: Job) -> dict[str, tuple[int, int]]:
    """Packages that the trace of ``job`` needs, and their oldest releases."""
    if job.torchtitan is not None:
        return {"torch": LEAST_OF_TORCHTITAN if job.torchtitan.stages is None else LEAST_OF_PIPELINES}
    found = {package: LEAST[package] for package in (*ALWAYS, *job.packages)}
    if job.fsdp is not None and job.tuned is not None and job.tuned.four_bit is not None:
        found["torch"] = LEAST_OF_4_BIT_SHARDS
    return found


Steps = Callable[[int, int], None]
"""How many steps were traced, and of how many."""


def answer_of(
    work: str, job: Job, data: Mapping[str, Any], model: str, report: Steps = lambda done, of: None
) -> dict[str, Any]:
    """What one of the worker's kinds of ``work`` answers about ``job`` and what ``data`` says besides; ``PlanError`` of
    ``model`` if it dies or cannot do it, ``LackingError`` without a package that it needs. ``report`` is told what the
    worker says of its progress."""
    least = needed(job)
    check_packages(least)
    command = [sys.executable, "-m", "memplan.trace.worker", work]
    pipe, environment = subprocess.PIPE, {**os.environ, "PYTHONHASHSEED": "0"}  # transformers goes through sets
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process:
        try:
            out, errors = _talk(process, json.dumps({"job": job.to_json(), **data}).encode(), report)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise PlanError("model", model, f"cannot be traced: {_death(process.returncode, errors)}")
    answer: dict[str, Any] = json.loads(out)
    if "lacking" in answer:
        package, problem = answer["lacking"]
        how = _how(package, least[package])
        raise LackingError(f"memplan trace needs {package}, which cannot be imported ({problem}): {how}")
    if "error" in answer:
        raise PlanError("model", model, answer["error"])
    return answer


def _talk(process: subprocess.Popen[bytes], request: bytes, report: Steps) -> tuple[bytes, str]:
    """The worker's answer to ``request``, and what it said on standard error besides its progress."""
    said: list[str] = []
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None  # noqa: PT018
    errors = process.stderr

    def listen() -> None:
        for line in errors:
            words = line.decode(errors="replace").rstrip("\n")
            if words.startswith(f"{PROGRESS} "):
                done, of = map(int, words.split()[1:])
                report(done, of)
            else:
                said.append(words)

    listening = Thread(target=listen, daemon=True)
    listening.start()
    with suppress(BrokenPipeError):  # it is dead: its exit code says why
        process.stdin.write(request)
    with suppress(BrokenPipeError):
        process.stdin.close()
    out = process.stdout.read()
    listening.join()
    process.wait()
    return out, "\n".join(said)


def _death(code: int, errors: str) -> str:
    """What ended the worker, and the last thing that it said."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    if code > 0:
        return f"the process that ran it ended with {code}{last}"
    name = signal.Signals(-code).name
    if name == "SIGKILL":
        last = ", which Linux sends where memory runs out"
    return f"the process that ran it was ended by {name}{last}"


def _how(package: str, least: tuple[int, int]) -> str:
    """What installs it."""
    return f"pip install '{package}>={'.'.join(map(str, least))}'"


def check_packages(least: Mapping[str, tuple[int, int]], command: str = "memplan trace") -> None:
    """``LackingError`` where a package is missing that ``command`` needs, or older than ``least`` has it."""
    for package, oldest in least.items():
        _check(package, oldest, command)


def installed(package: str) -> str | None:
    """The release of ``package`` that is here."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _check(package: str, least: tuple[int, int], command: str) -> None:
    wanted, found = _how(package, least), installed(package)
    if found is None:
        raise LackingError(f"{command} needs {package}, which is not installed: {wanted}")
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdecimal())
    if numbers < least:
        raise LackingError(f"{command} needs {package} {'.'.join(map(str, least))} or later, not {found}: {wanted}")


STAND_IN = {"model": traced_spec.STAND_IN, "positions-max": str(2**31)}
"""Takes the place of an architecture without a recipe while the rest of a plan is read."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A job, its plan, and the program of its recipe."""

    job: Job
    name: str
    plan: ResolvedPlan | None
    """``None`` where the architecture has no recipe."""
    program: Program | None
    reason: str = ""
    """Why there is no recipe."""


ReadsPlan = Callable[[str | None, Flags], ReadPlan]


def planned(source: str | None, flags: Flags, stage: int = 0, reads: ReadsPlan = read_plan) -> Planned:
    """The job of the plan that ``reads`` finds in ``source`` with ``flags`` over it, of the first rank of ``stage``. An
    architecture that is read from a ``config.json`` (``--model``) need not be one that memplan has a recipe for."""
    if source is None and not flags.keys() & {"gpus", "dp", "zero"}:
        flags = {"framework": "single", **flags}
    path = _config_path(flags)
    try:
        read = reads(source, flags)
    except PlanError as error:
        if path is None or source is not None or not (traced_spec.name_of_built_in(path) or _is_about(error, path)):
            raise
        check_stage(stage, 1)
        return _without_recipe(path, flags, error)
    running = framework(read.plan.framework).running
    has_recipe = family(read.plan.model.family).covers is not None
    if path is not None and running.runs_transformers(read.plan) and not has_recipe:
        check_stage(stage, 1)
        problem = "has no recipe of transformers' code"
        return _without_recipe(path, flags, PlanError("model.family", read.plan.model.family, problem))
    try:
        return _with_recipe(read, stage)
    except PlanError as error:
        raise read.located(error) from None


ONE_DEVICE = "must be false: a trace's tensors are on one device, so nothing is offloaded"


WHOLE_ROWS = 16
"""Tokens to a multiple of which a trace pads a mask (``substitutions``)."""


def _check_mask(plan: ResolvedPlan) -> None:
    """Masks that a trace hands to attention otherwise than transformers and PyTorch do on a GPU."""
    spec, seq = plan.model, plan.batch.seq
    must = f"must be below the sliding window of {spec.sliding_window} in a trace"
    if spec.kv_heads < spec.heads:
        raise plan.wrong("batch.seq", f"{must}: it repeats no heads of keys beside a mask, as a GPU does")
    if seq % WHOLE_ROWS:
        problem = f"{must}, or a multiple of {WHOLE_ROWS}: it pads the mask of every head, where a GPU's code pads one"
        raise plan.wrong("batch.seq", problem)


def _with_recipe(read: ReadPlan, stage: int) -> Planned:
    from ..estimate import programs_of

    plan = resolve(read.plan)
    job = job_of_plan(plan, stage=stage)
    if plan.masked_kernel:
        _check_mask(plan)
    if job.fsdp is not None and job.fsdp.offload:
        raise PlanError("fsdp.offload", True, ONE_DEVICE)
    return Planned(job, plan.model.name, plan, programs_of(plan, Options())[stage])


def _config_path(flags: Flags) -> Path | None:
    given = flags.get("model")
    if not isinstance(given, str):
        return None
    path = model_path(given, Path())
    path = path / "config.json" if is_folder(path) else path
    return path if path.suffix == ".json" and is_there(path) else None


def _is_about(error: PlanError, path: Path) -> bool:
    return error.origin is not None and error.origin.source == str(path) and error.problem != "no such file"


def _without_recipe(path: Path, flags: Flags, error: PlanError) -> Planned:
    config = _config(path, error)
    rest = {name: value for name, value in flags.items() if name not in ("model", "layers")}
    for name in rest:
        if by_flag()[name].section == "model":
            raise wrong_at(
                f"--{name}",
                f"changes an architecture with a recipe, which this one has not ({error.field}); change {path}",
            )
    if "lora-rank" in rest and "lora-targets" not in rest:
        problem = f"is needed: peft's targets are those of a family, which {path} is not (--lora-targets q_proj,v_proj)"
        raise PlanError("lora.targets", ABSENT, problem)
    if "seq" not in rest:
        length = traced_spec.length_in(config, path)
        if length is None:
            raise PlanError("batch.seq", ABSENT, "is needed: the configuration names no longest sequence")
        rest["seq"] = str(length)
    if "layers" in flags:
        name = next((name for name in traced_spec.LAYERS if name in config), traced_spec.LAYERS[0])
        config[name] = read_plan(None, {**STAND_IN, "layers": flags["layers"]}).plan.model.layers
    traced_spec.size_in(config, traced_spec.LAYERS, MOST_LAYERS, path)
    read = read_plan(None, {**STAND_IN, **rest})
    try:
        job = job_of_plan(resolve(read.plan), config)
    except PlanError as wrong:
        raise read.located(wrong) from None
    reason = str(PlanError(error.field, error.value, error.problem))
    return Planned(job, traced_spec.name_of_built_in(path) or str(path), None, None, reason)


def _config(path: Path, error: PlanError) -> dict[str, Any]:
    """The configuration as it is written; ``error`` where it is none."""
    try:
        config = json.loads(read_text(path, "model"))
    except (ValueError, RecursionError):
        raise error from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise PlanError("model_type", ABSENT, "is missing: transformers needs it", origin=Origin(str(path)))
    return config
