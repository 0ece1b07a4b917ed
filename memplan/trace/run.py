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

LEAST = {"torch": (2, 6), "transformers": (5, 0)}
"""Oldest releases that a trace runs on."""


def traced(job: Job, model: str) -> Traced:
    """The trace of ``job``. ``LackingError`` without torch or transformers; ``PlanError`` of ``model``, its name, where
    the model's code cannot run on fake tensors."""
    check_installed()
    answer = answer_of("worker", job.to_json(), model)
    if "error" in answer:
        raise PlanError("model", model, f"cannot be traced: {answer['error']}")
    return Traced.from_json(answer)


def check_installed() -> None:
    """``LackingError`` without torch or transformers."""
    for package in LEAST:
        _check(package)


def answer_of(worker: str, data: Mapping[str, Any], model: str) -> dict[str, Any]:
    """What a module of this package, run as a process, answers to ``data``; ``PlanError`` of ``model`` if it dies."""
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
    return answer


def _death(code: int, errors: str) -> str:
    """What ended the worker, and the last thing that it said."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    if code > 0:
        return f"the process that ran it ended with {code}{last}"
    return f"the process that ran it was ended by {signal.Signals(-code).name}{last}"


def _check(package: str) -> None:
    least = LEAST[package]
    wanted = f"pip install '{package}>={'.'.join(map(str, least))}'"
    try:
        found = version(package)
    except PackageNotFoundError:
        raise LackingError(f"memplan trace needs {package}, which is not installed: {wanted}") from None
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < least:
        raise LackingError(f"memplan trace needs {package} {'.'.join(map(str, least))} or later, not {found}: {wanted}")
