"""What is traced: plain data that goes to the worker as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..layers.coverage import TRANSFORMERS
from ..plan.errors import PlanError
from ..plan.plan import Plan
from .configs import config_of_spec
from .replicated import Replicated, replicated_of
from .torchtitan_settings import Torchtitan
from .tuned import Tuned, tuned_of

FRAMEWORKS = ("single", "ddp", "fsdp")
OPTIMIZERS = ("sgd", "adam", "adamw", "adafactor")
"""Those that torch itself has."""
IMPLEMENTATIONS = (None, "foreach", "for-loop", "fused")
MOST_MICROBATCHES = 2
"""The first leaves gradients, a later one adds to them; further ones are like the second."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """``fully_shard`` on every layer and on the model, as rank 0 of ``replicas`` x ``shards`` sees it."""

    shards: int
    replicas: int
    reshard: bool | int
    """``reshard_after_forward`` of the layers."""
    reshard_root: bool
    parameters: str
    reduce: str
    """Dtypes of shards and of the reduction of gradients."""
    syncs_each: bool
    """Every micro-batch reduces its gradients; else the last one alone."""


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's training step."""

    config: dict[str, Any]
    """A Hugging Face configuration, ``model_type`` among its keys."""
    b: int
    s: int
    dtype: str
    """``fp32``, ``fp16`` or ``bf16``, of parameters and, without autocast, activations."""
    attention: str
    """``eager``, or ``flash``: transformers' ``sdpa``."""
    recompute: bool
    optimizer: str
    implementation: str
    """``foreach``, ``for-loop`` or ``fused``."""
    momentum: float
    weight_decay: float
    microbatches: int
    fsdp: Sharded | None = None
    torchtitan: Torchtitan | None = None
    """torchtitan's Llama, instead of a model of transformers'."""
    ddp: Replicated | None = None
    autocast: str | None = None
    """The dtype that autocast computes in."""
    tuned: Tuned | None = None
    """What is trained, where it is not everything."""
    trainer: int | None = None
    """Micro-batches whose inputs are on the device at once where transformers' Trainer runs the model."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Those that its trace needs besides torch and transformers."""
        of_tuning = self.tuned.packages if self.tuned is not None else ()
        return of_tuning if self.trainer is None else (*of_tuning, "accelerate")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Job:
        made = {name: make(data[name]) for name, make in SECTIONS.items() if data.get(name) is not None}
        return Job(**{**data, **made})


SECTIONS: Mapping[str, Callable[[Any], object]] = {
    "fsdp": lambda data: Sharded(**data),
    "torchtitan": Torchtitan.from_json,
    "ddp": lambda data: Replicated(**data),
    "tuned": Tuned.from_json,
}
"""Fields of a job that are mappings in JSON."""


def job_of_plan(plan: Plan, config: dict[str, Any] | None = None) -> Job:
    """The step that a resolved plan's rank runs; ``config`` in place of its model's. ``PlanError``
    where a trace cannot follow it yet."""
    _check(plan)
    optimizer, loss = plan.optimizer, plan.loss
    if loss.kind != "plain" or loss.logits_to_keep is not None:
        raise PlanError("loss.kind", loss.kind, "must be plain, of all tokens: a trace runs the model's own loss")
    assert plan.batch.seq is not None
    assert plan.batch.gbs is not None
    assert plan.attention is not None
    microbatches = plan.batch.gbs // (plan.batch.mbs * (plan.layout.dp or 1))
    return Job(
        config=config_of_spec(plan.model) if config is None else config,
        b=plan.batch.mbs,
        s=plan.batch.seq,
        dtype=plan.precision.stored,
        attention=plan.attention,
        recompute=plan.recompute.mode == "full",
        optimizer=optimizer.name,
        implementation=optimizer.implementation or "foreach",
        momentum=optimizer.momentum,
        weight_decay=optimizer.weight_decay or 0.0,
        microbatches=min(microbatches, MOST_MICROBATCHES),
        fsdp=_sharded(plan) if plan.framework == "fsdp" else None,
        ddp=replicated_of(plan, has_recipe=config is None),
        autocast=plan.precision.dtype if plan.precision.autocast else None,
        tuned=tuned_of(plan),
        trainer=microbatches if plan.trainer.loop == "transformers" else None,
    )


def _sharded(plan: Plan) -> Sharded:
    given = plan.fsdp
    assert plan.layout.dp is not None
    return Sharded(
        shards=plan.layout.dp // given.replicas,
        replicas=given.replicas,
        reshard=given.reshard_to or given.reshard_after_forward,
        reshard_root=given.reshard_root,
        parameters=given.parameters,
        reduce=given.reduce,
        syncs_each=given.gradient_sync,
    )


def _check_fsdp(plan: Plan) -> None:
    if plan.fsdp.code != "transformers":
        raise PlanError("fsdp.code", plan.fsdp.code, "must be transformers here; torchtitan's has a job of its own")
    if plan.fsdp.offload:
        raise PlanError("fsdp.offload", True, "must be false: fake tensors are of one device, and offload moves none")
    for name in ("tp", "pp", "cp"):
        size = getattr(plan.layout, name)
        if size != 1:
            raise PlanError(f"layout.{name}", size, "must be 1: data parallelism alone is traced")


def _check(plan: Plan) -> None:
    if plan.framework == "device-map":
        problem = (
            f"must be one of {', '.join(FRAMEWORKS)}: layers on several CUDA devices are not traced, since autograd "
            "over fake tensors of such devices ends a process whose PyTorch has no CUDA"
        )
        raise PlanError("framework", plan.framework, problem)
    if plan.framework not in FRAMEWORKS:
        problem = f"must be one of {', '.join(FRAMEWORKS)}: others are not traced yet"
        raise PlanError("framework", plan.framework, problem)
    if plan.framework == "fsdp":
        _check_fsdp(plan)
    if plan.model.family not in TRANSFORMERS:
        problem = f"must be one of {', '.join(TRANSFORMERS)}: those that transformers runs"
        raise PlanError("model.family", plan.model.family, problem)
    if plan.trainer.evaluation_batches is not None:
        problem = "must be left out: a trace is of a training step, without evaluation"
        raise PlanError("trainer.evaluation_batches", plan.trainer.evaluation_batches, problem)
    if plan.code != "current":
        raise PlanError("code", plan.code, "must be current: the installed transformers is what is traced")
    if plan.recompute.mode == "selective":
        raise PlanError("recompute.mode", "selective", "must be none or full: transformers recomputes whole layers")
    check_optimizer(plan)


def check_optimizer(plan: Plan) -> None:
    """Refuses optimizers that are not torch's."""
    optimizer = plan.optimizer
    if optimizer.name not in OPTIMIZERS:
        problem = f"must be one of {', '.join(OPTIMIZERS)}: a trace runs torch's own"
        raise PlanError("optimizer.name", optimizer.name, problem)
    if optimizer.implementation not in IMPLEMENTATIONS:
        problem = "must be foreach, for-loop or fused, which are torch's own (--optimizer-implementation)"
        raise PlanError("optimizer.implementation", optimizer.implementation, problem)
