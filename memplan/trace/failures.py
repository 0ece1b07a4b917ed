"""What a model's code did that fake tensors cannot do, in one line: the operator, and the module that called it."""

from __future__ import annotations

import re
from traceback import extract_tb

from .recording import BACKWARD, Place

READS = {
    "aten._local_scalar_dense.default": ".item(), .tolist(), or a condition on a tensor",
    "aten.equal.default": "torch.equal",
    "aten.nonzero.default": "nonzero(), or a mask as an index",
}
"""Operators by what calls them in a model's code."""
ELEMENTS = "elements of a tensor, which fake tensors have not"
NUMPY = re.compile(r"\.numpy\(\) is not supported")
FORMAT = re.compile(r"format string passed to FakeTensor")
_MODELS = ("/transformers/models/", "torchtitan_model.py")
"""Where models' code is."""


class UntraceableError(Exception):
    """A model cannot run on fake tensors; its text is one line."""


_PLACE = "memplan_place"


def note(error: BaseException, place: Place) -> None:
    """``error`` was raised at ``place``, or further in. The error carries it, since who kept the error would keep the
    tensors of its frames: recompute stops early by one."""
    if not hasattr(error, _PLACE):
        setattr(error, _PLACE, place)


def explained(error: BaseException) -> str:
    """One line about ``error``: the operator that wants elements of a tensor, or else what was raised; the module,
    where it was noted; and the line of the model's code."""
    known: BaseException | None = error
    while known is not None and not hasattr(known, _PLACE):
        known = known.__cause__ or known.__context__
    place = getattr(known, _PLACE, None)
    return f"{_what(error)}{_in(place) if place else ''}{_at(error)}"


def _what(error: BaseException) -> str:
    operator = getattr(error, "func", None)
    kind, first = type(error).__name__, (str(error).strip().splitlines() or [""])[0]
    if kind == "DataDependentOutputException":
        return f"{_named(operator)} reads {ELEMENTS}"
    if kind == "DynamicOutputShapeException":
        return f"{_named(operator)} has a result whose shape depends on {ELEMENTS}"
    if NUMPY.search(first):
        return f".numpy() reads {ELEMENTS}"
    if FORMAT.search(first):
        return f"format() reads {ELEMENTS}"
    return f"{kind}: {first}" if first else kind


def _named(operator: object) -> str:
    words = READS.get(str(operator))
    return f"{operator} ({words})" if words else str(operator)


def _in(place: Place) -> str:
    module = f", in {place.module}" if place.module else ""
    return f"{module}, {place.phase}" if place.phase == BACKWARD else module


def _at(error: BaseException) -> str:
    frames = [frame for frame in extract_tb(error.__traceback__) if any(one in frame.filename for one in _MODELS)]
    return f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}, {frames[-1].name})" if frames else ""
