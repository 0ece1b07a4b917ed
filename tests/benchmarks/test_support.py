"""``docs/support.md`` has the tables that its script writes."""

from __future__ import annotations

from benchmarks import support


def test_page_is_up_to_date() -> None:
    written = support.PAGE.read_text(encoding="utf-8")
    assert written == support.page(written), "python benchmarks/support.py"
