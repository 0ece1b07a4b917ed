"""Traces one job in a process of its own: JSON on standard input, JSON on standard output.

Some operators on fake tensors of another device end the whole process on a CPU-only build; whoever started this
one sees it die. What libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from .job import Job


def main() -> int:
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = Job.from_json(json.load(sys.stdin))
    with answer:
        json.dump(answered(job), answer)
    return 0


def answered(job: Job) -> dict[str, Any]:
    """What was traced; or ``error`` and where it happened; or ``lacking``: the package that cannot be imported, why."""
    package = "torch"
    try:
        import torch

        package = "transformers"
        import transformers
    except (ImportError, OSError) as error:
        return {"lacking": (package, str(error).partition("\n")[0])}

    from .failures import UntraceableError, explained
    from .models import UnknownModelError
    from .step import traced_step
    from .substitutions import SUBSTITUTIONS

    versions: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    try:
        traced = traced_step(job)
    except (UnknownModelError, UntraceableError) as error:
        return {**versions, "error": str(error)}
    except Exception as error:  # whatever a model's code raises is the user's to read
        return {**versions, "error": explained(error)}
    return {**versions, "substitutions": SUBSTITUTIONS, **traced.to_json()}


if __name__ == "__main__":
    raise SystemExit(main())
