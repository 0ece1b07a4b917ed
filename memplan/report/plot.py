"""``memplan suggest-partition --plot``: memory against time as SVG or PNG, drawn by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..plan.errors import ABSENT, LackingError, Origin, PlanError
from ..search.result import Found, Suggestion
from .suggestion_words import TimeUnit, difference_pieces, layout_pieces, time_unit
from .units import GIB

FORMATS = ("svg", "png")
LABELLED = 8
"""Points with a label of their own."""
_INK, _FRONT, _BEST, _GIVEN, _OVER = "#333a44", "#4e8fce", "#2e8b57", "#e8a04c", "#c94f4f"


def format_of(path: Path) -> str:
    """``svg`` or ``png``; ``PlanError`` for any other ending."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in FORMATS:
        raise PlanError("", ABSENT, f"{path} must end in .svg or .png", origin=Origin("--plot"))
    return ending


def check_matplotlib() -> None:
    """``LackingError`` without it."""
    try:
        import_module("matplotlib")
    except ImportError:
        raise LackingError("--plot needs matplotlib, which is not installed: pip install 'memplan[plot]'") from None


def front_picture(found: Found, form: str) -> bytes:
    """The front of ``found``, the recommended layout, the plan as given, and how much a GPU has."""
    matplotlib = import_module("matplotlib")
    figure_module = import_module("matplotlib.figure")
    style = {"svg.hashsalt": "memplan", "svg.fonttype": "none", "font.size": 9, "text.color": _INK}
    style |= {"axes.labelcolor": _INK, "axes.edgecolor": "#b8bec7", "xtick.color": _INK, "ytick.color": _INK}
    with matplotlib.rc_context(style):
        figure = figure_module.Figure(figsize=(9, 5.4), layout="constrained")
        _draw(figure.subplots(), found)
        out = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else {"Software": "memplan"}
        figure.savefig(out, format=form, dpi=160, metadata=metadata)
    return out.getvalue()


def _draw(axes: Any, found: Found) -> None:
    points = _shown(found)
    unit = time_unit(points[0].seconds)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e9ee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("memory that the tensors of the fullest stage take (GiB)")
    axes.set_ylabel(f"step ({unit.name})")
    axes.set_title(_title(found), loc="left", fontsize=10)
    xs, ys = [_x(one) for one in points], [one.seconds / unit.seconds for one in points]
    axes.step(xs, ys, where="pre", color=_FRONT, linewidth=1.2, alpha=0.6)
    axes.scatter(xs, ys, color=_FRONT, s=28, zorder=3, label="no other needs less memory and less time")
    if found.best:
        _mark(axes, found.best[0], unit, _BEST, "*", 190, "recommended")
    if found.given is not None:
        fits = found.given.needs <= found.limit
        _mark(
            axes, found.given, unit, _GIVEN if fits else _OVER, "s", 42, "as given" if fits else "as given: too large"
        )
    _capacity(axes, found, [*xs, *([_x(found.given)] if found.given is not None else [])])
    _labels(axes, points, unit)
    axes.set_ylim(bottom=0, top=1.12 * max([*ys, *_given_y(found, unit)]))
    axes.legend(frameon=False, loc="best")


def _title(found: Found) -> str:
    plan = found.base
    return f"{plan.model.name} · {plan.framework} · {plan.hardware.gpus or 1:,} × {plan.hardware.gpu}"


def _shown(found: Found) -> Sequence[Suggestion]:
    return found.front or [one for one in (found.closest,) if one is not None]


def _given_y(found: Found, unit: TimeUnit) -> list[float]:
    return [] if found.given is None else [found.given.seconds / unit.seconds]


def _x(one: Suggestion) -> float:
    return one.requested / GIB


def _mark(axes: Any, one: Suggestion, unit: TimeUnit, colour: str, marker: str, area: int, label: str) -> None:
    axes.scatter([_x(one)], [one.seconds / unit.seconds], color=colour, marker=marker, s=area, zorder=4, label=label)


def _capacity(axes: Any, found: Found, xs: Sequence[float]) -> None:
    """A line at what a GPU may need. Tensors are not all that a GPU holds, so the front ends before it."""
    limit = found.limit / GIB
    axes.axvline(limit, color=_OVER, linestyle="--", linewidth=1.1)
    text = f"{found.base.hardware.gpu}: {limit:,.1f} GiB"
    text += " less headroom" if found.capacity != found.limit else ""
    axes.annotate(
        text,
        (limit, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -4),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="top",
        color=_OVER,
    )
    axes.set_xlim(0, 1.12 * max([limit, *xs]))


def _labels(axes: Any, points: Sequence[Suggestion], unit: TimeUnit) -> None:
    """What each point does differently from the fastest, on alternating sides so that neighbours stay readable."""
    step = max(1, -(-len(points) // LABELLED))
    for at, one in enumerate(points):
        if at % step and at != len(points) - 1:
            continue
        pieces = layout_pieces(one) if at == 0 else difference_pieces(one, points[0])
        text = " · ".join(pieces[:3]) + (" …" if len(pieces) > 3 else "")
        axes.annotate(
            text,
            (_x(one), one.seconds / unit.seconds),
            xytext=(6, 7 if at % 2 == 0 else -13),
            textcoords="offset points",
            fontsize=7.5,
            color=_INK,
        )


__all__ = ["check_matplotlib", "format_of", "front_picture"]
