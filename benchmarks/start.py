"""How long memplan takes to start, as a multiple of importing what it stands on, in one run.

    python benchmarks/start.py [--runs 10]

Seconds of the processor in user mode, which depend less on what else the machine does. Commands take turns; a multiple
is the median of those within a turn. The processes run with compiled byte code, as an installed package has it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
BASE = "import pydantic, typer, rich.table"
MEMPLAN = ("-c", "from memplan.cli import main; raise SystemExit(main())")
COMMANDS: dict[str, tuple[str, ...]] = {
    BASE: ("-c", BASE),
    "memplan --version": (*MEMPLAN, "--version"),
    "memplan estimate --help": (*MEMPLAN, "estimate", "--help"),
    "memplan estimate --model gpt2": (*MEMPLAN, "estimate", "--model", "gpt2"),
    "memplan estimate --model gpt2 --json": (*MEMPLAN, "estimate", "--model", "gpt2", "--json"),
    "memplan estimate llama-3-405b-1024gpu": (*MEMPLAN, "estimate", "llama-3-405b-1024gpu"),
}
AT_MOST = {"memplan estimate llama-3-405b-1024gpu": 8.0}
"""Multiples that are aimed at; 2.5 for the others."""


def user_seconds(arguments: Sequence[str], environment: dict[str, str]) -> float:
    """What one process takes."""
    process = subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):  # 1: it does not fit
        raise RuntimeError(f"exit code {process.returncode}: {' '.join(arguments)}")
    return used.ru_utime


def main() -> int:
    parser = argparse.ArgumentParser(description="how long memplan takes to start")
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="of each command (10)")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": cache, "MEMPLAN_DATA": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        times: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for turn in range(runs + 1):
            for name, arguments in COMMANDS.items():
                spent = user_seconds(arguments, environment)
                if turn:  # the first compiles
                    times[name].append(spent)
    for name, spent in times.items():
        ratio = median(one / base for one, base in zip(spent, times[BASE], strict=True))
        aim = 1.0 if name == BASE else AT_MOST.get(name, 2.5)
        print(f"{name:40} best {min(spent):.3f} s, median {median(spent):.3f} s: {ratio:5.2f} x (aim: {aim} x)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
