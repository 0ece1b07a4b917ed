"""Arguments that take several values: ``--compare A B C`` is ``--compare A --compare B --compare C``."""

from __future__ import annotations

from collections.abc import Sequence

_SEVERAL = ("--compare", "--vary", "--import")


def expanded(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with each flag that takes several values repeated before each of them."""
    result: list[str] = []
    repeated: str | None = None
    taken = 0
    for position, argument in enumerate(arguments):
        if argument == "--":
            return result + list(arguments[position:])
        if argument in _SEVERAL:
            repeated, taken = argument, 0
        elif repeated is not None:
            if taken and _continues(repeated, argument):
                result.append(repeated)
            elif taken:
                repeated = None
            taken += 1
        result.append(argument)
    return result


def _continues(flag: str, argument: str) -> bool:
    if argument.startswith("-") and argument != "-":
        return False
    return flag != "--vary" or "=" in argument
