"""What commands would change if they were run: for branches of which nobody knows whether they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from .syntax import Assignment, Body, Case, Chain, Command, For, Function, Group, If, Literal, Loop, Pipeline, Simple

_OPTION = re.compile(r"--[A-Za-z][\w-]*")


def assigned_in(bodies: Iterable[Body], functions: Mapping[str, Body]) -> dict[str, bool]:
    """Names that ``bodies`` may set, and whether all they do is to append."""
    found: dict[str, bool] = {}
    for name, appends in _assigned(bodies, dict(functions)):
        found[name] = found.get(name, True) and appends
    return found


def options_in(bodies: Iterable[Body], name: str) -> tuple[str, ...]:
    """Arguments (``--…``) in the values that ``bodies`` may give to ``name``."""
    found: dict[str, None] = {}
    for assignment in _assignments(bodies):
        if assignment.name == name:
            words = [assignment.value, *(word for _, word in assignment.items or ())]
            for word in words:
                for part in word:
                    if isinstance(part, Literal):
                        found.update(dict.fromkeys(_OPTION.findall(part.text)))
    return tuple(found)


def _assigned(bodies: Iterable[Body], functions: dict[str, Body]) -> Iterator[tuple[str, bool]]:
    for command in _commands(bodies):
        if isinstance(command, For):
            yield command.name, False
        if isinstance(command, Simple):
            for assignment in command.assignments:
                yield assignment.name, assignment.append
            called = command.words[0] if command.words else ()
            if len(called) == 1 and isinstance(called[0], Literal):
                if called[0].text in functions:
                    yield from _assigned([functions.pop(called[0].text)], functions)
                if called[0].text == "read":
                    last = command.words[-1][-1] if command.words[-1] else None
                    if isinstance(last, Literal):
                        yield last.text, False


def _assignments(bodies: Iterable[Body]) -> Iterator[Assignment]:
    for command in _commands(bodies):
        if isinstance(command, Simple):
            yield from command.assignments


def _commands(bodies: Iterable[Body]) -> Iterator[Command]:
    """Every command in ``bodies`` and below."""
    for body in bodies:
        for command in body:
            yield command
            yield from _commands(_inside(command))


def _inside(command: Command) -> list[Body]:
    if isinstance(command, If):
        return [body for arm in command.arms for body in arm]
    if isinstance(command, Loop):
        return [command.condition, command.body]
    if isinstance(command, (For, Group, Function)):
        return [command.body]
    if isinstance(command, Case):
        return [body for _, body in command.arms]
    if isinstance(command, Pipeline):
        return [command.commands]
    if isinstance(command, Chain):
        return [(command.first, *(other for _, other in command.rest))]
    return []
