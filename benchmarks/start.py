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
from collections.abc import Iterator, Mapping, Sequence
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
AIMS = {BASE: "1 x", "memplan estimate llama-3-405b-1024gpu": "8 x"}
"""What is aimed at, as a multiple of the imports or in seconds; 2.5 times for the others."""


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


def in_turns(commands: Mapping[str, Sequence[str]], runs: int) -> dict[str, list[tuple[float, float]]]:
    """By command, the seconds of each of its ``runs`` and those of the imports beside it. Commands take turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": cache, "MEMPLAN_DATA": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for turn in range(runs + 1):
            for name, arguments in commands.items():
                imports = min(user_seconds(("-c", BASE), environment) for _ in range(3))
                spent = user_seconds([word.format(folder=cache) for word in arguments], environment)
                if turn:  # the first compiles
                    times[name].append((spent, imports))
    return times


def lines(commands: Mapping[str, Sequence[str]], aims: Mapping[str, str], runs: int) -> Iterator[tuple[str, str]]:
    """How long each command takes: the fastest run, the median, and the median multiple within a turn."""
    for name, times in in_turns(commands, runs).items():
        spent = [one for one, _ in times]
        ratio = median(one / imports for one, imports in times)
        took = f"best {min(spent):.3f} s, median {median(spent):.3f} s: {ratio:5.2f} x"
        yield name, f"{took} (aim: {aims.get(name, '2.5 x')})"


LAYERS = (16, 160)
FEW_BITS = {
    "bf16": (), **{f"fp8 {recipe}": ("--fp8", recipe) for recipe in ("delayed", "tensorwise", "mxfp8")},
    # The last flag of two counts: blockwise runs on Hopper, and what does not fit would be searched for ways out.
    "fp8 blockwise": ("--fp8", "blockwise", "--gpu", "h200", "--capacity", "900GiB"),
    "nvfp4": ("--fp4", "nvfp4"),
}  # fmt: skip
DEEP = (
    *MEMPLAN, "estimate", "--model", "llama-3-70b", "--framework", "megatron", "--tp", "16", "--gpus", "16",
    "--zero", "1", "--sequence-parallel", "--seq", "2048", "--gbs", "8", "--dtype", "bf16", "--gpu", "b200", "--layers",
)  # fmt: skip


def per_layer(runs: int) -> Iterator[tuple[str, str]]:
    """What a layer more costs an estimate in few bits, as a multiple of one in BF16."""
    few, many = LAYERS
    commands = {f"{name} {size}": (*DEEP, str(size), *flags) for name, flags in FEW_BITS.items() for size in LAYERS}
    best = {name: min(spent for spent, _ in times) for name, times in in_turns(commands, runs).items()}
    each = {name: (best[f"{name} {many}"] - best[f"{name} {few}"]) / (many - few) for name in FEW_BITS}
    for name, spent in each.items():
        yield f"a layer in {name}", f"{1e3 * spent:.2f} ms: {spent / each['bf16']:5.2f} x BF16 (aim: 1 x)"


def main() -> int:
    parser = argparse.ArgumentParser(description="how long memplan takes to start")
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="of each command (10)")
    runs = parser.parse_args().runs
    for name, line in (*lines(COMMANDS, AIMS, runs), *per_layer(runs)):
        print(f"{name:40} {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
