"""Timelines as the data that a page's charts draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...allocator.named import Tensor
from ...allocator.timeline import Live, Timeline
from ...result import Estimate
from ...tape.events import Category
from ..names import in_order, kind_of, modules_text, numbers_text
from ..printing import COLOURS, label
from ..stages import limit_of, who

MOST = 12_000
"""Points of all stages' charts together, so that a page of many stages stays small."""
MOST_GROUPS = 250
"""Kinds of tensors at a stage's peak that are told one by one."""
STEPS = 100_000
"""Of a chart's height, at least."""


def chart_data(estimate: Estimate, lines: Sequence[Timeline]) -> dict[str, Any]:
    """What ``page.js`` draws. Bytes of charts are in ``unit``; those of contents are bytes."""
    highest = max((sum(point.by) for line in lines for point in line.points), default=1)
    unit = 512
    while highest // unit > STEPS:
        unit *= 2
    names: dict[Tensor, int] = {}
    most = max(50, MOST // max(len(lines), 1))
    return {
        "unit": unit,
        "categories": [{"label": label(one.key), "colour": COLOURS[one]} for one in Category],
        "stages": [
            {"name": who(estimate, estimate.stages[at]), **_stage(line, unit, names, most)}
            for at, line in enumerate(lines)
        ],
        "first": estimate.peak_stage,
        "limit": limit_of(estimate),
        "tensors": [[one.name, one.module, _shape(one)] for one in names],
    }


def _stage(line: Timeline, unit: int, names: dict[Tensor, int], most: int) -> dict[str, Any]:
    width = -(-len(line.points) // most)
    groups = [line.points[start : start + width] for start in range(0, len(line.points), width)]
    points = [max(group, key=lambda point: sum(point.by)) for group in groups]
    used = [at for at in range(len(Category)) if any(point.by[at] for point in points)]
    return {
        "events": line.events,
        "shown": line.shown,
        "microbatches": line.microbatches,
        "at": [point.event for point in points],
        "categories": used,
        "by": [[point.by[at] // unit for point in points] for at in used],
        "tensors": [names.setdefault(point.live.tensor, len(names)) for point in points],
        "microbatch": [-1 if point.live.microbatch is None else point.live.microbatch for point in points],
        "phases": "".join(point.phase[:1] or "-" for point in points),
        "begins": "".join("1" if point.begins else "0" for point in points),
        "contents": _contents(line.contents),
    }


def _contents(live: Sequence[Live]) -> list[list[Any]]:
    """Tensors of one name in modules of one kind together, the largest first: category, bytes, how many, name, modules,
    micro-batches, shape."""
    groups: dict[tuple[int, str, str, str], list[Live]] = {}
    for one in live:
        key = one.category, one.tensor.name, kind_of(one.tensor.module), _shape(one.tensor)
        groups.setdefault(key, []).append(one)
    rows: list[list[Any]] = []
    for (category, name, _, shape), members in groups.items():
        modules = in_order(list(dict.fromkeys(one.tensor.module for one in members)))
        microbatches = sorted({one.microbatch for one in members if one.microbatch is not None})
        rows.append(
            [
                int(category),
                sum(one.bytes for one in members),
                len(members),
                name,
                modules_text([module for module in modules if module]),
                numbers_text(microbatches),
                shape,
            ]
        )
    rows.sort(key=lambda row: -row[1])
    return rows[:MOST_GROUPS]


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}".replace(",)", ")") if tensor.shape else tensor.dtype
