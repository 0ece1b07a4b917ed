"""``single``: plain PyTorch, one process on one GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import Framework, Parts, Supports

if TYPE_CHECKING:
    pass


class Single(Framework):
    name = "single"
    parts = Parts("...search.framework:FrameworkSearch", ".timing:PlainTime", ".running:PlainRunning")
    supports = Supports(compiled="")


FRAMEWORK = Single()
