"""The ways out of a plan that does not fit, as ``estimate`` ends with them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ..frameworks import framework
from ..result import Estimate, WayOut
from .names import Unit
from .printing import FAINT, folded, plain_table, right, spaced
from .suggestion_words import change_percent, verdict_words


def ways_table(estimate: Estimate, unit: Unit) -> Iterator[RenderableType]:
    """Each with what it gains and what it costs; nothing where there is none."""
    ways = estimate.ways_out
    if not ways:
        return
    told = "cheapest first" if ways[0].helps else "none is enough; what gains most"
    yield from spaced(Text.assemble(("Ways out", "bold"), (f": {told}; peaks of the worst moment", FAINT)))
    table = plain_table(folded("change"), folded(), *map(right, (f"peak {unit.name}", "gained")), folded("costs"))
    for way in ways:
        row = verdict_words(way.judged), unit.figure(way.needs), unit.figure(way.gained), costs(way)
        table.add_row(Text(way.what), *row)
    yield table
    yield Text("Flags of each, beside the plan's own:", FAINT)
    for way in ways:
        yield Padding(Text(way.flags), (0, 0, 0, 2))
    if framework(estimate.plan.framework).search.searched(estimate.plan):
        yield Text("memplan suggest-partition searches all layouts.", FAINT)


def costs(way: WayOut) -> str:
    """``+29 % time; adapters of rank 16 alone are trained``, ``3 % less time``, or ``5.4 × the time``."""
    if way.slower is None:
        time = ["time not known"]
    elif way.slower >= 1:
        time = [f"{1 + way.slower:.{1 if way.slower < 9 else 0}f} × the time"]
    elif round(100 * way.slower) < 0:
        time = [f"{change_percent(1 + way.slower, 1).lstrip('−')} less time"]
    else:
        time = [f"{change_percent(1 + way.slower, 1)} time"] if round(100 * way.slower) else ["no time"]
    return "; ".join([*time, *([way.costs] if way.costs else [])])
