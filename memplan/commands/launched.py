"""``--from``: a framework's own launch file in place of a plan, and the flags that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..formats import FORMATS, READ, reader
from ..plan.errors import ABSENT, Origin, PlanError
from ..plan.library import examples
from ..plan.read import Flags, ReadPlan, read_plan
from ..values import dataclass

if TYPE_CHECKING:
    from ..formats.launch import Launch

LAUNCH = "A launch file in place of a plan"

From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="FRAMEWORK",
        help="PLAN is a launch script, list or mapping of arguments of megatron or megatron-deepspeed, the "
        "ds_config.json of deepspeed, the TOML or saved JSON of a job of torchtitan, arguments or a launch script of "
        "trainer, or the configuration of accelerate; default: known by what stands in it",
        rich_help_panel=LAUNCH,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=value",
        help="set a variable of the script ($1 as 1=value) or a key of torchtitan's job; replaces the file's own value",
        rich_help_panel=LAUNCH,
    ),
]
VocabSize = Annotated[
    int | None,
    typer.Option(
        "--vocab-size",
        metavar="N",
        help="size of the vocabulary, if the tokenizer's files are not on this machine",
        rich_help_panel=LAUNCH,
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="refuse arguments that are unknown or not modelled", rich_help_panel=LAUNCH),
]

MEANINGS = {
    "--from": f"the framework whose launch file PLAN is, {', '.join(READ[:-1])} or {READ[-1]}",
    "--set": "a variable that the launch script does not set, or a key of torchtitan's, as --set NAME=value",
    "--vocab-size": "number of the tokenizer's tokens, before padding",
}
"""What flags without a value would have said."""


@dataclass(frozen=True, slots=True)
class LaunchFlags:
    """The flags of ``estimate`` that are about a launch file."""

    format: str | None
    """``--from``, or whose file PLAN was found to be; nothing for a plan."""
    variables: Sequence[str]
    strict: bool
    vocab_size: int | None
    recognised: bool = False
    """No ``--from`` was given."""


def flags_of_launch(
    place: str | None,
    format: str | None,
    variables: Sequence[str] | None = None,
    *,
    strict: bool = False,
    vocab_size: int | None = None,
    explain: bool = False,
) -> LaunchFlags:
    """The flags for the file at ``place``, which says by itself whose it is where no ``--from`` does. Without a launch
    file none of the others means anything."""
    variables = variables or ()
    if format is None and place is not None and place not in examples():
        from ..formats.recognised import recognised

        found = recognised(place, variables)
        if found is not None:
            return LaunchFlags(found, variables, strict, vocab_size, recognised=True)
    given = {"--set": bool(variables), "--strict": strict, "--explain-args": explain}
    given["--vocab-size"] = vocab_size is not None
    for flag, is_given in given.items():
        if is_given and format is None:
            other = "; --vocab is the field of a plan" if flag == "--vocab-size" else ""
            raise PlanError("", ABSENT, f"belongs to --from, which reads a launch file{other}", origin=Origin(flag))
    return LaunchFlags(format, variables, strict, vocab_size)


def read_given(place: str | None, launch_flags: LaunchFlags, flags: Flags, *, traced: bool = False) -> ReadPlan:
    """The plan at ``place``, or in the launch file there, with ``flags`` over it; of an architecture that was
    ``traced``, too."""
    if launch_flags.format is None:
        return read_plan(place, flags, traced=traced)
    from ..formats.launch import launched_plan

    return launched_plan(read_launched(place, launch_flags, flags), flags)


def read_launched(place: str | None, launch_flags: LaunchFlags, flags: Flags, vary: Sequence[str] = ()) -> Launch:
    """The launch file at ``place``, read as ``launch_flags`` say."""
    from ..formats.launch import Asked

    name, size = launch_flags.format or "", launch_flags.vocab_size
    if name not in READ:
        problem = f"{name} must be {', '.join(READ[:-1])} or {READ[-1]}"
        raise PlanError("", ABSENT, problem, origin=Origin("--from"))
    if place is None:
        problem = f"needs a file, as memplan estimate --from {name} {FORMATS[name].example} --gpus 64"
        raise PlanError("", ABSENT, problem, origin=Origin("--from"))
    for flag, given in (("--set", bool(launch_flags.variables)), ("--vocab-size", size is not None)):
        if given and not FORMATS[name].takes_settings:
            raise PlanError("", ABSENT, f"belongs to launch scripts, and not to --from {name}", origin=Origin(flag))
    if size is not None and size < 1:
        raise PlanError("", ABSENT, f"{size} must be at least 1", origin=Origin("--vocab-size"))
    if size is not None and "vocab" in flags:
        raise PlanError("", ABSENT, "says the same as --vocab; give one of them", origin=Origin("--vocab-size"))
    varied = [assignment.partition("=")[0] for assignment in vary]
    launch = reader(name)(place, Asked(name, flags, varied, launch_flags.variables, launch_flags.strict, size))
    if not launch_flags.recognised:
        return launch
    return replace(
        launch, assumptions=(f"{place} is a launch file of {name} (--from names another)", *launch.assumptions)
    )
