"""``memplan estimate --html FILE``.

``memplan suggest-partition --html FILE``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...allocator.timeline import Timeline
from ...plan.notes import FIRST
from ...result import Estimate
from ...search.result import Found, Suggestion
from ..estimate import first_failure, verdict
from ..names import plan_text, size, stage_word
from ..stages import unit_of
from ..suggestion import Answer, suggestion_report
from ..suggestion_words import difference_pieces, layout_pieces, same_layout, time_unit, ways_table
from .markup import Markup, join, section, tag
from .page import converted, page, wide_console
from .stages import (
    TONES,
    breakdown,
    chart_data,
    every_reading,
    legend,
    notices,
    plan_part,
    readings,
    stage_rows,
    verdict_line,
)


def estimate_page(estimate: Estimate, lines: Sequence[Timeline]) -> bytes:
    """The page of ``estimate``, with the timelines of all its stages."""
    title = f"{estimate.plan.model.name}: {verdict(estimate).plain.partition(':')[0]}"
    return page(title, *_parts(estimate), data=chart_data(estimate, lines))


def _parts(estimate: Estimate) -> Iterator[Markup]:
    yield tag("h1", estimate.plan.model.name)
    yield verdict_line(verdict(estimate).plain, TONES[estimate.judged.verdict])
    yield tag("p", plan_text(estimate.plan), class_="faint")
    yield from (tag("p", one.message, class_="faint") for one in estimate.warnings if one.code in FIRST)
    yield from _failed(estimate)
    yield from converted(ways_table(estimate, unit_of(estimate)))
    yield readings(estimate)
    yield from memory_parts(estimate)
    yield from notices([one for one in estimate.warnings if one.code not in FIRST], estimate.assumptions)
    yield plan_part(estimate.plan)


def memory_parts(estimate: Estimate) -> Iterator[Markup]:
    """Stages, one of them over an iteration, its peak, and all readings."""
    several = len(estimate.stages) > 1
    yield section(
        f"{stage_word(estimate.plan).capitalize()}s" if several else "Memory",
        stage_rows(estimate, chosen=several),
        legend(estimate.stages),
    )
    yield section(
        "One iteration",
        tag("p", id="iteration", class_="faint"),
        tag("div", id="timeline", class_="chart"),
        tag("div", id="reading", class_="reading", aria_live="polite"),
    )
    by_category = [
        tag("div", breakdown(estimate, stage), class_="of-stage", data_stage=str(at), hidden=at != estimate.peak_stage)
        for at, stage in enumerate(estimate.stages)
    ]
    both = tag("div", tag("div", *by_category), tag("div", id="contents"), class_="beside")
    yield section("At the peak", tag("p", id="contents-of", class_="faint"), both)
    yield section("Readings and moments", every_reading(estimate))


def _failed(estimate: Estimate) -> Iterator[Markup]:
    """The first request that fails, as PyTorch will say it."""
    line, said = first_failure(estimate) or ("", "")
    if line:
        yield tag("div", tag("p", line), tag("pre", said) if said else None, class_="failure")


def layouts_of(found: Found) -> list[tuple[str, Suggestion]]:
    """Every layout that the answer names, once, with what it is: the recommended one first, then those of the front and
    the alternatives, by their time; then the plan as given, or the closest layout."""
    kept: list[tuple[str, Suggestion]] = []
    others = sorted([*found.front, *found.best[1:]], key=lambda one: one.seconds)
    named = [
        *(("recommended", one) for one in found.best[:1]),
        *(("front" if one in found.front else "", one) for one in others),
    ]
    ends = (("as given", found.given), ("closest", found.closest))
    for kind, one in [*named, *((kind, one) for kind, one in ends if one is not None)]:
        if not any(same_layout(one, other) and one.plan.framework == other.plan.framework for _, other in kept):
            kept.append((kind, one))
    return kept


def suggestion_page(
    answer: Answer, estimate: Callable[[Suggestion], Estimate], lines: Callable[[Estimate], Sequence[Timeline]]
) -> bytes:
    """The page of ``answer``. ``estimate`` is asked for the fullest stage of layouts that the search has not kept the
    stages of, ``lines`` for the timelines of the one that is recommended, or closest."""
    found = answer.found
    layouts = [(kind, one, one.estimate or estimate(one)) for kind, one in layouts_of(found)]
    stated = next((own for _, one, own in layouts if one is (found.best or (found.closest,))[0]), None)
    data = chart_data(stated, lines(stated)) if stated is not None else {}
    parts = list(
        converted(suggestion_report(replace(answer, found=replace(found, front=())), wide_console(), verbose=True))
    )
    first, rest = parts[0], parts[1:]
    assumed = rest.index(_ASSUMED) if _ASSUMED in rest else len(rest)
    shown: list[Markup] = [tag("h1", found.base.model.name), tag("div", first, class_="verdict")]
    if layouts:
        data["front"] = {"points": [_point(at, kind, one, found) for at, (kind, one, _) in enumerate(layouts)]}
    shown += [tag("div", *rest[:assumed], class_="report")]
    if layouts:
        shown.append(_front(layouts, found))
    if stated is not None:
        title = "The recommended layout" if found.best else "The closest layout"
        shown += [
            section(title, tag("p", plan_text(stated.plan), class_="faint")),
            *memory_parts(stated),
        ]
    shown.append(tag("div", *rest[assumed:], class_="report"))  # long, and seldom asked for
    if stated is not None:
        shown.append(plan_part(stated.plan))
    return page(f"{found.base.model.name}: layouts", *shown, data=data)


_ASSUMED = tag("h2", "Assumed")

Layout = tuple[str, Suggestion, Estimate]


def _words(one: Suggestion, found: Found) -> str:
    first = found.best[0] if found.best else one
    same = one is first or one.plan.framework != first.plan.framework
    return " · ".join(layout_pieces(one) if same else difference_pieces(one, first))


def _point(at: int, kind: str, one: Suggestion, found: Found) -> dict[str, Any]:
    kinds = {"recommended": "recommended", "as given": "given"}
    return {
        "layout": at,
        "kind": kinds.get(kind, "front") if one.fits else "over",
        "name": str(at + 1),
        "bytes": one.requested,
        "seconds": one.seconds,
        "words": f"{time_unit(one.seconds).text(one.seconds)}, {size(one.requested)} of tensors · {_words(one, found)}",
    }


def _front(layouts: Sequence[Layout], found: Found) -> Markup:
    return section(
        "Memory against time",
        tag(
            "p",
            "Each point is a layout; a click opens it below. Tensors: the bytes of all tensors that are alive at "
            "the peak of the fullest stage. Device: tensors with the allocator's blocks and cache, the CUDA context "
            "and NCCL, as nvidia-smi shows it; this must fit.",
            class_="faint",
        ),
        tag("div", id="front", class_="chart"),
        tag("p", id="front-reading", class_="faint", aria_live="polite"),
        *(_layout(at, *layout, found) for at, layout in enumerate(layouts)),
    )


def _layout(at: int, kind: str, one: Suggestion, own: Estimate, found: Found) -> Markup:
    """A line that opens the layout's verdict, stages and categories."""
    mark = tag("span", kind, class_="marker") if kind and kind != "front" else None
    words = tag("span", f"{at + 1}. ", _words(one, found), mark)
    device = own.stages[own.peak_stage].device
    known = size(device) if device is not None else "?"
    figures = time_unit(one.seconds).text(one.seconds), f"{size(one.requested)} tensors", f"{known} device"
    summary = tag("summary", *(tag("span", figure, class_="figure") for figure in figures), words)
    return tag("details", summary, tag("div", *_opened(own)), class_="layout", id=f"layout-{at}")


def _opened(own: Estimate) -> Iterator[Markup]:
    word, colon, rest = verdict(own).plain.partition(": ")
    yield tag("p", tag("b", word, class_=TONES[own.judged.verdict]), f"{colon}{rest}")
    yield tag("p", plan_text(own.plan), class_="faint")
    yield stage_rows(own, chosen=False)
    yield join(legend(own.stages), breakdown(own, own.stages[own.peak_stage]))
