"""``--from``: a framework's own launch file in place of a plan, and the flags that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ..plan.errors import ABSENT, Origin, PlanError
from ..plan.read import Flags, ReadPlan, build_plan

if TYPE_CHECKING:
    from ..plan.launch import Launch
    from ..plan.launch.tables import Launched
    from ..plan.node import Node

READ = ("megatron", "megatron-deepspeed")
"""Frameworks whose launch files are read."""
PLANNED = ("deepspeed", "torchtitan")
"""Those whose own configurations will be."""

MEANINGS = {
    "--from": f"the framework whose launch file PLAN is, {' or '.join(READ)}",
    "--set": "a variable that the launch script does not set, as --set NAME=value",
    "--vocab-size": "number of the tokenizer's tokens, before padding",
}
"""What flags without a value would have said."""


@dataclass(frozen=True, slots=True)
class LaunchFlags:
    """The flags of ``estimate`` that are about a launch file."""

    framework: str | None
    variables: Sequence[str]
    strict: bool
    vocab_size: int | None

    def check_alone(self, *, explain: bool) -> None:
        """Without ``--from`` none of them means anything."""
        given = {"--set": bool(self.variables), "--strict": self.strict, "--explain-args": explain}
        given["--vocab-size"] = self.vocab_size is not None
        for flag, is_given in given.items():
            if is_given and self.framework is None:
                other = "; --vocab is the field of a plan" if flag == "--vocab-size" else ""
                raise PlanError("", ABSENT, f"belongs to --from, which reads a launch file{other}", origin=Origin(flag))


def read_launched(place: str | None, launch_flags: LaunchFlags, flags: Flags, vary: Sequence[str] = ()) -> Launch:
    """The launch file at ``place``, read as ``launch_flags`` say."""
    from ..plan.launch import Choices, read_launch
    from ..plan.node import Node

    framework = launch_flags.framework
    if framework not in READ:
        origin = Origin("--from")
        if framework in PLANNED:
            problem = f"{framework}: reading its configuration is not built yet; {' and '.join(READ)} are"
            raise PlanError("", ABSENT, problem, origin=origin)
        raise PlanError("", ABSENT, f"{framework} must be {' or '.join(READ)}", origin=origin)
    if place is None:
        problem = f"needs a file, as memplan estimate --from {framework} train.sh --gpus 64"
        raise PlanError("", ABSENT, problem, origin=Origin("--from"))
    size = launch_flags.vocab_size
    if size is not None and size < 1:
        raise PlanError("--vocab-size", size, "must be at least 1", origin=Origin("--vocab-size"))
    names = {*flags, *(assignment.partition("=")[0] for assignment in vary)}
    vocabulary = Node(size, Origin("--vocab-size")) if size is not None else _whole(flags, "vocab")
    choices = Choices(
        _variables(launch_flags.variables),
        launch_flags.strict,
        _whole(flags, "gpus"),
        vocabulary,
        any_gpus=bool(names & {"gpus", "dp"}),
    )
    return read_launch(place, cast("Launched", framework), choices)


def launched_plan(launch: Launch, flags: Flags) -> ReadPlan:
    """The plan of ``launch`` with ``flags`` over it."""
    read = build_plan(launch.source, flags)
    return ReadPlan(read.plan, read.origins, (*launch.notes, *read.warnings))


def _whole(flags: Flags, name: str) -> Node | None:
    from ..plan.node import Node

    value = flags.get(name)
    is_whole = isinstance(value, str) and value.isascii() and value.isdigit() and 0 < len(value) < 10
    return Node(int(value), Origin(f"--{name}")) if isinstance(value, str) and is_whole and int(value) else None


def _variables(assignments: Sequence[str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not (name.isidentifier() or name.isdigit()) or not name.isascii():
            raise PlanError("", ABSENT, f"{assignment} must be NAME=value", origin=Origin("--set"))
        variables[name] = value
    return variables
