"""Disks that are full, users who may write nowhere, no home: one line, its exit code, and no file half there."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_cli_process import ENVIRONMENT

SEVERAL = """
import contextlib, io, json, os, sys
from memplan import cli
for arguments in json.loads(sys.argv[1]):
    out, errors = io.StringIO(), io.StringIO()
    if arguments == ["broken"]:
        whole, cli._run = cli._run, lambda arguments: 1 / 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = cli.main(arguments)
    if arguments == ["broken"]:
        cli._run = whole
    print(json.dumps([code, len(out.getvalue()), errors.getvalue()]))
"""
COMMANDS = (
    ["estimate", "--model", "gpt2", "--gpu", "h200", "-q"],
    ["runs"],
    ["init", "plan.yaml"],
    ["export", "gpt2-xl-4gpu", "-q", "-o", "plan.py"],
    ["suggest-partition", "gpt2-xl-4gpu", "--top", "1", "-q", "--write", "layout.yaml"],
    ["broken"],
)
WRITING = COMMANDS[2:5]


def ran(
    folder: Path, before: list[str], limit: Callable[[], None] | None = None, **variables: str
) -> list[list[object]]:
    """Exit code, characters of output, and standard error of each of ``COMMANDS``, in one process that ``before``
    starts."""
    command = [*before, sys.executable, "-c", SEVERAL, json.dumps(COMMANDS)]
    given = {name: value for name, value in ENVIRONMENT.items() if name not in ("HOME", "MEMPLAN_DATA")}
    done = subprocess.run(
        command, cwd=folder, env={**given, **variables}, capture_output=True, text=True, timeout=120, preexec_fn=limit
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(answers: list[list[object]], why: str) -> None:
    """Nothing could be written, for the reason ``why``."""
    for arguments, (code, printed, errors) in zip(COMMANDS, answers, strict=True):
        if arguments in WRITING:
            assert (code, str(errors).count("\n")) == (2, 1), errors
            assert why in str(errors)
        elif arguments == ["broken"]:
            assert (code, str(errors).count("\n")) == (4, 1)
            assert "cannot be written" in str(errors)
        else:
            assert (code, errors) == (0, "")
            assert printed


def test_a_full_disk(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    script = 'mount -t tmpfs -o size=4k none . && cd "$PWD" && head -c 4096 /dev/zero > first && exec "$@"'
    check(ran(tmp_path, [unshare, "-Urm", "sh", "-c", script, "sh"], HOME=str(tmp_path)), "no space left on device")


def test_a_limit_to_the_size_of_files(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    check(ran(tmp_path, [], limit, HOME=str(tmp_path)), "file too large")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def somebody(user: str) -> list[str]:
    """What runs a command as the user of that number, who may read everything, so that this Python runs wherever it
    is."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() or setpriv is None:
        pytest.skip("only root can be somebody else")
    reading = [f"--{kind}=+dac_read_search" for kind in ("inh-caps", "ambient-caps")]
    return [
        setpriv,
        f"--reuid={user}",
        f"--regid={user}",
        "--clear-groups",
        *reading,
        "--bounding-set=-all,+dac_read_search",
    ]


def test_a_user_who_may_write_nowhere(tmp_path: Path) -> None:
    check(ran(tmp_path, somebody("65534"), HOME=str(tmp_path)), "is read-only")


@pytest.mark.parametrize(("user", "runs"), [("65534", 0), ("54321", 2)])
def test_no_home(user: str, runs: int) -> None:
    """Of a user that the system knows, and of one that it does not, as in containers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        answers = ran(folder, somebody(user))
    codes = {arguments[0]: code for arguments, (code, _, _) in zip(COMMANDS, answers, strict=True)}
    assert codes == {"estimate": 0, "runs": runs, "init": 0, "export": 0, "suggest-partition": 0, "broken": 4}
    assert all(str(errors).count("\n") == (code in (2, 4)) for code, _, errors in answers)
