"""How fast the search is; part of ``speed.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from memplan.plan.plan import Plan  # noqa: E402
from memplan.plan.read import read_plan  # noqa: E402
from memplan.plan.resolve import resolve  # noqa: E402
from memplan.search.answer import suggest  # noqa: E402
from memplan.search.clock import Clock  # noqa: E402
from memplan.search.cuts import Ratios, smallest  # noqa: E402
from memplan.search.partition import Option, choose, contiguous  # noqa: E402
from memplan.search.search import Search  # noqa: E402
from memplan.search.space import filled, space_of  # noqa: E402

LARGE = {
    "model": "llama-3-405b", "framework": "megatron", "dtype": "bf16", "seq": "8192", "gbs": "2048",
    "gpu": "h100-80gb", "gpus": "16384",
}  # fmt: skip


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
