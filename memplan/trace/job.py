"""What is traced: plain data that goes to the worker as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..layers.coverage import TRANSFORMERS
from ..plan.errors import PlanError
from ..plan.plan import Plan
from .configs import config_of_spec

OPTIMIZERS = ("sgd", "adam", "adamw", "adafactor")
"""Those that torch itself has."""
IMPLEMENTATIONS = (None, "foreach", "for-loop", "fused")
MOST_MICROBATCHES = 2
"""The first leaves gradients, a later one adds to them; further ones are like the second."""


@dataclass(frozen=True, slots=True)
class Job:
    """One training step on one device."""

    config: dict[str, Any]
    """A Hugging Face configuration, ``model_type`` among its keys."""
    b: int
    s: int
    dtype: str
    """``fp32``, ``fp16`` or ``bf16``, of parameters and activations."""
    attention: str
    """``eager``, or ``flash``: transformers' ``sdpa``."""
    recompute: bool
    optimizer: str
    implementation: str
    """``foreach``, ``for-loop`` or ``fused``."""
    momentum: float
    weight_decay: float
    microbatches: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Job:
        return Job(**data)


def job_of_plan(plan: Plan, config: dict[str, Any] | None = None) -> Job:
    """The step that a resolved plan's rank runs; ``config`` where its model was read from one. ``PlanError``
    where a trace cannot follow it yet."""
    _check(plan)
    optimizer, loss = plan.optimizer, plan.loss
    if loss.kind != "plain" or loss.logits_to_keep is not None:
        raise PlanError("loss.kind", loss.kind, "must be plain, of all tokens: a trace runs the model's own loss")
    assert plan.batch.seq is not None
    assert plan.batch.gbs is not None
    assert plan.attention is not None
    return Job(
        config=config_of_spec(plan.model) if config is None else config,
        b=plan.batch.mbs,
        s=plan.batch.seq,
        dtype=plan.precision.dtype,
        attention=plan.attention,
        recompute=plan.recompute.mode == "full",
        optimizer=optimizer.name,
        implementation=optimizer.implementation or "foreach",
        momentum=optimizer.momentum,
        weight_decay=optimizer.weight_decay or 0.0,
        microbatches=min(plan.batch.gbs // plan.batch.mbs, MOST_MICROBATCHES),
    )


def _check(plan: Plan) -> None:
    if plan.framework != "single":
        problem = "must be single: other frameworks are not traced yet"
        raise PlanError("framework", plan.framework, problem)
    if plan.model.family not in TRANSFORMERS:
        problem = f"must be one of {', '.join(TRANSFORMERS)}: those that transformers runs"
        raise PlanError("model.family", plan.model.family, problem)
    if plan.code != "current":
        raise PlanError("code", plan.code, "must be current: the installed transformers is what is traced")
    if plan.recompute.mode == "selective":
        raise PlanError("recompute.mode", "selective", "must be none or full: transformers recomputes whole layers")
    optimizer = plan.optimizer
    if optimizer.name not in OPTIMIZERS:
        problem = f"must be one of {', '.join(OPTIMIZERS)}: a trace runs torch's own"
        raise PlanError("optimizer.name", optimizer.name, problem)
    if optimizer.implementation not in IMPLEMENTATIONS:
        raise PlanError("optimizer.implementation", optimizer.implementation, "must be foreach, for-loop or fused")
