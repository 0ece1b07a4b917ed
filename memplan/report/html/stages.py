"""An estimate's stages on a page: bars side by side, the peak's categories, the readings, the plan.

Timelines as the data that a page's charts draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...allocator.named import Tensor
from ...allocator.timeline import Live, Timeline
from ...frameworks import framework
from ...plan.fields import sections
from ...plan.plan import Plan
from ...plan.section import FrameworkSection
from ...result import Estimate, Notice, StageEstimate, Verdict
from ...tape.events import Category
from ..estimate import MOMENTS, READINGS, span_words
from ..names import (
    MEANING,
    elements,
    in_order,
    kind_of,
    modules_text,
    numbers_text,
    percent,
    ranks_text,
    size,
    stage_word,
)
from ..printing import COLOURS, Share, label, ledger, shares
from ..stages import free_on, limit_of, reading_of, unit_of, who, worst_moment
from .markup import Child, Markup, details, join, section, table, tag

TONES = {
    Verdict.FITS: "good",
    Verdict.RETRIES: "caution",
    Verdict.TIGHT: "caution",
    Verdict.UNKNOWN: "caution",
    Verdict.DOES_NOT_FIT: "bad",
}
"""Classes of a verdict's words."""


def verdict_line(plain: str, tone: str) -> Markup:
    """``Fits: …``, its first words in the verdict's colour."""
    word, colon, rest = plain.partition(": ")
    return tag("p", tag("b", word, class_=tone), f"{colon}{rest}", class_="verdict")


def bar(parts: Sequence[Share], scale: int, limit: int | None = None) -> Markup:
    """``parts`` as a bar of which ``scale`` bytes fill the width, with a mark at ``limit``."""
    pieces: list[Child] = [
        tag(
            "i",
            style=f"width:{_share(part.size, scale)};background:{part.colour}",
            title=f"{part.label}: {size(part.size)}",
        )
        for part in parts
    ]
    mark = None if limit is None else tag("u", style=f"left:{_share(limit, scale)}", title=f"limit: {size(limit)}")
    return tag("span", *pieces, mark, class_="bar")


def _share(part: int, scale: int) -> str:
    return f"{100 * part / max(scale, 1):.3f}%"


def legend(stages: Sequence[StageEstimate]) -> Markup:
    """What the colours are."""
    colours = {part.label: part.colour for stage in stages for part in shares(stage)}
    keys = [tag("li", tag("i", style=f"background:{colour}"), name) for name, colour in colours.items()]
    return tag("ul", *keys, class_="legend")


def stage_rows(estimate: Estimate, *, chosen: bool) -> Markup:
    """A row for each stage with its bar; ``chosen``: rows are buttons that show a stage below."""
    limit, scale = limit_of(estimate), max(estimate.capacity or 0, estimate.peak, 1)
    rows = []
    for at, stage in enumerate(estimate.stages):
        free = free_on(estimate, stage)
        moment, more = worst_moment(estimate, stage)
        over = stage.judged.verdict is Verdict.DOES_NOT_FIT
        cells = (
            tag("span", who(estimate, stage), class_="name"),
            bar(shares(stage), scale, limit),
            tag("span", size(stage.headline), class_="figure bad" if over else "figure"),
            tag("span", _left(free, moment if more else ""), class_="figure faint"),
        )
        hint = (
            f"{modules_text(stage.modules)}; ranks {ranks_text(stage.ranks)}; {elements(stage.parameters)} parameters"
        )
        named: dict[str, Any] = {"class_": "stage", "title": hint}
        if chosen:
            pressed = "true" if at == estimate.peak_stage else "false"
            rows.append(tag("button", *cells, type="button", data_stage=str(at), aria_pressed=pressed, **named))
        else:
            rows.append(tag("div", *cells, **named))
    return tag("div", *rows, class_="stages")


def _left(free: int | None, moment: str) -> str:
    """``22.93 GiB free``, and in which ``moment`` where that is not an iteration."""
    if free is None:
        return ""
    when = f" in {moment}" if moment else ""
    return f"{size(free)} free{when}" if free >= 0 else f"{size(-free)} over{when}"


def readings(estimate: Estimate) -> Markup:
    """The four readings of the stage that needs most."""
    worst = estimate.stages[estimate.peak_stage]
    cards = []
    for name in READINGS:
        count: int | None = getattr(worst, name)
        chief = "card chief" if name == reading_of(worst) else "card"
        cards.append(
            tag(
                "div",
                tag("dt", name),
                tag("dd", "?" if count is None else size(count)),
                tag("p", _MEANS[name]),
                class_=chief,
            )
        )
    return tag("dl", *cards, class_="cards")


_MEANS = {
    "requested": "live tensors, each rounded up to 512 B",
    "allocated": "torch.cuda.max_memory_allocated",
    "reserved": "segments that the allocator took",
    "device": "what nvidia-smi shows",
}


def breakdown(estimate: Estimate, stage: StageEstimate) -> Markup:
    """The categories of a stage's headline; they sum to each reading."""
    unit, rows = unit_of(estimate), []
    for entry in ledger(stage):
        span = span_words(entry.span, unit)
        if entry.size is None:
            rows.append([entry.label, "?", ""])
            continue
        figures = unit.figure(entry.size), percent(entry.size, stage.headline)
        if entry.colour:
            swatch = tag("i", style=f"background:{entry.colour}", class_="swatch")
            rows.append([tag("span", swatch, entry.label, span), *figures])
        else:
            rows.append([tag("b", word) for word in (f"{entry.label}{span}", *figures)])
    return table(["for", unit.name, "%"], rows, ("wraps", "figure", "figure"))


def every_reading(estimate: Estimate) -> Markup:
    """Readings and moments of all stages."""
    unit, word = unit_of(estimate), stage_word(estimate.plan)
    rows: list[list[Child]] = []
    for stage in estimate.stages:
        known = [getattr(stage, name) for name in READINGS]
        moments = [stage.moments.get(name) for name in MOMENTS]
        rows.append([
            str(stage.stage), ranks_text(stage.ranks), modules_text(stage.modules), elements(stage.parameters),
            unit.figure(stage.static), *map(unit.figure, known), *map(unit.figure, moments), str(stage.in_flight),
        ])  # fmt: skip
    head: list[Child] = [word, "ranks", "modules", "params", "static", *READINGS, *MOMENTS, "in flight"]
    caption = f"{MEANING[unit.name]}; most loaded rank; static: between iterations; moments: the peak of each"
    return join(
        tag("p", caption, class_="faint"), table(head, rows, [None, None, "wraps", *("figure" for _ in head[3:])])
    )


def notices(found: Sequence[Notice], assumptions: Sequence[str]) -> Iterator[Markup]:
    """What the reader is told, and what was assumed."""
    if found:
        entries = [join(tag("dt", one.code), tag("dd", one.message)) for one in found]
        yield section("To know", tag("dl", *entries, class_="entries"))
    if assumptions:
        yield section("Assumed", tag("ul", *(tag("li", one) for one in assumptions)))


def plan_part(plan: Plan) -> Markup:
    """The whole plan, section by section."""
    content: dict[str, Any] = plan.model_dump(mode="json")
    top = {name: value for name, value in content.items() if not isinstance(value, dict) or name in _FLAT}
    read = framework(plan.framework).supports.sections
    own = {name for name in content if name in read or not issubclass(sections().get(name, Plan), FrameworkSection)}
    parts = {"": top, **{name: value for name, value in content.items() if name in own and name not in top}}
    blocks = [
        tag(
            "div",
            tag("h3", name or "plan"),
            tag("dl", *(join(tag("dt", key), tag("dd", _value(value))) for key, value in fields.items())),
        )
        for name, fields in parts.items()
    ]
    return section(
        "The plan", details("every field, defaults filled in", tag("div", *blocks, class_="plan")), id="plan"
    )


_FLAT = ("environment", "device_map")


def _value(value: object) -> str:
    match value:
        case None:
            return "–"
        case bool():
            return "true" if value else "false"
        case dict():
            return ", ".join(f"{key}={item}" for key, item in value.items()) or "–"
        case list():
            return ", ".join(map(str, value)) or "–"
    return str(value)


# -- timelines -----------------------------------------------------------------------------------------


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
