"""What a step costs where the price of a GPU for an hour is known."""

from __future__ import annotations

from ...plan.plan import Plan
from .step import StepTime

HOUR = 3600.0


def cost_of_step(plan: Plan, time: StepTime) -> float | None:
    """In the currency of ``hardware.price``; ``None`` without one."""
    price, gpus = plan.hardware.price, plan.hardware.gpus
    return None if price is None or gpus is None else price * gpus * time.total / HOUR


def cost_of_tokens(plan: Plan, time: StepTime, tokens: float = 1e9) -> float | None:
    """Of training on ``tokens``, a billion unless said."""
    step = cost_of_step(plan, time)
    return None if step is None else step * tokens / (time.tokens_per_second * time.total)
