"""``memplan suggest-partition``: the recommended layout, why this one, memory against time, and what was searched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..plan.fields import plan_fields
from ..plan.resolve import resolve
from ..result import Notice
from ..search.methods import Method
from ..search.result import Counts, Found, Suggestion
from ..search.timing import StepTime, cost_of_step, cost_of_tokens
from .names import stage_word
from .output import put, put_line
from .palette import BAD, CAUTION, FAINT, GOOD
from .pieces import DOT, Pieces
from .stages import stage_tables
from .suggestion_tables import alternatives, changes_table, compact_stages, cuts_table, front_table
from .suggestion_words import (
    comparison_words,
    cut_field,
    cut_words,
    gpus_words,
    layout_pieces,
    same_layout,
    time_unit,
)
from .table import named_list
from .units import size
from .verdict import verdict

BILLION = 1e9
SHOWN = 8
"""Points of the front, and changes, that are printed without ``-v``."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found, and what stands beside it in print."""

    found: Found
    methods: tuple[Method, ...] = ()
    """The recommended layout cut by others."""
    notes: tuple[Notice, ...] = ()
    """Of how the plan was read."""
    assumptions: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    """Files."""


def print_suggestion(answer: Answer, console: Console, *, verbose: bool = False, quiet: bool = False) -> None:
    """Prints the answer; ``quiet`` only its first line, ``verbose`` every stage, rule and assumption."""
    if quiet:
        found = answer.found
        stated = _stated(found)
        put_line(console, Text.assemble(*_headline(found), DOT.join(_pieces(found, stated)) if stated else ""))
    else:
        put(console, *_body(answer, console, verbose))


def _body(answer: Answer, console: Console, verbose: bool) -> Iterator[RenderableType]:
    found = answer.found
    word, said = _headline(found)
    stated = _stated(found)
    first, *rest = _pieces(found, stated) if stated is not None else [""]
    yield Pieces([Text.assemble(word, said, first), *rest])
    yield Pieces(_job(found), style=FAINT)
    yield Text()
    if stated is not None:
        yield from _layout(stated, console, verbose)
    if found.best:
        yield from _why(found, console)
    if found.changes:
        yield from _changes(found, verbose)
    if answer.methods:
        yield Text()
        yield from cuts_table(answer.methods)
    if len(found.front) > 1:
        yield Text()
        yield from front_table(found.front, console, SHOWN if not verbose else None)
    yield Text()
    yield from _search(found.counts, found.seconds, verbose)
    yield from _notes(answer, stated, verbose)
    for file in answer.written:
        yield Text(f"Written: {file}", GOOD)


def _stated(found: Found) -> Suggestion | None:
    """The layout that the report is about."""
    return found.best[0] if found.best else found.closest


def _pieces(found: Found, stated: Suggestion) -> list[str]:
    """The layout, and on how many GPUs where that was the question."""
    changed = [] if stated.point.keeps_numerics else ["changes the numerics"]
    return [*([gpus_words(stated.plan)] if found.objective == "gpus" else []), *layout_pieces(stated), *changed]


def _headline(found: Found) -> tuple[tuple[str, str], str]:
    """The verdict, and what stands between it and the layout."""
    if found.best:
        estimate = found.best[0].estimate
        if estimate is None or estimate.fits:
            return ("Recommended", f"bold {GOOD}"), ": "
        return ("Recommended, may fit", f"bold {CAUTION}"), ": "
    if found.closest is None:
        return ("Nothing fits", f"bold {BAD}"), ", and no layout runs"
    return ("Nothing fits", f"bold {BAD}"), f": {size(found.closest.needs - found.limit)} too much on the closest, "


def _job(found: Found) -> list[str]:
    """What is given and kept: ``bigscience-104b-250k · megatron-deepspeed · 128 × v100-32gb · gbs 2048 · …``."""
    plan = found.base
    most = "up to " if found.objective == "gpus" else ""
    parts = [plan.model.name, plan.framework, f"{most}{plan.hardware.gpus or 1:,} × {plan.hardware.gpu}"]
    parts += [f"gbs {plan.batch.gbs}", f"seq {plan.batch.seq}", plan.precision.dtype, plan.optimizer.name]
    parts += [f"headroom {plan.headroom}"] if plan.headroom != "0" else []
    parts += [{"time": "the fastest", "memory": "the least memory", "gpus": "the fewest GPUs"}[found.objective]]
    return [*parts, *(f"{_field_name(path)} {_short(value)} fixed" for path, value in found.fixed.items())]


def _field_name(path: str) -> str:
    fields = plan_fields()
    return fields[path].flag[2:] if path in fields else path


def _short(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 24 else f"{text[:23]}…"


# -- the recommended one -----------------------------------------------------------------------------------


def _layout(suggestion: Suggestion, console: Console, verbose: bool) -> Iterator[RenderableType]:
    estimate, step = suggestion.estimate, suggestion.step
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style=FAINT, no_wrap=True)
    facts.add_column(ratio=1, overflow="fold")
    if step is not None:
        facts.add_row("step", _speed(suggestion, step))
        facts.add_row("of it", _parts(step))
        facts.add_row("costs", _costs(suggestion, step))
    if estimate is not None:
        facts.add_row("memory", verdict(estimate))
    if suggestion.works and len(suggestion.works) > 1:
        stages = f"on {len(suggestion.works)} {stage_word(suggestion.plan)}s"
        facts.add_row("layers", f"{cut_words(suggestion.works)} {stages}")
        field = cut_field(suggestion.plan, whole=verbose)
        if field:
            facts.add_row("cut", field)
    yield facts
    if estimate is None:
        return
    yield Text()
    yield from stage_tables(estimate, console, folded=False) if verbose else compact_stages(estimate, console)


def _speed(suggestion: Suggestion, step: StepTime) -> Pieces:
    rates = f"{step.tokens_per_second:,.0f} tokens/s", f"{step.tokens_per_second_per_gpu:,.0f} of each GPU"
    return Pieces(
        [Text(time_unit(suggestion.seconds).text(suggestion.seconds), "bold"), *rates, f"MFU {100 * step.mfu:.1f} %"]
    )


def _parts(step: StepTime) -> Pieces:
    """Shares of the step's time, the largest first."""
    parts = {
        "compute": step.compute,
        "recompute": step.recompute,
        "tensor parallel": step.tensor_parallel,
        "bubble": step.pipeline_bubble,
        "sends": step.pipeline_send,
        "data parallel": step.data_parallel,
        "optimizer": step.optimizer,
        "offload": step.offload,
    }
    shares = sorted(((part / step.total, name) for name, part in parts.items()), reverse=True)
    return Pieces([f"{name} {100 * share:.1f} %" for share, name in shares if share >= 0.0005])


def _costs(suggestion: Suggestion, step: StepTime) -> Pieces:
    """GPU-hours of a step and of a billion tokens, and what they cost where a price is known."""
    plan = resolve(suggestion.plan)
    gpus = plan.hardware.gpus or 1
    whole = gpus * BILLION / step.tokens_per_second / 3600
    prices = cost_of_step(plan, step), cost_of_tokens(plan, step)
    figures = gpus * step.total / 3600, whole
    texts = [f"{_figure(hours)} GPU-hours" for hours in figures]
    texts = [text if cost is None else f"{_figure(cost)} ({text})" for text, cost in zip(texts, prices, strict=True)]
    price = [] if plan.hardware.price is None else [f"at {plan.hardware.price:g} for a GPU-hour"]
    return Pieces([f"{texts[0]} a step", f"{texts[1]} for a billion tokens", *price])


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


# -- why ----------------------------------------------------------------------------------------------------


def _why(found: Found, console: Console) -> Iterator[RenderableType]:
    best, *others = found.best
    if others or found.given is not None:
        yield Text()
        yield Text("Why this one", "bold")
        yield alternatives(found)
    given = found.given
    if given is not None and not same_layout(given, best):
        fits = "" if given.needs <= found.limit else ", and does not fit"
        yield Text(f"The plan as given is {comparison_words(given, best)}{fits}.")
    elif given is not None:
        yield Text("It is the plan as given.")


def _changes(found: Found, verbose: bool) -> Iterator[RenderableType]:
    stuck = found.closest if found.closest is not None else found.given
    if stuck is None:
        return
    yield Text()
    whose = "the closest layout" if found.closest is not None else "the plan as given, which does not fit"
    shown: Sequence[object] = found.changes if verbose else found.changes[:SHOWN]
    more = len(found.changes) - len(shown)
    yield Text.assemble((f"Single changes of {whose}", "bold"), (f" ({more} more with -v)" if more else "", FAINT))
    yield changes_table(stuck, found.changes[: len(shown)])


# -- how it was found -----------------------------------------------------------------------------------------


def _search(counts: Counts, seconds: float, verbose: bool) -> Iterator[RenderableType]:
    refused = sum(counts.refused.values())
    yield Text(
        f"Searched {counts.total:,} layouts in {seconds:.2f} s: {refused:,} against a framework's rule, "
        f"{counts.too_large:,} too large by a bound, {counts.slower:,} slower or no smaller, {counts.folded:,} folded "
        f"to the byte, {counts.replayed:,} replayed in the allocator.",
        FAINT,
    )
    if verbose and counts.refused:
        rules = sorted(counts.refused.items(), key=lambda rule: (-rule[1], rule[0]))
        yield Text()
        yield Text("Left out by a rule", "bold")
        yield named_list([(f"{count:,}", rule) for rule, count in rules], FAINT)


def _notes(answer: Answer, stated: Suggestion | None, verbose: bool) -> Iterator[RenderableType]:
    estimate = stated.estimate if stated is not None else None
    warnings = [*answer.notes, *(estimate.warnings if estimate is not None else ())]
    if warnings:
        yield Text()
        yield named_list([(notice.code, notice.message) for notice in warnings], CAUTION)
    step = stated.step if stated is not None else None
    assumed = [*answer.assumptions, *(step.assumptions if step is not None else ())]
    assumed += estimate.assumptions if estimate is not None else ()
    if assumed and verbose:
        yield Text()
        yield Text("Assumed", "bold")
        for assumption in assumed:
            yield Padding(Text(assumption), (0, 0, 0, 2))
    elif assumed:
        yield Text(
            f"Times are reckoned from published figures, not measured; {len(assumed)} assumptions with -v.", FAINT
        )
