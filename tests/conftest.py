"""What all tests share: the order of files, when garbage is collected, fake tensors, and that nobody's own records are
read."""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from memplan.cli import FEW

_EMPTY = tempfile.mkdtemp(prefix="memplan-no-records-")
# When this is imported, before any test module: some keep the environment of the processes that they start.
os.environ["MEMPLAN_DATA"] = _EMPTY
# Tensors of tests are small: on a second thread, operators and processes wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
atexit.register(shutil.rmtree, _EMPTY, ignore_errors=True)
gc.disable()  # while tests are collected, and import most of what they need
# A property does not fail because something else keeps the machine busy.
settings.register_profile("memplan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("memplan")

LONGEST = (
    "tests/test_questions.py",
    "tests/frameworks/test_fsdp_against_torch.py",
    "tests/search/test_ways_out.py",
    "tests/search/test_search.py",
    "tests/validate/test_validate.py",
    "tests/layers/test_against_transformers.py",
    "tests/trace/test_built_in.py",
    "tests/trace/test_ddp.py",
    "tests/validate/test_launch_together.py",
    "tests/trace/test_tuning.py",
    "tests/layers/test_autocast.py",
    "tests/validate/test_megatron.py",
    "tests/trace/test_fits.py",
    "tests/benchmarks/test_accuracy_rows.py",
    "tests/trace/test_fits_tuned.py",
    "tests/frameworks/test_fsdp_titan.py",
    "tests/commands/test_suggest_partition.py",
    "tests/test_docs.py",
    "tests/search/test_lower_bounds.py",
    "tests/trace/test_autocast.py",
    "tests/trace/test_adapted.py",
    "tests/formats/test_megatron.py",
    "tests/search/test_recommended.py",
    "tests/golden/test_golden.py",
    "tests/trace/test_step.py",
    "tests/validate/test_launch.py",
    "tests/fuzz/test_fuzz.py",
    "tests/trace/test_run.py",
    "tests/commands/test_trace.py",
    "tests/test_surface.py",
    "tests/layers/megatron_core/test_local_layer.py",
    "tests/records/test_database.py",
    "tests/frameworks/test_fsdp_pipeline.py",
    "tests/trace/test_torchtitan.py",
    "tests/commands/test_validate.py",
    "tests/frameworks/test_ddp_against_torch.py",
    "tests/explain/test_issues.py",
    "tests/trace/test_torchtitan_pipeline.py",
    "tests/layers/test_coverage.py",
    "tests/plan/test_huggingface.py",
    "tests/commands/test_learned.py",
    "tests/test_cli.py",
    "tests/formats/test_sameness.py",
    "tests/search/test_candidates.py",
    "tests/frameworks/test_fsdp_tensor_parallel.py",
    "tests/layers/test_tuning_against_peft.py",
    "tests/trace/test_trainer.py",
    "tests/validate/test_trainings.py",
    "tests/validate/test_interrupted.py",
    "tests/test_interrupts.py",
    "tests/layers/megatron_core/test_te_modules.py",
    "tests/frameworks/test_deepspeed.py",
    "tests/benchmarks/test_support.py",
    "tests/frameworks/test_fsdp_titan_pipeline.py",
    "tests/formats/launch/test_files.py",
    "tests/benchmarks/test_proof.py",
)
"""Files that take longest, in the order in which they begin: what begins last keeps one worker busy alone."""

SHORTER_WAY = "2.13.0"
"""The release of torch whose ``FakeTensorMode`` ``fakes.py`` knows."""

_ORDER = {Path(__file__).parent.parent / name: at for at, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _ORDER.get(item.path, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Garbage is looked for as seldom as in a process of memplan's own. Where tests have imported the torch that the
    shorter way to fake tensors was read in, they take it."""
    gc.freeze()
    gc.set_threshold(*FEW)
    gc.enable()
    torch = sys.modules.get("torch")
    if torch is not None and torch.__version__.partition("+")[0] == SHORTER_WAY:
        from .fakes import shorten

        shorten()


def pytest_runtest_setup() -> None:
    """Tracers look for garbage all the time: not among what was imported, and left by tests before this one."""
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown() -> None:
    """A test that installed kernels of gated delta nets leaves transformers as it was."""
    kernels = sys.modules.get("tests.oracle.delta_kernels")
    if kernels is not None:
        kernels.restore()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces run in this process, which has imported torch: one of its own takes three seconds to."""
    from memplan.plan.errors import PlanError
    from memplan.trace import run, worker

    def answer_of(work: str, job: Any, data: Mapping[str, Any], model: str, *_: Any) -> dict[str, Any]:
        run.check_packages(run.needed(job))
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = worker.answered(worker.WORK[work], json.loads(json.dumps({"job": job.to_json(), **data})))
        if "error" in found:
            raise PlanError("model", model, found["error"])
        answer: dict[str, Any] = json.loads(json.dumps(found))
        return answer

    monkeypatch.setattr(run, "answer_of", answer_of)
