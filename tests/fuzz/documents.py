"""YAML, JSON and TOML from random numbers: mappings of known names with values that nobody expects."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from .texts import NUMBERS, SIGNS, repeated, text

WORDS = ("gpt2", "llama-3-8b", "adamw", "bf16", "fp32", "full", "none", "type:embed|transformer", "type:(.*)*x", "uniform",
         "0,1,2", "0-11", "1,2    x", "80GB", "a100-80gb", "megatron", "deepspeed", "fsdp", "expandable_segments:True", "auto",
         "layers.0", "Et*2|t*9999L", "(t|)*9999", "4096:8", ":4096:8", "nvme", "cpu")  # fmt: skip
"""Values that some field understands."""


def scalar(random: Random) -> Any:
    """A value of any type."""
    return random.choice(_SCALARS)(random)


_SCALARS: tuple[Callable[[Random], Any], ...] = (
    lambda random: random.choice((None, True, False, 1e308, float("inf"), 2**31, 2**63, "")),
    lambda random: random.randrange(-2, 100),
    lambda random: 10 ** random.randrange(40),
    lambda random: random.random(),
    lambda random: random.choice(WORDS),
    lambda random: random.choice(WORDS),
    lambda random: random.choice(NUMBERS),
    lambda random: text(random, most=6),
    lambda random: repeated(random) if random.random() < 0.1 else "",
)


def tree(random: Random, names: Sequence[str], depth: int = 0) -> Any:
    """Mappings and lists of scalars; keys are of ``names``, mostly."""
    kind = random.random()
    if depth == 0 or (kind < 0.25 and depth < 6):
        size = random.choice((0, 1, 2, 3, 8, 8, 300 if depth < 2 else 3))
        return {key(random, names): tree(random, names, depth + 1) for _ in range(size)}
    if kind < 0.35 and depth < 6:
        return [tree(random, names, depth + 1) for _ in range(random.choice((0, 1, 2, 5, 200 if depth < 2 else 3)))]
    return scalar(random)


def key(random: Random, names: Sequence[str]) -> str:
    """A key: one of ``names``, one changed a little, or anything."""
    name = random.choice(names)
    match random.randrange(12):
        case 0:
            return name[:-1]
        case 1:
            return text(random, most=4)
        case 2:
            return str(random.randrange(10**6))
        case 3:
            return name.partition(".")[0]
        case _:
            return name


def changed(random: Random, document: Any, names: Sequence[str]) -> Any:
    """``document`` with some values replaced by others, and some keys added or left out."""
    if isinstance(document, dict):
        kept = {name: changed(random, value, names) for name, value in document.items() if random.random() > 0.03}
        if random.random() < 0.2:
            kept[key(random, names)] = tree(random, names, 1)
        return kept
    if isinstance(document, list):
        return [changed(random, value, names) for value in document if random.random() > 0.05]
    return tree(random, names, 1) if random.random() < 0.06 else document


def as_json(random: Random, document: Any) -> str:
    """``document`` as JSON in one of its forms."""
    return json.dumps(document, indent=random.choice((None, 2, "\t")), ensure_ascii=random.random() < 0.5)


def as_toml(document: Any) -> str:
    """A mapping as TOML: a table for every mapping at the top."""
    lines = [f"{_name(name)} = {_toml(value)}" for name, value in document.items() if not isinstance(value, dict)]
    for name, value in document.items():
        if isinstance(value, dict):
            lines += ["", f"[{_name(name)}]", *(f"{_name(key)} = {_toml(one)}" for key, one in value.items())]
    return "\n".join(lines)


def _name(name: str) -> str:
    return name if name.replace("_", "").replace(".", "").isalnum() and name.isascii() else json.dumps(name)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_name(name)} = {_toml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    return '""' if value is None else json.dumps(value)


def extreme(random: Random, names: Sequence[str]) -> str:
    """Something repeated, alone or where a key or a value stands."""
    return random.choice(_EXTREMES)(random, random.choice(names))


_EXTREMES: tuple[Callable[[Random, str], str], ...] = (
    lambda random, name: repeated(random),
    lambda random, name: f"{name}: {repeated(random)}",
    lambda random, name: f"{name} = {repeated(random)}",
    lambda random, name: f'{{"{name}": {repeated(random)}',
    lambda random, name: f'{{"{name}": "{repeated(random)}"}}',
    lambda random, name: f"[{repeated(random)}",
    lambda random, name: f"[{name}]\n{repeated(random)}",
    lambda random, name: f"{repeated(random)}: 1",
    lambda random, name: f"{repeated(random)} = 1",
    lambda random, name: f"[{repeated(random)}]",
    lambda random, name: f"{name}:\n{repeated(random)}",
    lambda random, name: f'{name} = """{repeated(random)}',
    lambda random, name: f"{name} = [{repeated(random)}]",
    lambda random, name: "\n".join(f"{random.choice(SIGNS)}{n} = {n}" for n in range(int(20_000 ** random.random()))),
    lambda random, name: "\n".join(f"k{n}: {n}" for n in range(int(20_000 ** random.random()))),
)
