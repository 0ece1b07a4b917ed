"""A layout in words: its sizes, its cut, and what another one does differently.

The changes that help a plan that does not fit, as ``estimate`` ends with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ..frameworks import framework
from ..plan.checks import listed
from ..plan.plan import Plan
from ..result import Estimate, Judged, Verdict, WayOut
from ..search.cuts import StageLayers
from ..search.point import Recomputing
from ..search.result import Suggestion
from ..values import dataclass
from .names import DASH, MINUS, Unit, size
from .printing import BAD, CAUTION, DOT, FAINT, GOOD, folded, plain_table, right, spaced

SIZES = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp")


def layout_words(suggestion: Suggestion) -> str:
    """``tp 4 · pp 32 · mbs 2 · full recompute``."""
    return DOT.join(layout_pieces(suggestion))


def layout_pieces(suggestion: Suggestion) -> list[str]:
    """What a layout is, piece by piece; sizes of one are left out."""
    point, own = suggestion.point, framework(suggestion.plan.framework)
    parts = [f"{name} {getattr(point, name)}" for name in _sizes(suggestion) if getattr(point, name) > 1]
    parts += [f"etp {point.etp}"] if _divides_experts(suggestion) and point.etp == 1 else []
    parts += [own.zero_words(point.zero)] if point.zero else []
    parts += [f"mbs {point.mbs}", recompute_words(point.recompute, point.vpp)]
    return [*([] if parts[:-2] else [_alone(suggestion)]), *parts, *(one.label for one in point.extras)]


def gpus_words(plan: Plan) -> str:
    return _plural(plan.hardware.gpus or 1, "GPU")


def _alone(suggestion: Suggestion) -> str:
    cut = suggestion.cut
    return _plural(len(cut), "device") if _is_one_process(suggestion) and cut else "no parallelism"


def _sizes(suggestion: Suggestion) -> tuple[str, ...]:
    """Devices of a map are one replica, whatever its batch is multiplied by."""
    return () if _is_one_process(suggestion) else SIZES


def _divides_experts(suggestion: Suggestion) -> bool:
    """It says how, where experts need not be divided like the layers around them."""
    return suggestion.point.tp > 1 and suggestion.plan.model.experts > 0


def _is_one_process(suggestion: Suggestion) -> bool:
    """Its devices are one process's."""
    return framework(suggestion.plan.framework).supports.several_gpus_of_a_process


def recompute_words(recompute: Recomputing, vpp: int = 1) -> str:
    if recompute.mode == "none":
        return "no recompute"
    if recompute.mode == "full" and recompute.method == "block" and recompute.layers is not None:
        return f"full recompute of {_plural(recompute.layers, 'layer')} of each {'chunk' if vpp > 1 else 'stage'}"
    if recompute.modules and recompute.modules != ("core_attn",):
        return f"recompute of {listed(recompute.modules, 'and')}"
    return f"{recompute.mode} recompute"


def cut_words(cut: StageLayers) -> str:
    """Layers of each stage, equal neighbours together, chunks of a stage joined: ``1, 2 ×30, 1`` or ``2+2 ×7, 2+1``."""
    texts = ("+".join(str(chunk.layers) for chunk in stage) for stage in cut)
    runs = [(text, len(list(same))) for text, same in groupby(texts)]
    return ", ".join(text if count == 1 else f"{text} ×{count}" for text, count in runs)


def same_layout(one: Suggestion, other: Suggestion) -> bool:
    return next(_differences(one, other), None) is None


def difference_pieces(other: Suggestion, than: Suggestion) -> list[str]:
    """What ``other`` does that ``than`` does not: ``mbs 4``, ``no recompute``."""
    return list(_differences(other, than)) or ["the same layout"]


def _differences(other: Suggestion, than: Suggestion) -> Iterator[str]:
    mine, theirs, own = other.point, than.point, framework(other.plan.framework)
    if other.plan.hardware.gpus != than.plan.hardware.gpus and other.plan.hardware.gpus is not None:
        yield gpus_words(other.plan)
    for name in _sizes(other):
        if getattr(mine, name) != getattr(theirs, name):
            yield f"{name} {getattr(mine, name)}"
    sharded, other_sharded = (one.plan.layout.sequence_parallel for one in (other, than))
    if mine.tp > 1 and theirs.tp > 1 and sharded != other_sharded and own.supports.sequence_parallel:
        yield f"{'with' if sharded else 'without'} sequence parallelism"
    if mine.zero != theirs.zero:
        yield own.zero_words(mine.zero)
    if mine.mbs != theirs.mbs:
        yield f"mbs {mine.mbs}"
    if recompute_words(mine.recompute) != recompute_words(theirs.recompute):
        yield recompute_words(mine.recompute, mine.vpp)
    new = [extra for extra in mine.extras if extra not in theirs.extras]
    yield from (extra.label for extra in new)
    replaced = {path for extra in new for path, _ in extra.fields}
    for extra in theirs.extras:
        kept = extra in mine.extras or _has(other.plan, extra.fields)
        if not kept and replaced.isdisjoint(path for path, _ in extra.fields):
            yield extra.lacking or f"without {extra.label}"
    same_stages = (mine.pp, mine.vpp) == (theirs.pp, theirs.vpp) and other.cut and than.cut
    if same_stages and cut_words(other.cut) != cut_words(than.cut):
        yield "another cut"


def _has(plan: Plan, fields: tuple[tuple[str, object], ...]) -> bool:
    return all(plan.at(path) == value for path, value in fields)


def beside_training(judged: Judged) -> str:
    """Where no iteration fails and something else does, what that is: `` in evaluation``."""
    moments = dict.fromkeys(failure.moment for failure in judged.failures)
    return f" in {' and '.join(moments)}" if moments and "steady" not in moments else ""


def verdict_words(judged: Judged) -> Text:
    """In a table: ``fits``, ``too large in evaluation``, ``fits with 2 retries an iteration``."""
    verdict = judged.verdict
    if verdict is Verdict.DOES_NOT_FIT:
        return Text(f"too large{beside_training(judged)}", BAD)
    if verdict is Verdict.RETRIES:
        times = judged.retries_in_iteration
        least = "at least " if judged.at_least else ""
        words = f"{least}{times} {'retry' if times == 1 else 'retries'} an iteration" if times else "retries at first"
        return Text(f"fits with {words}", CAUTION)
    others = {Verdict.TIGHT: "tight", Verdict.UNKNOWN: "may fit"}
    return Text(others[verdict], CAUTION) if verdict in others else Text("fits", GOOD)


def comparison_words(other: Suggestion, than: Suggestion) -> str:
    """``slower by 11 %, needs 13.9 GiB less``."""
    parts = [speed_words(other.seconds, than.seconds)] if other.timed and than.timed else []
    more = other.needs - than.needs
    parts += [f"needs {size(abs(more))} {'more' if more > 0 else 'less'}"] if more else ["needs as much"]
    return ", ".join(parts)


def speed_words(seconds: float, than: float) -> str:
    """``slower by 11 %``: of the time that the other takes."""
    change = change_percent(seconds, than)
    if change == "0 %":
        return "as fast"
    return f"{'slower' if seconds > than else 'faster'} by {change.lstrip('+' + MINUS)}"


def change_percent(seconds: float, than: float) -> str:
    """``+11 %``, ``−4 %``; ``0 %`` for less than a half."""
    percent = round(100 * (seconds / than - 1))
    return f"{'+' if percent > 0 else MINUS if percent < 0 else ''}{abs(percent):,} %"


def part(share: float) -> str:
    """``5 %`` of 0.05."""
    return f"{100 * share:.0f} %"


def rough(number: float) -> str:
    """Three digits: ``95,700``."""
    return f"{float(f'{number:.3g}'):,.0f}" if number >= 100 else f"{number:.3g}"


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """The unit of all times of a table."""

    name: str
    seconds: float
    decimals: int
    known: bool = True
    """``False``: on a GPU that has no times."""

    def figure(self, seconds: float) -> str:
        if not self.known:
            return DASH
        return f"{seconds / self.seconds:,.{self.decimals}f}"

    def text(self, seconds: float) -> str:
        return f"{self.figure(seconds)} {self.name}"

    def change(self, seconds: float, than: float) -> str:
        return change_percent(seconds, than) if self.known else ""


def unit_of_time(best: Suggestion) -> TimeUnit:
    """For a table of layouts that are compared with ``best``."""
    return time_unit(best.seconds) if best.timed else TimeUnit("", 1.0, 0, known=False)


def time_unit(seconds: float) -> TimeUnit:
    """Three digits or more of ``seconds``, which is more than the time model has: milliseconds below one."""
    unit, size = ("ms", 1e-3) if seconds < 1 else ("s", 1.0)
    return TimeUnit(unit, size, 0 if seconds >= 100 * size else 1 if seconds >= 10 * size else 2)


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


# -- changes that help ------------------------------------------------------------------------------------------


def ways_table(estimate: Estimate, unit: Unit) -> Iterator[RenderableType]:
    """Each with what it gains and what it costs; nothing where there is none."""
    ways = estimate.ways_out
    if not ways:
        return
    none = "only another GPU is enough; the others gain most" if ways[-1].helps else "none is enough; these gain most"
    told = "cheapest first" if ways[0].helps else none
    yield from spaced(
        Text.assemble(("Changes that help", "bold"), (f": {told}; peak: in the moment that needs most", FAINT))
    )
    table = plain_table(folded("change"), folded(), *map(right, (f"peak {unit.name}", "gained")), folded("costs"))
    for way in ways:
        row = verdict_words(way.judged), unit.figure(way.needs), unit.figure(way.gained), costs(way)
        table.add_row(Text(way.what), *row)
    yield table
    yield Text("Flags to add for each:", FAINT)
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
