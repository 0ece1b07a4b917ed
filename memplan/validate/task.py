"""What a worker is told, as JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from ..plan.plan import Plan
from .readings import Code, World


class Task(BaseModel):
    """A run of ``plan``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: Plan
    """Resolved, as it runs."""
    code: Code = "torch"
    """Whose code runs it."""
    world: World
    device: Literal["cuda", "cpu"]
    warmup: int
    """Iterations before those that are measured; the first makes the optimizer's states."""
    steps: int
    """Iterations that are timed."""
    seconds: float
    """After which a collective that has not ended is an error."""
    gathers: bool = False
    """Ranks are on several machines, or were not started by this one: their readings come to the first."""
