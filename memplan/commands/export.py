"""``memplan export``: the plan in a framework's own words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..formats import WRITTEN, target
from ..frameworks import STAND_FOR, framework, frameworks
from ..plan.errors import PlanError, guessed, nearest, one_line, wrong_at
from ..plan.read import Flags, ReadPlan
from ..streams import tell
from .launched import From, LaunchFlags, Set, Strict, VocabSize, flags_of_launch, placed, read_given
from .output import OUTPUT, Overwrite, PlanOrLaunchFiles, beginning, check_writable, print_file, print_json, write_whole

if TYPE_CHECKING:
    from ..formats.exported import Exported


def export(
    plan: PlanOrLaunchFiles = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="TARGET",
            help="megatron, megatron-deepspeed, deepspeed, torchtitan or device-map; default: the plan's framework",
            rich_help_panel=OUTPUT,
            autocompletion=beginning(lambda: WRITTEN),
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help="file to write; standard output if left out"),
    ] = None,
    from_: From = None,
    set_: Set = None,
    vocab_size: VocabSize = None,
    strict: Strict = False,
    force: Overwrite = False,
    json: Annotated[
        bool, typer.Option("--json", help="print only JSON of the written configuration", rich_help_panel=OUTPUT)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="print nothing on standard error", rich_help_panel=OUTPUT)
    ] = False,
    flags: Flags = {},  # noqa: B006 (replaced by a flag for every field)
) -> int:
    """The plan as a launch script, ds_config.json, job or device_map, which reads back as the same plan.

    Exit code 2: the plan is wrong, or says something that the framework's configuration cannot; the line names it.
    """
    launch_flags = flags_of_launch(placed(plan), from_, set_, strict=strict, vocab_size=vocab_size)
    if output is not None and output != "-":
        check_writable(output, force=force)
    read = read_given(placed(plan), launch_flags, with_framework_of(to, plan, launch_flags, flags))
    done = _exported(read, to)
    _tell([note.message for note in read.warnings], quiet)
    if json:
        print_json(_as_json(done))
        return 0
    if output is None or output == "-":
        print_file(done.text)
        if not done.says_its_command:
            _tell([f"estimate it with: {done.command_line()}"], quiet)
        return 0
    write_whole(output, done.text_at(output).encode(), force=force)
    _tell([f"wrote {output}; estimate it with: {done.command_line(output)}"], quiet)
    return 0


def with_framework_of(to: str | None, plan: list[str] | None, launch: LaunchFlags, given: Flags) -> Flags:
    """``given`` of a job in flags alone, with the framework that ``--to`` is about where they name none."""
    if to is None or plan or launch.formats or "framework" in given:
        return given
    names = {one.configuration: one.name for one in frameworks()}
    return {**STAND_FOR.get(to, {"framework": names[to]} if to in names else {}), **given}


def _exported(read: ReadPlan, to: str | None) -> Exported:
    from ..formats.exported import exported

    name = to if to is not None else framework(read.plan.framework).configuration
    if name is None:
        names = {one.configuration: one.name for one in frameworks()}
        known = ", ".join(names[format] for format in WRITTEN)
        problem = f"has no configuration of its own, but Python; these have: {known} (--framework or --to)"
        raise read.located(PlanError("framework", read.plan.framework, problem))
    if name not in WRITTEN:
        must = f"{name} must be {', '.join(WRITTEN[:-1])} or {WRITTEN[-1]}"
        raise wrong_at("--to", guessed(must, nearest(name, WRITTEN)))
    try:
        return exported(read.plan, target(name))
    except PlanError as error:
        raise read.located(error) from None


def _as_json(done: Exported) -> dict[str, Any]:
    from .. import __version__

    return {
        "schema": 1,
        "memplan": __version__,
        "to": done.target.name,
        "text": done.text,
        **done.content,
        "read_back": done.command(),
    }


def _tell(lines: list[str], quiet: bool) -> None:
    for line in () if quiet else lines:
        tell(one_line(line))
