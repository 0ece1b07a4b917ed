"""Rules of the section ``trainer``."""

from __future__ import annotations

from .errors import PlanError
from .framework_sections import Trainer
from .plan import Plan

FRAMEWORKS = ("single", "ddp", "device-map")
"""Those that the Trainer's loop is modelled around."""


def check_trainer(plan: Plan) -> None:
    """The Trainer's loop is around a model that is whole, and its evaluation belongs to it."""
    trainer = plan.trainer
    if trainer.loop == "none":
        for name, default in Trainer():
            value = getattr(trainer, name)
            if value != default:
                raise PlanError(f"trainer.{name}", value, "belongs to trainer.loop transformers (--trainer)")
        return
    if plan.framework not in FRAMEWORKS:
        problem = f"must be none with framework {plan.framework}: around it the Trainer's loop is not modelled"
        raise PlanError("trainer.loop", trainer.loop, problem)
    if plan.code != "current":
        raise PlanError("trainer.loop", trainer.loop, "must be none with code 2020: the loop is today's")
    if trainer.evaluation_batches is not None and plan.loss.kind not in ("plain", "liger"):
        problem = f"must be left out with loss {plan.loss.kind}, which has no logits to keep"
        raise PlanError("trainer.evaluation_batches", trainer.evaluation_batches, problem)
