"""Exports, and the proof that an export says the plan: the reader of its format reads it back.

A configuration says what its framework decides. What it has no word for (the GPU, the number of ranks where a
launcher says it, the model where code names it) is *beside* it: flags of ``memplan estimate --from``. An export is
whole when configuration and flags, read back, resolve to the plan that was exported; ``Target.beside`` are the fields
that may become flags, and the first other field that differs is one that the framework cannot express.

A launch script: arguments in named arrays, a launcher, and the training script that takes them.

What configurations say of ``torch.compile`` of a model: the Trainer's arguments and Accelerate's own.

transformers 5.23, ``training_args.py`` (``__post_init__``: a backend or a mode turns it on); accelerate 1.15,
``utils/dataclasses.py`` (``TorchDynamoPlugin``) and ``accelerator.py`` (``prepare_model``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, NamedTuple

from .. import __version__
from ..estimate import check
from ..frameworks import framework
from ..plan.environment import is_followed
from ..plan.errors import Node, PlanError, one_line, shown
from ..plan.fields import Kind, by_flag, plan_fields
from ..plan.library import model_specs
from ..plan.models import load_spec
from ..plan.plan import Plan, ResolvedPlan
from ..plan.read import Flags
from ..plan.resolve import resolve
from ..plan.spec import ModelSpec
from ..values import dataclass
from . import target as target_of
from .settings import Building, Row

DESCRIPTIONS = frozenset({"model.published_parameters", "model.source"})
"""Fields of a spec that describe it, and have no flag."""

PLACE = "FILE"
"""How a command names the file that has been written."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A configuration that a target has written and nobody has read back yet."""

    text: str
    content: Mapping[str, Any]
    """Its parts for ``--json``, by name: groups of arguments, sections, files."""
    flags: Flags = field(default_factory=dict)
    """Flags without which it cannot be read back."""
    settings: tuple[str, ...] = ()
    """``--set`` of the reader."""


def _as_it_is(_: ResolvedPlan) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of configuration: how it is written, and read back."""

    name: str
    framework: str
    """That of the plans which it can express."""
    what: str
    """As an error names it: ``Megatron's arguments``."""
    write: Callable[[ResolvedPlan], Draft]
    read: Callable[[str, Flags, tuple[str, ...]], Plan]
    """Text, flags and settings to a plan before defaults."""
    command: tuple[str, ...]
    """Words of the command that reads it back, ``PLACE`` among them."""
    beside: Collection[str]
    """Sections, and fields by their paths, that may be flags."""
    settled: Callable[[ResolvedPlan], Mapping[str, Any]] = _as_it_is
    """Sections of a plan with one spelling of what has several, and with the default of what has no effect."""

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
    plan: ResolvedPlan
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


def differences(plan: ResolvedPlan, other: ResolvedPlan) -> Iterator[str]:
    """Paths of the fields in which two plans, every default of them filled in, say different things."""
    first, second = settled(plan), settled(other)
    for path in plan_fields():
        if path != "model" and path not in DESCRIPTIONS and first.at(path) != second.at(path):
            yield path


def settled(plan: ResolvedPlan) -> ResolvedPlan:
    """``plan`` with one spelling of what has several, and with the default of what has no effect: what two plans may
    differ in that are the same job."""
    name = framework(plan.framework).configuration
    updates: dict[str, Any] = {
        "batch": plan.batch.model_copy(update={"accumulation": None}),  # gbs says it
        "environment": {name: text for name, text in plan.environment.items() if is_followed(name, plan)},
        **(target_of(name).settled(plan) if name is not None else {}),
    }
    return plan.model_copy(update=updates)


def flag_words(name: str, value: str | tuple[str, ...]) -> list[str]:
    """The flag ``name`` with its value, as words of a command line."""
    if by_flag()[name].kind is Kind.SWITCH:
        return [f"--{name}" if value == "true" else f"--no-{name}"]
    values = (value,) if isinstance(value, str) else value
    return [word for one in values for word in ([f"--{name}={one}"] if one.startswith("-") else [f"--{name}", one])]


def exported(plan: Plan, target: Target) -> Exported:
    """``plan`` as a configuration of ``target``; ``PlanError`` that names the first field which it cannot express."""
    plan = check(plan)
    if framework(plan.framework).configuration != target.name:
        raise plan.wrong(
            "framework",
            f"must be {target.framework} for --to {target.name}: in another framework the job is another, "
            f"and so is its memory; change the plan first (--framework {target.framework})",
        )
    draft = target.write(plan)
    flags = _flags_beside(plan, target, draft)
    done = Exported(target, draft.text, draft.content, flags, draft.settings, plan)
    return replace(done, text=draft.text.replace(READ_BACK, done.comment(), 1))


READ_BACK = "# @@READ-BACK@@"
"""The line of comment in which a draft wants the command that reads it back."""


def _flags_beside(plan: ResolvedPlan, target: Target, draft: Draft) -> Flags:
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


def _all_beside(plan: ResolvedPlan, target: Target) -> dict[str, str | tuple[str, ...]]:
    """Flags for every field beside the configuration that is not at its default, and for the dtype, whose default
    depends on the GPU."""
    flags: dict[str, str | tuple[str, ...]] = {}
    for path, known in plan_fields().items():
        said = plan.at(path) != known.default or path == "precision.dtype"
        if known.flag and path != "model" and target.may_be_flag(path) and said:
            name, value = as_flag(plan, path)
            flags[name] = value
    return flags


def _cannot_say(plan: ResolvedPlan, other: Plan, path: str, target: Target) -> PlanError:
    found, value = other.at(path), plan.at(path)
    instead = "without it" if found is None else f"as {shown(found)}"
    problem = f"cannot be said in {target.what}, which would be read {instead}"
    return PlanError(path, list(value) if isinstance(value, tuple) else value, problem)


def _refused(plan: ResolvedPlan, target: Target, error: PlanError) -> PlanError:
    """The reader's own refusal: what it says of its configuration is true of the plan."""
    subject = f"{error.field}: " if error.field else ""
    return plan.wrong("framework", f"cannot be said in {target.what}: {subject}{error.problem}")


# -- fields as flags of the command line ---------------------------------------------------------------

FlagValue = str | tuple[str, ...]

_DERIVED = ("kv_heads", "head_dim", "ffn")
"""Sizes that follow from others where they are not given (``models._with_derived_sizes``)."""


def as_flag(plan: ResolvedPlan, path: str) -> tuple[str, FlagValue]:
    """Name (without hyphens) and value of the flag that sets ``path`` as in ``plan``; an empty name if it has none."""
    return plan_fields()[path].flag.removeprefix("--"), as_text(plan.at(path))


def as_text(value: Any) -> FlagValue:
    """``value`` of a field as its flag takes it."""
    match value:
        case bool():
            return "true" if value else "false"
        case None:
            return "null"
        case tuple():
            return ",".join(map(str, value)) + ("," if len(value) == 1 and isinstance(value[0], int) else "")
        case Mapping():
            return tuple(f"{name}={text}" for name, text in value.items())
    return str(value)


def model_flags(spec: ModelSpec) -> dict[str, FlagValue]:
    """The flags that name ``spec``: a built-in model, and the fields in which it is another."""
    base = spec.name if spec.name in model_specs() else _relative(spec)
    known = load_spec(base)
    fields = [field for field in by_flag().values() if field.section == "model"]
    changed = {field.name for field in fields if getattr(spec, field.name) != getattr(known, field.name)}
    if changed & {"hidden", "heads", *_DERIVED}:
        changed |= {*_DERIVED}
    return {
        "model": base,
        **{field.flag[2:]: as_text(getattr(spec, field.name)) for field in fields if field.name in changed},
    }


def _relative(spec: ModelSpec) -> str:
    """The built-in model that has most in common with ``spec``, of its family where there is one."""
    names = [field.name for field in plan_fields().values() if field.section == "model" and field.flag]

    def likeness(name: str) -> tuple[bool, int]:
        known = load_spec(name)
        return known.family == spec.family, sum(getattr(known, one) == getattr(spec, one) for one in names)

    found = max(model_specs(), key=likeness, default=None)
    if found is None:
        raise PlanError("model", spec.name, "is not built in, and nothing is")
    return found


Argument = tuple[str, ...]
"""A name, then its values: ``("--tensor-model-parallel-size", "8")``."""

_SAFE_IN_HEREDOC = "EOT"
WIDTH = 118


@dataclass(slots=True)
class Arguments:
    """Arguments of a training script in groups, in the order in which they are written."""

    groups: dict[str, list[Argument]] = field(default_factory=dict)

    def add(self, group: str, name: str, *values: object) -> None:
        """Adds an argument with its values, none for a switch."""
        self.groups.setdefault(group, []).append((name, *(_text(value) for value in values)))

    def switch(self, group: str, name: str, on: bool) -> None:
        """Adds the switch ``name`` where it is ``on``."""
        if on:
            self.add(group, name)

    def rows(self, rows: Iterable[Row], plan: ResolvedPlan) -> None:
        """Adds what ``plan`` is in ``rows``."""
        for row in rows:
            value = row.written(plan)
            if row.kind == "switch":
                self.switch(row.group, row.name, value is True)
            elif value is not None:
                self.add(row.group, row.name, *(value if isinstance(value, tuple) else (value,)))

    def content(self) -> dict[str, object]:
        """The arguments for ``--json``: group to argument to value, ``true`` for a switch."""
        return {
            group: {one[0]: True if len(one) == 1 else one[1] if len(one) == 2 else list(one[1:]) for one in arguments}
            for group, arguments in self.groups.items()
        }


def _text(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def nodes(plan: ResolvedPlan) -> tuple[int, int]:
    """Nodes, and processes on each of them."""
    gpus, on_node = plan.hardware.gpus, plan.hardware.gpus_per_node
    assert gpus is not None
    if gpus <= on_node:
        return 1, gpus
    if gpus % on_node:
        raise plan.wrong(
            "hardware.gpus",
            f"must be a multiple of hardware.gpus_per_node = {on_node}: a launcher starts so many on every node",
        )
    return gpus // on_node, on_node


def exports(environment: Mapping[str, str]) -> Iterator[str]:
    """Lines that export variables to what the script starts, behind an empty one."""
    if environment:
        yield ""
    for name, value in environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise PlanError(f"environment.{name}", value, "cannot be exported by a shell: letters, digits and _ can")
        yield f"export {name}={shlex.quote(value)}"


def array(name: str, arguments: Sequence[Argument]) -> Iterator[str]:
    """Lines of a shell array, an argument each."""
    yield f"{name}=("
    for argument in arguments:
        name, *values = argument
        taken_for_argument = len(values) == 1 and re.match(r"-\D|-$", values[0])
        yield f"    {shlex.join([f'{name}={values[0]}'] if taken_for_argument else argument)}"
    yield ")"


def heredoc(path: str, text: str) -> Iterator[str]:
    """Lines that write ``text`` into the file at ``path``."""
    yield f"cat > {shlex.quote(path)} <<'{_SAFE_IN_HEREDOC}'"
    yield from text.rstrip("\n").splitlines()
    yield _SAFE_IN_HEREDOC


RENDEZVOUS = (
    '--node_rank "${NODE_RANK:-0}"',
    '--master_addr "${MASTER_ADDR:-localhost}"',
    '--master_port "${MASTER_PORT:-6000}"',
)


@dataclass(frozen=True, slots=True)
class Script:
    """A script that starts a training with arguments in named arrays."""

    title: str
    launcher: str
    """``torchrun``, or the module of PyTorch that it was before."""
    python: str
    arguments: Arguments
    environment: Mapping[str, str]
    before: Sequence[str] = ()
    """Lines in front of the arguments: files that the training reads."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """Comments in front of groups of arguments."""

    def text(self, plan: ResolvedPlan) -> str:
        """The script that starts ``plan`` on all its nodes."""
        count, per_node = nodes(plan)
        lines = ["#!/bin/bash", *head(self.title), *exports(self.environment), *self.before]
        for group, given in self.arguments.groups.items():
            lines += ["", *comment(self.remarks.get(group, "")), *array(group, given)]
        words = [self.launcher, f"--nproc_per_node {per_node}", f"--nnodes {count}", *RENDEZVOUS, self.python]
        lines += ["", f"{' '.join(words)} \\"]
        lines += [f'    "${{{group}[@]}}" \\' for group in self.arguments.groups]
        return "\n".join([*lines, '    "$@"', ""])


def head(title: str) -> Iterator[str]:
    """Comments that open a file: what it is, and the command that reads it back."""
    yield from comment(title)
    yield f"# Written by memplan {__version__}. Estimate it with"
    yield READ_BACK


def sizes_of(plan: ResolvedPlan, *names: str) -> str:
    """``1,024 GPUs (tp 8, pp 16, dp 8)``: sizes of the layout by ``names``."""
    return f"{plan.hardware.gpus:,} GPUs ({', '.join(f'{name} {getattr(plan.layout, name)}' for name in names)})"


def comment(text: str) -> Iterator[str]:
    """``text`` as lines of comment, with whatever would end one left out."""
    import textwrap

    plain = "".join(c if c.isprintable() else " " for c in text)
    for line in textwrap.wrap(plain, WIDTH - 2, break_long_words=False, break_on_hyphens=False):
        yield f"# {line}"


# -- compiler ------------------------------------------------------------------------------------------


OFF = ("NO", "NONE", "FALSE", "")
"""Backends that compile nothing."""
_ON = (True, "true", "True", "auto")


class Compiler(NamedTuple):
    """What turns the compiler on, and what has it compile regions, if anything does."""

    on: Node
    regions: Node | None

    def put(self, building: Building, *names: str) -> None:
        """What the settings ``names`` say of the plan."""
        building.put("compile", self.on, *names)
        building.put_said("compile_regions", self.regions)


def compiled(given: Mapping[str, Node], prefix: str) -> Compiler | None:
    """What turns the compiler on among ``given``, whose keys begin with ``prefix`` (``dynamo_``); nothing where nothing
    does. ``PlanError`` where it is another compiler than the one that is modelled: Inductor, in its default mode."""
    backend, mode = given.get(f"{prefix}backend"), given.get(f"{prefix}mode")
    if backend is None or str(backend.plain()).upper() in OFF:
        return None
    if str(backend.value).lower() != "inductor":
        raise backend.wrong(
            f"{prefix}backend",
            "must be inductor: what other backends keep is not modelled; without a compiler it must be left out",
        )
    if mode is not None and mode.value not in (None, "default"):
        raise mode.wrong(
            f"{prefix}mode",
            "must be default: CUDA graphs of compiled code, and kernels chosen by running them, are not modelled",
        )
    regional = given.get(f"{prefix}use_regional_compilation")
    regions = regional is not None and regional.value in _ON
    return Compiler(
        Node(True, backend.origin), Node(True, regional.origin) if regional is not None and regions else None
    )


def of_trainer(given: Mapping[str, Node]) -> Compiler | None:
    """The same among the Trainer's arguments: ``torch_compile``, or a backend or a mode that turns it on."""
    names = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
    said = {name: given[name] for name in names if name in given and given[name].value is not None}
    on = next((node for name, node in said.items() if name != names[0] or node.value in _ON), None)
    if on is None:
        return None
    return compiled({names[1]: Node("inductor", on.origin), **said}, "torch_compile_")
