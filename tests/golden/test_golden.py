"""The part of the safety net that runs with every test run; ``make golden`` checks all of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .answers import ROOT, answer
from .cases import commands, fast, smoke
from .comparing import differences, recorded

OTHER_FRAMES = """
import torch
torch._C._dynamo.eval_frame.set_eval_frame(False)
from tests.golden.cases import fast, tuned
from tests.golden.comparing import answers_of, differences, recorded
known = recorded()
commands = [one for one in fast() if one.startswith("estimate")][::9]
commands += [f"estimate {flags}" for flags in list(tuned())[::3]]
for now in answers_of(commands, 1):
    for line in differences(known[now.command], now):
        print(now.command, line)
"""
"""A custom frame evaluator, such as any use of ``torch.compile`` leaves behind: the caller's stack keeps the arguments
of a Python function until it returns, as Python 3.10 always does."""

KNOWN = recorded()


@pytest.mark.parametrize("command", fast())
def test_answer_is_the_recorded_one(command: str) -> None:
    assert not differences(KNOWN[command], answer(command))


def test_every_case_is_recorded() -> None:
    assert list(KNOWN) == commands()
    assert set(smoke()) | set(fast()) <= set(KNOWN)


def test_answers_do_not_depend_on_when_the_arguments_of_a_call_die() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    ran = subprocess.run([sys.executable, "-c", OTHER_FRAMES], cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stdout + ran.stderr
