"""What the README promises: its plan estimates, its commands are commands, its links lead somewhere,
as those of every page do, and the site's navigation has every page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.pages import MADE
from memplan.cli import main

TOP = Path(__file__).resolve().parent.parent
README = (TOP / "README.md").read_text(encoding="utf-8")
COMMANDS = [line.split("#")[0].split("|")[0].strip() for line in README.splitlines() if line.startswith("memplan ")]
OWN_FILES = ("accelerate.yaml", "mine.yaml", "plan.yaml", "path/to/config.json", "train.sh", "train.py")
"""Files in examples that are the reader's."""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", [line for line in COMMANDS if not any(name in line for name in OWN_FILES)])
def test_each_command_answers(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)[1:]) in (0, 1)
    shown = capsys.readouterr()
    assert shown.out
    assert not shown.err


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 6


def test_the_answer_that_it_shows_is_given(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.search(r"```\n\$ (memplan .*?)\n(.*?)```", README, re.DOTALL)
    assert example
    monkeypatch.setenv("COLUMNS", "120")
    assert main(shlex.split(example[1])[1:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = [line for line in example[2].splitlines() if line != "…"]
    assert len(shown) >= 6
    assert [line for line in shown if line not in printed] == []


def test_the_plan_is_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert plan
    (tmp_path / "plan.yaml").write_text(plan[1], encoding="utf-8")
    assert main(["estimate", str(tmp_path / "plan.yaml"), "-q"]) == 0
    assert capsys.readouterr().out.startswith("Fits")


def test_links_lead_somewhere() -> None:
    made = {TOP / "docs" / name for name in MADE}
    for document in (TOP / "README.md", TOP / "CONTRIBUTING.md", *(TOP / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text(encoding="utf-8")):
            path = (document.parent / target).resolve()
            assert path.exists() or path in made, f"{document.name}: {target}"


def test_the_navigation_has_every_page_once() -> None:
    # As text: the file may hold tags that only MkDocs can read.
    listed = re.findall(r"^ +- .+: (\S+\.md)$", (TOP / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = [path.relative_to(TOP / "docs").as_posix() for path in (TOP / "docs").rglob("*.md")]
    assert sorted(listed) == sorted([*pages, *MADE])
