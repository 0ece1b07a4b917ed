"""Traces repeated: what ``memplan trace`` finds beside the measured file's traces of the same steps, and how long
traces of large models take.

    python benchmarks/traces.py [--measured FILE] [--large]

Needs torch and transformers. Both sides are PyTorch on fake tensors, traced by different programs; differences that
have a name are taken out and listed. ``--large``: time and memory of the command itself, alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measured import Row, read_rows, traced_plan  # noqa: E402
from memplan.tape.events import Hold, compose  # noqa: E402
from memplan.trace.framework import job_of_plan  # noqa: E402
from memplan.trace.recording import (  # noqa: E402
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    Traced,
)

MEASURED = ROOT.parent / "shared" / "measured" / "traced_transformers_5_23.jsonl"
CLOSE = 4096
NORM = "aten.native_layer_norm.default"
STEPS = 512
"""Bytes of a parameter's step counter, which the file's traces have on the device."""


def differences(row: Row, traced: Traced) -> Iterator[tuple[str, int]]:
    """Ours less the file's at each named point, in bytes, without labels, step counters and fp32 norm statistics."""
    recording = traced.recording
    counters = STEPS * sum(hold.name == "parameter" for hold in recording.events if isinstance(hold, Hold))
    forward, backward = recording.of(0, FORWARD), recording.of(0, BACKWARD)
    passes, step = compose((forward, backward)), recording.of(0, OPTIMIZER)
    labels = 8 * row["b"] * row["s"]
    start = traced.setup.net - labels + counters
    wider = _statistics(row, traced)
    yield "after forward", start + forward.net - wider - row.get("held", row["after_forward"])
    yield "peak of both passes", start + passes.peak - wider - row["peak_fwd_bwd"]
    yield "after backward", start + passes.net - row["after_backward"]
    yield "peak of the step", start + passes.net + step.peak - row["peak_step"]
    yield "after the step", start + passes.net + step.net - row["end"]


def _statistics(row: Row, traced: Traced) -> int:
    """Bytes of a layer norm's mean and rstd, which the file's traces have in 16 bits where the input is."""
    if row.get("dtype") != "torch.bfloat16" or row["ckpt"]:
        return 0
    tokens = row["b"] * row["s"]
    holds = (hold for hold in traced.recording.events if isinstance(hold, Hold))
    return sum(hold.bytes - 2 * tokens for hold in holds if hold.name == NORM and hold.shape[-1] == 1)


class Large(NamedTuple):
    """A command, and how long it may take on a laptop."""

    name: str
    flags: str
    seconds: float


TITAN = "--framework fsdp --fsdp-code torchtitan --seq 8192 --recompute full"
STAGE = "--pp 8 --dp 8 --gbs 64 --stage 3"
LARGE = (
    Large("llama-3-8b, one GPU", "--model llama-3-8b --framework single --seq 8192", 10),
    Large("llama-3-8b, torchtitan, FSDP8", f"--model llama-3-8b --dp 8 {TITAN}", 20),
    Large(
        "llama-3-70b, torchtitan, PP8 FSDP8, stage 3",
        f"--model llama-3-70b {STAGE} {TITAN}",
        60,
    ),
    Large("llama-3-405b, torchtitan, TP8 FSDP64", f"--model llama-3-405b --tp 8 --dp 64 {TITAN}", 60),
)


def measured(large: Large) -> None:
    """Runs the command in a process of its own and prints wall and processor time, memory, and the difference."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "memplan.cli", "trace", *large.flags.split(), "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        answer = json.loads(process.stdout.read())
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0
    seconds = time.perf_counter() - began
    apart = max(abs(one["traced_bytes"] - one["estimated_bytes"]) for one in answer["points"])
    processor = used.ru_utime + used.ru_stime
    verdict = "ok" if seconds <= large.seconds else "SLOW"
    print(
        f"{large.name:44} {seconds:5.1f} s ({processor:.1f} s of processor time)  {used.ru_maxrss / 2**20:.2f} GiB  "
        f"{answer['events']} events  {apart} bytes from the estimate  {verdict}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="memplan trace beside the measured file's traces")
    parser.add_argument("--measured", type=Path, default=MEASURED, metavar="FILE")
    parser.add_argument("--large", action="store_true", help="time and memory of traces of large models")
    chosen = parser.parse_args(arguments)
    if chosen.large:
        for large in LARGE:
            measured(large)
        return 0
    if not chosen.measured.is_file():
        print(f"skipped: no {chosen.measured} (--measured FILE names it)")
        return 0
    from memplan.trace.step import traced_step

    for row in read_rows(chosen.measured):
        began = time.perf_counter()
        traced = traced_step(job_of_plan(traced_plan(row)), sums_in_place=False)
        seconds = time.perf_counter() - began
        found = dict(differences(row, traced))
        worst = max(map(abs, found.values()))
        print(f"{row['id']:44} {seconds:5.1f} s  {'ok' if worst <= CLOSE else 'BEYOND'}  {found}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
