"""Traces repeated: what ``memplan trace`` finds beside the measured file's traces of the same steps.

    python benchmarks/traces.py [--measured DIR]

Needs torch and transformers. Both sides are PyTorch on fake tensors, traced by different programs; differences that
have a name are taken out and listed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measured import Row, read_rows, traced_plan  # noqa: E402
from memplan.tape import Hold, compose  # noqa: E402
from memplan.trace.job import job_of_plan  # noqa: E402
from memplan.trace.recording import BACKWARD, FORWARD, OPTIMIZER  # noqa: E402
from memplan.trace.traced import Traced  # noqa: E402

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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="memplan trace beside the measured file's traces")
    parser.add_argument("--measured", type=Path, default=MEASURED, metavar="FILE")
    chosen = parser.parse_args(arguments)
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
