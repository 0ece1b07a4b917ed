"""``memplan trace``: the tape of real PyTorch code on fake tensors, beside the estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..plan.read import Flags
from ..report.progress import progress
from .launched import flags_of_launch, read_given
from .output import (
    OUTPUT,
    Json,
    NoColor,
    Overwrite,
    PlanOrLaunchFile,
    check_files,
    console,
    print_either,
    write_whole,
)

if TYPE_CHECKING:
    from ..plan.plan import ResolvedPlan
    from ..trace.recording import Recording


def trace(
    plan: PlanOrLaunchFile = None,
    stage: Annotated[
        int,
        typer.Option("--stage", metavar="N", help="pipeline stage whose rank is traced", rich_help_panel=OUTPUT),
    ] = 0,
    events: Annotated[
        str | None,
        typer.Option(
            "--events",
            metavar="FILE",
            help="write every event to FILE, one JSON object per line",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    snapshot: Annotated[
        str | None,
        typer.Option(
            "--snapshot",
            metavar="FILE.pickle",
            help="write a snapshot for PyTorch's memory viewer (python -m torch.cuda._memory_viz trace_plot "
            "FILE.pickle)",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    learn: Annotated[
        bool,
        typer.Option(
            "--learn",
            help="learn an architecture without a recipe, so that memplan estimate can read it: tensor sizes as "
            "polynomials in b and s, saved in the user's cache directory",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    force: Overwrite = False,
    json: Json = False,
    quiet: Annotated[
        bool,
        typer.Option("-q", "--quiet", help="print only how trace and estimate differ", rich_help_panel=OUTPUT),
    ] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="print every layer", rich_help_panel=OUTPUT)] = False,
    no_color: NoColor = False,
    flags: Flags = {},  # noqa: B006 (replaced by a flag for every field)
) -> int:
    """A training step of the plan's model, run by PyTorch on fake tensors (no GPU, no memory), beside the estimate.

    Needs torch, and transformers for other code than torchtitan's. --model takes any config.json that transformers
    knows, also one that memplan has no recipe for. Exit code 2: the plan is wrong, or cannot be traced. 3: torch or
    transformers is missing.
    """
    from ..trace.comparison import compared
    from ..trace.run import planned, traced

    if learn:
        if events is not None or snapshot is not None:
            raise typer.BadParameter("--learn traces many steps; leave out --events and --snapshot")
        if stage or force:
            raise typer.BadParameter(
                "--learn has no stages and writes none of your files; leave out --stage and --overwrite"
            )
        return _learn(plan, flags, json, quiet, no_color)
    check_files({"--events": events, "--snapshot": snapshot}, force=force)
    asked = planned(plan, flags, stage, lambda place, given: read_given(place, flags_of_launch(place, None), given))
    with progress(f"tracing {asked.name}"):
        found = traced(asked.job, asked.name)
    _write(found.recording, events, snapshot, force)
    comparison = compared(found, asked.program)
    from ..report.trace import print_trace, trace_to_json

    print_either(
        json,
        lambda: trace_to_json(asked, found, comparison),
        lambda: print_trace(asked, found, comparison, console(no_color), verbose=verbose, quiet=quiet),
    )
    return 0


def _learn(plan: str | None, flags: Flags, json: bool, quiet: bool, no_color: bool) -> int:
    from ..plan.errors import PlanError
    from ..plan.resolve import resolve
    from ..report.trace import learned_to_json, print_learned
    from ..trace.learned import learned

    given = {"framework": "single", **flags} if plan is None else flags
    read = read_given(plan, flags_of_launch(plan, None), given, traced=True)
    try:
        resolved = resolve(read.plan)
        if resolved.compile:
            return _learn_compiled(resolved, json)
        doing = f"tracing {resolved.model.name} at several sizes"
        with progress(doing) as report:
            found = learned(resolved, lambda done, of: report(doing, done, of))
    except PlanError as error:
        raise read.located(error) from None
    print_either(
        json,
        lambda: learned_to_json(resolved, found),
        lambda: print_learned(resolved, found, console(no_color), quiet=quiet),
    )
    return 0


def _learn_compiled(plan: ResolvedPlan, json: bool) -> int:
    """Of the whole model under ``torch.compile``, at the plan's sizes."""
    from ..frameworks.plain.compiled import kept

    doing = f"compiling {plan.model.name} on fake tensors"
    with progress(doing) as report:
        path = kept(plan, lambda done, of: report(doing, done, of))
    print_either(
        json,
        lambda: {"model": plan.model.name, "file": str(path)},
        lambda: print(f"Learnt: {plan.model.name} under torch.compile, kept in {path}"),
    )
    return 0


def _write(recording: Recording, events: str | None, snapshot: str | None, force: bool) -> None:
    if events is not None:
        from ..trace.recording import as_lines

        write_whole(events, as_lines(recording).encode(), force=force)
    if snapshot is not None:
        import pickle

        from ..trace.recording import snapshot as snapshot_of

        write_whole(snapshot, pickle.dumps(snapshot_of(recording)), force=force)
