"""HTML as values, in which every text is escaped that is not markup already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ...plan.errors import lines

VOID = frozenset({"br", "input", "meta"})
"""Elements without an end."""


class Markup(str):
    """HTML; any other text is escaped where it becomes part of some."""

    __slots__ = ()


Child = str | None
"""Text or markup; ``None`` is nothing."""


def text(value: str) -> Markup:
    """``value`` as text, its control characters shown escaped."""
    return value if isinstance(value, Markup) else Markup(escape(lines(value)))


def join(*children: Child) -> Markup:
    """One behind the other."""
    return Markup("".join(text(child) for child in children if child is not None))


def tag(element: str, /, *children: Child, **attributes: str | bool | None) -> Markup:
    """``<name …>children</name>``. ``class_`` is the attribute ``class``, ``data_stage`` is ``data-stage``; one that is
    ``True`` has no value, one that is ``False`` or ``None`` is left out."""
    parts = [element]
    for attribute, value in attributes.items():
        if value is not None and value is not False:
            written = attribute.rstrip("_").replace("_", "-")
            parts.append(written if value is True else f'{written}="{escape(lines(value), quote=True)}"')
    start = f"<{' '.join(parts)}>"
    return Markup(start) if element in VOID else Markup(f"{start}{join(*children)}</{element}>")


def table(head: Sequence[Child], rows: Iterable[Sequence[Child]], kinds: Sequence[str | None] = ()) -> Markup:
    """A table that scrolls where it is wider than the page. ``kinds`` of columns: ``figure`` (to the right), ``wraps``,
    or ``None``."""

    def row(cells: Sequence[Child], element: str) -> Markup:
        own = (*kinds, *(None for _ in cells))
        return tag("tr", *(tag(element, one, class_=kind) for one, kind in zip(cells, own, strict=False)))

    body = tag("tbody", *(row(cells, "td") for cells in rows))
    shown = tag("table", tag("thead", row(head, "th")) if head else None, body)
    return tag("div", shown, class_="scrolls", tabindex="0")


def section(title: str, *children: Child, id: str | None = None) -> Markup:
    return tag("section", tag("h2", title), *children, id=id)


def details(summary: Child, *children: Child, **attributes: str | bool | None) -> Markup:
    """What opens with a click."""
    return tag("details", tag("summary", summary), *children, **attributes)
