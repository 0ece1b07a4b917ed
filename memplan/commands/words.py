"""The words of a command line before they are parsed.

Flags that take several values (``--compare A B C`` is ``--compare A --compare B --compare C``), flags as other tools
call them, and all that is wrong with flags at once.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..plan.errors import ABSENT, Guesses, PlanError, wrong_at
from ..plan.fields import Kind, by_flag
from ..values import pattern
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


def spelled(words: Sequence[str], unknown: Container[str]) -> tuple[list[str], list[str]]:
    """``words`` with other tools' flags as memplan's own (``--tensor-parallel`` as ``--tp``), and those flags that
    change nothing, which are left out. ``unknown``: those that the command has not."""
    from ..formats.own_settings import without_effect
    from ..plan.near_misses import CHANGES_NOTHING, FILES, MEANT, NOT_MODELLED, SAME

    end = words.index("--") if "--" in words else len(words)
    made: list[str] = []
    left_out: list[str] = []
    given: dict[str, tuple[str, str, str]] = {}
    rest = list(words[:end])
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        many = (
            1 + bool(rest and re.match(r"[^-]|-[0-9.]", rest[0]))
            if flag in CHANGES_NOTHING
            else without_effect(flag, rest)
            if word.partition("=")[0] in unknown and not any(flag in known for known in (SAME, MEANT, NOT_MODELLED))
            else None
        )
        if many is not None:
            left_out.append(flag)
            del rest[: 0 if equals else many - 1]
        elif flag in FILES and (value if equals else "".join(rest[:1])).endswith((".yaml", ".yml", ".json")):
            made.append(value if equals else rest.pop(0))
        elif flag == "--recipe" and (value if equals else "".join(rest[:1])).endswith("_config"):
            made.append(value if equals else rest.pop(0))  # of Megatron-Bridge, which is a place of a plan
        else:
            own = SAME.get(flag, flag if flag[2:] in by_flag() else word.partition("=")[0])
            if flag.startswith("--"):
                field, fixed, of_itself = own.partition("=")
                said = of_itself if fixed else value if equals or not rest else rest[0]
                before = given.setdefault(field, (flag, said, flag if fixed else f"{flag} {said}"))
                if before[0] != flag and before[1] != said:
                    problem = f"contradicts {before[2]}, which sets the same field"
                    raise wrong_at(flag, problem if fixed else f"{said} {problem}")
            if _is_switch(own) and (value if equals else next(iter(rest), "")).lower() in _TRUTHS:
                value = value if equals else rest.pop(0)
                off = own.replace("--", "--no-", 1)
                on = _TRUTHS[value.lower()]
                if "=" not in own:  # stands over the same switch before it, as any other value does
                    made = [one for one in made if one != (off if on else own)]
                if on or "=" not in own:
                    made.append(own if on else off)
            else:
                made.append(own + equals + value)
    return [*_with_nodes(made), *words[end:]], left_out


_TRUTHS = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}
"""What others write behind a switch."""


def _is_switch(flag: str) -> bool:
    """Whether ``flag`` takes no value here, where others write one: ``--load_in_4bit True``, ``--autocast True``."""
    field = by_flag().get(flag[2:])
    return "=" in flag or (field is not None and field.kind is Kind.SWITCH)


def _with_nodes(words: Sequence[str]) -> list[str]:
    """``--nodes 4 --gpus-per-node 8`` or ``--nodes 4 --gpus 32`` as ``--gpus 32 --gpus-per-node 8``."""
    from ..plan.near_misses import NODES, PER_NODE

    said: dict[str, tuple[str, str]] = {}
    made: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        plain = flag.replace("_", "-")
        kind = "nodes" if plain in NODES else "each" if plain in PER_NODE else ""
        if kind and (equals or (rest and not rest[0].startswith("--"))):
            said[kind] = flag, value if equals else rest.pop(0)
        else:
            made.append(word)
    nodes, each = said.get("nodes"), said.get("each")
    for flag, number in said.values():
        if re.fullmatch("[1-9][0-9]{0,5}", number) is None:
            raise wrong_at(flag, f"{number} must be a whole number from 1 on")
    total = _whole_number_of("--gpus", made)
    if nodes is not None and each is None and total is not None and total % int(nodes[1]) == 0:
        each = "--gpus-per-node", str(total // int(nodes[1]))
    if nodes is not None and each is not None and total not in (None, int(nodes[1]) * int(each[1])):
        raise wrong_at(nodes[0], f"{nodes[1]} nodes of {each[1]} GPUs are not the {total} of --gpus")
    if nodes is not None and each is None:
        flag, count = nodes
        raise wrong_at(
            flag, f"{count} says how many GPUs only with those of a node: --gpus-per-node 8, or --gpus {8 * int(count)}"
        )
    if each is None:
        return made
    known = any(word.partition("=")[0] == "--gpus" for word in made)
    product = int(each[1]) * int(nodes[1] if nodes is not None else 1)
    says_total = not known and (nodes is not None or each[0].replace("_", "-") != "--gpus-per-node")
    return [*made, *(["--gpus", str(product)] if says_total else []), "--gpus-per-node", each[1]]


def _whole_number_of(flag: str, words: Sequence[str]) -> int | None:
    """The whole number that ``flag`` has among ``words``."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == flag:
            number = value if equals else after
            return int(number) if re.fullmatch("[1-9][0-9]{0,8}", number) else None
    return None


def wrong_flags(words: Sequence[str], parameters: Iterable[Any], path: str) -> list[PlanError]:
    """Of every flag among ``words`` that the command ``path`` has not, or that lacks its value, what to write.
    ``parameters`` are the parser's."""
    takes = {name: not getattr(one, "is_flag", True) for one in parameters for name in (*one.opts, *one.secondary_opts)}
    return list(_wrong(iter(words[: words.index("--")] if "--" in words else words), takes, path))


def _is_value(rest: Sequence[str]) -> bool:
    return bool(rest) and re.match(r"[^-]|-[0-9.]|-$", rest[0]) is not None


def wrong_values(words: Sequence[str]) -> Iterator[PlanError]:
    """What is wrong with values of flags of fields, of a command line that is refused for others already."""
    from ..plan.read import read_plan
    from ..plan.spellings import with_said_at_once

    flags: dict[str, str | tuple[str, ...]] = {}
    rest = list(words[: words.index("--")] if "--" in words else words)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if flag.startswith("--") and flag[2:] in by_flag() and not _is_switch(flag) and (equals or _is_value(rest)):
            flags[flag[2:]] = value if equals else rest.pop(0)
    try:
        read_plan(None, with_said_at_once(flags))
    except PlanError as error:
        yield from (one for one in error.errors if one.value is not ABSENT and str(one.origin).startswith("--"))


def _wrong(words: Iterator[str], takes: Mapping[str, bool], path: str) -> Iterator[PlanError]:
    from ..plan.near_misses import likely

    guesses = Guesses(lambda flag: likely(flag, takes))
    word = next(words, None)
    while word is not None:
        flag, equals, value = word.partition("=")
        following = next(words, None)
        if flag not in takes and (flag.startswith("--") or _is_short_of_none(flag, takes)):
            yield _unknown(flag, value if equals else following or "", guesses, path)
        elif takes.get(flag) is False and (equals or _is_no_place(following or "")) and _turns(flag):
            yield _valued(flag, value if equals else following or "")
            following = following if equals else next(words, None)
        elif takes.get(flag) and not equals:
            if following is None or following.partition("=")[0] in takes:
                yield wrong_at(flag, f"needs a value{_meaning(flag)}")
            else:
                following = next(words, None)
        word = following


def _turns(flag: str) -> bool:
    """Whether ``flag`` turns a field on or off."""
    return flag.startswith("--") and (_is_switch(flag) or _is_switch(flag.replace("--no-", "--", 1)))


def _is_no_place(word: str) -> bool:
    """Whether ``word`` is one of letters and digits, and no plan or model, not nearly one, no file and no GPU."""
    from difflib import get_close_matches

    from ..plan.library import examples, model_specs
    from ..plan.spellings import gpus_called, gpus_named
    from ..plan.text import is_there

    if _BARE.fullmatch(word) is None or word.endswith("_config"):
        return False
    if get_close_matches(word, [*examples(), *model_specs()], 1, 0.75):
        return False
    return not (is_there(Path(word)) or gpus_called(word) or gpus_named(word))


_BARE = pattern(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def _valued(flag: str, value: str) -> PlanError:
    """What to write in place of ``flag``, a switch, with ``value`` behind it."""
    from ..plan.near_misses import BESIDE

    beside = by_flag().get(BESIDE.get(flag, ""))
    if beside is not None and value.lower() in beside.choices:
        return wrong_at(flag, f"is a switch, which takes no value: {flag} {beside.flag} {value.lower()}")
    on = flag.replace("--no-", "--", 1)
    off = on.replace("--", "--no-", 1)
    what = f"{value} is a value, which a switch does not take" if value else "is a switch, which takes no value"
    return wrong_at(flag, f"{what}: {on} turns it on, {off} off")


def _is_short_of_none(flag: str, takes: Mapping[str, bool]) -> bool:
    """Whether ``flag`` is written with one hyphen (``-tp``, ``-m``), and is no short flags of the command in one."""
    letters = flag[1:]
    return _ONE_HYPHEN.fullmatch(flag) is not None and not all(f"-{letter}" in takes for letter in letters)


_ONE_HYPHEN = pattern(r"-[A-Za-z][A-Za-z-]*")


def _unknown(flag: str, value: str, guesses: Guesses, path: str) -> PlanError:
    from ..formats.own_settings import own_setting
    from ..plan.near_misses import MEANT, NOT_MODELLED, SAME, VALUED

    problem = NOT_MODELLED.get(flag) or NOT_MODELLED.get(flag.replace("_", "-"))
    if problem is None and not {flag, flag.replace("_", "-")} & {*MEANT, *SAME}:
        problem = own_setting(flag)
    if problem is None:
        guess = VALUED.get(f"{flag.replace('_', '-')} {value.lower()}") or guesses.of(flag)
        hint = f"did you mean {guess}?" if guess else "--help-all lists them"
        problem = f"is not a flag of {path}; {hint}"
    return wrong_at(flag, problem)


def _meaning(flag: str) -> str:
    from .launched import MEANINGS
    from .suggest_partition import MEANINGS as SEARCHED

    meanings = {**MEANINGS, **SEARCHED}
    if flag in meanings:
        return f": {meanings[flag]}"
    field = by_flag().get(flag.removeprefix("--"))
    choices = f" ({', '.join(field.choices)})" if field and field.choices else ""
    return f": {field.description}{choices}" if field else ""
