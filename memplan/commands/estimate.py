"""``memplan estimate``: the memory of every stage, with what and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..plan.completion import completed
from ..plan.errors import ABSENT, Origin, PlanError
from ..plan.read import Flags, ReadPlan
from .launch_options import LAUNCH, From, Set, Strict, VocabSize
from .launched import CONFIGURED, LaunchFlags, read_given, read_launched
from .output import console, print_json, printing
from .plan_flags import with_plan_flags
from .recorded import NoRecords, measured_of, warned

if TYPE_CHECKING:
    from ..measured import Measured
    from ..plan.launch import Launch
    from ..result import Estimate

_OUTPUT = "Output"
_SEVERAL = "Side by side"

DOES_NOT_FIT = 1


@with_plan_flags
def estimate(
    plan: Annotated[
        str | None,
        typer.Argument(
            help="YAML or JSON file, name of a built-in example, or - for standard input; with --from a launch file."
        ),
    ] = None,
    from_: From = None,
    set_: Set = None,
    vocab_size: VocabSize = None,
    strict: Strict = False,
    explain_args: Annotated[
        bool,
        typer.Option(
            "--explain-args", help="which argument was read from where, and what became of it", rich_help_panel=LAUNCH
        ),
    ] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", metavar="PLAN2 …", help="other plans to put beside it", rich_help_panel=_SEVERAL),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="FLAG=A,B",
            help="values of a field to put side by side, as optimizer=adamw,adam8bit; again for every combination",
            rich_help_panel=_SEVERAL,
        ),
    ] = None,
    no_records: NoRecords = False,
    detail: Annotated[
        int | None,
        typer.Option(
            "--detail", metavar="STAGE", help="the stage's tape: every tensor, layer by layer", rich_help_panel=_OUTPUT
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON, and nothing else", rich_help_panel=_OUTPUT)] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="only the verdict", rich_help_panel=_OUTPUT)] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="every stage and reading", rich_help_panel=_OUTPUT)
    ] = False,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="no colours (as NO_COLOR=1)", rich_help_panel=_OUTPUT)
    ] = False,
    flags: Flags = {},  # noqa: B006 (replaced by a flag for every field)
) -> int:
    """Memory of every stage of a training job: does it fit, and if not, what is in the way?

    Exit code 0: it fits. 1: it does not (of several, any). 2: the plan is wrong.
    """
    launch_flags = LaunchFlags(from_, set_ or (), strict, vocab_size)
    launch_flags.check_alone(explain=explain_args)
    if explain_args:
        if compare or vary or detail is not None:
            raise typer.BadParameter("--explain-args shows arguments; leave out --compare, --vary and --detail")
        if launch_flags.framework in CONFIGURED:
            given = f"--from {launch_flags.framework}"
            raise typer.BadParameter(f"--explain-args shows arguments of launch scripts, which {given} has none of")
        return _explain(read_launched(plan, launch_flags, flags), json, quiet, no_color)
    if detail is not None and json:
        raise typer.BadParameter("--detail prints text; leave out --json")
    if not compare and not vary:
        read = read_given(plan, launch_flags, flags, traced=True)
        return (
            _detail(read, detail, no_color, verbose)
            if detail is not None
            else _one(read, no_records, json, quiet, verbose, no_color)
        )
    if detail is not None:
        raise typer.BadParameter("--detail shows one plan's stage; leave out --compare and --vary")
    return _several(_variants(plan, launch_flags, flags, compare or (), vary or ()), no_records, json, no_color)


def _variants(
    plan: str | None, launch_flags: LaunchFlags, flags: Flags, compare: Sequence[str], vary: Sequence[str]
) -> dict[str, ReadPlan]:
    """Variants of a plan or of a launch file; what it is compared with are plans."""
    from ..plan.read import load_source
    from .variants import read_variants

    if launch_flags.framework is None:
        return read_variants(plan, flags, compare, vary)
    launch = read_launched(plan, launch_flags, flags, vary)
    variants = read_variants(
        plan, flags, compare, vary, lambda place: launch.source if place == plan else load_source(place)
    )
    noted = len(variants) // (1 + len(compare))
    return {
        name: completed(launch, read) if position < noted else read
        for position, (name, read) in enumerate(variants.items())
    }


def _explain(launch: Launch, json: bool, quiet: bool, no_color: bool) -> int:
    from ..report.arguments import arguments_to_json, print_arguments

    if json:
        print_json(arguments_to_json(launch))
    else:
        with printing():
            print_arguments(launch, console(no_color), quiet=quiet)
    return 0


def _one(read: ReadPlan, no_records: bool, json: bool, quiet: bool, verbose: bool, no_color: bool) -> int:
    known, problem = measured_of(no_records=no_records)
    estimated = _estimated(warned(read, problem), known)
    if json:
        from ..report.json import to_json

        print_json(to_json(estimated))
    else:
        from ..report.table import print_estimate

        with printing():
            print_estimate(estimated, console(no_color), verbose=verbose, quiet=quiet)
    return _code([estimated])


def _several(variants: dict[str, ReadPlan], no_records: bool, json: bool, no_color: bool) -> int:
    known, problem = measured_of(no_records=no_records)
    estimates = [_estimated(warned(read, problem), known) for read in variants.values()]
    names = list(variants)
    if json:
        from ..report.json import comparison_to_json

        print_json(comparison_to_json(names, estimates))
    else:
        from ..report.comparison import print_comparison

        with printing():
            print_comparison(names, estimates, console(no_color))
    return _code(estimates)


def _detail(read: ReadPlan, stage: int, no_color: bool, verbose: bool) -> int:
    from ..estimate import detail
    from ..report.detail import print_detail

    try:
        tapes = detail(read.plan, stage)
    except PlanError as error:
        if error.field == "--detail":
            raise PlanError("", ABSENT, f"{stage} {error.problem}", origin=Origin(error.field)) from None
        raise error.located(read.origins) from None
    with printing():
        print_detail(tapes, console(no_color), verbose=verbose)
    return 0


def _estimated(read: ReadPlan, known: Measured) -> Estimate:
    from ..estimate import estimate
    from ..result import Notice

    try:
        estimated = estimate(read.plan, known)
    except PlanError as error:
        raise error.located(read.origins) from None
    notices = tuple(Notice(note.code, note.message) for note in read.warnings)
    return replace(
        estimated,
        warnings=(*notices, *estimated.warnings),
        assumptions=(*read.assumptions, *estimated.assumptions),
    )


def _code(estimates: Sequence[Estimate]) -> int:
    """1 if any of them does not fit; where no GPU was named there is nothing to fit into."""
    return DOES_NOT_FIT if any(estimated.fits is False for estimated in estimates) else 0
