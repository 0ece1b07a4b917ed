"""Modules that documents and docstrings name are there."""

from __future__ import annotations

import re
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent


def test_files_that_are_named_exist() -> None:
    texts = [*TOP.glob("*.md"), *(TOP / "docs").glob("*.md")]
    texts += [path for folder in ("memplan", "tests", "benchmarks") for path in (TOP / folder).rglob("*.py")]
    named = {
        (path.relative_to(TOP), name)
        for path in texts
        for name in re.findall(r"\b(?:memplan|tests|benchmarks)/[\w/]+\.py\b", path.read_text(encoding="utf-8"))
    }
    assert not sorted((str(path), name) for path, name in named if not (TOP / name).exists())
