"""What tests of commands share."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import pytest

from memplan.plan.errors import PlanError
from memplan.trace import run, worker
from memplan.trace.job import Job


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces run in this process, which has imported torch: one of its own takes three seconds to."""

    def answer_of(work: str, job: Job, data: Mapping[str, Any], model: str, *_: Any) -> dict[str, Any]:
        run.check_packages(run.needed(job))
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = worker.answered(worker.WORK[work], json.loads(json.dumps({"job": job.to_json(), **data})))
        if "error" in found:
            raise PlanError("model", model, found["error"])
        answer: dict[str, Any] = json.loads(json.dumps(found))
        return answer

    monkeypatch.setattr(run, "answer_of", answer_of)
