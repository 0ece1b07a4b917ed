"""What is built in, as files that anyone can read and copy: model specs, example plans, and configurations of models
that were learnt from traces."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

_PACKAGE = Path(__file__).resolve().parent.parent
LEARNED = _PACKAGE / "learned"
"""A folder for each learned model: its configuration, and what was learnt of it."""


class LearnedModel(NamedTuple):
    """A model of an architecture without a recipe, which ships with what traces of it came to."""

    name: str
    hub: tuple[str, ...]
    """Repositories on the Hugging Face Hub that hold it."""
    parameters: int
    """As published."""
    source: str
    unsaid: frozenset[str] = frozenset()
    """Keys of its configuration that a published one may leave out: transformers' defaults are their values."""
    is_text_part: bool = False
    """The Hub's model reads images, too; this is its part that reads text."""

    @property
    def config(self) -> Path:
        """Its ``config.json``."""
        return LEARNED / self.name / "config.json"

    def configuration(self) -> dict[str, Any]:
        """What stands in it."""
        import json

        found: dict[str, Any] = json.loads(self.config.read_text("utf-8"))
        return found


@cache
def model_specs() -> Mapping[str, Path]:
    """Built-in model specs by name: in the wheel inside the package, in a checkout beside it."""
    shipped = _PACKAGE / "model_specs"
    return _yaml_files(shipped if shipped.is_dir() else _PACKAGE.parent / "model_specs")


@cache
def learned_models() -> Mapping[str, LearnedModel]:
    """Built-in models without a recipe, by name."""
    import json

    listed = json.loads((LEARNED / "models.json").read_text("utf-8"))
    unsaid = json.loads((LEARNED / "unsaid.json").read_text("utf-8"))
    return MappingProxyType(
        {
            name: LearnedModel(
                name,
                tuple(one["hub"]),
                one["parameters"],
                one["source"],
                frozenset(unsaid.get(name, "").split()),
                one.get("is_text_part", False),
            )
            for name, one in listed.items()
        }
    )


@cache
def hub_ids() -> Mapping[str, tuple[str, ...]]:
    """Repositories on the Hugging Face Hub that hold each built-in model, learned ones among them."""
    return MappingProxyType({**_of_specs(), **{name: one.hub for name, one in learned_models().items()}})


def _of_specs() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for name, path in model_specs().items():
        line = next((line for line in path.read_text("utf-8").splitlines() if line.startswith("hub:")), "hub:")
        found[name] = tuple(part for part in line[len("hub:") :].strip().split(", ") if part)
    return found


@cache
def examples() -> Mapping[str, Path]:
    """Built-in example plans by name."""
    return _yaml_files(_PACKAGE / "examples")


def _yaml_files(folder: Path) -> Mapping[str, Path]:
    return MappingProxyType({path.stem: path for path in sorted(folder.glob("*.yaml"), key=_natural)})


def _natural(path: Path) -> tuple[str | int, ...]:
    """Sorts ``llama-3-8b`` before ``llama-3-70b``."""
    import re

    return tuple(int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", path.stem))
