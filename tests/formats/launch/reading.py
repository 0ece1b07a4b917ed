"""Reading text as a launch file."""

from __future__ import annotations

from collections.abc import Mapping

from memplan.bash.shell import read_script
from memplan.bash.values import text
from memplan.formats.files import words_of
from memplan.formats.launch import Asked, Launch
from memplan.formats.training_scripts import launched
from memplan.plan.plan import Plan
from memplan.plan.read import build_plan


def launch(
    content: str,
    framework: str = "megatron",
    *,
    source: str = "train.sh",
    variables: Mapping[str, str] | None = None,
    strict: bool = False,
    gpus: int | None = None,
    vocabulary: int | None = 50257,
) -> Launch:
    """``content`` as the file ``source``."""
    flags = {"gpus": str(gpus)} if gpus else {}
    asked = Asked(framework, flags, strict=strict, vocab_size=vocabulary)
    return launched(words_of(content, source, framework, variables or {}), asked)


def plan(content: str, framework: str = "megatron", **flags: str) -> Plan:
    """The plan in ``content``, whose vocabulary is GPT-2's."""
    return build_plan(launch(content, framework, gpus=8).source, flags).plan


def words(script: str, **variables: str) -> list[str]:
    """Words of the last command in which ``script`` runs a Python file, unknowns as they were written."""
    reading = read_script(script, "train.sh", variables)
    return [reading.ledger.shown(word) for word in reading.started[-1].words]


def known_words(script: str) -> list[str]:
    """The same, where nothing is unknown."""
    reading = read_script(script, "train.sh")
    return [text(word) for word in reading.started[-1].words]
