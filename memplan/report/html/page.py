"""The page around an answer: its head, style and scripts, and the data that its charts draw.

``memplan runs --html FILE`` and ``memplan validate --html FILE``: measured beside estimated.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from ... import __version__
from ...records.record import Difference, Record, differences
from ..names import size
from ..runs import Row, model_words, part_words, run_report, runs_table
from .markup import Child, Markup, section, tag
from .reports import converted, wide_console

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
