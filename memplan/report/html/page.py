"""The page around an answer: its head, style and scripts, and the data that its charts draw."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

from ... import __version__
from .markup import Child, Markup, tag

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
