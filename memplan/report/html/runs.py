"""``memplan runs --html FILE`` and ``memplan validate --html FILE``: measured beside estimated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...records.differences import Difference, differences
from ...records.record import Record
from ..names import size
from ..runs import Row, model_words, part_words, run_report, runs_table
from .markup import Markup, section, tag
from .page import page
from .reports import converted, wide_console

MOST = 200
"""Runs of a page that are told in full, the newest first."""


def run_page(record: Record) -> bytes:
    """The page of one run."""
    return page(f"{model_words(record)}: {record.verdict}", tag("h1", model_words(record)), *_run(record), data={})


def runs_page(rows: Sequence[Row], ids: Sequence[str]) -> bytes:
    """The page of all of ``rows``, each run with its own part."""
    table = converted([runs_table(rows, ids, wide_console())])
    records = [row for row in rows if isinstance(row, Record)][:MOST]
    parts = [
        tag(
            "details",
            tag("summary", f"{record.id[:6]} · {model_words(record)} ", tag("span", record.verdict, class_="marker")),
            tag("div", *_run(record)),
        )
        for record in records
    ]
    return page("Runs", tag("h1", "Runs"), *table, section("Measured beside estimated", *parts), data={})


def _run(record: Record) -> Iterator[Markup]:
    verdict, *rest = converted(run_report(record))
    yield tag("div", verdict, class_="verdict")
    yield from _bars(differences(record.estimate, record.run))
    yield tag("div", *rest, class_="report")


def _bars(found: Sequence[Difference]) -> Iterator[Markup]:
    """Of each stage every reading that was measured, with the estimate's below it."""
    if not found:
        return
    scale = max(max(one.measured, one.estimated or 0) for one in found) or 1
    rows = []
    for one in found:
        name = f"stage {one.stage}, {one.reading}"
        bars = [_one("measured", one.measured, scale)]
        bars += [] if one.estimated is None else [_one("estimated", one.estimated, scale)]
        rows.append(
            tag(
                "div",
                tag("span", name, class_="name"),
                tag("div", *bars),
                tag("span", part_words(one), class_="figure"),
                class_="pair",
            )
        )
    yield section("Measured and estimated", tag("div", *rows, class_="pairs"))


def _one(what: str, count: int, scale: int) -> Markup:
    piece = tag("i", style=f"width:{100 * count / scale:.3f}%", class_=what)
    return tag(
        "div", tag("span", piece, class_="bar"), tag("span", f"{what} {size(count)}", class_="faint"), class_="one"
    )
