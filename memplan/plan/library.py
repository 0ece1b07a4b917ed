"""What is built in, as files that anyone can read and copy: model specs, example plans, and configurations of models
that were learnt from traces."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..values import NamedTuple

SAVED_DTYPE = "saved_dtype"
"""The line of a spec that says in which dtype the model's checkpoint was published."""
SPEC_NAMES = ("hub", "text_part_of", "also")
"""Lines of a spec that list names: repositories on the Hugging Face Hub, of the model and of models that it is the text
part of, and what else people call it, as Ollama's ``deepseek-r1:7b``, which is Qwen 2.5's shape. A name of two models
stands at both, and is refused with both. One with a colon is Ollama's alone, where it and another model's would be one
without: ``mistral:7b`` is version 0.3 (https://ollama.com/library)."""

_PACKAGE = Path(__file__).resolve().parent.parent
LEARNED = _PACKAGE / "learned"
COMPILED = _PACKAGE / "compiled"
"""What was learnt of models under ``torch.compile``, by the names of models (``benchmarks/compiled_models.py``)."""
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
    of_specs = {name: hub + parts for name, (hub, parts, _) in _of_specs().items()}
    return MappingProxyType({**of_specs, **{name: one.hub for name, one in learned_models().items()}})


@cache
def text_parts() -> frozenset[str]:
    """Those of them, in lower case, that hold models which read images, too: what is built in is their text part."""
    of_specs = (repository for _, parts, _ in _of_specs().values() for repository in parts)
    of_learned = (repository for one in learned_models().values() if one.is_text_part for repository in one.hub)
    return frozenset(map(str.lower, (*of_specs, *of_learned)))


@cache
def nicknames() -> Mapping[str, tuple[str, ...]]:
    """What else people call each built-in model."""
    return MappingProxyType({name: also for name, (_, _, also) in _of_specs().items()})


@cache
def _of_specs() -> Mapping[str, tuple[tuple[str, ...], ...]]:
    """What the lines ``SPEC_NAMES`` of each spec list, read without parsing the whole."""
    found = {}
    for name, path in model_specs().items():
        lines = dict(line.split(": ", 1) for line in path.read_text("utf-8").splitlines() if ": " in line)
        found[name] = tuple(tuple(lines[key].split(", ")) if key in lines else () for key in SPEC_NAMES)
    return MappingProxyType(found)


def published_dtype(name: str) -> str | None:
    """The dtype of the checkpoint that the built-in model ``name`` was published as, where its spec says one."""
    lines = model_specs()[name].read_text("utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith(f"{SAVED_DTYPE}: ")), None)


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
