"""The page around an answer: its head, style and scripts, and the data that its charts draw.

``memplan runs --html FILE`` and ``memplan validate --html FILE``: measured beside estimated.

A terminal's report as HTML, part by part, so that a page says what the terminal says, in the same words.
"""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ... import __version__
from ...records.record import Difference, Record, differences
from ..names import size
from ..printing import BAD, CAUTION, FAINT, GOOD, Breakable, Pieces
from ..runs import Row, model_words, part_words, run_report, runs_table
from .markup import Child, Markup, section, table, tag

CLASSES = {GOOD: "good", BAD: "bad", CAUTION: "caution", FAINT: "faint", "bold": "strong"}


def wide_console() -> Console:
    """For which reports shorten nothing, and draw no bars."""
    return Console(file=io.StringIO(), width=1_000, no_color=True, highlight=False, markup=False, emoji=False)


def converted(parts: Iterable[RenderableType]) -> Iterator[Markup]:
    """``parts`` of a report: texts as paragraphs, those that begin in bold as headings, tables as tables."""
    for part in parts:
        match part:
            case Padding():
                yield from converted([part.renderable])
            case Table():
                yield _table(part)
            case Text() if part.plain and _is_bold(part):
                title, _, rest = part.plain.partition(": ")
                yield tag("h2", title)
                yield tag("p", rest, class_="faint") if rest else Markup()
            case _:
                shown = cell(part)
                if shown:
                    yield tag("p", shown, class_=_class(part))


def _is_bold(text: Text) -> bool:
    """All of it, or its beginning; a verdict's word has a colour besides."""
    return text.style == "bold" or any(span.start == 0 and span.style == "bold" for span in text.spans)


def _class(part: RenderableType) -> str | None:
    style = part.style if isinstance(part, Text | Pieces) else ""
    return CLASSES.get(str(style))


def cell(part: RenderableType) -> Markup:
    """What a cell holds."""
    match part:
        case Breakable():
            return cell(part.text)
        case Pieces():
            return Markup(Markup(part.separator).join(cell(piece) for piece in part.pieces))
        case Text():
            return _styled(part)
    return Markup() if not isinstance(part, str) else tag("span", part) if part else Markup()


def _styled(part: Text) -> Markup:
    """Stretches of one style after the other."""
    ends = sorted({0, len(part), *(end for span in part.spans for end in (span.start, min(span.end, len(part))))})
    found: list[Child] = []
    for start, end in pairwise(ends):
        styles = [str(part.style), *(str(span.style) for span in part.spans if span.start <= start < span.end)]
        classes = dict.fromkeys(CLASSES[word] for style in styles for word in style.split() if word in CLASSES)
        found.append(tag("span", part.plain[start:end], class_=" ".join(classes) or None))
    return Markup("".join(filter(None, found)))


def _table(part: Table) -> Markup:
    columns = [column for column in part.columns if column.header or any(column.cells)]
    kinds = [
        "figure" if column.justify == "right" else None if column.no_wrap else "wraps" if column.header else "mark"
        for column in columns
    ]
    cells = zip(*(list(column.cells) for column in columns), strict=True)
    rows: list[list[Child]] = [[cell(one) for one in row] for row in cells]
    head: list[Child] = [cell(column.header) for column in columns] if part.show_header else []
    return table(head, rows, kinds)


# -- page ----------------------------------------------------------------------------------------------


_ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("uPlot.iife.min.js", "page.js")
STYLES = ("uPlot.min.css", "page.css")


def page(title: str, *parts: Child, data: dict[str, Any]) -> bytes:
    """The whole file. Nothing in it runs but the two scripts, and it loads nothing: a policy says so to the browser, in
    case a text should slip through as markup."""
    scripts = [_asset(name) for name in SCRIPTS]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
        tag("title", title),
        *(tag("style", _asset(name)) for name in STYLES),
    )
    switch = tag("button", "light or dark", type="button", id="theme")
    body = tag(
        "body",
        tag("header", tag("span", "memplan", class_="name"), switch),
        tag("main", *parts),
        tag("footer", f"memplan {__version__}"),
        tag("script", _as_data(data), type="application/json", id="data"),
        *(tag("script", script) for script in scripts),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n".encode()


def _asset(name: str) -> Markup:
    return Markup((_ASSETS / name).read_text(encoding="utf-8").strip())


def _policy(scripts: list[Markup]) -> str:
    digests = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    return f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def _as_data(data: dict[str, Any]) -> Markup:
    """JSON that ends no element: a text in it may be ``</script>``."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


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
