"""The words of a command line before they are parsed.

Flags that take several values (``--compare A B C`` is ``--compare A --compare B --compare C``), flags as other tools
call them, and all that is wrong with flags at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..plan.errors import ABSENT, Guesses, Origin, PlanError, nearest
from .output import PRINTED

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


def with_file_of_csv(arguments: Sequence[str]) -> list[str]:
    """``arguments`` where ``--csv``, whose file may be left out, has one: the next word if it is called as such a file
    is, and no plan; else standard output."""
    result: list[str] = []
    end = arguments.index("--") if "--" in arguments else len(arguments)
    rest = list(arguments[:end])
    while rest:
        word = rest.pop(0)
        if word == "--csv":
            named = rest and (rest[0] == PRINTED or rest[0].endswith((".csv", ".tsv", ".txt")))
            word = f"--csv={rest.pop(0) if named else PRINTED}"
        result.append(word)
    return result + list(arguments[end:])


def _continues(flag: str, argument: str) -> bool:
    if argument.startswith("-") and argument != "-":
        return False
    return flag != "--vary" or "=" in argument


def spelled(word: str) -> str:
    """``--quantization`` as ``--quantisation``, ``--tensor-parallel`` as ``--tp``."""
    from .near_misses import SAME

    flag, equals, value = word.partition("=")
    return SAME.get(flag.replace("_", "-"), flag) + equals + value


def wrong_flags(words: Sequence[str], parameters: Iterable[Any], path: str) -> list[PlanError]:
    """Of every flag among ``words`` that the command ``path`` has not, or that lacks its value, what to write.
    ``parameters`` are the parser's."""
    takes = {name: not getattr(one, "is_flag", True) for one in parameters for name in (*one.opts, *one.secondary_opts)}
    return list(_wrong(iter(words[: words.index("--")] if "--" in words else words), takes, path))


def _wrong(words: Iterator[str], takes: Mapping[str, bool], path: str) -> Iterator[PlanError]:
    guesses = Guesses(lambda flag: likely(flag, takes))
    word = next(words, None)
    while word is not None:
        flag, equals, _ = word.partition("=")
        following = next(words, None)
        if flag.startswith("--") and flag not in takes:
            yield _unknown(flag, guesses, path)
        elif takes.get(flag) and not equals:
            if following is None or following.partition("=")[0] in takes:
                yield PlanError("", ABSENT, f"needs a value{_meaning(flag)}", origin=Origin(flag))
            else:
                following = next(words, None)
        word = following


def likely(flag: str, known: Iterable[str]) -> str | None:
    """What was probably meant by ``flag``, which is none of ``known``: one of them, or what other tools call one."""
    from .near_misses import MEANT, SAME

    elsewhere = {**MEANT, **SAME}
    name = flag.replace("_", "-").removeprefix("--")
    called = nearest(name, [other[2:] for other in elsewhere], cutoff=0.85)
    if called is not None:
        return " or ".join(dict.fromkeys(elsewhere[f"--{one}"] for one in called.split(" or ")))
    found = nearest(name, [other[2:] for other in known if other.startswith("--")])
    return " or ".join(f"--{one}" for one in found.split(" or ")) if found is not None else None


def _unknown(flag: str, guesses: Guesses, path: str) -> PlanError:
    from .near_misses import NOT_MODELLED

    problem = NOT_MODELLED.get(flag)
    if problem is None:
        guess = guesses.of(flag)
        hint = f"did you mean {guess}?" if guess else "--help lists them"
        problem = f"is not a flag of {path}; {hint}"
    return PlanError("", ABSENT, problem, origin=Origin(flag))


def _meaning(flag: str) -> str:
    from ..plan.fields import by_flag
    from .launched import MEANINGS
    from .suggest_partition import MEANINGS as SEARCHED

    meanings = {**MEANINGS, **SEARCHED}
    if flag in meanings:
        return f": {meanings[flag]}"
    field = by_flag().get(flag.removeprefix("--"))
    return f": {field.description}" if field else ""
