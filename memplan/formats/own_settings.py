"""Settings of the formats that are read, given as flags of memplan: what they are called here.

Found in the tables by which files are read, so that a launch script and its flags typed by hand mean the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import takewhile
from pathlib import Path

from ..plan.fields import Kind, plan_fields
from .settings import Row, Table, arguments_of
from .trainer.keys import REFUSED, WITHOUT_EFFECT

_TABLES = {
    "Megatron-LM": (".megatron.table", "megatron"),
    "Megatron-DeepSpeed": (".megatron_deepspeed.table", "megatron-deepspeed"),
    "torchtitan": (".torchtitan.table", None),
    "TrainingArguments": (".trainer.table", None),
    "DeepSpeed": (".deepspeed.config", None),
}
"""Whose setting it is, the module of its rows, and the parser's table of arguments."""


def own_setting(flag: str) -> str | None:
    """What to write for ``flag``, where it is a setting of one of the formats."""
    name = _plain(flag)
    for owner, (module, parser) in _TABLES.items():
        rows = [row for row in import_module(module, __package__).ROWS if row.path and name in map(_plain, row.names)]
        if rows:
            return f"is {_of(owner)}; here it is {' and '.join(dict.fromkeys(_flags(rows)))}"
        argument = arguments_of(parser).get(f"--{name}") if parser is not None else None
        if argument is not None and argument.table is not Table.MODELLED:
            return f"is {_of(owner)}, and not modelled: {argument.why}"
        if argument is not None:
            return f"is {_of(owner)}, which is read in a launch script: memplan estimate --from {parser} train.sh"
    refused = REFUSED.get(name.replace("-", "_"))
    return f"is {_of('TrainingArguments')}, and refused: {refused[1]}" if refused is not None else None


def without_effect(flag: str, following: Sequence[str]) -> int | None:
    """How many words ``flag`` is, with those of ``following`` that are its values, where it is a setting of one of the
    formats that changes no memory. A switch of ``TrainingArguments`` may be given its value: a word is taken for one
    that is no file, which would be the plan."""
    name = _plain(flag)
    values = list(takewhile(lambda word: not word.startswith("--"), following))
    for _, parser in _TABLES.values():
        argument = arguments_of(parser).get(f"--{name}") if parser is not None else None
        if argument is not None and argument.table is Table.IRRELEVANT:
            return 1 + min(len(values), 0 if argument.is_switch else len(values) if argument.count else 1)
    if name.replace("-", "_") in WITHOUT_EFFECT:
        return 1 + bool(values and not Path(values[0]).is_file())
    return None


def _flags(rows: Iterable[Row]) -> Iterator[str]:
    """What the fields of ``rows`` are called on a command line, with the value of a switch."""
    for row in rows:
        field = plan_fields().get(row.path)
        if field is None or not field.flag:
            yield f"{row.path} of a plan"
        elif field.kind is Kind.SWITCH:
            yield field.flag if row.words.get(True, True) else f"--no-{field.flag[2:]}"
        elif True in row.words and row.words[True] is not True:
            yield f"{field.flag} {row.words[True]}"
        else:
            yield f"{field.flag} ({', '.join(field.choices)})" if field.choices else field.flag


def _of(owner: str) -> str:
    return f"{owner}'" if owner.endswith("s") else f"{owner}'s"


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-")
