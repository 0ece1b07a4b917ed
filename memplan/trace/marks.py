"""Where hooks of DeepSpeed's ZeRO-3 run in a traced step: a tensor of one number that ends at once, whose shape says
which hook it is and which parameters its module reads. So a fit has hooks among its events, in their order.
"""

from __future__ import annotations

from typing import NamedTuple

from ..tape.events import Hold, Hook
from .recording import EMBEDDING, FINAL_NORM, HEAD

DTYPE = "uint16"
"""Of marks, and of no other tensor of a model's."""
OPERATOR = "aten.empty_strided.default"
HOOKS = (Hook.BEFORE_FORWARD, Hook.AFTER_FORWARD, Hook.BEFORE_BACKWARD, Hook.AFTER_BACKWARD)
ENTRIES = ("", EMBEDDING, FINAL_NORM, HEAD)
"""Owners of parameters, the layer that the hook runs in first."""


class Mark(NamedTuple):
    """A hook of a module; or part of it, where the module's own parameters do not follow one another."""

    hook: Hook
    entry: str
    """That owns the module's parameters; empty: the one in which the hook runs."""
    first: int
    """Number of the module's first parameter among those of the entry,"""
    size: int
    """and how many it has itself: those of modules inside it are theirs."""
    more: bool = False
    """The next mark is of the same hook."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return 1 + HOOKS.index(self.hook), 1 + ENTRIES.index(self.entry), 1 + self.first, 1 + self.size, 1 + self.more


def mark_of(hold: Hold) -> Mark | None:
    """The mark that a traced tensor is, if it is one."""
    if hold.dtype != DTYPE or hold.name != OPERATOR or len(hold.shape) != len(Mark._fields):
        return None
    hook, entry, first, size, more = (one - 1 for one in hold.shape)
    return Mark(HOOKS[hook], ENTRIES[entry], first, size, bool(more))
