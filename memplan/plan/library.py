"""What is built in: model specs and example plans, as files that anyone can read and copy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

_PACKAGE = Path(__file__).resolve().parent.parent


@cache
def model_specs() -> Mapping[str, Path]:
    """Built-in model specs by name: in the wheel inside the package, in a checkout beside it."""
    shipped = _PACKAGE / "model_specs"
    return _yaml_files(shipped if shipped.is_dir() else _PACKAGE.parent / "model_specs")


@cache
def hub_ids() -> Mapping[str, tuple[str, ...]]:
    """Repositories on the Hugging Face Hub that hold each built-in model."""
    found: dict[str, tuple[str, ...]] = {}
    for name, path in model_specs().items():
        line = next((line for line in path.read_text("utf-8").splitlines() if line.startswith("hub:")), "hub:")
        found[name] = tuple(part for part in line[len("hub:") :].strip().split(", ") if part)
    return MappingProxyType(found)


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
