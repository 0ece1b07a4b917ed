"""What OmegaConf puts in the place of ``${…}`` in a configuration, as a shell can say it."""

from __future__ import annotations

import re
from collections.abc import Callable
from shlex import quote

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_HELD = re.compile("\0([0-9]+)\0")
"""A variable of the environment, which stands here until nothing is left to put."""
_DEEPEST = 16
"""References to references that are followed."""


class _OnlyThereError(Exception):
    """What a resolver makes that the job's own Python registers, or a key that is not written down."""


def for_shell(text: str, value_at: Callable[[str], object]) -> str | None:
    """``text`` with values of other keys, which ``value_at`` gives, and with variables of the environment as a shell
    reads them; ``None`` where a command cannot say it.

    Of resolvers OmegaConf's own ``oc.env``, ``oc.decode`` and ``oc.select`` (``omegaconf/resolvers/oc/__init__.py``).
    """
    if "\0" in text:
        return None
    variables: list[str] = []
    try:
        for _ in range(_DEEPEST):
            text, before = _INNERMOST.sub(lambda match: _put(match[1], value_at, variables), text), text
            if text == before:
                break
    except _OnlyThereError:
        return None
    if "${" in text:
        return None
    while _HELD.search(text):
        text = _HELD.sub(lambda match: variables[int(match[1])], text)
    return text


def _put(expression: str, value_at: Callable[[str], object], variables: list[str]) -> str:
    resolver, colon, rest = (part.strip() for part in expression.partition(":"))
    if not colon:
        return _text(value_at(resolver))
    if resolver == "oc.decode":
        return rest
    name, _, default = (part.strip() for part in rest.partition(","))
    default = default.strip("'\"")
    if resolver == "oc.select":
        found = value_at(name)
        return _text(default if found is None else found)
    if resolver != "oc.env":
        raise _OnlyThereError
    unset = default if _HELD.search(default) else quote(default)
    variables.append(f"${name}" if default in ("", "null") else f"${{{name}-{unset}}}")
    return f"\0{len(variables) - 1}\0"


def _text(value: object) -> str:
    if value in (None, "") or isinstance(value, (dict, list)):
        raise _OnlyThereError
    return str(value)
