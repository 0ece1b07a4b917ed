"""In which module an operator runs, forward and backward; and, in one line, what a model's code did there that fake
tensors cannot do.

Forward: hooks that every module calls. Backward: autograd numbers its nodes in the order in which forward made
them, so that a node belongs to the innermost module during whose forward its number was given; nothing is hung
onto the graph. ``AccumulateGrad`` has no such number, but the parameter.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from traceback import extract_tb
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .recording import BACKWARD, SETUP, Place

READS = {
    "aten._local_scalar_dense.default": ".item(), .tolist(), or a condition on a tensor",
    "aten.equal.default": "torch.equal",
    "aten.nonzero.default": "nonzero(), or a mask as an index",
}
"""Operators by what calls them in a model's code."""
ELEMENTS = "elements of a tensor, which fake tensors have not"
NUMPY = re.compile(r"\.numpy\(\) is not supported")
FORMAT = re.compile(r"format string passed to FakeTensor")
_MODELS = ("/transformers/models/", "/memplan/trace/torchtitan.py")
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


class Places:
    """The current place, and which module made which autograd node."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.microbatch = 0
        self.phase = SETUP.phase
        self.names = {id(module): name for name, module in model.named_modules()}
        self.owners = {
            id(parameter): name
            for name, module in model.named_modules()
            for parameter in module.parameters(recurse=False)
        }
        self.stack: list[str] = []
        self.begins: list[int] = []
        """Numbers of nodes at which another module began, or went on."""
        self.modules: list[str] = []
        """Those modules."""
        self._thread = get_ident()
        """In which forward runs."""

    def __call__(self) -> Place:
        if self.phase != BACKWARD or self.stack:
            module = self.stack[-1] if self.stack else ""
            return Place(self.microbatch, self.phase, module, self.phase == BACKWARD and bool(self.stack))
        return Place(self.microbatch, self.phase, self._of_node())

    def _of_node(self) -> str:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        variable = getattr(node, "variable", None)
        if variable is not None:
            return str(self.owners.get(id(variable), ""))
        at = bisect_right(self.begins, node._sequence_nr())
        return self.modules[at - 1] if at else ""

    def _note(self) -> None:
        if get_ident() != self._thread:
            return
        number: int = torch._C._autograd._get_sequence_nr()
        self.begins.append(number)
        self.modules.append(self.stack[-1] if self.stack else "")

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        self.stack.append(self.names.get(id(module), self.stack[-1] if self.stack else ""))
        self._note()

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None:
            note(error, self())
        self.stack.pop()
        self._note()

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While modules tell where they are."""
        handles = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


WRAPPED = "._checkpoint_wrapped_module"


class HookedPlaces(Places):
    """As ``Places``, but what a module's hooks do to its output belongs to the module, and wrappers have no
    name. To be made when all hooks are there. ``models``: the stages of one rank, whose layers have names
    of their own."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        super().__init__(models[0])
        self.models = list(models)
        self.names, self.owners = {}, {}
        for model in models:
            for path, module in model.named_modules():
                name = path.replace(WRAPPED, "")
                self.names[id(module)] = name
                self.owners |= dict.fromkeys(map(id, module.parameters(recurse=False)), name)

    @contextmanager
    def followed(self) -> Iterator[None]:
        handles = [register_module_forward_pre_hook(self._enter)]
        for model in self.models:
            handles += [module.register_forward_hook(self._leave, always_call=True) for module in model.modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
