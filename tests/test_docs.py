"""The site: tutorials print what they say, every field has its row, and it builds."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import tutorials
from benchmarks.pages import fields
from memplan import __version__
from memplan.cli import main

TOP = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("path", tutorials.PAGES, ids=lambda path: path.stem)
def test_a_tutorial_prints_what_it_says(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of one page as processes, which take half a second each to start."""
    written = path.read_text(encoding="utf-8")
    made = tutorials.page(written, None if path.stem == "died" else partial(printed, monkeypatch, capsys))
    assert written == made, "python benchmarks/tutorials.py"


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, folder: Path) -> str:
    """As ``tutorials.printed``, in this process; what stands behind a bar reads it from a shell's."""
    ours, _, others = command.replace("\\\n", "").partition(" | ")
    monkeypatch.chdir(folder)
    for name, value in tutorials.environment(folder).items():
        monkeypatch.setenv(name, value)
    assert main(shlex.split(ours)[1:]) <= 1
    shown, errors = capsys.readouterr()
    if others:
        shown = subprocess.run(
            ["bash", "-c", others], input=shown, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    monkeypatch.chdir(TOP)
    return "\n".join(line.rstrip() for line in (errors + shown).splitlines())


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
