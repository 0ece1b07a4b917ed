"""A launch script: arguments in named arrays, a launcher, and the training script that takes them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field

from .. import __version__
from ..plan.errors import PlanError
from ..plan.resolved import ResolvedPlan
from ..values import dataclass
from .exported import READ_BACK
from .rows import Row

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
        problem = f"must be a multiple of hardware.gpus_per_node = {on_node}: a launcher starts so many on every node"
        raise PlanError("hardware.gpus", gpus, problem)
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
