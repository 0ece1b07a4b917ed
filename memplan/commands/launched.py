"""``--from``: a framework's own launch file in place of a plan, and the flags that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..formats import ALSO_CALLED, FORMATS, READ, reader
from ..formats.elsewhere import ELSEWHERE
from ..plan.errors import wrong_at
from ..plan.fields import by_flag, plan_fields
from ..plan.library import examples
from ..plan.read import Flags, ReadPlan, read_plan
from ..plan.spellings import gpus_called, gpus_named, with_said_at_once
from ..plan.text import is_there
from ..values import dataclass, replace
from .output import beginning

if TYPE_CHECKING:
    from ..formats.launch import Launch

LAUNCH = "A launch file in place of a plan"

From = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="FRAMEWORK",
        help="PLAN is a launch script, list or mapping of arguments of megatron or megatron-deepspeed, the "
        "ds_config.json of deepspeed, the TOML, Python or saved JSON of a job of torchtitan, arguments or a launch "
        "script of trainer, or the configuration of accelerate; of several files, one each; default: known by what "
        "stands in it",
        rich_help_panel=LAUNCH,
        autocompletion=beginning(lambda: READ),
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

_LAUNCHED = (".py", ".sh", ".toml", ".json", ".yaml", ".yml", ".ipynb", ".slurm", ".sbatch", ".bash")
"""Endings of launch files."""
MEANINGS = {
    "--from": f"the framework whose launch file PLAN is, {', '.join(READ[:-1])} or {READ[-1]}",
    "--set": "a variable that the launch script does not set, or a key of torchtitan's, as --set NAME=value",
    "--vocab-size": "number of the tokenizer's tokens, before padding",
}
"""What flags without a value would have said."""


@dataclass(frozen=True, slots=True)
class LaunchFlags:
    """The flags of ``estimate`` that are about a launch file."""

    formats: tuple[str, ...]
    """``--from`` of each file, or whose it was found to be; none for a plan."""
    variables: Sequence[str]
    strict: bool
    vocab_size: int | None
    recognised: bool = False
    """No ``--from`` was given."""
    overrides: tuple[str, ...] = ()
    """Of the words of PLAN, those that are no file: Megatron-Bridge's overrides."""

    @property
    def takes_settings(self) -> bool:
        """``--set`` and ``--vocab-size`` mean something for one of the files."""
        return any(FORMATS[name].takes_settings for name in self.formats if name in FORMATS)


Place = str | tuple[str, ...] | None
"""Where a plan is, a launch file, or several files of one job."""


def placed(given: Sequence[str] | None) -> Place:
    """The words of PLAN on a command line."""
    if given is not None and len(given) == 2:
        from ..formats.megatron_bridge.called import together

        given = [one] if (one := together([*given])) is not None else given
    return None if not given else given[0] if len(given) == 1 else tuple(given)


def with_gpu_said(given: list[str] | None, flags: Flags) -> tuple[list[str] | None, Flags]:
    """PLAN and the flags of ``estimate llama-3-8b 8xh100``, whose second word is a GPU."""
    gpus = [one for one in given or () if gpus_called(one) or gpus_named(one)]
    if given is None or len(given) != 2 or len(gpus) != 1 or "gpu" in flags:
        return given, flags
    return [one for one in given if one not in gpus], with_said_at_once({**flags, "gpu": gpus[0]})


def name_of(place: Place) -> str | None:
    """What a report calls it."""
    return " + ".join(place) if isinstance(place, tuple) else place


def flags_of_launch(
    place: Place,
    formats: Sequence[str] | str | None,
    variables: Sequence[str] | None = None,
    *,
    strict: bool = False,
    vocab_size: int | None = None,
    explain: bool = False,
    beside: bool = False,
) -> LaunchFlags:
    """The flags for the files at ``place``, which say by themselves whose they are where no ``--from`` does. Without a
    launch file, here or ``beside`` it, none of the others means anything."""
    variables, words = variables or (), _words(place)
    given = tuple(one for one in words if not _is_override(one))
    if len(given) < len(words):
        return _overridden(
            given, tuple(one for one in words if _is_override(one)), formats, variables, strict, vocab_size
        )
    named = [_called(name) for name in ((formats,) if isinstance(formats, str) else formats or ())]
    if named and not {*named} <= {one.name.lower() for one in ELSEWHERE}:
        return LaunchFlags(_of_each(named, given), variables, strict, vocab_size)
    found: list[str] = []
    for one in given:
        if one not in examples():
            from ..formats.recognised import recognised

            found += [name] if (name := recognised(one, variables)) is not None else []
    if found and len(found) == len(given):
        return LaunchFlags(tuple(found), variables, strict, vocab_size, recognised=True)
    fields = [said for one in given if not is_there(Path(one)) and (said := _flag_of(one)) is not None]
    if fields:
        raise wrong_at("command line", f"{fields[0][0]} is no file: a field of a plan is a flag, {fields[0][1]}")
    if len(given) > 1:
        gpus = [one for one in given if gpus_called(one) or gpus_named(one)]
        problem = "are no launch files of one job; --compare puts plans side by side"
        problem += f", and a GPU is --gpu {gpus[0]}" if gpus else ""
        locks = [one for one in given if one.endswith((".txt", ".lock"))]
        missing = [one for one in given if Path(one).suffix[1:].isalpha() and not is_there(Path(one))]
        if missing and not gpus and not locks:
            raise wrong_at(missing[0], "no such file")
        of_script = given[0].endswith((".sh", ".bash", ".slurm", ".sbatch")) and not gpus and not locks
        if of_script and not any(is_there(Path(one)) for one in given[1:]):
            set_by = " ".join(f"--set {n}={one}" for n, one in enumerate(given[1:], 1))
            problem = f"no file: arguments of a script are given as {given[0]} {set_by}"
            raise wrong_at("command line", f"{' and '.join(given[1:])}: {problem}")
        problem += f", and installed releases are --versions {locks[0]}" if locks else ""
        raise wrong_at("command line", f"{' and '.join(given)} {problem}")
    missing = [one for one in given if Path(one).suffix in _LAUNCHED and not is_there(Path(one))]
    others = {"--set": bool(variables), "--strict": strict, "--explain-args": explain}
    others["--vocab-size"] = vocab_size is not None
    for flag, is_given in others.items():
        if is_given and missing:
            raise wrong_at(missing[0], "no such file")
        if is_given and not (beside and flag == "--set"):
            other = "; --vocab is the field of a plan" if flag == "--vocab-size" else ""
            said_by = _flag_of(variables[0]) if flag == "--set" and variables else None
            other = f"; a field of a plan is a flag, {said_by[1]}" if said_by is not None else other
            raise wrong_at(flag, f"belongs to --from, which reads a launch file{other}")
    return LaunchFlags((), variables, strict, vocab_size)


def _is_override(word: str) -> bool:
    if "=" not in word and not word.startswith("~"):
        return False  # without what reads them
    from ..formats.megatron_bridge.overrides import is_override

    return is_override(word)


def _words(place: Place) -> tuple[str, ...]:
    return place if isinstance(place, tuple) else () if place is None else (place,)


def _overridden(
    given: Sequence[str],
    overrides: tuple[str, ...],
    formats: Sequence[str] | str | None,
    variables: Sequence[str],
    strict: bool,
    vocab_size: int | None,
) -> LaunchFlags:
    """The flags for overrides of Megatron-Bridge, alone or over the one file ``given``."""
    from ..formats.recognised import recognised

    named = formats if isinstance(formats, str) else formats[0] if formats else None
    found = _called(named) if named is not None else recognised(given[0], variables) if given else _BRIDGE
    if found != _BRIDGE or len(given) > 1:
        whose = f"of a {found} file" if found is not None else "of a plan"
        problem = (
            f"is an override as Megatron-Bridge's recipes take it; a field {whose} is given as a flag, such as --tp 4"
        )
        raise wrong_at("command line", f"{overrides[0]} {problem}")
    return LaunchFlags((_BRIDGE,), variables, strict, vocab_size, recognised=bool(given), overrides=overrides)


_BRIDGE = "megatron-bridge"


def _flag_of(word: str) -> tuple[str, str] | None:
    """``layout.tp=4``, ``tp=4`` or ``zero3``, and the flag that says it."""
    from ..plan.near_misses import MEANT, called

    name, equals, value = word.partition("=")
    field = plan_fields().get(name) or by_flag().get(called(name))
    if equals and field is not None and field.flag:
        return word, f"{field.flag} {value}"
    meant = MEANT.get(f"--{word.lower()}")
    return (word, meant) if meant is not None and len(meant.split(" ")) == 2 else None


def _called(name: str) -> str:
    """A format as ``FORMATS`` calls it."""
    plain = name.lower().replace("_", "-")
    return ALSO_CALLED.get(plain, plain)


def _of_each(formats: Sequence[str], given: Sequence[str]) -> tuple[str, ...]:
    """``formats`` of ``--from``, which name that of each file."""
    for name in formats:
        if name not in READ:
            raise wrong_at("--from", f"{name} must be {', '.join(READ[:-1])} or {READ[-1]}")
    if not given:
        raise wrong_at(
            "--from", f"needs a file, as memplan estimate --from {formats[0]} {FORMATS[formats[0]].example} --gpus 64"
        )
    if len(formats) != len(given):
        raise wrong_at(
            "--from", f"is given {len(formats)}x for {len(given)} files: name the format of each, or of none"
        )
    return tuple(formats)


def read_given(place: Place, launch_flags: LaunchFlags, flags: Flags, *, traced: bool = False) -> ReadPlan:
    """The plan at ``place``, or in the launch files there, with ``flags`` over it; of an architecture that was
    ``traced``, too."""
    if not launch_flags.formats:
        assert not isinstance(place, tuple)
        return read_plan(place, flags, traced=traced)
    from ..formats.launch import launched_plan

    return launched_plan(read_launched(place, launch_flags, flags), flags, traced=traced)


def read_launched(place: Place, launch_flags: LaunchFlags, flags: Flags, vary: Sequence[str] = ()) -> Launch:
    """The launch files at ``place``, read as ``launch_flags`` say."""
    from ..formats.launch import Asked

    names, size = launch_flags.formats, launch_flags.vocab_size
    for flag, given in (("--set", bool(launch_flags.variables)), ("--vocab-size", size is not None)):
        if given and not launch_flags.takes_settings:
            raise wrong_at(flag, f"belongs to launch scripts, and not to --from {names[0]}")
    if size is not None and size < 1:
        raise wrong_at("--vocab-size", f"{size} must be at least 1")
    if size is not None and "vocab" in flags:
        raise wrong_at("--vocab-size", "says the same as --vocab; give one of them")
    varied = [assignment.partition("=")[0] for assignment in vary]
    overrides = launch_flags.overrides
    asked = Asked(names[0], flags, varied, launch_flags.variables, launch_flags.strict, size, overrides)
    place = placed([one for one in _words(place) if one not in overrides]) if overrides else place
    if place is None and overrides:
        return reader(names[0])("", asked)
    if isinstance(place, tuple):
        from ..formats.together import Part, read_together

        launch, places = read_together([Part(*pair) for pair in zip(names, place, strict=True)], asked), place
    else:
        assert place is not None
        launch, places = reader(names[0])(place, asked), (place,)
    if launch_flags.takes_settings:
        from ..formats.slurm import with_gpu_of_job

        launch = with_gpu_of_job(launch, places, asked)
    if not launch_flags.recognised:
        return launch
    told = [f"{one} is a launch file of {name} (--from names another)" for one, name in zip(places, names, strict=True)]
    return replace(launch, assumptions=(*told, *launch.assumptions))
