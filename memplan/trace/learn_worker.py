"""Learns one architecture in a process of its own: JSON on standard input, JSON on standard output, as ``worker``."""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import replace
from typing import Any

from .job import Job
from .traced import Traced
from .worker import NotImportableError, imported


def main() -> int:
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    data = json.load(sys.stdin)
    with answer:
        json.dump(answered(Job.from_json(data["job"]), data["longest"]), answer)
    return 0


def answered(job: Job, longest: int) -> dict[str, Any]:
    """The fit and a traced step to compare it with, or ``error``; or ``lacking``, as ``worker``."""
    try:
        versions = {package: imported(package).__version__ for package in ("torch", "transformers")}
    except NotImportableError as error:
        return {"lacking": error.args}

    from .comparison import compared
    from .failures import UntraceableError, explained
    from .learning import learn
    from .models import UnknownModelError
    from .step import traced_step
    from .structure import UnfitError

    traces = 0

    def trace(one: Job) -> Traced:
        nonlocal traces
        traces += 1
        gc.collect()
        gc.freeze()  # a trace looks for garbage twice: not among all that was imported, and traced before
        return traced_step(one, evaluates=True)

    try:
        fit, whole, point = learn(job, trace, longest)
    except UnfitError as error:
        return {"error": f"cannot be written as polynomials: {error}"}
    except (UnknownModelError, UntraceableError) as error:
        return {"error": f"cannot be traced: {error}"}
    except Exception as error:  # whatever a model's code raises is the user's to read
        return {"error": f"cannot be traced: {explained(error)}"}
    fit = replace(fit, **versions)
    points = {one.name: one.traced for one in compared(whole, None).points}
    return {"fit": fit.to_json(), "traces": traces, "point": point, "points": points}


if __name__ == "__main__":
    raise SystemExit(main())
