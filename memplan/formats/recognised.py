"""Whose configuration a file is that no ``--from`` names: by its ending, its keys, or what its script starts.

A Jupyter notebook as one Python file: the code of its cells, without what IPython alone understands.

Every line of code keeps the number that it has in the notebook's file, where nbformat writes one line of code a line.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..plan.errors import Node, Origin, PlanError, wrong_at
from ..plan.library import examples
from ..plan.text import LARGEST, folder_of, is_there, parse_yaml, path_of, read_bytes, text_at
from . import FORMATS
from .elsewhere import ELSEWHERE
from .in_flags import in_flags
from .launchers import MAPPINGS, IsMark, found_from, started_by
from .megatron_bridge.called import recipe_called
from .megatron_bridge.overrides import HINTS, are_overrides
from .trainer.swift import MARKS as SWIFT

ENDING = ".ipynb"
LARGEST_NOTEBOOK = 16 << 20
"""Bytes: pictures stand in the file beside the code."""
_OF_IPYTHON = re.compile(r"(\s*)(?:%+\w|!|\?*[\w.]+\?+\s*$|\?|[\w, ]+=\s*(?:!|%\w))")
"""A line that is no Python: magic, a command of the shell, help."""
_STILL_PYTHON = re.compile(r"%%(?:time|timeit|capture|prun)\b")
"""First lines of cells that IPython runs as Python; behind others stands something else."""


def source_at(place: str) -> tuple[str, str]:
    """The text at ``place`` as ``text_at`` gives it; of a notebook its code."""
    if not place.endswith(ENDING):
        return text_at(place)
    data = read_bytes(path_of(place), largest=LARGEST_NOTEBOOK, what="a notebook")
    try:
        text = data.decode("utf-8-sig")
        written = json.loads(text)
    except (ValueError, RecursionError):
        written = None
    cells = written.get("cells") if isinstance(written, dict) else None
    if not isinstance(cells, list):
        raise wrong_at(Origin(place), "is no notebook that can be read: it is no JSON with cells")
    pairs: list[tuple[str, str]] = []
    for cell in cells:
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source")
            lines = source if isinstance(source, list) else str(source or "").splitlines(keepends=True)
            lines = [str(line) for line in lines]
            pairs += zip(lines, _python(lines), strict=True)
    if sum(len(line) for line, _ in pairs) > LARGEST:
        raise wrong_at(Origin(place), f"has more code than a plan can be ({LARGEST >> 20} MiB)")
    return "\n".join(_in_place(pairs, text)), place


def _in_place(pairs: Iterable[tuple[str, str]], text: str) -> list[str]:
    """Lines of Python, each where the line that it stands for has a line of ``text`` for itself, else behind the one
    before."""
    numbers: dict[str, list[int]] = {}
    for number, line in enumerate(text.splitlines()):
        numbers.setdefault(line.strip().removesuffix(","), []).append(number)
    code: list[str] = []
    for line, python in pairs:
        found = numbers.get(json.dumps(line, ensure_ascii=False)) or numbers.get(json.dumps(line)) or []
        at = bisect_left(found, len(code))
        code += [""] * (found[at] - len(code) if at < len(found) else 0) + [python]
    return code


def _python(lines: list[str]) -> list[str]:
    """``lines`` of a cell without their ends, ``pass`` in place of each that is IPython's."""
    first = next((line for line in lines if line.strip()), "")
    if first.startswith("%%") and not _STILL_PYTHON.match(first):
        return [""] * len(lines)
    found, goes_on = [], False
    for line in lines:
        match = _OF_IPYTHON.match(line)
        kept = "" if goes_on else f"{match[1]}pass" if match is not None else line.rstrip("\n")
        goes_on = (goes_on or match is not None) and line.rstrip().endswith("\\")
        found.append(kept)
    return found


# -- recognised ----------------------------------------------------------------------------------------


_SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")


def is_script(content: str, source: str) -> bool:
    """Whether ``content`` is for a shell, by its name or its first line."""
    first = content.partition("\n")[0]
    return source.endswith(_SCRIPTS) or (first.startswith("#!") and first.rstrip().endswith("sh"))


def is_python(source: str) -> bool:
    """Whether the file called ``source`` is Python, or a notebook of it."""
    return source.endswith((".py", ENDING))


def recognised(place: str, assignments: Sequence[str]) -> str | None:
    """The format of the file at ``place``; nothing where it is a plan, or nobody's. ``assignments`` are those
    of ``--set``."""
    if recipe_called(place) is not None:
        return "megatron-bridge"
    if place in examples() or (place != "-" and not (is_there(path_of(place)) and Path(place).suffix)):
        return None
    if place.endswith(".toml"):
        return "torchtitan"
    text, name = source_at(place)
    if is_python(name):
        from .megatron_bridge.recipes import is_recipe
        from .torchtitan.registry import is_registry
        from .trainer.parsed import INSTEAD, STARTED
        from .trainer.python import holds_arguments as stand_in, takes_arguments

        if is_registry(text):
            return "torchtitan"
        if is_recipe(text):
            return "megatron-bridge"
        if stand_in(text):
            return "trainer"
        instead = f"is {'a notebook' if name.endswith(ENDING) else 'Python'}, which is not run; {INSTEAD}"
        if takes_arguments(text):
            instead = STARTED
        raise _recipe(text, name) or wrong_at(name, instead)
    if is_script(text, name):
        from .launch import Asked
        from .trainer.python import python_in

        folder = Path() if place == "-" else folder_of(path_of(place))
        given = Asked(assignments=[one for one in assignments if "." not in one.partition("=")[0]]).variables()
        return started_by(text, name, given, folder, holds_arguments(folder), python_in(folder))
    if text.lstrip().startswith("--"):
        return "megatron"
    known = [*(one.marks for one in FORMATS.values()), *(tool.marks for tool in ELSEWHERE)]
    if not any(mark in text for marks in (*known, HINTS) for mark in marks):
        return None
    return format_of(parse_yaml(text.expandtabs(2), name))


def format_of(written: Node) -> str | None:
    """The format of a file in which ``written`` stands; nothing where it is a plan, or nobody's. ``PlanError`` where it
    is a tool's whose configurations are not read."""
    if isinstance(written.value, list):
        return "megatron"
    keys = written.mapping.keys()
    inner = {key for node in written.mapping.values() for key in node.mapping}
    for tool in ELSEWHERE:
        if (keys | inner) & {*tool.marks}:
            named = written.with_items({"_file_": Node(written.origin.source, written.origin)})
            raise wrong_at(written.origin.source, in_flags(tool, named))
    if are_overrides(written):
        return "megatron-bridge"
    if not keys & {"_target_", *SWIFT} and keys & {"model", "framework", "extends"}:
        return None
    return next((one.name for one in FORMATS.values() if keys & {*one.marks}), None)


def _recipe(text: str, name: str) -> PlanError | None:
    """What to give in place of a Python file that calls a recipe of another tool."""
    for tool in ELSEWHERE:
        called = re.search(tool.recipe, text) if tool.recipe else None
        if called is None:
            continue
        origin = Origin(name)
        keys = [key for key, _ in tool.flags] + [key for key, _, _ in tool.implied]
        values = {tool.marks[0]: Node(called[1], origin)}
        for key in keys:
            found = re.search(rf"\b{key.rpartition('.')[2]}\s*=\s*(?:(\d+)|[\"'](\w+))", text)
            if found is not None:
                values[key] = Node(found[1] or found[2], origin)
        problem = in_flags(tool, Node(values, origin), f"is a recipe of {tool.name}, which is not read")
        return wrong_at(origin, problem)
    return None


def holds_arguments(folder: Path) -> IsMark:
    """Whether a word of a script in ``folder`` is a file that holds the Trainer's arguments (``found_from``)."""

    def holds(word: str) -> bool:
        path = found_from(word, folder)
        return word.endswith(MAPPINGS) and is_there(path) and recognised(str(path), ()) == "trainer"

    return holds
