"""What all tests share: the order of files, when garbage is collected, fake tensors, and that nobody's own records are
read."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

_EMPTY = tempfile.mkdtemp(prefix="memplan-no-records-")
# When this is imported, before any test module: some keep the environment of the processes that they start.
os.environ["MEMPLAN_DATA"] = _EMPTY
atexit.register(shutil.rmtree, _EMPTY, ignore_errors=True)

LONGEST = (
    "search/test_search.py",
    "test_questions.py",
    "validate/test_launch_together.py",
    "validate/test_validate.py",
    "validate/test_megatron.py",
    "trace/test_fits.py",
    "layers/test_against_transformers.py",
    "trace/test_ddp.py",
    "frameworks/test_fsdp_against_torch.py",
    "frameworks/test_fsdp_titan_pipeline.py",
    "frameworks/test_fsdp_gpt_oss.py",
    "commands/test_trace.py",
    "trace/test_step.py",
    "trace/test_autocast.py",
    "layers/test_autocast.py",
    "trace/test_run.py",
    "layers/megatron_core/test_local_layer.py",
    "commands/test_learned.py",
    "trace/test_tuning.py",
    "trace/test_torchtitan.py",
    "trace/test_trainer.py",
    "test_docs.py",
    "trace/test_torchtitan_pipeline.py",
    "trace/test_torchtitan_witness.py",
    "formats/test_sameness.py",
)
"""Files that take longest, in the order in which they begin: what begins last keeps one worker busy alone."""

_ORDER = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _ORDER.get(item.path, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Where tests have imported torch, fake tensors take the shorter way."""
    if "torch" in sys.modules:
        from .fakes import shorten

        shorten()


def pytest_runtest_setup() -> None:
    """Tracers look for garbage all the time: not among what was imported, and left by tests before this one."""
    gc.collect()
    gc.freeze()
