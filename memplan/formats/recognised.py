"""Whose configuration a file is that no ``--from`` names: by its ending, its keys, or what its script starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..plan.library import examples
from ..plan.text import folder_of, is_there, path_of, text_at
from ..plan.yaml_nodes import parse_yaml
from . import FORMATS

_SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")


def is_script(content: str, source: str) -> bool:
    """Whether ``content`` is for a shell, by its name or its first line."""
    first = content.partition("\n")[0]
    return source.endswith(_SCRIPTS) or (first.startswith("#!") and first.rstrip().endswith("sh"))


def recognised(place: str, assignments: Sequence[str]) -> str | None:
    """The format of the file at ``place``; nothing where it is a plan, or nobody's. ``assignments`` are those
    of ``--set``."""
    if place in examples() or (place != "-" and not (is_there(path_of(place)) and Path(place).suffix)):
        return None
    if place.endswith(".toml"):
        return "torchtitan"
    text, name = text_at(place)
    if is_script(text, name):
        from .files import started_by
        from .launch import Asked

        folder = Path() if place == "-" else folder_of(path_of(place))
        return started_by(text, name, Asked(assignments=assignments).variables(), folder)
    if text.lstrip().startswith("--"):
        return "megatron"
    possible = [one for one in FORMATS.values() if any(mark in text for mark in one.marks)]
    if not possible:
        return None
    written = parse_yaml(text.expandtabs(2), name)
    if isinstance(written.value, list):
        return "megatron"
    if "_target_" not in written.mapping and written.mapping.keys() & {"model", "framework", "extends"}:
        return None
    return next((one.name for one in possible if written.mapping.keys() & {*one.marks}), None)
