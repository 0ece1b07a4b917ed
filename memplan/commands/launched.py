"""``--from``: a framework's own launch file in place of a plan, and the flags that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ..plan.errors import ABSENT, Origin, PlanError
from ..plan.read import Flags, ReadPlan
from ..plan.text import is_there

if TYPE_CHECKING:
    from ..plan.launch import Launch
    from ..plan.launch.tables import Launched
    from ..plan.node import Node

SCRIPTED = ("megatron", "megatron-deepspeed")
"""Frameworks whose launch scripts are read,"""
CONFIGURED = ("deepspeed", "trainer")
"""those whose configurations are: ``ds_config.json``, and arguments of Hugging Face's Trainer,"""
READ = (*SCRIPTED, "deepspeed", "torchtitan", "trainer")
"""and all whose launch files are: torchtitan's is a job's TOML or saved JSON."""

_FILES = {
    "deepspeed": "ds_config.json --model gpt2",
    "torchtitan": "llama3_8b.toml",
    "trainer": "arguments.json --model gpt2",
}

_SHELL_SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")

MEANINGS = {
    "--from": f"the framework whose launch file PLAN is, {', '.join(READ[:-1])} or {READ[-1]}",
    "--set": "a variable that the launch script does not set, or a key of torchtitan's, as --set NAME=value",
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


def refuse_script(place: str | None) -> None:
    """Says how to read a shell script that is given as a plan."""
    if place is not None and place.endswith(_SHELL_SCRIPTS) and is_there(Path(place)):
        problem = f"is a shell script, not a plan; read it with --from {' or --from '.join(SCRIPTED)}"
        raise PlanError("", ABSENT, problem, origin=Origin(place))


def read_given(place: str | None, launch_flags: LaunchFlags, flags: Flags, *, traced: bool = False) -> ReadPlan:
    """The plan at ``place``, or in the launch file there, with ``flags`` over it; of an architecture that was
    ``traced``, too."""
    from ..plan.completion import launched_plan
    from ..plan.read import read_plan

    if launch_flags.framework is None:
        refuse_script(place)
        return read_plan(place, flags, traced=traced)
    return launched_plan(read_launched(place, launch_flags, flags), flags)


def read_launched(place: str | None, launch_flags: LaunchFlags, flags: Flags, vary: Sequence[str] = ()) -> Launch:
    """The launch file at ``place``, read as ``launch_flags`` say."""
    from ..plan.launch import Choices, read_launch
    from ..plan.node import Node

    framework = launch_flags.framework
    if framework not in READ:
        problem = f"{framework} must be {', '.join(READ[:-1])} or {READ[-1]}"
        raise PlanError("", ABSENT, problem, origin=Origin("--from"))
    if place is None:
        file = _FILES.get(framework, "train.sh")
        problem = f"needs a file, as memplan estimate --from {framework} {file} --gpus 64"
        raise PlanError("", ABSENT, problem, origin=Origin("--from"))
    if framework in CONFIGURED:
        return _configured(place, launch_flags, flags, vary)
    size = launch_flags.vocab_size
    if size is not None and size < 1:
        raise PlanError("", ABSENT, f"{size} must be at least 1", origin=Origin("--vocab-size"))
    if size is not None and "vocab" in flags:
        raise PlanError("", ABSENT, "says the same as --vocab; give one of them", origin=Origin("--vocab-size"))
    names = {*flags, *(assignment.partition("=")[0] for assignment in vary)}
    if framework == "torchtitan":
        from ..plan.launch.torchtitan import Said, read_torchtitan

        tokens = Node(size, Origin("--vocab-size")) if size is not None else None
        gpus = _whole(flags, "gpus")
        return read_torchtitan(place, Said(launch_flags.variables, names, launch_flags.strict, gpus, tokens))
    vocabulary = Node(size, Origin("--vocab-size")) if size is not None else _whole(flags, "vocab")
    choices = Choices(
        _variables(launch_flags.variables),
        launch_flags.strict,
        _whole(flags, "gpus"),
        vocabulary,
        any_gpus=bool(names & {"gpus", "dp"}),
    )
    return read_launch(place, cast("Launched", framework), choices)


def _configured(place: str, launch_flags: LaunchFlags, flags: Flags, vary: Sequence[str]) -> Launch:
    """DeepSpeed's configuration at ``place``, or the Trainer's."""
    from ..plan.launch.ds_config import read_ds_config
    from ..plan.launch.trainer_args import read_trainer_arguments

    for flag, given in (("--set", bool(launch_flags.variables)), ("--vocab-size", launch_flags.vocab_size is not None)):
        if given:
            raise PlanError(
                "",
                ABSENT,
                f"belongs to launch scripts, and not to --from {launch_flags.framework}",
                origin=Origin(flag),
            )
    varied = [assignment.partition("=")[0] for assignment in vary]
    read = read_ds_config if launch_flags.framework == "deepspeed" else read_trainer_arguments
    return read(place, flags, varied, strict=launch_flags.strict)


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
