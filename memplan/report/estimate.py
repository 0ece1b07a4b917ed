"""``memplan estimate``: the verdict in a sentence, the stages, what the worst stage's memory is for (the categories,
then what PyTorch cannot see), what was assumed, and, where a request fails, what PyTorch prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..allocator.memory import printed
from ..allocator.timeline import Line
from ..device.gpus import runtime_of
from ..plan.notes import FIRST, says_choice
from ..result import Estimate, Failure, Notice, StageEstimate, Verdict
from .names import MEANING, UNKNOWN, Unit, percent, plan_text, retry_words, size, stage_word
from .printing import (
    BAD,
    CAUTION,
    FAINT,
    GOOD,
    SWATCH,
    WholeTable,
    entries,
    label,
    ledger,
    left,
    plain_table,
    put_report,
    right,
    spaced,
    written_lines,
)
from .stages import (
    drawn_lines,
    free_words,
    in_colour,
    limit_of,
    measured,
    reading_of,
    stage_tables,
    unit_of,
    who,
    worst_moment,
)


def verdict(estimate: Estimate) -> Text:
    """One sentence: ``Does not fit: stage 31 needs 33.08 GiB of 31.75 GiB on v100-32gb …``."""
    judged = estimate.judged
    told = estimate.stages[estimate.peak_stage]
    fails = judged.verdict is Verdict.DOES_NOT_FIT
    if told.judged.verdict is not judged.verdict:
        told = next(stage for stage in estimate.stages if stage.judged == judged)
    elif not fails:
        alike = [stage for stage in estimate.stages if stage.judged.verdict is judged.verdict]
        told = max(alike, key=lambda one: (one.headline + worst_moment(estimate, one)[1], one is told))
    moment, more = ("steady", 0) if fails else worst_moment(estimate, told)
    told_of = who(estimate, told) if not more else f"{moment} on {who(estimate, told)}"
    need = f"{size(told.headline + more)}"
    if reading_of(told) != "device":
        need = f"at least {need} ({'allocated' if more else reading_of(told)})"
    most = "most, " if len(estimate.stages) > 1 else ""
    limit = limit_of(estimate)
    if limit is None:
        cause = "" if more else f" — {_cause(told)}"
        return Text.assemble(("No GPU named", f"bold {CAUTION}"), f": {told_of} needs {need}{cause}")
    free = limit - told.headline - more
    if fails:
        return Text.assemble(("Does not fit", f"bold {BAD}"), f": {_too_much(estimate, told, told_of, need, free)}")
    match judged.verdict:
        case Verdict.UNKNOWN:
            if judged.retries or free <= 0:
                needs = f"would take {need.removeprefix('at least ')} of {_limit(estimate)}"
                retries = f"; {retry_words(judged)}" if judged.retries else ""
                return Text.assemble(
                    ("May fit, with retries", f"bold {CAUTION}"),
                    f": {told_of} {needs}{retries}; {_unknown(estimate, told)}",
                )
            return Text.assemble(
                (f"Fits if {_outside(estimate)} take at most {size(free)}", f"bold {CAUTION}"),
                f": {told_of} needs {need} of {_limit(estimate)}; {_unknown(estimate, told)}",
            )
        case Verdict.RETRIES:
            return Text.assemble(
                ("Fits with retries", f"bold {CAUTION}"),
                f": {told_of} would take {most}{need} of {_limit(estimate)}; {retry_words(judged)}",
            )
        case Verdict.TIGHT if told.device_range is not None:
            least, utmost = (size(one + more) for one in told.device_range)
            what = f"what {_outside(estimate)} take decides, and it fits only at the lower end"
            if judged.retries:
                needs = f"would take {most}{need} of {_limit(estimate)}; {retry_words(judged)}: {what}"
            else:
                needs = f"needs {most}{least} to {utmost} of {_limit(estimate)}: {what}"
            return Text.assemble(("Tight", f"bold {CAUTION}"), f": {told_of} {needs}")
    left_over = f"{size(free)} free" if free >= 0 else retry_words(judged)
    return Text.assemble(("Fits", f"bold {GOOD}"), f": {told_of} needs {most}{need} of {_limit(estimate)}; {left_over}")


def _outside(estimate: Estimate) -> str:
    """What takes memory beside PyTorch: ``CUDA and NCCL``."""
    return " and ".join(runtime_of(estimate.plan.hardware.gpu))


def _unknown(estimate: Estimate, stage: StageEstimate) -> str:
    """What of a device nobody has published."""
    platform, library = runtime_of(estimate.plan.hardware.gpu)
    parts = {f"{platform} context": stage.beyond.cuda_context, library: stage.beyond.nccl}
    names = [name for name, known in parts.items() if known is None]
    return f"{' and '.join(names)} on this GPU {'are' if names[1:] else 'is'} not known"


def _too_much(estimate: Estimate, stage: StageEstimate, who: str, need: str, free: int) -> str:
    """What ``stage`` needs beyond what there is, and for what."""
    failures = {failure.moment: failure for failure in stage.judged.failures}
    beside, limit = sum(one.least for one in stage.outside), limit_of(estimate)
    assert limit is not None
    if "steady" in failures or not failures or beside + (stage.moments.get("steady") or 0) > limit:
        over = f", {size(-free)} too much" if free < 0 else ""
        return f"{who} needs {need} of {_limit(estimate)}{over} — {_cause(stage)}{_others(estimate)}"
    moment, failure = next(iter(failures.items()))
    what = f" — {_place(failure)}" if failure.tensor else ""
    known = stage.moments.get(moment) or 0
    least = beside + max(known, failure.allocated + failure.request)
    needed = size(known) if known > limit else f"at least {size(least)}"
    return f"{moment} on {who} needs {needed} of {_limit(estimate)}{what}"


SETTLED = 2
"""Iterations until all tensors of a steady one have been there; what fails later, fails because memory is in pieces."""


def _place(failure: Failure) -> str:
    return f"{failure.tensor} in {failure.module}" if failure.module else failure.tensor


def first_failure(estimate: Estimate) -> tuple[str, str] | None:
    """Which request fails first, and what PyTorch says then (nothing known of an evaluation)."""
    found = [(stage, failure) for stage, failure in estimate.failures if failure.tried]
    if not found:
        return None
    stage, failure = found[0]
    when = failure.phase if failure.moment == "steady" and failure.phase else failure.moment
    when += "" if failure.microbatch is None else f" of micro-batch {failure.microbatch}"
    when += f", iteration {failure.iteration}" if failure.iteration > SETTLED else ""
    what = f"{_place(failure)} asks for {size(failure.request)}"
    told = f"Out of memory on {who(estimate, stage)} in {when}: {what}"
    if failure.moment == "evaluation":
        return told, ""

    return told, out_of_memory(estimate, stage, failure)


def _failed(estimate: Estimate) -> Iterator[RenderableType]:
    line, said = first_failure(estimate) or ("", "")
    if line:
        yield Text(line)
    if said:
        yield Padding(Text(said, FAINT), (0, 0, 0, 2))


def _limit(estimate: Estimate) -> str:
    """The capacity, less the headroom where there is one, and whose it is."""
    text = size(estimate.capacity or 0)
    if estimate.headroom:
        text += f" less {size(estimate.headroom)} headroom"
    gpu = estimate.plan.hardware.gpu
    return f"{text} on {gpu}" if gpu else text


def _cause(stage: StageEstimate) -> str:
    peak = stage.peak
    tensor = f"{peak.tensor} in " if peak.tensor else ""
    return f"{tensor}{peak.module}, {peak.phase}"


def _others(estimate: Estimate) -> str:
    """How many more stages do not fit."""
    over = sum(stage.judged.verdict is Verdict.DOES_NOT_FIT for stage in estimate.stages)
    return f"; {over} of {len(estimate.stages)} {stage_word(estimate.plan)}s are over" if over > 1 else ""


MOMENTS = ("initialisation", "steady", "evaluation", "checkpoint")
FIRST_ITERATION = "first_iteration_device"
READINGS = ("requested", "allocated", "reserved", "device")
BETWEEN = 6
"""Columns between ledger and facts where they stand beside each other."""


def stage_breakdown(estimate: Estimate, stage: StageEstimate, console: Console) -> RenderableType:
    """Ledger, readings and moments of ``stage``, laid out for the console's width."""
    unit = unit_of(estimate)
    name = f"{stage_word(estimate.plan).capitalize()} {stage.stage} at its peak"
    title = Text.assemble((name if len(estimate.stages) > 1 else "At the peak", "bold"), f": {_moment(stage)}")
    ledger = _ledger(stage, unit, coloured=in_colour(console))
    readings = _facts(
        "readings", READINGS, [getattr(stage, name) for name in READINGS], marked=reading_of(stage), unit=unit
    )
    moments = _facts(
        "moments", MOMENTS, [stage.moments.get(name) for name in MOMENTS], marked=stage.peak.moment, unit=unit
    )
    facts = Group(readings, Text(), moments, *_first_iteration(stage, unit), *_beside_device(stage, unit))
    if measured(ledger, console).maximum + BETWEEN + measured(moments, console).maximum > console.width:
        return Group(title, Text(), ledger, Text(), facts)
    grid = Table.grid(padding=(0, BETWEEN, 0, 0), pad_edge=False)
    grid.add_row(ledger, facts)
    return Group(title, Text(), grid)


def _first_iteration(stage: StageEstimate, unit: Unit) -> list[RenderableType]:
    """What the device shows while no optimizer step has been applied, where that is less."""
    early = stage.moments.get(FIRST_ITERATION)
    if early is None or stage.device is None or early >= stage.device:
        return []
    return [Text(), Text(f"device before the first applied step  {unit.figure(early)}", FAINT)]


def _beside_device(stage: StageEstimate, unit: Unit) -> list[RenderableType]:
    """What the stage's ranks take of a node besides its devices."""
    parts = [("host memory", stage.host), ("NVMe", stage.nvme)]
    shown = [f"{name}  {unit.figure(size)}" for name, size in parts if size]
    return [Text(), Text(f"also on each node: {', '.join(shown)}", FAINT)] if shown else []


def _moment(stage: StageEstimate) -> str:
    peak = stage.peak
    batch = "" if peak.microbatch is None else f" of micro-batch {peak.microbatch}"
    what = f"{peak.tensor} in {peak.module}" if peak.tensor else peak.module
    alive = f"; {stage.in_flight} micro-batches in flight" if stage.in_flight > 1 else ""
    bound = "; an upper bound" if peak.upper_bound else ""
    return f"{what}, {peak.phase}{batch}{alive}{bound}"


def _ledger(stage: StageEstimate, unit: Unit, *, coloured: bool) -> Table:
    """Every share that shows in ``unit``, with its % of the headline; a line with ``=`` where a reading is complete."""
    table = WholeTable.grid(left(), right(), right(), padding=(0, 2, 0, 0))
    table.add_row(Text("  for", FAINT), Text(unit.name, FAINT), Text("%", FAINT))

    for entry in ledger(stage):
        if entry.size is None:
            table.add_row(f"  {entry.label}", UNKNOWN)
            continue
        figures = unit.figure(entry.size), percent(entry.size, stage.headline)
        span = span_words(entry.span, unit)
        if not entry.colour:
            table.add_row(f"{entry.label}{span}", *figures, style="bold")
        elif unit.prints(entry.size):
            swatch = (SWATCH, entry.colour) if coloured else " "
            table.add_row(Text.assemble(swatch, f" {entry.label}", (span, FAINT)), *figures)
    return table


def span_words(span: tuple[int, int] | None, unit: Unit) -> str:
    """``, 0.47 to 1.04``, where that is not one figure."""
    least, most = map(unit.figure, span or (0, 0))
    return f", {least} to {most}" if least != most else ""


def _facts(title: str, names: Sequence[str], sizes: Sequence[int | None], *, marked: str, unit: Unit) -> Table:
    """Sizes under their names, the one that is the headline in bold; ``?`` where not known."""
    table = WholeTable.grid(
        left(width=8), *[right(style="bold" if name == marked else "") for name in names], padding=(0, 2, 0, 0)
    )
    table.add_row(Text(title, FAINT), *(Text(label(name), FAINT) for name in names))
    table.add_row(Text(unit.name, FAINT), *map(unit.figure, sizes))
    return table


SHORT_LIST = 3
"""Assumptions that are printed without ``-v``."""


def print_estimate(
    estimate: Estimate,
    console: Console,
    verbose: bool = False,
    quiet: bool = False,
    lines: Sequence[Line] = (),
    written: Sequence[str] = (),
) -> None:
    """Prints ``estimate``; ``quiet`` only the verdict, ``verbose`` every stage, reading and assumption. ``lines`` are
    those of stages to draw, ``written`` files that were written."""
    report = chain(estimate_report(estimate, console, verbose, lines), written_lines(written))
    put_report(console, verdict(estimate), report, quiet=quiet)


def first_notes(notices: Iterable[Notice]) -> Iterator[Text]:
    """What decides the answer and may surprise."""
    for notice in notices:
        if notice.code in FIRST:
            yield Text(notice.message, FAINT if says_choice(notice.code) else CAUTION)


def estimate_report(
    estimate: Estimate, console: Console, verbose: bool = False, lines: Sequence[Line] = ()
) -> Iterator[RenderableType]:
    """The verdict, and what follows it, for ``console``'s width."""
    yield verdict(estimate)
    worst = estimate.stages[estimate.peak_stage]
    yield Text(plan_text(estimate.plan), FAINT)
    yield from first_notes(estimate.warnings)
    yield Text()
    failed = list(_failed(estimate))
    yield from (*failed, *([Text()] if failed else []))
    tables = stage_tables(estimate, console, folded=not verbose)
    for table in tables:
        yield table
        yield Text()
    yield Text(_caption(estimate), FAINT)
    yield from spaced(stage_breakdown(estimate, worst, console))
    if lines:
        yield from spaced(*drawn_lines(estimate, lines, console))
    if verbose:
        yield from spaced(_every_reading(estimate))
    warnings = [(one.code, one.message) for one in estimate.warnings if one.code not in FIRST]
    if warnings:
        yield from spaced(entries(warnings, CAUTION))
    if estimate.assumptions:
        yield from spaced(*_assumptions(estimate, verbose))
    if estimate.ways_out:  # else nothing of a search is imported
        from .suggestion_words import ways_table

        yield from ways_table(estimate, unit_of(estimate))


def _caption(estimate: Estimate) -> str:
    meaning = {
        "device": "reserved, CUDA context and NCCL together, as nvidia-smi shows it",
        "reserved": "segments that PyTorch's allocator took",
        "allocated": "torch.cuda.max_memory_allocated",
        "requested": "sum of live tensors",
    }
    worst = estimate.stages[estimate.peak_stage]
    reading = reading_of(worst)
    told = [
        f"{MEANING[unit_of(estimate).name]} of the most loaded rank in steady state",
        "static: held between iterations",
        f"{reading}: {meaning[reading]}",
    ]
    return "; ".join(filter(None, [*told, free_words(estimate)])) + "."


def _every_reading(estimate: Estimate) -> Table:
    """The four readings of every stage, and how many micro-batches it keeps alive."""
    table = plain_table(*map(right, (stage_word(estimate.plan), *READINGS, "in flight")))
    unit = unit_of(estimate)
    for stage in estimate.stages:
        table.add_row(str(stage.stage), *(unit.figure(getattr(stage, name)) for name in READINGS), str(stage.in_flight))
    return table


def _assumptions(estimate: Estimate, verbose: bool) -> Iterator[RenderableType]:
    shown = estimate.assumptions if verbose else estimate.assumptions[:SHORT_LIST]
    more = len(estimate.assumptions) - len(shown)
    yield Text.assemble(("Assumed", "bold"), (f" ({more} more with -v)" if more else "", FAINT))
    for assumption in shown:
        yield Padding(Text(assumption), (0, 0, 0, 2))


# -- out of memory -------------------------------------------------------------------------------------


def out_of_memory(estimate: Estimate, stage: StageEstimate, failure: Failure) -> str:
    """The message of ``torch.OutOfMemoryError`` on the stage's first rank, up to its advice, as PyTorch 2.6 and later
    write it (``CUDACachingAllocator.cpp``, ``DeviceCachingAllocator::malloc`` and ``reportProcessMemoryInfo``).

    What the plan leaves as headroom counts as taken by somebody else, and outside PyTorch lies the least that may: the
    request fails even so.
    """
    capacity = estimate.capacity or 0
    outside = 0 if stage.device_range is None or stage.reserved is None else stage.device_range[0] - stage.reserved
    free = max(capacity - estimate.headroom - outside - failure.reserved, 0)
    gpu = stage.ranks[0] % estimate.plan.hardware.gpus_per_node if stage.ranks else 0
    platform, _ = runtime_of(estimate.plan.hardware.gpu)
    return (
        f"{platform} out of memory. Tried to allocate {printed(failure.tried)}. GPU {gpu} has a total capacity of "
        f"{printed(capacity)} of which {printed(free)} is free. Including non-PyTorch memory, this process has "
        f"{printed(failure.reserved + outside)} memory in use. Of the allocated memory {printed(failure.allocated)} is "
        f"allocated by PyTorch, and {printed(failure.reserved - failure.allocated)} is reserved by PyTorch but "
        "unallocated."
    )
