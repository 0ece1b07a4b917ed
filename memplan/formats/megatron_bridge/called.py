"""A recipe of Megatron-Bridge that is named in the place of a file."""

from __future__ import annotations

from pathlib import PurePath

from ...plan.text import is_there, path_of
from ...values import pattern

_FUNCTION = pattern(r"(?:[\w.]+\.)?([a-z]\w*_(?:pretrain|sft|peft|finetune|lora|dora)(?:_\w+)?_config)")
"""``llama3_8b_pretrain_config``, alone or behind its module."""
_IN_FILE = pattern(r"(.+\.py)::?([A-Za-z]\w*)")
LAUNCHER = "run_recipe.py"


def recipe_called(place: str) -> tuple[str, str] | None:
    """The file, where ``place`` says one (``llama3.py:NAME``), and the name of the recipe that it is; nothing where it
    is a file, or no recipe's name."""
    inside, alone = _IN_FILE.fullmatch(place), _FUNCTION.fullmatch(place)
    if (inside is None and alone is None) or is_there(path_of(place)):
        return None
    if inside is None:
        return ("", alone[1]) if alone is not None else None
    return "" if PurePath(inside[1]).name == LAUNCHER else inside[1], inside[2]


def command_of(name: str) -> str:
    """The command that starts the recipe ``name``."""
    return f"python {LAUNCHER} --recipe {name}"


def together(words: list[str]) -> str | None:
    """A file and a recipe of it, which are given as two words, in one."""
    if len(words) != 2 or not words[0].endswith(".py"):
        return None
    found = recipe_called(words[1])
    return f"{words[0]}:{found[1]}" if found is not None and not found[0] else None
