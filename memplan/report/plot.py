"""``--plot``: a search's memory against time, or an estimate's stages, as SVG or PNG, drawn by matplotlib."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from textwrap import wrap
from typing import Any

from ..allocator.timeline import Timeline
from ..plan.errors import LackingError, wrong_at
from ..result import Estimate
from ..search.result import Found, Suggestion
from ..tape.events import Category
from .names import GIB, stage_word
from .printing import COLOURS, shares
from .stages import limit_of, reading_of
from .suggestion_words import TimeUnit, difference_pieces, layout_pieces, time_unit

FORMATS = ("svg", "png")
KEYED = 14
"""Points that the key has room for."""
KEY_WIDTH = 54
"""Characters after which a line of the key wraps."""
_INK, _FRONT, _BEST, _GIVEN, _OVER = "#333a44", "#4e8fce", "#2e8b57", "#e8a04c", "#c94f4f"


def format_of(path: Path) -> str:
    """``svg`` or ``png``; ``PlanError`` for any other ending."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in FORMATS:
        raise wrong_at("--plot", f"{path} must end in .svg or .png")
    return ending


def check_matplotlib() -> None:
    """``LackingError`` without it. It says nothing of caches that it cannot keep."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        import_module("matplotlib")
    except ImportError:
        raise LackingError("--plot needs matplotlib, which is not installed: pip install 'memplan[plot]'") from None


def front_picture(found: Found, form: str) -> bytes:
    """The front of ``found``, the recommended layout, the plan as given, and how much a GPU has."""

    def draw(axes: Any, key: Any) -> None:
        _draw(axes, found)
        _key(key, found)

    return _picture(draw, (13, 8), form)


def estimate_picture(estimate: Estimate, line: Timeline, form: str) -> bytes:
    """The stages of ``estimate`` by category, and one of them over an iteration."""

    def draw(axes: Any, over: Any) -> None:
        _stages(axes, estimate)
        _iteration(over, estimate, line)

    return _picture(draw, (9, 12), form)


def _picture(draw: Callable[[Any, Any], None], widths: tuple[int, int], form: str) -> bytes:
    """Two axes side by side, as ``draw`` fills them."""
    matplotlib = import_module("matplotlib")
    figure_module = import_module("matplotlib.figure")
    style = {"svg.hashsalt": "memplan", "svg.fonttype": "none", "font.size": 9, "text.color": _INK}
    style |= {"axes.labelcolor": _INK, "axes.edgecolor": "#b8bec7", "xtick.color": _INK, "ytick.color": _INK}
    with matplotlib.rc_context(style):
        figure = figure_module.Figure(figsize=(11, 5.6), layout="constrained")
        draw(*figure.subplots(1, 2, width_ratios=widths))
        out = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else {"Software": "memplan"}
        figure.savefig(out, format=form, dpi=160, metadata=metadata)
    return out.getvalue()


def _plain(axes: Any, title: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#e6e9ee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize=10)


def _stages(axes: Any, estimate: Estimate) -> None:
    """A bar for each stage, and what may be used."""
    _plain(axes, f"{estimate.plan.model.name}: {reading_of(estimate.stages[estimate.peak_stage])} memory by stage")
    labels: dict[str, Any] = {}
    for stage in estimate.stages:
        left = 0.0
        for part in shares(stage):
            bar = axes.barh(stage.stage, part.size / GIB, left=left, color=part.colour, height=0.8)
            labels.setdefault(part.label, bar)
            left += part.size / GIB
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    axes.set_ylabel(stage_word(estimate.plan))
    axes.yaxis.get_major_locator().set_params(integer=True)
    limit = limit_of(estimate)
    if limit is not None:
        axes.axvline(limit / GIB, color=_OVER, linestyle="--", linewidth=1.1)
    axes.legend(
        labels.values(), labels, frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3
    )


def _iteration(axes: Any, estimate: Estimate, line: Timeline) -> None:
    """Live tensors of one stage, event by event."""
    of = f" of {stage_word(estimate.plan)} {line.stage}" if len(estimate.stages) > 1 else ""
    _plain(axes, f"live tensors{of}, whenever one begins or ends")
    used = [one for one in Category if any(point.by[one] for point in line.points)]
    rows = [[point.by[one] / GIB for point in line.points] for one in used]
    axes.stackplot([point.event for point in line.points], rows, colors=[COLOURS[one] for one in used], step="pre")
    axes.set_xlabel("event of the iteration")
    axes.set_ylabel("GiB")
    axes.margins(x=0)


def _draw(axes: Any, found: Found) -> None:
    points = _shown(found)
    unit = time_unit(points[0].seconds)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e9ee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("tensors of the fullest stage (GiB)")
    axes.set_ylabel(f"step ({unit.name})")
    axes.set_title(_title(found), loc="left", fontsize=10)
    xs, ys = [_x(one) for one in points], [one.seconds / unit.seconds for one in points]
    axes.step(xs, ys, where="pre", color=_FRONT, linewidth=1.2, alpha=0.6)
    axes.scatter(xs, ys, color=_FRONT, s=28, zorder=3, label="nothing needs less memory and less time")
    if found.best:
        _mark(axes, found.best[0], unit, _BEST, "*", 190, "recommended")
    given = [] if found.given is None else [found.given]
    for one in given:
        colour, label = (_GIVEN, "as given") if one.fits else (_OVER, "as given: too large")
        _mark(axes, one, unit, colour, "s", 42, label)
    for number, one in _numbered(points):
        at = (_x(one), one.seconds / unit.seconds)
        axes.annotate(str(number), at, xytext=(-4, -6), textcoords="offset points", ha="right", va="top", fontsize=8)
    _memory_axis(axes, found, [*xs, *map(_x, given)])
    heights = [*ys, *(one.seconds / unit.seconds for one in given)]
    spread = max(heights) - min(heights) or max(heights)
    axes.set_ylim(bottom=max(0.0, min(heights) - 0.12 * spread), top=max(heights) + 0.2 * spread)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)


def _memory_axis(axes: Any, found: Found, xs: Sequence[float]) -> None:
    """Logarithmic, as the front's steps are parts of what came before; with a line at what a GPU may need. Tensors
    are not all that a GPU holds, so the front ends before it."""
    ticker = import_module("matplotlib.ticker")
    limit = found.limit / GIB
    least, most = 0.85 * min([limit, *xs]), 1.12 * max([limit, *xs])
    axes.set_xscale("log", base=2)
    axes.set_xlim(least, most)
    parts = (1.0, 1.25, 1.5, 1.75) if most < 4 * least else (1.0, 1.5)
    axes.xaxis.set_major_locator(ticker.LogLocator(base=2, subs=parts, numticks=24))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.axvline(limit, color=_OVER, linestyle="--", linewidth=1.1)
    text = f"{found.base.hardware.gpu}: {limit:,.1f} GiB" + (" less headroom" if found.capacity != found.limit else "")
    axes.annotate(
        text,
        (limit, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-4, -4),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="top",
        fontsize=8,
        color=_OVER,
    )


def _key(axes: Any, found: Found) -> None:
    """What the numbers are: the fastest layout whole, of the others what they do differently."""
    axes.set_axis_off()
    points = _shown(found)
    unit = time_unit(points[0].seconds)
    lines: list[str] = []
    for number, one in _numbered(points):
        pieces = layout_pieces(one) if number == 1 else difference_pieces(one, points[0])
        lines.append(f"{number:>2}  {unit.text(one.seconds)}, {_x(one):.2f} GiB")
        lines += [f"      {line}" for line in wrap(" · ".join(pieces), KEY_WIDTH)]
    axes.text(0.0, 1.0, "\n".join(lines), va="top", fontsize=8, linespacing=1.35, transform=axes.transAxes)


def _numbered(points: Sequence[Suggestion]) -> list[tuple[int, Suggestion]]:
    """Those that the key names, numbered along the front; ends included."""
    step = max(1, -(-len(points) // KEYED))
    return [(at + 1, one) for at, one in enumerate(points) if at % step == 0 or at == len(points) - 1]


def _title(found: Found) -> str:
    plan = found.base
    return f"{plan.model.name} · {plan.framework} · {plan.hardware.gpus or 1:,} × {plan.hardware.gpu}"


def _shown(found: Found) -> Sequence[Suggestion]:
    return found.front or [one for one in (found.closest,) if one is not None]


def _x(one: Suggestion) -> float:
    return one.requested / GIB


def _mark(axes: Any, one: Suggestion, unit: TimeUnit, colour: str, marker: str, area: int, label: str) -> None:
    axes.scatter([_x(one)], [one.seconds / unit.seconds], color=colour, marker=marker, s=area, zorder=4, label=label)


__all__ = ["check_matplotlib", "estimate_picture", "format_of", "front_picture"]
