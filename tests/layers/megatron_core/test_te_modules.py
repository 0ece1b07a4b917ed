"""Recipes of Transformer Engine's modules against its real Python, event by event, size by size.

``te_golden.json`` holds what ``tests.oracle.transformer_engine_modules`` measured, by version of Transformer
Engine. With ``MEMPLAN_TE_SOURCE`` naming a source tree, those figures are measured again.

Where several tensors end at once, with nothing held in between, their order is not compared. In 8 bits single numbers
are left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from memplan.layers.module import Interface, Options, build
from memplan.tape.events import GRAD_OUTPUT, INPUT, Drop, Hold, Tape

from ...oracle.transformer_engine import SOURCE, source
from ...oracle.transformer_engine_modules import SINGLE, version
from .te_cases import CASES, covered, recipe, tuning

FILE = Path(__file__).with_name("te_golden.json")
GOLDEN: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text())
BY_NAME = {str(case): case for case in CASES}
MEASURED = [
    (release, name, entry["forward"], entry["backward"])
    for name, entries in GOLDEN.items()
    for entry in entries
    for release in entry["releases"]
]


def sizes(tape: Tape, least: int = 0) -> list[int]:
    """Signed sizes of what the module itself holds and drops, above ``least``."""
    return [
        event.bytes if isinstance(event, Hold) else -event.bytes
        for event in tape
        if isinstance(event, Hold) or (isinstance(event, Drop) and event.tensor not in (INPUT, GRAD_OUTPUT))
        if event.bytes > least
    ]


def drops_sorted(sizes: list[int]) -> list[int]:
    """Signed sizes with those that end at once in order of size."""
    runs = groupby(sizes, lambda size: size < 0)
    return [size for ended, run in runs for size in (sorted(run) if ended else run)]


@pytest.mark.parametrize(
    ("release", "name", "forward", "backward"), MEASURED, ids=[f"{name}-{release}" for release, name, _, _ in MEASURED]
)
def test_recipe_is_the_real_module(release: str, name: str, forward: list[int], backward: list[int]) -> None:
    case = BY_NAME[name]
    interface = Interface(case.input(), "bf16")
    options = Options(accumulates_in_place=False, tuning=tuning(case))
    module = build(case.module, recipe(case, version(release)), interface, options)
    least = SINGLE if case.recipe is not None else 0
    assert drops_sorted(sizes(module.first.forward, least)) == drops_sorted(forward)
    assert drops_sorted(sizes(module.first.backward, least)) == drops_sorted(backward)


def test_every_case_was_measured_in_every_release() -> None:
    releases = {release for release, *_ in MEASURED}
    wanted = {(one, str(case)) for one in releases for case in CASES if covered(case, version(one))}
    assert {(release, name) for release, name, *_ in MEASURED} == wanted


@pytest.mark.skipif(source() is None, reason=f"{SOURCE} names no source tree of Transformer Engine")
def test_golden_figures_are_those_of_the_source(tmp_path: Path) -> None:
    """In a process of its own: Transformer Engine is imported, and a process group made."""
    again = tmp_path / FILE.name
    again.write_bytes(FILE.read_bytes())
    command = [sys.executable, "-m", "tests.oracle.transformer_engine_modules", str(again)]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[3])
    assert json.loads(again.read_text()) == GOLDEN
