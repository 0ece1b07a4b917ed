"""Standard streams that are closed, full or without a reader change neither the exit code nor what goes where."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memplan.cli import main
from tests.test_cli_process import ENVIRONMENT, MEMPLAN

COMMANDS = {
    0: ["estimate", "--model", "gpt2", "--gpu", "h200", "-q"],
    1: ["estimate", "--model", "gpt2-xl", "--gpu", "v100-16gb", "--mbs", "4", "-q"],
    2: ["estimate", "nope"],
}
"""A command line by its exit code where all streams are well."""
STREAMS = {
    "input": ("", "<&-", "</dev/null", "</dev/full"),
    "output": ("", ">&-", "> >(true)", ">/dev/null"),
    "error": ("", "2>&-", "2> >(true)", "2>/dev/full", "2>/dev/null", "2</dev/null"),
}
"""What a shell makes of each stream."""


def ran(redirections: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``memplan`` below a shell that redirects what it is given; output of the rest comes back."""
    command = ["bash", "-c", f'"$@" {redirections}', "bash", *MEMPLAN, *arguments]
    options = {"env": ENVIRONMENT, "timeout": 60, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_no_stream_changes_the_exit_code() -> None:
    seed = int(os.environ.get("MEMPLAN_TEST_SEED", random.randrange(1 << 16)))
    print(f"MEMPLAN_TEST_SEED={seed}")
    chance = random.Random(seed)
    for at, error in enumerate(STREAMS["error"]):
        code = 2 if at % 2 else chance.choice((0, 1))
        chosen = [chance.choice(STREAMS["input"]), chance.choice(STREAMS["output"]), error]
        chance.shuffle(chosen)
        done = ran(" ".join(chosen), *COMMANDS[code])
        assert done.returncode == code, chosen
        lines = (done.stdout + done.stderr).splitlines()
        assert not any("Traceback" in line or "Exception ignored" in line for line in lines), (chosen, lines)
        assert code < 2 or done.stdout == "", chosen


def test_what_is_printed_goes_into_no_file_that_is_opened(tmp_path: Path) -> None:
    """A file gets the lowest descriptor that is free, which a closed stream's is."""
    plan = tmp_path / "plan.yaml"
    done = ran("<&- >&- 2>&-", "init", str(plan), "--model", "gpt2")
    assert done.returncode == 0
    assert plan.read_text() == ran("", "init", "--model", "gpt2").stdout.replace("plan.yaml", str(plan))


def test_what_cannot_be_printed_is_said_where_it_can_be() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    for error in ("", "2>/dev/full"):
        done = ran(f">/dev/full {error}", *COMMANDS[0])
        assert (done.returncode, done.stderr) == (3, "" if error else "memplan: No space left on device\n")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) in (0, 1)
    out, errors = capsys.readouterr()
    assert errors == ""
    return out


@pytest.mark.parametrize("name", ["COLUMNS", "LINES", "TERMINAL_WIDTH", "TERM"])
def test_a_size_that_cannot_be_is_none(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for command in (["estimate", "gpt2-xl-4gpu"], ["runs", "--help"]):
        whole = printed(capsys, *command)
        assert len(whole) > 500
        for nonsense in ("0", "-1", "²", "9" * 30, "x", "", "1e3", " "):
            monkeypatch.setenv(name, nonsense)
            assert printed(capsys, *command) == whole, nonsense
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("command", ["estimate gpt2-xl-4gpu", "estimate gpt2-xl-4gpu --vary mbs=1,2", "models", "gpus"])
def test_a_narrow_terminal_shows_every_figure(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = {}
    for columns in (200, 59, 32, 20, 5, 1):
        monkeypatch.setenv("COLUMNS", str(columns))
        seen[columns] = printed(capsys, *command.split())
    for columns in (59, 32):
        assert set(re.findall(r"\d+[.,]\d+", seen[200])) == set(re.findall(r"\d+[.,]\d+", seen[columns]))
        assert seen[columns].count("…") == seen[200].count("…")


def test_importing_the_command_imports_only_itself() -> None:
    """Until ``main`` runs, an interrupt is Python's own to show."""
    code = "import sys; before = set(sys.modules); import memplan.cli; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert set(done.stdout.split()) <= {"__future__", "atexit", "gc", "memplan", "memplan.cli"}
