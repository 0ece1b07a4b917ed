"""Plans from Python: paths, mappings and fields in the command line's spellings."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from ..plan.assumed_releases import notes_of_releases
from ..plan.errors import ABSENT, Node, Origin, PlanError, scalar, together, wrong_at
from ..plan.fields import by_flag, plan_fields
from ..plan.notes import notes_of
from ..plan.plan import Plan as _Plan
from ..plan.read import COMMAND_LINE, Flags, ReadPlan, Source, build_plan
from ..plan.spellings import with_said_at_once
from ..values import dataclass

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..commands.launched import Place
    from ..formats.together import Part

Path_: TypeAlias = "str | os.PathLike[str]"
Given: TypeAlias = "Path_ | Mapping[str, object] | Sequence[Path_ | Mapping[str, object]] | _Plan | None"
"""Where a plan is: a path or a built-in example's name; its fields; a plan; launch files of one job, or what stands in
them (``TrainingArguments.to_dict()``, a ``ds_config``); or nothing, where fields say it all."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a plan was read from."""

    place: Place | Source | list[Part]
    from_: str | None
    flags: Flags

    def read(self, *, traced: bool) -> ReadPlan:
        from ..commands.launched import flags_of_launch, read_given

        if isinstance(self.place, Source):
            return build_plan(self.place, self.flags, traced=traced)
        if isinstance(self.place, list):
            from ..formats.launch import Asked, launched_plan
            from ..formats.together import read_together

            return launched_plan(read_together(self.place, Asked(flags=self.flags)), self.flags)
        launch = flags_of_launch(self.place, [self.from_] if self.from_ is not None else None)
        return read_given(self.place, launch, self.flags, traced=traced)


class Plan(_Plan):
    """A training job, as it was read: before defaults are filled in. Immutable; ``read_plan`` makes it, and another
    with other fields: ``read_plan(plan, mbs=2)``."""

    model_config = ConfigDict(defer_build=True)

    def __init__(self, **fields: object) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name, problem = ".".join(map(str, first["loc"])), first["msg"]
            raise PlanError(
                name,
                ABSENT,
                f"{problem[:1].lower()}{problem[1:]}; read_plan(model=…, gpus=8) takes names and fills in the rest",
                origin=Origin("Plan"),
            ) from None

    _asked: _Asked | None = PrivateAttr(None)

    @classmethod
    def _of(cls, plan: _Plan, asked: _Asked | None = None) -> Self:
        made = constructed(cls, plan)
        made._asked = asked
        return made

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        if update:
            copied._asked = None  # it is no longer what was read
        return copied


def read_plan(plan: Given = None, /, *, from_: str | None = None, **fields: object) -> Plan:
    """A plan from a path, a built-in example's name, a mapping or another plan; ``fields`` override it.

    Raises ``PlanError``, whose text names the field, its value, what is allowed and where it came from.

    A mapping has sections as a plan's file has them (``{"layout": {"tp": 4}}``), flags' names (``{"tp": 4}``), or both.
    Launch files are known by what stands in them, several of one job together
    (``["arguments.json", "zero3.json"]``); ``from_`` is the command line's ``--from``:
    ``read_plan("train.sh", from_="megatron", gpus=64)``.
    """
    with as_arguments():
        asked = asked_of(plan, from_, flags_of(fields))
        return Plan._of(asked.read(traced=True).plan, asked)


# -- reading ------------------------------------------------------------------------------------------------


def read_any(plan: Given, flags: Flags, *, traced: bool = False) -> ReadPlan:
    if isinstance(plan, _Plan) and not flags and getattr(plan, "_asked", None) is None:
        own = constructed(_Plan, plan)
        return ReadPlan(own, {}, (*notes_of(own), *notes_of_releases(own)))
    return asked_of(plan, None, flags).read(traced=traced)


Data = TypeVar("Data", bound=BaseModel)


def constructed(kind: type[Data], value: BaseModel) -> Data:
    """``value``, which was checked when it was made, as one of ``kind``."""
    return kind.model_construct(value.model_fields_set, **{name: getattr(value, name) for name in kind.model_fields})


def asked_of(plan: Given, from_: str | None, flags: Flags) -> _Asked:
    if isinstance(plan, _Plan):
        before = getattr(plan, "_asked", None) or _Asked(_source(plan), None, {})
        return replace(before, flags={**before.flags, **flags})
    if plan is None or isinstance(plan, str | os.PathLike):
        return _Asked(None if plan is None else os.fspath(plan), from_, flags)
    if isinstance(plan, Mapping):
        parts = _parts([plan])
        if parts:
            return _Asked(parts, None, flags)
        document, own = _mapping(plan)
        return _Asked(Source(document, Path()), None, {**own, **flags})
    if not isinstance(plan, Sequence):
        raise wrong_at(
            "arguments",
            f"a plan is a path, an example's name, a mapping, a Plan or a list of launch files, not {plan!r}",
        )
    parts = _parts(plan)
    if len(parts) != len(plan):
        raise wrong_at(
            "arguments", "a list is of launch files of one job: paths, TrainingArguments.to_dict(), a ds_config"
        )
    return _Asked(parts, None, flags)


def _parts(given: Sequence[Path_ | Mapping[str, object]]) -> list[Part]:
    """Those of ``given`` that are launch files, or what stands in one."""
    from ..formats.recognised import format_of, recognised
    from ..formats.together import Part

    found: list[Part] = []
    for one in given:
        content = _node(one, Origin("plan")) if isinstance(one, Mapping) else os.fspath(one)
        name = recognised(content, ()) if isinstance(content, str) else format_of(content)
        if name is not None:
            found.append(Part(name, content))
    return found


def _source(plan: _Plan) -> Source:
    """A plan that was made by itself, as written."""
    from ..plan.normalise import normalised
    from ..plan.text import parse_yaml
    from ..plan.write import plan_yaml

    return Source(normalised(parse_yaml(plan_yaml(plan), "the plan", line=False)), Path())


def _mapping(plan: Mapping[str, object]) -> tuple[Node, Flags]:
    """The fields and sections of a plan's file, and the rest as flags."""
    from ..plan.normalise import normalised

    own = {path.partition(".")[0] for path in plan_fields()} | {"$schema"}
    for name in plan:
        if not isinstance(name, str):
            raise wrong_at("plan", f"{name!r} is no name of a field")
    document = {name: _node(value, Origin(_argument(name))) for name, value in plan.items() if name in own}
    flags, names = _named_flags({name: value for name, value in plan.items() if name not in own})
    written = normalised(Node(document, Origin("plan")))
    for flag, text in flags.items():
        path = "model.base" if flag == "model" else by_flag()[flag].path
        said = written.at(path)
        if said is not None and _text(said.plain()) != text:
            raise _twice(names.get(flag, flag), text, path.removesuffix(".base"), said.plain())
    return written, flags


def _node(value: object, origin: Origin) -> Node:
    if isinstance(value, Mapping):
        return Node({str(key): _node(item, origin) for key, item in value.items()}, origin)
    if isinstance(value, list | tuple):
        return Node([_node(item, origin) for item in value], origin)
    if value is None or isinstance(value, bool | int | float):
        return Node(value, origin)
    return scalar(os.fspath(value) if isinstance(value, os.PathLike) else str(value), origin)


def flags_of(fields: Mapping[str, object]) -> Flags:
    """``fields`` as the command line has them, in memplan's names or those of other tools."""
    return _named_flags(fields)[0]


def _named_flags(fields: Mapping[str, object]) -> tuple[Flags, Mapping[str, str]]:
    """``flags_of``, and by flag the name under which it was given."""
    from ..plan.near_misses import CHANGES_NOTHING, NOT_MODELLED, SAME

    flags: dict[str, str | tuple[str, ...]] = {}
    names: dict[str, str] = {}
    wrong: list[PlanError] = []
    for name, value in fields.items():
        written = f"--{name.replace('_', '-')}"
        flag = SAME.get(written, written)[2:]
        if flag not in by_flag():
            if written not in CHANGES_NOTHING:
                problem = NOT_MODELLED.get(written) or f"is not a field of a plan{_hint(written)}"
                wrong.append(PlanError(name, ABSENT, problem, origin=Origin("argument")))
        elif value is not None:
            text = _text(value)
            if flags.setdefault(flag, text) != text:
                wrong.append(_twice(name, text, names[flag], flags[flag]))
            names.setdefault(flag, name)
    if wrong:
        raise together(wrong)
    return with_said_at_once(flags), names


def _twice(name: str, value: object, other: str, before: object) -> PlanError:
    """Of one field under two names, with two values."""
    return PlanError(name, value, f"is the same field as {other}, which is {before}", origin=Origin("argument"))


def _hint(flag: str) -> str:
    from ..plan.near_misses import likely

    guess = likely(flag, (f"--{name}" for name in by_flag()))
    return f"; did you mean {in_python(guess)}?" if guess is not None else ""


_OF_SEARCH = ("objective", "top", "fix")
"""Flags of a search that are arguments of ``suggest``, and no fields of a plan."""
_COMMAND = r"memplan [a-z-]+ (?:\S+\.json )?--(?:(?!, )[^`;()])*"
"""A command for a shell: ``memplan estimate ds_config.json --model …``."""


def in_python(text: str) -> str:
    """``text`` with the names of arguments where it has flags, but for those of a whole command."""

    def named(match: re.Match[str]) -> str:
        name = match["flag"]
        known = name is not None and (name in by_flag() or name in _OF_SEARCH)
        return name.replace("-", "_") if known else match[0]

    return re.sub(rf"{_COMMAND}|--(?P<flag>[a-z][a-z0-9-]*)", named, text)


def _text(value: object) -> str | tuple[str, ...]:
    match value:
        case bool():
            return "true" if value else "false"
        case Mapping():
            if all(isinstance(item, str) for item in value.values()):
                return tuple(f"{key}={item}" for key, item in value.items())  # variables
            return json.dumps({str(key): item for key, item in value.items()})  # a device map
        case list() | tuple():
            return tuple(map(str, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _argument(name: str) -> str:
    return f"argument {name.replace('-', '_')}"


@contextmanager
def as_arguments() -> Iterator[None]:
    """Errors that name a flag name the argument."""
    try:
        yield
    except PlanError as error:
        raise error.each(_of_arguments) from None


def _of_arguments(error: PlanError) -> PlanError:
    source = error.origin.source if error.origin is not None else ""
    origin = error.origin
    if source.startswith("--"):
        origin = Origin(_argument(source[2:]))
    elif origin == COMMAND_LINE:
        origin = Origin("arguments")
    return error.but(problem=in_python(error.problem), origin=origin)
