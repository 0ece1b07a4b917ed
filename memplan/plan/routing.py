"""Where tokens went in a run: a record of the tokens of every expert, layer by layer, as ``--experts-imbalance FILE``.

A JSON file is a list with a list for each layer that has experts, or a mapping of such layers' numbers, from 0, to
lists. A CSV file has a line for each of them, with a number for each expert, and may have a heading. Counts may be of
any number of steps: only their shares matter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .errors import Origin, PlanError
from .plan import Plan
from .text import path_of, read_bytes

FIELD = "experts.imbalance"
LARGEST = 16 << 20
"""Bytes of the largest record: some hundred layers of a thousand experts."""

Counts = Sequence[Sequence[float]]
"""By layer that has experts, then by expert."""


def with_routing(plan: Plan, folder: Path) -> Plan:
    """``plan`` with the record that its imbalance names, if it does, as a factor of each layer: the tokens of one
    expert-parallel rank against the mean over ranks. It is the rank that has most tokens in all layers together."""
    name, model, ep = plan.experts.imbalance, plan.model, plan.layout.ep
    if not name.endswith((".csv", ".json")) or not model.experts or model.experts % ep:
        return plan
    path = path_of(name, folder)
    numbers = [layer for layer in range(model.layers) if model.has_experts(layer)]
    counts = _checked(_read(path, numbers), len(numbers), model.experts, path)
    each = model.experts // ep
    shares = [[ep * sum(layer[at : at + each]) / sum(layer) for at in range(0, len(layer), each)] for layer in counts]
    most = max(range(ep), key=lambda rank: sum(layer[rank] for layer in shares))
    factors = ",".join(f"{max(layer[most], 0.01):.2f}" for layer in shares)
    return plan.model_copy(update={"experts": plan.experts.model_copy(update={"imbalance": factors})})


def _read(path: Path, numbers: Sequence[int]) -> object:
    text = read_bytes(path, FIELD, largest=LARGEST, what="a routing record").decode("utf-8", "replace")
    if path.suffix == ".csv":
        lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
        return [[_number(cell) for cell in line] for line in lines if any(_number(cell) is not None for cell in line)]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise _wrong(path, "is not JSON") from None
    if isinstance(found, dict):
        missing = [layer for layer in numbers if str(layer) not in found]
        if missing:
            raise _wrong(path, f"has no layer {missing[0]}, which has experts")
        return [found[str(layer)] for layer in numbers]
    return found


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _checked(found: object, layers: int, experts: int, path: Path) -> Counts:
    if not isinstance(found, list) or len(found) != layers:
        rows = f"{len(found)} rows" if isinstance(found, list) else "no rows"
        raise _wrong(path, f"has {rows}; one for each of the {layers} layers with experts is wanted")
    for at, row in enumerate(found):
        if not isinstance(row, list) or len(row) != experts or not all(map(_is_count, row)) or not 0 < sum(row) < 1e18:
            raise _wrong(path, f"row {at}: must have {experts} numbers of at least 0, one for each expert, not all 0")
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


def _wrong(path: Path, problem: str) -> PlanError:
    return PlanError(FIELD, path.name, problem, origin=Origin(str(path)))
