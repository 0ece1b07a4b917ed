"""DeepSpeed's engine in a worker."""

from __future__ import annotations

from contextlib import AbstractContextManager

from ...plan.plan import Plan
from ...program import Program
from ...trace.surroundings import Surroundings
from ...trace.traced import Traced
from .deepspeed import WithDeepspeed
from .deepspeed_engine import EngineTraining, engine_of, followed_engine


def training_of(plan: Plan, rank: int, within: Surroundings) -> AbstractContextManager[EngineTraining]:
    return engine_of(WithDeepspeed(plan, plan).job(rank), within)


def followed(plan: Plan, rank: int, program: Program, within: Surroundings) -> Traced:
    return followed_engine(WithDeepspeed(plan, plan).job(rank), within)
