"""Kernels that were timed alone on an H200 and an H100 beside the time model, and the steps that ran on the first.

    python -m benchmarks.kernel_times

``measured_kernels_h200.json`` and ``…_h100.json`` say how each was timed. Kernels of less than ``LEAST`` are left out
of the table: they end before the host has started the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.campaign.validations import seconds
from benchmarks.measured import plan_of
from memplan import read_plan
from memplan.layers import work
from memplan.layers.work import Alone, Product, Stream
from memplan.plan.plan import ResolvedPlan
from memplan.plan.resolve import resolve
from memplan.records.record import read_record
from memplan.search.time.kernels import alone, streamed
from memplan.search.time.rates import Rates, as_validated, rates_of

FILES = {
    "h200": Path(__file__).with_name("measured_kernels_h200.json"),
    "h100-80gb": Path(__file__).with_name("measured_kernels_h100.json"),
}
"""By GPU."""
RECORDS = Path(__file__).with_name("records")
LEAST = 20e-6
"""Seconds."""
LONGEST = 3e-3
"""Of a product: longer ones, repeated, ran into the power limit."""


class Timed(NamedTuple):
    """One kernel, in seconds."""

    group: str
    name: str
    measured: float
    modelled: float


def measured(gpu: str = "h200") -> Mapping[str, Any]:
    """The file."""
    found: Mapping[str, Any] = json.loads(FILES[gpu].read_text(encoding="utf-8"))
    return found


def rates(gpu: str = "h200", *, flash: bool = False, dtype: str = "bf16") -> Rates:
    """Of plain PyTorch; ``flash``: with its own attention."""
    plan = resolve(plan_of(None, model="gpt2", gpu=gpu, framework="single", dtype=dtype))
    return rates_of(as_validated(plan) if flash else plan)


# -- what a name says ---------------------------------------------------------------------------------

Made = Sequence[Alone]
MOVED = {"add": 6, "mul": 12, "cast bf16 fp32": 6, "cast fp32 bf16": 6, "dropout": 5, "native_dropout": 5}
"""Bytes that move for each element; else 4, backward 6."""
SLOW = {
    "cast bf16 fp32": work.WIDENED,
    "gelu": work.GELU,
    "gelu_backward": work.GELU_BACKWARD,
    "dropout": work.DROPOUT,
    "native_dropout": work.DROPOUT,
}


def _elementwise(name: str, n: int) -> Made:
    name = name if name.startswith("cast") else re.sub(" (bf16|fp32)$", "", name)
    moved = MOVED.get(name, 6 if name.endswith("_backward") else 4) * n
    return [Stream(moved, 1, False, SLOW[name].of(n) if name in SLOW else 0)]


def _by_rows(name: str, rows: int, n: int) -> Made:
    """A kernel on ``rows`` of ``n`` elements in all."""
    wide = Stream(6 * n, 1, False, work.WIDENED.of(n))
    return {
        "layer_norm": [Stream(4 * n, 1, False, work.LAYER_NORM.of(n, rows))],
        "layer_norm_backward": [Stream(10 * n, 3, False, work.LAYER_NORM_BACKWARD.of(n, rows))],
        "mean of squares fp32": [Stream(8 * n), Stream(4 * n)],
        "softmax bf16": [Stream(4 * n, 1, False, work.SOFTMAX.of(n))],
        "softmax bf16->fp32": [wide, Stream(8 * n, 1, False, work.SOFTMAX.of(n))],
        "softmax_backward bf16": [Stream(6 * n, 1, False, work.SOFTMAX_BACKWARD.of(n))],
        "sum rows": [Stream(2 * n, 1, False, work.SUM_OF_ROWS.of(n, rows))],
        "log_softmax fp32": [Stream(16 * n, 1, True)],
        "log_softmax_backward fp32": [Stream(16 * n, 1, True)],
        "nll_backward fp32": [Stream(4 * n, 2, True)],
        "cast bf16 fp32": [wide],
    }.get(name, [])


def _attention(b: int, heads: int, kv: int, s: int, d: int, *, causal: bool, backward: bool, efficient: bool) -> Made:
    both = [one._replace(efficient=efficient) for one in work.fused((b, s, heads, d), kv, s, "bf16", causal=causal)]
    return both if backward else both[:1]


ADAMW = r"AdamW (foreach|fused) torch\.(float32|bfloat16) (\d+)x(\d+)"


def _adamw(how: str, dtype: str, count: int, size: int, of: Rates) -> float:
    plan = plan_of(None, model="gpt2", gpu="h200", framework="single", dtype="bf16", optimizer_implementation=how)
    chosen, element, n = resolve(plan).optimizer, 4 if dtype == "float32" else 2, count * size
    moved = chosen.algorithm.bytes_moved(chosen, element, element) * n
    return streamed(of, moved, 1, chosen.algorithm.issue(chosen, element) * n)


def kernels(gpu: str = "h200") -> list[Timed]:
    """Those of the file that the model knows, of ``LEAST`` and more."""
    plain, flash, wide, found = rates(gpu), rates(gpu, flash=True), rates(gpu, dtype="fp32"), []

    def add(group: str, name: str, spent: float, made: Made, of: Rates = plain) -> None:
        if made and spent >= LEAST:
            found.append(Timed(group, name, spent, sum(alone(one, of) for one in made)))

    for name, micro in measured(gpu)["kernels"]:
        spent = micro * 1e-6
        if at := re.fullmatch(
            r"(flash|cudnn|memory-efficient) b(\d+) h(\d+) kv(\d+) s(\d+) d(\d+) causal(\d) (forward|both)", name
        ):
            kernel, *sizes, causal, passes = at.groups()
            efficient = kernel == "memory-efficient"
            made = _attention(*map(int, sizes), causal=causal == "1", backward=passes == "both", efficient=efficient)
            add(f"attention, {kernel}", name, spent, made, flash if kernel == "flash" else plain)
        elif at := re.fullmatch(r"(?:b?mm)(?: TN| NN)? (bf16|fp32) (?:(\d+)x)?(\d+)x(\d+)x(\d+)", name):
            dtype, batch, *sizes = at.groups()
            element = 2 if dtype == "bf16" else 4
            m, n, k = map(int, sizes)
            odd = element == 2 and (m % 8 or n % 8 or k % 8)
            if odd and not n % 8:  # rows of 50,257 elements are odd; 50,257 rows are not
                continue
            made, of = [Product(m, n, k, int(batch or 1), element)], wide if element == 4 else plain
            if odd or spent <= LONGEST:
                add(f"products, {dtype}{', odd' if odd else ''}", name, spent, made, of)
        elif at := re.fullmatch(ADAMW, name):
            how, dtype, count, size = at.groups()
            if int(count) * int(size) >= 1 << 28:  # less waits for the host
                found.append(Timed("AdamW", name, spent, _adamw(how, dtype, int(count), int(size), plain)))
        elif at := re.fullmatch(r"(.*) (\d+)x(\d+)", name):
            kind, rows, columns = at.groups()
            add("rows", name, spent, _by_rows(kind, int(rows), int(rows) * int(columns)))
        elif at := re.fullmatch(r"(.*) (\d+)", name):
            add("element-wise", name, spent, _elementwise(at[1], int(at[2])))
    return found


def groups(found: Sequence[Timed]) -> Mapping[str, list[float]]:
    """Errors by kind, the smallest first."""
    by: dict[str, list[float]] = {}
    for one in found:
        by.setdefault(one.group, []).append(one.modelled / one.measured - 1)
    return {group: sorted(errors) for group, errors in sorted(by.items())}


# -- steps --------------------------------------------------------------------------------------------


def steps() -> list[tuple[str, float, ResolvedPlan]]:
    """What ran on one H200, alone on it and in a world of its own: its command, the median of its steps' seconds, its
    plan."""
    found = []
    for path in sorted(RECORDS.glob("*_h200_*.json")):
        record = read_record(path)
        taken = seconds(record)
        if taken is None or record.ran.framework != "single":
            continue
        version = record.run.versions.torch
        name = re.sub(r"memplan validate --model | --device.*|--", "", record.command)
        plan = read_plan({**record.plan, "hardware": {"gpu": "h200"}, "torch": version})
        found.append((name, taken, as_validated(resolve(plan))))
    return found


def main() -> int:
    found = kernels()
    for one in found:
        both = f"{one.measured * 1e6:9.1f} {one.modelled * 1e6:9.1f} us"
        print(f"{one.group:20s} {one.name:55s} {both} {one.modelled / one.measured - 1:+6.0%}")
    print("\n| kernels | how many | median error | middle four fifths |\n| --- | ---: | ---: | ---: |")
    for group, errors in groups(found).items():
        least, most = errors[len(errors) // 10], errors[-1 - len(errors) // 10]
        print(f"| {group} | {len(errors)} | {median(errors):+.0%} | {least:+.0%} to {most:+.0%} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
