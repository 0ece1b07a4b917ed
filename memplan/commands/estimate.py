"""``memplan estimate``: the memory of every stage, with what and when; of one plan, or of several files or values of a
field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..frameworks import ROOMS, framework
from ..plan.errors import ABSENT, Origin, PlanError, together
from ..plan.fields import Kind, by_flag
from ..plan.library import examples
from ..plan.notes import Note
from ..plan.read import COMMAND_LINE, Flags, ReadPlan, Source, build_plan, load_source
from ..streams import tell
from .launched import (
    LAUNCH,
    From,
    LaunchFlags,
    Place,
    Set,
    Strict,
    VocabSize,
    flags_of_launch,
    name_of,
    placed,
    read_given,
    read_launched,
    with_gpu_said,
)
from .output import (
    OUTPUT,
    PRINTED,
    Csv,
    Files,
    Html,
    Json,
    NoColor,
    NoRecords,
    Overwrite,
    PlanOrLaunchFiles,
    Plot,
    Quiet,
    Verbose,
    beginning,
    console,
    file_of,
    measured_of,
    print_either,
    print_json,
    print_text,
    printing,
    tell_of_shell,
    warned,
    without_collection,
)
from .plan_flags import assignments

if TYPE_CHECKING:
    from ..allocator.timeline import Line
    from ..device.measured import Measured
    from ..formats.launch import Launch
    from ..result import Estimate


MOST_VARIANTS = 64
"""Estimates that one table can hold."""


def read_variants(
    source: str | None,
    flags: Flags,
    compare: Sequence[str],
    vary: Sequence[str],
    load: Callable[[str | None], Source] = load_source,
    finished: Callable[[str | None, ReadPlan], ReadPlan] = lambda place, read: read,
) -> dict[str, ReadPlan | PlanError]:
    """Every combination of the plans and of the values to vary, by the name that tells it apart; or why it is refused.

    ``load`` reads a plan from where ``source`` or ``compare`` say it is; ``finished`` adds what follows from flags.
    """
    if [source, *compare].count("-") > 1:
        raise PlanError("", ABSENT, "can be read only once, as one of the plans", origin=Origin("standard input"))
    merged: dict[str, list[tuple[str, str]]] = {}
    for name, value in dict.fromkeys(pair for assignment in vary for pair in _values(assignment)):
        merged.setdefault(name, []).append((name, value))
    choices = list(merged.values())
    combinations: list[dict[str, str]] = [dict(combination) for combination in product(*choices)]
    sources = _named_sources(source, compare, flags)
    if len(combinations) * len(sources) > MOST_VARIANTS:
        problem = f"makes {len(combinations) * len(sources)} variants; at most {MOST_VARIANTS} fit side by side"
        raise PlanError("", ABSENT, problem, origin=Origin("--vary"))
    plans: dict[str, ReadPlan | PlanError] = {}
    for source_name, place in sources.items():
        loaded = load(place)
        for values in combinations:
            changes = " ".join(f"{name}={value}" for name, value in values.items())
            name = " ".join(part for part in (source_name if len(sources) > 1 else "", changes) if part) or source_name
            alike = _alike(loaded, flags, merged, values)
            told = tuple(
                Note(LIKE_WITH_LIKE, f"ZeRO-{zero}, as fsdp shards; --zero says otherwise") for zero in alike.values()
            )
            try:
                read = finished(place, build_plan(loaded, flags, {**values, **alike}, traced=True))
                plans[name] = replace(read, warnings=(*read.warnings, *told))
            except PlanError as error:
                plans[name] = error
    return plans


LIKE_WITH_LIKE = "like-with-like"

Varied = Mapping[str, Sequence[tuple[str, str]]]
"""Pairs of a field and a value, by the field."""


def _alike(source: Source, flags: Flags, varied: Varied, values: Mapping[str, str]) -> dict[str, str]:
    """The stage of ZeRO with which a framework shards as one does that it is compared with, of itself and under another
    name: where it has that stage and nobody says another."""
    others = [framework(value).supports for _, value in varied.get(FRAMEWORK, ()) if value in ROOMS]
    layout = source.plan.mapping.get("layout")
    said = "zero" in flags or "zero" in varied or (layout is not None and "zero" in layout.mapping)
    name = values.get(FRAMEWORK, "")
    shards = not said and any(3 in other.shards_as_zero for other in others)
    return {"zero": "3"} if shards and name in ROOMS and 3 in framework(name).supports.zero else {}


FRAMEWORK = "framework"


def _named_sources(source: str | None, compare: Sequence[str], flags: Flags) -> dict[str, str | None]:
    """Where plans are read, by a short name; the plan that is only flags is left out when others are compared."""
    places = [source] if source is not None or not compare or "model" in flags else []
    named: dict[str, str | None] = {}
    for place in [*places, *compare]:
        name = "flags" if place is None else place
        if name in named:
            raise PlanError(
                "plan", name, "is there twice; compare different plans, or --vary a field", origin=COMMAND_LINE
            )
        named[name] = place
    return named


def _values(assignment: str) -> list[tuple[str, str]]:
    """``optimizer=adamw,adam8bit`` as pairs of the flag's name and a value."""
    from ..plan.near_misses import called, likely

    name, equals, values = assignment.partition("=")
    name = called(name)
    field = by_flag().get(name)
    origin = Origin("--vary")
    if field is None:
        guess = likely(f"--{name}", [one.flag for one in by_flag().values()])
        hint = f"; did you mean {guess.removeprefix('--')}?" if guess else ""
        problem = f"{name!r} is not a field that can vary; names are those of the flags, as optimizer or tp{hint}"
        raise PlanError("", ABSENT, problem, origin=origin)
    lists = field.kind in (Kind.INTEGERS, Kind.NAMES, Kind.PARTITION, Kind.DEVICE_MAP)
    parts = [part.strip() for part in values.split(";" if lists and ";" in values else ",")]
    if lists and ";" not in values and field.kind is not Kind.PARTITION:
        parts = [values]
    if not equals or not all(parts):
        problem = f"needs values, as --vary {name}=A,B"
        raise PlanError(name, ABSENT, problem, origin=origin)
    return [(name, part) for part in dict.fromkeys(parts)]


_SEVERAL = "Side by side"

DOES_NOT_FIT = 1
REFUSED = 2

Form = Literal["text", "json", "csv"]
"""How the answer is printed."""


def estimate(
    plan: PlanOrLaunchFiles = None,
    from_: From = None,
    set_: Set = None,
    vocab_size: VocabSize = None,
    strict: Strict = False,
    explain_args: Annotated[
        bool,
        typer.Option(
            "--explain-args",
            help="list every launch argument, its origin, and the field that it sets",
            rich_help_panel=LAUNCH,
        ),
    ] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            metavar="PLAN2 …",
            help="other plans to compare with PLAN",
            rich_help_panel=_SEVERAL,
            autocompletion=beginning(examples),
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="FLAG=A,B",
            help="values of a field to compare, as optimizer=adamw,adam8bit; repeated, every combination of values",
            rich_help_panel=_SEVERAL,
            autocompletion=assignments,
        ),
    ] = None,
    no_records: NoRecords = False,
    detail: Annotated[
        int | None,
        typer.Option(
            "--detail", metavar="STAGE", help="print every tensor of this stage, layer by layer", rich_help_panel=OUTPUT
        ),
    ] = None,
    html: Html = None,
    plot: Plot = None,
    snapshot: Annotated[
        str | None,
        typer.Option(
            "--snapshot",
            metavar="FILE.pickle",
            help="write what the allocator does, for pytorch.org/memory_viz and memplan explain, too",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    force: Overwrite = False,
    json: Json = False,
    csv: Csv = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_color: NoColor = False,
    flags: Flags = {},  # noqa: B006 (replaced by a flag for every field)
) -> int:
    """Memory of every stage of a training job: does it fit, and if not, what is in the way?

    Exit code 0: it fits. 1: it does not (of several, any). 2: the plan is wrong (of several, any).
    """
    plan, flags = with_gpu_said(plan, flags)
    place = placed(plan)
    others = [(other, flags_of_launch(other, None)) for other in compare or ()]
    beside = any(one.takes_settings for _, one in others)
    launch_flags = flags_of_launch(
        place, from_, set_, strict=strict, vocab_size=vocab_size, explain=explain_args, beside=beside
    )
    if explain_args:
        if compare or vary or detail is not None:
            raise typer.BadParameter("--explain-args shows arguments; leave out --compare, --vary and --detail")
        if any((csv, html, plot, snapshot)):
            problem = "--explain-args shows arguments; leave out --csv, --html, --plot and --snapshot"
            raise typer.BadParameter(problem)
        if not launch_flags.takes_settings:
            given = f"--from {launch_flags.formats[0]}"
            raise typer.BadParameter(f"--explain-args shows arguments of launch scripts, which {given} has none of")
        return _explain(read_launched(place, launch_flags, flags), json, quiet, no_color)
    pictures = {"--html": html, "--plot": plot, "--snapshot": snapshot}
    for flag, file in pictures.items():
        if file is not None and (compare or vary or detail is not None):
            raise typer.BadParameter(f"{flag} shows one plan; leave out --compare, --vary and --detail")
    files = Files({"--csv": file_of(csv), **pictures}, force)
    files.check()
    if csv == PRINTED and json:
        raise typer.BadParameter("--csv and --json exclude each other")
    if detail is not None and (json or csv):
        raise typer.BadParameter("--detail prints text; leave out --json and --csv")
    form: Form = "json" if json else "csv" if csv == PRINTED else "text"
    if not compare and not vary:
        read = read_given(place, launch_flags, flags, traced=True)
        if form == "text" and not quiet:
            tell_of_shell(read.plan)
        return (
            _detail(read, detail, no_color, verbose)
            if detail is not None
            else _one(read, files, no_records, form, quiet, verbose, no_color)
        )
    if detail is not None:
        raise typer.BadParameter("--detail shows one plan's stage; leave out --compare and --vary")
    variants = _variants(place, launch_flags, flags, others, vary or ())
    return _several(variants, files, no_records, form, no_color)


def _variants(
    place: Place,
    launch_flags: LaunchFlags,
    flags: Flags,
    others: Sequence[tuple[str, LaunchFlags]],
    vary: Sequence[str],
) -> dict[str, ReadPlan | PlanError]:
    """Variants of plans and of launch files; ``--set`` is of all that take it."""
    from ..formats.launch import completed

    source = name_of(place)
    launches = {source: read_launched(place, launch_flags, flags, vary)} if launch_flags.formats else {}
    for other, found in others:
        if found.formats:
            given = replace(found, variables=launch_flags.variables if found.takes_settings else ())
            launches[other] = read_launched(other, given, flags, vary)
    for launch in launches.values():
        flags = launch.flags_over(flags)
    return read_variants(
        source,
        flags,
        [other for other, _ in others],
        vary,
        lambda one: launches[one].source if one in launches else load_source(one),
        lambda one, read: completed(launches[one], read) if one in launches else read,
    )


def _explain(launch: Launch, json: bool, quiet: bool, no_color: bool) -> int:
    from ..report.arguments import arguments_to_json, print_arguments

    print_either(
        json, lambda: arguments_to_json(launch), lambda: print_arguments(launch, console(no_color), quiet=quiet)
    )
    return 0


def _written(files: Files, found: Estimate, known: Measured) -> Iterator[str]:
    """The files that were."""
    yield from files.write("--csv", lambda _: _rows([found.plan.model.name], [found]).encode())
    yield from files.write("--html", lambda _: _page(found, known))
    yield from files.write("--plot", lambda file: _picture(found, known, Path(file)))
    yield from files.write("--snapshot", lambda _: _snapshot(found, known))


def _page(found: Estimate, known: Measured) -> bytes:
    from ..estimate import timelines
    from ..report.html.estimate import estimate_page

    with without_collection():
        return estimate_page(found, tuple(timelines(found, known=known)))


def _picture(found: Estimate, known: Measured, file: Path) -> bytes:
    from ..estimate import timelines
    from ..report.plot import estimate_picture, format_of

    (line,) = timelines(found, (found.peak_stage,), known, contents=False)
    return estimate_picture(found, line, format_of(file))


def _snapshot(found: Estimate, known: Measured) -> bytes:
    from ..explain import written_snapshot

    with without_collection():
        return written_snapshot(found.plan, known)


def _one(read: ReadPlan, files: Files, no_records: bool, form: Form, quiet: bool, verbose: bool, no_color: bool) -> int:
    known, problem = measured_of(no_records=no_records)
    ways = form == "json" or (form == "text" and not quiet) or files.by_flag["--html"] is not None
    found = estimated(warned(read, problem), known, ways=ways)
    written = tuple(_written(files, found, known))
    if form == "json":
        from ..report.json import to_json

        print_json(to_json(found))
    elif form == "csv":
        print_text(_rows([read.plan.model.name], [found]))
    else:
        from ..report.estimate import print_estimate

        with printing():
            lines = () if quiet else _drawn(found, known, verbose)
            print_estimate(found, console(no_color), verbose=verbose, quiet=quiet, lines=lines, written=written)
    return _code([found])


def _drawn(found: Estimate, known: Measured, verbose: bool) -> tuple[Line, ...]:
    """The fullest stage over an iteration; with ``verbose`` one of each kind."""
    from ..estimate import lines
    from ..report.stages import rows_of

    stages = [found.peak_stage]
    if verbose:
        stages = [found.stages.index(row.worst) for row in rows_of(found)]
    return tuple(lines(found, stages, known))


def _rows(names: Sequence[str], estimates: Sequence[Estimate]) -> str:
    """As CSV."""
    from ..report.json import to_csv

    return to_csv(names, estimates)


def _several(
    variants: dict[str, ReadPlan | PlanError], files: Files, no_records: bool, form: Form, no_color: bool
) -> int:
    """Prints the variants; those that are refused have their reason in their place, unless all are refused."""
    known, problem = measured_of(no_records=no_records)
    found = {name: _estimated_or_refused(read, known, problem) for name, read in variants.items()}
    estimates = {name: one for name, one in found.items() if not isinstance(one, PlanError)}
    refused = [one for one in found.values() if isinstance(one, PlanError)]
    if not estimates:
        raise together(refused)
    names, answered = list(estimates), list(estimates.values())
    written = tuple(files.write("--csv", lambda _: _rows(names, answered).encode()))
    if form == "json":
        from ..report.json import comparison_to_json

        print_json(comparison_to_json(list(found), list(found.values())))
    elif form == "csv":
        print_text(_rows(names, answered))
    else:
        from ..report.stages import print_comparison

        with printing():
            print_comparison(list(found), list(found.values()), console(no_color), written)
    if not refused:
        return _code(answered)
    tell(str(together(refused)))
    return REFUSED


def _estimated_or_refused(read: ReadPlan | PlanError, known: Measured, problem: str) -> Estimate | PlanError:
    if isinstance(read, PlanError):
        return read
    try:
        return estimated(warned(read, problem), known, ways=False)
    except PlanError as error:
        return error


def _detail(read: ReadPlan, stage: int, no_color: bool, verbose: bool) -> int:
    from ..estimate import detail
    from ..report.detail import print_detail

    try:
        tapes = detail(read.plan, stage)
    except PlanError as error:
        if error.field == "--detail":
            raise PlanError("", ABSENT, f"{stage} {error.problem}", origin=Origin(error.field)) from None
        raise read.located(error) from None
    with printing():
        print_detail(tapes, console(no_color), verbose=verbose)
    return 0


def estimated(read: ReadPlan, known: Measured, *, ways: bool = True) -> Estimate:
    """The estimate of a plan, with what reading it has to tell, and the ``ways`` out where it does not fit."""
    from ..estimate import estimate
    from ..result import Notice

    try:
        with without_collection():
            found = estimate(read.plan, known)
            if ways and found.judged.verdict.is_short:
                from ..search.ways_out import ways_out

                named = not read.chosen_framework
                found = replace(found, ways_out=ways_out(read.plan, found, known, named=named))
    except PlanError as error:
        raise read.located(error) from None
    notices = tuple(Notice(note.code, note.message) for note in read.warnings)
    return replace(
        found,
        warnings=(*notices, *found.warnings),
        assumptions=(*read.assumptions, *found.assumptions),
    )


def _code(estimates: Sequence[Estimate]) -> int:
    """1 if any of them does not fit; where no GPU was named there is nothing to fit into."""
    return DOES_NOT_FIT if any(estimated.fits is False for estimated in estimates) else 0
