"""In which module an operator runs, forward and backward.

Forward: hooks that every module calls. Backward: autograd numbers its nodes in the order in which forward made
them, so that a node belongs to the innermost module during whose forward its number was given; nothing is hung
onto the graph. ``AccumulateGrad`` has no such number, but the parameter.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .failures import note
from .recording import BACKWARD, SETUP, Place


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
