"""Traces one job in a process of its own: JSON on standard input, JSON on standard output.

Some operators on fake tensors of another device end the whole process on a CPU-only build; whoever started this
one sees it die. What libraries print goes to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from .job import Job
from .traced import Traced


def main() -> int:
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = Job.from_json(json.load(sys.stdin))
    with answer:
        json.dump(answered(job), answer)
    return 0


def answered(job: Job) -> dict[str, Any]:
    """What was traced; or ``error`` and where it happened; or ``lacking``: the package that cannot be imported, why."""
    try:
        versions, trace, substitutions = _of_torchtitan() if job.torchtitan is not None else _of_transformers()
    except NotImportableError as error:
        return {"lacking": error.args}

    from .failures import UntraceableError, explained
    from .models import UnknownModelError

    gc.freeze()  # a trace looks for garbage twice: not among all that was imported
    try:
        traced = trace(job)
    except (UnknownModelError, UntraceableError) as error:
        return {**versions, "error": str(error)}
    except Exception as error:  # whatever a model's code raises is the user's to read
        return {**versions, "error": explained(error)}
    return {**versions, "substitutions": substitutions, **traced.to_json()}


class NotImportableError(Exception):
    """A package, and why it cannot be imported."""


def imported(package: str) -> Any:
    try:
        return import_module(package)
    except (ImportError, OSError) as error:
        raise NotImportableError(package, str(error).partition("\n")[0]) from error


_Tracer = tuple[dict[str, Any], Callable[[Job], Traced], tuple[str, ...]]
"""Versions of libraries, what traces a job, and what is put in CUDA's place."""


def _of_transformers() -> _Tracer:
    versions = {package: imported(package).__version__ for package in ("torch", "transformers")}

    from .step import traced_step
    from .substitutions import SUBSTITUTIONS

    return versions, traced_step, SUBSTITUTIONS


def _of_torchtitan() -> _Tracer:
    versions = {"torch": imported("torch").__version__}

    from .torchtitan_step import SUBSTITUTIONS, traced_torchtitan

    return versions, traced_torchtitan, SUBSTITUTIONS


if __name__ == "__main__":
    raise SystemExit(main())
