"""Ctrl-C, SIGTERM and SIGHUP, as real signals to real processes: exit code 130, silence, nothing half-written."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_cli_process import ENVIRONMENT, MEMPLAN, heed_interrupts

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

NOW = "signal.raise_signal(number); int()"
SWALLOWING = {
    "nothing": NOW,
    "del": f"class Deaf:\n def __del__(self): {NOW}\nDeaf()",
    "deep in del": "class Deaf:\n def __del__(self): [signal.raise_signal(number) for _ in 'x']; print\nDeaf()",
    "weak reference": f"import weakref\nclass One: pass\ndef told(_): {NOW}\nkept = weakref.ref(One(), told)",
    "garbage": f"import gc\ndef told(*_): {NOW}\ngc.callbacks.append(told)\ngc.collect()\ngc.callbacks.clear()",
    "generator": f"def one():\n try: yield\n finally: {NOW}\nkept = one()\nnext(kept)\ndel kept",
    "except": f"try: {NOW}\nexcept BaseException: pass",
    "suppress": f"import contextlib\nwith contextlib.suppress(BaseException): {NOW}",
    "another": f"try: {NOW}\nexcept BaseException: raise SystemExit",
    "another error": f"try: {NOW}\nexcept BaseException as error: raise ImportError from error",
    "a class": f"class Field:\n def __set_name__(*_): {NOW}\nclass One: field = Field()",
    "exec": f"exec({NOW!r})",
    "import": f"class Finder:\n def find_spec(*_): {NOW}\nsys.meta_path.insert(0, Finder)\nimport nothing_of_that_name",
    "thread": f"import threading\ndef ask(): {NOW}\nasked = threading.Thread(target=ask)\nasked.start(); asked.join()",
    "wait": "import threading\nthreading.Timer(0.05, os.kill, (os.getpid(), number)).start()\nwhile True: input()",
}
"""Code that gets a signal where Python, or the code, would lose it."""


def program(body: str, *, before: str = "") -> list[str]:
    """A process in which the command does ``body``."""
    code = (
        f"import os, signal, sys, time\nfrom memplan import cli\nnumber = int(sys.argv[1])\n{before}\n"
        f"def run(arguments):\n exec({body!r}, globals())\n return 0\n"
        "cli._run = run\nsys.exit(cli.main())"
    )
    return [sys.executable, "-c", code]


def ended(command: list[str], number: int) -> tuple[int, str, str]:
    """Exit code and output; standard input stays open until then."""
    with subprocess.Popen(
        [*command, str(int(number))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=heed_interrupts,
    ) as process:
        try:
            code = process.wait(30)
        finally:
            process.kill()
        assert process.stdout is not None
        assert process.stderr is not None
        return code, process.stdout.read(), process.stderr.read()


@pytest.mark.parametrize("where", SWALLOWING)
def test_no_interrupt_is_lost(where: str) -> None:
    number = SIGNALS[sum(map(ord, where)) % len(SIGNALS)]
    body = SWALLOWING[where] + "\nfor _ in range(2000): time.sleep(0.005)\nprint('the end')"
    assert ended(program(body), number) == (130, "", "")


def test_an_interrupt_lets_what_tidies_up_finish(tmp_path: Path) -> None:
    tidied = tmp_path / "tidied"
    body = (
        "try: signal.raise_signal(number); int()\nfinally:\n for _ in range(20): signal.raise_signal(number); int()\n"
        f" open({str(tidied)!r}, 'w').close()"
    )
    for number in SIGNALS:
        assert ended(program(body), number) == (130, "", "")
        tidied.unlink()


def test_an_interrupt_at_the_very_end_is_quiet() -> None:
    """Whenever it comes the process ends with its code or with 130, and Python's own end is silent."""
    before = "import atexit\natexit.register(lambda: (signal.raise_signal(number), int()))"
    for number in SIGNALS:
        assert ended(program("print('done')", before=before), number) == (0, "done\n", "")


def test_what_ignores_a_signal_goes_on_doing_so() -> None:
    before = "signal.signal(number, signal.SIG_IGN)"
    for number in SIGNALS:
        assert ended(program("signal.raise_signal(number); print('done')", before=before), number)[:2] == (0, "done\n")


def test_a_caller_keeps_its_signals() -> None:
    from memplan.cli import main

    before = [signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)], sys.unraisablehook
    assert main(["--version"]) == 0
    assert main(["estimate", "nope"]) == 2
    assert ([signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)], sys.unraisablehook) == before


# -- at any moment ------------------------------------------------------------------------------------------

COMMANDS = (
    ["estimate", "llama-3-8b-8gpu", "--json"],
    ["suggest-partition", "gpt2-xl-4gpu", "--top", "1", "--write", "plan.yaml", "--plot", "plot.svg", "--json"],
    ["init", "plan.yaml"],
    ["runs", "--json"],
)


def started(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """The process, once it listens: until then signals are Python's own affair."""
    process = subprocess.Popen(
        [*MEMPLAN, *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**ENVIRONMENT, "MEMPLAN_DATA": str(folder.parent / "data"), "SOURCE_DATE_EPOCH": "0"},
        preexec_fn=heed_interrupts,
    )
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None and not any(_catches(status, number) for number in (signal.SIGTERM,)):
        time.sleep(0.001)
    return process


def _catches(status: Path, number: int) -> bool:
    found = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigCgt")]
    return bool(found) and bool(int(found[0], 16) >> (number - 1) & 1)


def interrupted(count: int, folder: Path) -> Iterator[tuple[list[str], int, float, str]]:
    """Runs commands ``count`` times, and interrupts each once; gives what went wrong."""
    seed = int(os.environ.get("MEMPLAN_TEST_SEED", random.randrange(1 << 16)))
    print(f"MEMPLAN_TEST_SEED={seed}")
    chance = random.Random(seed)
    whole: dict[int, tuple[float, int | None, bytes, dict[str, bytes]]] = {}
    for at in range(count):
        chosen = at % len(COMMANDS)
        for delay in [-1.0] * (chosen not in whole) + [chance.random()]:
            place = folder / f"{at}{delay < 0}"
            place.mkdir()
            process = started(COMMANDS[chosen], place)
            began = time.monotonic()
            if delay >= 0:
                time.sleep(delay * whole[chosen][0])
                process.send_signal(chance.choice(SIGNALS))
            out, errors = process.communicate(timeout=60)
            out = re.sub(rb'"seconds": [\d.]+', b"", out)  # that the search took
            files = {path.name: path.read_bytes() for path in place.iterdir()}
            if delay < 0:
                whole[chosen] = time.monotonic() - began, process.returncode, out, files
                continue
            _, code, text, complete = whole[chosen]
            wrong = [
                "code" * (process.returncode not in (130, code)),
                "output" * (process.returncode == code and out != text),
                "stderr" * bool(errors),
                "files" * any(complete.get(name) is None or len(complete[name]) != len(files[name]) for name in files),
            ]
            if any(wrong):
                yield COMMANDS[chosen], process.returncode, delay, " ".join([*wrong, *files, errors.decode()])


def test_an_interrupt_at_any_moment_ends_the_command(tmp_path: Path) -> None:
    assert list(interrupted(8, tmp_path)) == []


@pytest.mark.slow
def test_a_thousand_interrupts(tmp_path: Path) -> None:
    wrong = list(interrupted(1000, tmp_path))
    assert not wrong, "\n".join(map(str, wrong))
