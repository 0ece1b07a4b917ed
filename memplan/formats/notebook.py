"""A Jupyter notebook as one Python file: the code of its cells, without what IPython alone understands.

Every line of code keeps the number that it has in the notebook's file, where nbformat writes one line of code a line.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable

from ..plan.errors import Origin, wrong_at
from ..plan.text import LARGEST, path_of, read_bytes, text_at

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
