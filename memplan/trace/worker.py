"""Traces one job in a process of its own: JSON on standard input, JSON on standard output.

Some operators on fake tensors of another device end the whole process on a CPU-only build; whoever started this
one sees it die. What libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
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
    """What was traced, or ``error`` and where it happened."""
    from .models import UnknownModelError

    versions, trace, substitutions = _of_torchtitan() if job.torchtitan is not None else _of_transformers()
    try:
        traced = trace(job)
    except UnknownModelError as error:
        return {**versions, "error": str(error)}
    except Exception as error:  # whatever a model's code raises is the user's to read
        return {**versions, "error": _explained(error)}
    return {**versions, "substitutions": substitutions, **traced.to_json()}


_Tracer = tuple[dict[str, Any], Callable[[Job], Traced], tuple[str, ...]]
"""Versions of libraries, what traces a job, and what is put in CUDA's place."""


def _of_transformers() -> _Tracer:
    import torch
    import transformers

    from .step import traced_step
    from .substitutions import SUBSTITUTIONS

    return {"torch": torch.__version__, "transformers": transformers.__version__}, traced_step, SUBSTITUTIONS


def _of_torchtitan() -> _Tracer:
    import torch

    from .torchtitan_step import SUBSTITUTIONS, traced_torchtitan

    return {"torch": torch.__version__}, traced_torchtitan, SUBSTITUTIONS


_MODELS = ("/transformers/models/", "torchtitan_model.py")
"""Where models' code is."""


def _explained(error: Exception) -> str:
    """One line: what was raised, and by which line of the model's code."""
    from traceback import extract_tb

    frames = [frame for frame in extract_tb(error.__traceback__) if any(one in frame.filename for one in _MODELS)]
    where = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}, {frames[-1].name})" if frames else ""
    operator = getattr(error, "func", None)
    named = f"{operator}: " if operator is not None else ""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {named}{first}{where}"


if __name__ == "__main__":
    raise SystemExit(main())
