"""Sixty everyday questions (``questions/questions.txt``), typed as people type them, are answered at the first try, or
asked back for everything that is missing at once."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import main

FOLDER = Path(__file__).parent / "questions"
SIXTY, LATER = (
    [
        [part.strip() for part in line.split("|", 1)]
        for line in text.splitlines()
        if "|" in line and not line.startswith("#")
    ]
    for text in (FOLDER / "questions.txt").read_text(encoding="utf-8").split("# ---")
)
UNANSWERED = {
    "--pp 16": "126 layers on 16 stages: Megatron-LM itself asks for --first-layers or the like",
    "phi-3-mini": "peft has no default targets for Phi 3, and asks for them",
}
"""Why, by a part of the question."""

LONG = (
    "--gpu a10g --gbs 64",
    "smollm3-3b --gpus 8",
    "llama-2-7b --gpus 64",
    "bigscience-104b",
    "llama-3-70b --gpus 64",
    "llama-3-8b --gpus 8 --gpu h100 --gbs 128 --seq 8k",
    "qwen2.5-32b --gpus 16 --gpu a100-80gb --gbs 64 --framework deepspeed",
    "nemotron-h-8b --gpus 8",
)
"""Searches of many seconds, by a part of the question; ``tests/search`` tries what they run."""


def _marked(want: str, question: str) -> Any:
    is_long = question.startswith("suggest-partition") and any(part in question for part in LONG)
    return pytest.param(want, question, id=question, marks=[pytest.mark.slow] if is_long else [])


def test_there_are_sixty() -> None:
    assert len(SIXTY) == 60
    assert sum(want == "answered" for want, _ in SIXTY) == 56


@pytest.mark.parametrize(("want", "question"), [_marked(*one) for one in SIXTY + LATER])
def test_a_question(
    want: str,
    question: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    if question.startswith("trace"):
        request.getfixturevalue("here")
    why = next((why for part, why in UNANSWERED.items() if part in question), None)
    monkeypatch.chdir(FOLDER)
    code = main(shlex.split(question))
    said = capsys.readouterr()
    if why is not None:
        assert code == 2, f"answered by now: {why}"
    elif want == "answered":
        assert code in (0, 1), said.err
        assert said.out
    else:
        asked = want.removeprefix("asks ").split(" --")
        assert (code, said.out, said.err.count("\n")) == (2, "", 1)
        assert all(part.removeprefix("--") in said.err for part in asked), said.err
