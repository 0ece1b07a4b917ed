"""A fault in memplan itself: exit code 4, one line, and details in a file that says what it holds."""

from __future__ import annotations

import builtins
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from memplan import cli
from memplan.commands import app
from memplan.plan.errors import LackingError, PlanError
from tests.test_cli_process import ENVIRONMENT

Captured = pytest.CaptureFixture[str]
OTHERS = (OSError, ImportError, KeyboardInterrupt, SystemExit)
"""Exceptions that say something of the environment or the user."""
KINDS = [
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type)
    and issubclass(kind, BaseException)
    and not issubclass(kind, OTHERS)
    and not kind.__name__.endswith(("Group", "codeError", "TranslateError"))
]
"""Python's own, of those that a message is enough for."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def broken(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run_command(arguments: list[str]) -> int:
        raise error.with_traceback(None)

    monkeypatch.setattr(app, "run_command", run_command)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(KINDS), message=st.text(), words=st.lists(st.text(max_size=9), max_size=3))
def test_any_exception_is_a_fault_and_one_line(
    kind: type[BaseException], message: str, words: list[str], folder: Path, capsys: Captured
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        broken(patch, kind(message))
        assert cli.main(["estimate", *words]) == cli.FAULT
        out, line = capsys.readouterr()
        assert (out, line.count("\n")) == ("", 1)
        assert "Traceback" not in line
        named = re.search(r"in (\S+\.txt)", line)
        assert named is not None, line
        details = Path(named[1]).read_text(encoding="utf-8")
        assert kind.__name__ in details
        assert cli.main([*words, cli.DEBUG] if "--" not in words else [cli.DEBUG]) == cli.FAULT
        assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PlanError("a", 1, "must be 2"), 2),
        (LackingError("needs torch"), 3),
        (OSError(28, "No space left on device"), 3),
        (ModuleNotFoundError("No module named 'rich'", name="rich"), 3),
        (ModuleNotFoundError("No module named 'memplan.x'", name="memplan.x"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_is_no_fault_keeps_its_code(
    error: BaseException, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    broken(monkeypatch, error)
    assert cli.main(["estimate"]) == code
    assert capsys.readouterr().err.count("\n") == (code != 130)


def test_a_file_that_the_system_refuses_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    broken(monkeypatch, FileNotFoundError(2, "No such file or directory", "gone.yaml"))
    assert cli.main(["estimate"]) == cli.WRONG_ENVIRONMENT
    assert capsys.readouterr().err == "memplan: gone.yaml: No such file or directory\n"


def test_details_hold_nothing_private_that_they_do_not_tell_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("MEMPLAN_SECRET", "of-the-environment")
    broken(monkeypatch, ValueError("a-value"))
    cli.main(["estimate", f"{folder}/plan.yaml"])
    (path,) = (folder / "cache").iterdir()
    details = path.read_text(encoding="utf-8")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert "command: memplan estimate " in details
    assert "~/plan.yaml" in details
    assert str(folder) not in details
    assert "of-the-environment" not in details
    assert "Read it before you pass it on" in details
    assert re.search(r"memplan [\d.]+, Python [\d.]+ on .*, typer ", details)
    cli.main(["estimate", f"{folder}/plan.yaml"])
    assert len(list((folder / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"MEMPLAN_CACHE": "/dev/null/x"}, "not a directory"),
        ({"MEMPLAN_CACHE": "/proc/x"}, "no such file or directory"),
        ({"MEMPLAN_CACHE": "~nosuchuser/x"}, "no home directory is known"),
        ({"MEMPLAN_CACHE": "x" * 300}, "file name too long"),
    ],
)
def test_details_that_cannot_be_written_leave_the_code(
    variables: dict[str, str], why: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(folder)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    broken(monkeypatch, ValueError("x"))
    assert cli.main(["estimate"]) == cli.FAULT
    line = capsys.readouterr().err
    assert why in line
    assert line.endswith("--debug shows them\n")


def test_a_fault_in_telling_a_fault_is_one(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    class UntoldError(PlanError):
        def __str__(self) -> str:
            raise ValueError

    broken(monkeypatch, UntoldError("a", 1, "must be 2"))
    assert cli.main(["estimate"]) == cli.FAULT
    assert capfd.readouterr().err == cli.LAST_LINE.decode()


PROGRAMS = {
    "memory": "held = []\n    while True: held.append(bytearray(1 << 22))",
    "small": "held = []\n    while True: held.append([held, len(held) * 1.5])",
    "recursion": "run(arguments)",
    "swallowed": "class Deaf:\n        def __del__(self): raise ValueError\n    Deaf()\n    return 0",
}


def process(program: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process in which every command is ``program``, with 300 MB."""
    code = (
        "import resource, sys\nfrom memplan import cli\n"
        "resource.setrlimit(resource.RLIMIT_AS, (300 << 20,) * 2)\n"
        f"def run(arguments):\n    {program}\n"
        "run.__globals__['__name__'] = 'memplan.broken'\ncli._run = run\nsys.exit(cli.main())"
    )
    environment = {**ENVIRONMENT, "MEMPLAN_CACHE": str(folder)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_process_that_runs_out_of_something_says_so(program: str, tmp_path: Path) -> None:
    done = process(PROGRAMS[program], tmp_path, "estimate")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (4, "", 1), done.stderr
    starts = "memplan: out of memory; " if program in ("memory", "small") else "memplan: a fault in memplan itself ("
    assert done.stderr.startswith(starts)
    (path,) = tmp_path.iterdir()
    assert f"the details are in {path}" in done.stderr
    assert len(path.read_text(encoding="utf-8")) < 20_000


SIZES: Any = st.integers() | st.sampled_from([0, -1, 2**31, 2**31 + 1, 10**9, 10**30]) | st.none() | st.booleans()
NAMES = ("num_hidden_layers", "n_layer", "num_layers", "max_position_embeddings", "n_positions", "seq_length")
ANYTHING: Any = SIZES | st.floats() | st.text(max_size=5) | st.lists(SIZES, max_size=3)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.dictionaries(st.sampled_from(NAMES), ANYTHING),
    kind=st.sampled_from(["mamba", "llama", "\ud800", ""]) | ANYTHING,
    flags=st.lists(st.sampled_from([["--layers", "0"], ["--layers", "3"], ["--seq", "0"], ["--seq", "8"]]), max_size=2),
)
def test_any_configuration_of_an_unknown_architecture_gives_a_result_or_one_line(
    sizes: dict[str, Any], kind: object, flags: list[list[str]], folder: Path, capsys: Captured
) -> None:
    import json

    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": kind, **sizes}))
    for command in ("estimate", "export"):
        code = cli.main([command, "--model", str(path), *(word for flag in flags for word in flag)])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1) or (code in (0, 3) and command == "estimate"), err
