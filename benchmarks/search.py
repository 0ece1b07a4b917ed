"""How fast whole answers are, in multiples of the imports; and parts of a search (``speed.py`` runs both).

    python benchmarks/search.py [--runs 3]

Seconds of the processor in user mode; processes take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.start import MEMPLAN, lines  # noqa: E402
from memplan.plan.plan import Plan  # noqa: E402
from memplan.plan.read import read_plan  # noqa: E402
from memplan.plan.resolve import resolve  # noqa: E402
from memplan.search.answer import suggest  # noqa: E402
from memplan.search.candidates import Clock  # noqa: E402
from memplan.search.cuts import Option, Ratios, choose, contiguous, smallest  # noqa: E402
from memplan.search.search import Search  # noqa: E402
from memplan.search.space import filled, space_of  # noqa: E402

LARGE = {
    "model": "llama-3-405b", "framework": "megatron", "dtype": "bf16", "seq": "8192", "gbs": "2048",
    "gpu": "h100-80gb", "gpus": "16384",
}  # fmt: skip

_SEARCH = (*MEMPLAN, "suggest-partition", "--framework", "megatron", "--json")
_ESTIMATE = (*MEMPLAN, "estimate")
_AIMS = {
    "--model llama-3-405b --gpus 16384 --gpu h100-80gb --gbs 2048 --seq 8192": "16 x",
    "--model gpt3-175b --gpus 512 --gpu a100-80gb --gbs 1536 --seq 2048": "20 x",
    "--model llama-3-70b --gpus 64 --gpu h100-80gb --gbs 512 --seq 4096": "20 x",
    "--model deepseek-v3 --gpus 2048 --gpu h100-80gb --gbs 15360 --seq 4096": "4 s",
}
"""Flags of ``suggest-partition --framework megatron``, and what is aimed at."""
DEEPSEEK = "--framework megatron --model deepseek-v3 --gpu h100-80gb --gpus 1024 --tp 1 --pp 16 --ep 64 --zero 1"
ANSWERS: dict[str, tuple[str, ...]] = {
    "estimate llama-3-405b-1024gpu": (*_ESTIMATE, "llama-3-405b-1024gpu"),
    "estimate llama-3-405b-1024gpu --html": (
        *_ESTIMATE, "llama-3-405b-1024gpu", "--html", "{folder}/a.html", "--overwrite",
    ),
    "estimate --model deepseek-v3, 1,024 GPUs": (
        *_ESTIMATE, *DEEPSEEK.split(), "--gbs", "8192", "--seq", "4096", "--first-layers", "3", "--last-layers", "2",
    ),
    **{f"search {flags}": (*_SEARCH, *flags.split()) for flags in _AIMS},
}  # fmt: skip
AIMS = {
    "estimate llama-3-405b-1024gpu": "8 x",
    "estimate llama-3-405b-1024gpu --html": "3 s",
    "estimate --model deepseek-v3, 1,024 GPUs": "1.5 times llama-3-405b's",
    **{f"search {flags}": aim for flags, aim in _AIMS.items()},
}


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


def answering(runs: int) -> Iterator[tuple[str, str]]:
    """Processes that give a whole answer."""
    return lines(ANSWERS, AIMS, runs)


def main() -> int:
    parser = argparse.ArgumentParser(description="how long whole answers take")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each (3)")
    for name, line in answering(parser.parse_args().runs):
        print(f"{name:80} {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
