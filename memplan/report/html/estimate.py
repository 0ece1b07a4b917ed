"""``memplan estimate --html FILE``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...allocator.timeline import Timeline
from ...plan.notes import FIRST
from ...result import Estimate
from ..estimate import first_failure, verdict
from ..names import plan_text, stage_word
from ..stages import unit_of
from ..ways_out import ways_table
from .markup import Markup, section, tag
from .page import page
from .reports import converted
from .stages import (
    TONES,
    breakdown,
    every_reading,
    legend,
    notices,
    plan_part,
    readings,
    stage_rows,
    verdict_line,
)
from .timelines import chart_data


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
