"""Verdicts at the edge, tried: the largest micro-batch that memplan says fits this GPU, and the next.

    python -m benchmarks.campaign.edges [--device cpu] --model NAME … flags of a plan

On a CPU nothing runs out of memory: there the larger one is found for a capacity that is made up, and both run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memplan.estimate import estimate
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.validate.devices import Device, devices, gpu_of, visible

from .readings import Reading, answer

ROOT = Path(__file__).resolve().parents[2]
MADE_UP = 48 << 20
"""Bytes of the capacity that a rehearsal has."""
MOST = 1 << 14
"""Micro-batch size that nothing reaches."""
OUT_OF_MEMORY = "out-of-memory"


def largest(fits: Callable[[int], bool], most: int = MOST) -> int:
    """The largest number up to ``most`` for which ``fits`` holds, 0 where none does; it holds below that, too."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def flags_of(words: Sequence[str]) -> dict[str, str]:
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}


def fitting(flags: dict[str, str], gpu: str | None, capacity: int) -> Callable[[int], bool]:
    """Whether memplan says that a micro-batch size fits ``capacity`` bytes."""

    def fits(mbs: int) -> bool:
        hardware = {} if gpu is None else {"gpu": gpu}
        plan = resolve(read_plan(None, {**flags, **hardware, "mbs": str(mbs), "gbs": str(mbs)}).plan)
        known = plan.hardware.model_copy(update={"capacity": capacity})
        found = estimate(resolve(plan.model_copy(update={"hardware": known})))
        if found.fits is not None:
            return found.fits
        return max(stage.reserved or stage.requested for stage in found.stages) <= capacity

    return fits


def tried(flags: dict[str, str], mbs: int, device: str) -> dict[str, Any]:
    """The record of a run with ``mbs``, whatever came of it."""
    words = [
        word for name, value in {**flags, "mbs": str(mbs), "gbs": str(mbs)}.items() for word in (f"--{name}", value)
    ]
    fixed = ["--device", device, "--json", "--no-records", "--force", "--warmup", "1", "--steps", "1"]
    command = [sys.executable, "cli.py", "validate", *words, *fixed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def readings(mbs: int, fits: bool, record: dict[str, Any]) -> tuple[list[Reading], str]:
    """1 where it ran out of memory, beside 0 where memplan said that it fits; and the largest reading of memory."""
    failures = record["run"]["failures"]
    full = bool(failures) and failures[0]["kind"] == OUT_OF_MEMORY
    found = [Reading(f"out of memory at mbs {mbs}", "count", int(full), int(not fits))]
    for rank in record["run"]["ranks"]:
        stage = record["estimate"]["stages"][rank["stage"]]
        known = [name for name in ("requested", "allocated", "reserved") if rank[name] is not None]
        found += [Reading(f"{name} at mbs {mbs}", "bytes", rank[name], stage[f"{name}_bytes"]) for name in known]
    if failures and not full:
        return found, f"mbs {mbs} failed otherwise: {failures[0]['message']}"
    verdict = record["estimate"].get("verdict", "")
    said = failures[0]["message"] if failures else "it ran"
    return found, f"mbs {mbs}, estimated {verdict or 'to fit' if fits else verdict or 'not to fit'}: {said}"


def first_device() -> Device:
    return visible(devices(), os.environ)[0]


def main() -> int:
    words = sys.argv[1:]
    device = "cuda"
    if words[:1] == ["--device"]:
        device, words = words[1], words[2:]
    flags = flags_of(words)
    if device == "cuda":
        found = first_device()
        gpu, capacity = gpu_of(found.name, found.total), found.free
    else:
        gpu, capacity = None, MADE_UP
    try:
        most = largest(fitting(flags, gpu, capacity))
    except PlanError as error:
        print(error, file=sys.stderr)
        return 2
    made, notes = [], []
    for mbs, fits in ((most, True), (most + 1, device == "cpu")):
        if mbs:
            one, note = readings(mbs, fits, tried(flags, mbs, device))
            made += one
            notes.append(note)
    print(json.dumps(answer(made, "; ".join(notes))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
