"""The site: tutorials print what they say, every field has its row, and it builds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import tutorials
from benchmarks.pages import fields
from memplan import __version__

TOP = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("path", tutorials.PAGES, ids=lambda path: path.stem)
def test_a_tutorial_prints_what_it_says(path: Path) -> None:
    written = path.read_text(encoding="utf-8")
    assert written == tutorials.page(written), "python benchmarks/tutorials.py"


def test_a_command_that_is_refused_is_no_tutorial() -> None:
    with pytest.raises(RuntimeError, match="exit code 2"):
        tutorials.page("```\n$ memplan estimate --model no-such-model | head -1\n```")


def test_every_field_of_the_schema_has_a_row() -> None:
    schema = json.loads((TOP / "memplan/plan.schema.json").read_text(encoding="utf-8"))
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", fields(), re.DOTALL | re.MULTILINE))
    assert len(sections) == len(schema["$defs"])
    for name, text in sections.items():
        reference = re.search(r"#/\$defs/(\w+)", json.dumps(schema["properties"][name]))
        assert reference
        properties = set(schema["$defs"][reference[1]]["properties"]) - {"base"}
        assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == properties, name


def test_a_row_says_flag_default_and_what_is_allowed() -> None:
    rows = fields().splitlines()
    assert "| `pp` | `--pp` | `1` | a whole number, ≥ 1, ≤ 128 | pipeline-parallel size (number of stages) |" in rows
    assert any(
        row.startswith("| `memory_efficient_linear` | `--no-memory-efficient-linear` | `true` |") for row in rows
    )
    assert len({row.count(" | ") for row in rows if row.startswith("| `")}) == 1


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (TOP / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.skipif(find_spec("material") is None, reason="needs mkdocs-material (pip install 'memplan[docs]')")
def test_the_site_builds_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=TOP, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--transformer-impl" in (tmp_path / "fields/index.html").read_text(encoding="utf-8")
    loaded = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="https?://')
    assert not [page for page in tmp_path.rglob("*.html") if loaded.search(page.read_text(encoding="utf-8"))]
