"""``single``: plain PyTorch, one process on one GPU."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from ..base import Framework, Supports

if TYPE_CHECKING:
    from ...layers.module import Options
    from ...plan.resolved import ResolvedPlan
    from ...search.framework import FrameworkSearch
    from ...search.time.framework import FrameworkTime
    from ...tape.program import Program
    from ...trace.framework import FrameworkRunning


class Single(Framework):
    name = "single"
    supports = Supports(compiled="")

    def programs(self, plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
        from . import programs

        return programs.programs(plan, options)

    @cached_property
    def search(self) -> FrameworkSearch:
        from ...search.framework import FrameworkSearch as Plain

        return Plain()

    @cached_property
    def running(self) -> FrameworkRunning:
        from .running import PlainRunning

        return PlainRunning()

    @cached_property
    def time(self) -> FrameworkTime:
        from .timing import PlainTime

        return PlainTime()


FRAMEWORK = Single()
