"""What an export is, and the proof that it says the plan: it is read back by the reader of its framework.

A configuration says what its framework decides. What it has no word for (the GPU, the number of ranks where a
launcher says it, the model where code names it) is *beside* it: flags of ``memplan estimate --from``. An export is
whole when configuration and flags, read back, resolve to the plan that was exported; ``Target.beside`` are the fields
that may become flags, and the first other field that differs is one that the framework cannot express.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..estimate import check
from ..plan.errors import PlanError, one_line, shown
from ..plan.fields import Kind, plan_fields
from ..plan.plan import Plan
from ..plan.read import Flags
from ..plan.resolve import resolve
from .beside import as_flag
from .sameness import differences, value_at

PLACE = "FILE"
"""How a command names the file that has been written."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A configuration that a target has written and nobody has read back yet."""

    text: str
    content: Mapping[str, Any]
    """What ``--json`` shows of it, by name: groups of arguments, sections, files."""
    flags: Flags = field(default_factory=dict)
    """Flags without which it cannot be read back."""
    settings: tuple[str, ...] = ()
    """``--set`` of the reader."""


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of configuration: how it is written, and read back."""

    name: str
    framework: str
    """That of the plans which it can express."""
    what: str
    """As an error names it: ``Megatron's arguments``."""
    write: Callable[[Plan], Draft]
    read: Callable[[str, Flags, tuple[str, ...]], Plan]
    """Text, flags and settings to a plan before defaults."""
    command: tuple[str, ...]
    """Words of the command that reads it back, ``PLACE`` among them."""
    beside: Collection[str]
    """Sections, and fields by their paths, that may be flags."""

    def may_be_flag(self, path: str) -> bool:
        return path in self.beside or path.rpartition(".")[0] in self.beside


@dataclass(frozen=True, slots=True)
class Exported:
    """A configuration that reads back as the plan."""

    target: Target
    text: str
    content: Mapping[str, Any]
    flags: Flags
    settings: tuple[str, ...]
    plan: Plan
    """The plan, every default filled in."""

    def command(self, place: str = PLACE) -> list[str]:
        """The command that estimates the configuration at ``place``."""
        words = ["memplan", "estimate", *(place if word == PLACE else word for word in self.target.command)]
        for setting in self.settings:
            words += ["--set", setting]
        for name, value in self.flags.items():
            words += flag_words(name, value)
        return words

    def command_line(self, place: str = PLACE) -> str:
        return shlex.join(self.command(place))

    def text_at(self, place: str) -> str:
        """The text of the file ``place``, whose comment names it."""
        return self.text.replace(self.comment(), self.comment(place), 1)

    def comment(self, place: str = PLACE) -> str:
        """The command as a line of comment, which nothing in a name can end."""
        return f"# {one_line(self.command_line(place))}"

    @property
    def says_its_command(self) -> bool:
        """Whether a comment in it is the command that reads it back."""
        return self.comment() in self.text


def flag_words(name: str, value: str | tuple[str, ...]) -> list[str]:
    """The flag ``name`` with its value, as words of a command line."""
    from ..plan.fields import by_flag

    field = by_flag()[name]
    if field.kind is Kind.SWITCH:
        return [f"--{name}" if value == "true" else f"--no-{name}"]
    values = (value,) if isinstance(value, str) else value
    return [word for one in values for word in ([f"--{name}={one}"] if one.startswith("-") else [f"--{name}", one])]


def exported(plan: Plan, target: Target) -> Exported:
    """``plan`` as a configuration of ``target``; ``PlanError`` that names the first field which it cannot express."""
    plan = check(plan)
    if plan.framework != target.framework:
        problem = (
            f"must be {target.framework} for --to {target.name}: in another framework the job is another, "
            f"and so is its memory; change the plan first (--framework {target.framework})"
        )
        raise PlanError("framework", plan.framework, problem)
    draft = target.write(plan)
    flags = _flags_beside(plan, target, draft)
    done = Exported(target, draft.text, draft.content, flags, draft.settings, plan)
    return replace(done, text=draft.text.replace(READ_BACK, done.comment(), 1))


READ_BACK = "# @@READ-BACK@@"
"""The line of comment in which a draft wants the command that reads it back."""


def _flags_beside(plan: Plan, target: Target, draft: Draft) -> Flags:
    """The flags that make the configuration read back as ``plan``, found one by one."""
    flags = dict(draft.flags)
    for _ in plan_fields():
        try:
            other = resolve(target.read(draft.text, flags, draft.settings))
            path = next(iter(differences(plan, other)), None)
        except PlanError as error:
            further = {name: value for name, value in _all_beside(plan, target).items() if name not in flags}
            if not further:
                raise _refused(plan, target, error) from None
            flags |= further
            continue
        if path is None:
            return flags
        name, value = as_flag(plan, path) if target.may_be_flag(path) else ("", "")
        if not name or flags.get(name) == value:
            raise _cannot_say(plan, other, path, target)
        flags[name] = value
    raise AssertionError("every field has been given")


def _all_beside(plan: Plan, target: Target) -> dict[str, str | tuple[str, ...]]:
    """Flags for every field beside the configuration that is not at its default."""
    flags: dict[str, str | tuple[str, ...]] = {}
    for path, known in plan_fields().items():
        if known.flag and path != "model" and target.may_be_flag(path) and value_at(plan, path) != known.default:
            name, value = as_flag(plan, path)
            flags[name] = value
    return flags


def _cannot_say(plan: Plan, other: Plan, path: str, target: Target) -> PlanError:
    problem = f"cannot be said in {target.what}, which would be read as {shown(value_at(other, path))}"
    value = value_at(plan, path)
    return PlanError(path, list(value) if isinstance(value, tuple) else value, problem)


def _refused(plan: Plan, target: Target, error: PlanError) -> PlanError:
    """The reader's own refusal: what it says of its configuration is true of the plan."""
    subject = f"{error.field}: " if error.field else ""
    return PlanError("framework", plan.framework, f"cannot be said in {target.what}: {subject}{error.problem}")
