"""Starts the worker, and turns whatever becomes of it into a result or one line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..plan.errors import LackingError, PlanError
from .job import Job
from .traced import Traced

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
LEAST_OF_TORCHTITAN = {"torch": (2, 13)}
"""And one of torchtitan's code, which follows ``DTensor`` and pipeline schedules from within."""


def traced(job: Job, model: str) -> Traced:
    """The trace of ``job``. ``LackingError`` without torch, transformers or what the job needs besides;
    ``PlanError`` of ``model``, its name, where the model's code cannot run on fake tensors."""
    answer = answer_of("worker", job, job.to_json(), model)
    if "error" in answer:
        raise PlanError("model", model, f"cannot be traced: {answer['error']}")
    return Traced.from_json(answer)


def needed(job: Job) -> dict[str, tuple[int, int]]:
    """Packages that the trace of ``job`` needs, and their oldest releases."""
    if job.torchtitan is not None:
        return LEAST_OF_TORCHTITAN
    return {package: LEAST[package] for package in (*ALWAYS, *job.packages)}


def answer_of(worker: str, job: Job, data: Mapping[str, Any], model: str) -> dict[str, Any]:
    """What a module of this package, run as a process, answers to ``data`` about ``job``; ``PlanError`` of ``model`` if
    it dies, ``LackingError`` without a package that it needs."""
    least = needed(job)
    check_packages(least)
    command = [sys.executable, "-m", f"memplan.trace.{worker}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, errors = process.communicate(json.dumps(data).encode())
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise PlanError("model", model, f"cannot be traced: {_death(process.returncode, errors.decode())}")
    answer: dict[str, Any] = json.loads(out)
    if "lacking" in answer:
        package, problem = answer["lacking"]
        how = _how(package, least[package])
        raise LackingError(f"memplan trace needs {package}, which cannot be imported ({problem}): {how}")
    return answer


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


def _check(package: str, least: tuple[int, int], command: str) -> None:
    wanted = _how(package, least)
    try:
        found = version(package)
    except PackageNotFoundError:
        raise LackingError(f"{command} needs {package}, which is not installed: {wanted}") from None
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < least:
        raise LackingError(f"{command} needs {package} {'.'.join(map(str, least))} or later, not {found}: {wanted}")
