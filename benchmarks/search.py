"""How fast the search is: whole processes in multiples of the imports below, and its parts (``speed.py`` runs those).

    python benchmarks/search.py [--runs 3]

Seconds of the processor in user mode; processes take turns, and the fastest run of each counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.start import BASE, MEMPLAN, user_seconds  # noqa: E402
from memplan.plan.plan import Plan  # noqa: E402
from memplan.plan.read import read_plan  # noqa: E402
from memplan.plan.resolve import resolve  # noqa: E402
from memplan.search.answer import suggest  # noqa: E402
from memplan.search.candidates import Clock  # noqa: E402
from memplan.search.cuts import Option, Ratios, choose, contiguous, smallest  # noqa: E402  # noqa: E402
from memplan.search.search import Search  # noqa: E402
from memplan.search.space import filled, space_of  # noqa: E402

LARGE = {
    "model": "llama-3-405b", "framework": "megatron", "dtype": "bf16", "seq": "8192", "gbs": "2048",
    "gpu": "h100-80gb", "gpus": "16384",
}  # fmt: skip

SEARCHES = {
    "--model llama-3-405b --gpus 16384 --gpu h100-80gb --gbs 2048 --seq 8192": 16.0,
    "--model gpt3-175b --gpus 512 --gpu a100-80gb --gbs 1536 --seq 2048": 20.0,
    "--model llama-3-70b --gpus 64 --gpu h100-80gb --gbs 512 --seq 4096": 20.0,
}
"""Flags of ``suggest-partition --framework megatron``, and the multiples that are aimed at."""


def base(**flags: str) -> Plan:
    return read_plan(None, {**LARGE, **flags}).plan


def searched(plan: Plan) -> Search:
    space = space_of(plan, filled(plan), {})
    capacity = filled(plan).hardware.capacity
    assert capacity is not None
    return Search(space, Clock(space), capacity, 0, lambda what, done, of: None)


def searching() -> Iterator[tuple[str, str]]:
    """A joint search in parts: every layout timed and bounded; the answer; what it leaves; and growth."""
    start = perf_counter()
    search = searched(base())
    each = perf_counter() - start
    considered = search.counts().considered
    yield "search: layouts timed and bounded", f"{considered / each:,.0f} a second ({considered:,} on 16,384 GPUs)"
    start = perf_counter()
    search.fastest(1)
    counts = search.counts()
    built = f"{counts.folded} folded, {counts.replayed} replayed"
    yield "search: the fastest that fits, replayed", f"{perf_counter() - start:.2f} s more ({built})"
    for gpus in (512, 2048, 8192, 16384):
        start = perf_counter()
        found = suggest(base(gpus=str(gpus)), {})
        yield f"search, with front: {gpus:,} GPUs", f"{perf_counter() - start:.2f} s for {found.counts.total:,} layouts"
    for layers in (32, 64, 126):
        start = perf_counter()
        found = suggest(base(gpus="4096", layers=str(layers)), {})
        spent = perf_counter() - start
        yield f"search, with front: {layers} layers, 4,096 GPUs", f"{spent:.2f} s for {found.counts.total:,} layouts"


def cutting() -> Iterator[tuple[str, str]]:
    """Dynamic programming alone, costs known; and with the peaks of stages folded for it."""
    options = [
        [Option((low, high), 7.0 * low + 5 * high + stage % 3) for low in range(6) for high in range(6)]
        for stage in range(64)
    ]
    yield "cut: 128 layers, 64 stages x 2 chunks", f"{_best(lambda: choose(options, 128)):.1f} ms"
    yield "cut: 128 entries, 64 stages, any costs", f"{_best(lambda: contiguous(64, 128, _cost)):.1f} ms"
    plan = resolve(base(gpus="1024", tp="8", pp="16", zero="1", recompute="full", gbs="1024"))
    start = perf_counter()
    smallest(plan, Ratios(0.05, 0.6))
    yield "cut: llama-3-405b, 16 stages, folded for it", f"{1e3 * (perf_counter() - start):.0f} ms, cold"


def _cost(stage: int, low: int, high: int) -> float:
    return (high - low) * (70 - stage) + (high == 128) * 50 if high - low < 8 else 1e9


def _best(work: object) -> float:
    """Milliseconds of the fastest of five."""
    times = []
    for _ in range(5):
        start = perf_counter()
        work()  # type: ignore[operator]
        times.append(perf_counter() - start)
    return 1e3 * min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description="how long searches take")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each search (3)")
    runs = parser.parse_args().runs
    command = (*MEMPLAN, "suggest-partition", "--framework", "megatron", "--json")
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": cache, "MEMPLAN_DATA": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        user_seconds((*command, *next(iter(SEARCHES)).split()), environment)  # compiles
        imports, times = list[float](), {flags: list[float]() for flags in SEARCHES}
        for _ in range(runs):
            for flags, spent in times.items():
                imports += [user_seconds(("-c", BASE), environment) for _ in range(3)]
                spent.append(user_seconds((*command, *flags.split()), environment))
    for flags, spent in times.items():
        ratio = min(spent) / min(imports)
        print(f"{flags:75} best {min(spent):5.2f} s: {ratio:5.1f} x (aim: {SEARCHES[flags]:.0f} x)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
