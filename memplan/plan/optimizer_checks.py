"""Which optimizer there is where, in which implementation, and which of its fields belong together."""

from __future__ import annotations

from ..frameworks import framework, frameworks
from ..optimizers import algorithms
from .checks import listed
from .errors import PlanError
from .plan import Optimizer
from .resolved import ResolvedPlan

FIELDS = (
    *("momentum", "weight_decay", "paged", "block_size", "embeddings_32bit"),
    *("precision_aware", "main_parameters", "exp_avg", "exp_avg_sq", "fp8_recipe"),
)
"""Fields that some frameworks have, or some optimizers."""

BLOCK_SIZES = (256, 2048)
"""Elements per scale of 8-bit states (``bitsandbytes/optim/optimizer.py``, ``init_state``)."""


def check_optimizer(plan: ResolvedPlan) -> None:
    """What the framework has of the optimizer, and what the optimizer has."""
    optimizer = plan.optimizer
    if optimizer.momentum and not optimizer.algorithm.has_momentum:
        raise plan.wrong(
            "optimizer.momentum", f"must be left out: only SGD has momentum, and optimizer.name is {optimizer.name}"
        )
    _check_name(plan)
    _check_fields(plan)
    _check_implementation(plan)
    _check_bitsandbytes(optimizer)


def _check_name(plan: ResolvedPlan) -> None:
    """Refuses what does not run, or is not modelled, on pieces of parameters."""
    own = framework(plan.framework)
    name, supports = plan.optimizer.name, own.supports
    if supports.optimizers is None or name in supports.optimizers:
        return
    others = [one.name for one in frameworks() if one.supports.optimizers is None]
    why = supports.optimizers_refused.get(name, f"{listed(others, 'and')} support other optimizers")
    problem = f"must be one of {', '.join(own.optimizers_of(plan))} with framework {plan.framework}: {why}"
    raise PlanError("optimizer.name", plan.optimizer.called, problem)


def _check_fields(plan: ResolvedPlan) -> None:
    """Refuses fields that change nothing in the framework, and paged states where they are not modelled."""
    known = framework(plan.framework).supports.optimizer_fields
    for name in FIELDS:
        value, default = getattr(plan.optimizer, name), Optimizer.model_fields[name].default
        if value != default and name not in known:
            others = [one.name for one in frameworks() if name in one.supports.optimizer_fields]
            must = str(default).lower() if isinstance(default, bool) else "left out"
            why = "with which it is not modelled" if name == "paged" else "where it changes nothing"
            problem = f"must be {must} with framework {plan.framework}, {why}"
            have = "has" if len(others) == 1 else "have"
            raise PlanError(f"optimizer.{name}", value, f"{problem}; {listed(others, 'and')} {have} it")


def _check_implementation(plan: ResolvedPlan) -> None:
    name, value = plan.optimizer.name, plan.optimizer.implementation
    supports, field = framework(plan.framework).supports, "optimizer.implementation"
    own = plan.optimizer.algorithm.implementations
    if value is None:
        return
    if own == (None,):
        raise PlanError(field, value, f"must be left out: {name} has one implementation, bitsandbytes'")
    by_default = supports.default_implementations.get(name)
    refused = supports.implementations_refused
    known = [one for one in own if one in supports.implementations and (name, one) not in refused]
    known += [by_default] if by_default is not None and by_default not in known else []
    if value in known:
        return
    must = f"must be {listed(known) if known else 'left out'} for {name} with framework {plan.framework}"
    why = refused.get((name, value)) or ("" if known else "it has an implementation of its own")
    raise PlanError(field, value, f"{must}: {why}" if why else must)


def _check_bitsandbytes(optimizer: Optimizer) -> None:
    """Fields of bitsandbytes' optimizers."""
    if optimizer.algorithm.eight_bit:
        if optimizer.block_size not in (None, *BLOCK_SIZES):
            problem = f"must be {listed(BLOCK_SIZES)}: bitsandbytes' value since 0.44, and the value before"
            raise PlanError("optimizer.block_size", optimizer.block_size, problem)
        return
    if optimizer.paged and optimizer.implementation != "bitsandbytes":
        problem = f"must be false: {optimizer.name} is not bitsandbytes'; set --optimizer-implementation bitsandbytes"
        raise PlanError("optimizer.paged", True, problem)
    for field in ("block_size", "embeddings_32bit"):
        value = getattr(optimizer, field)
        if value != Optimizer.model_fields[field].default:
            others = " and ".join(one.name for one in algorithms() if one.eight_bit)
            problem = f"must be left out: {optimizer.name} has no 8-bit states, unlike {others}"
            raise PlanError(f"optimizer.{field}", value, problem)
