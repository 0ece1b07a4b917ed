"""What a plan says of ZeRO, checked, and the program that every rank runs under DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

from ..layers.huggingface import LayerShape
from ..layers.module import Options
from ..plan.errors import PlanError
from ..plan.plan import Plan
from ..program import Program
from . import deepspeed
from .plain import layer_shape
from .zero_config import Zero
from .zero_layout import shard
from .zero_traffic import Gathering, LayerShards, gathering, layer_shards
from .zero_weave import Model, Woven


@dataclass(frozen=True, slots=True)
class Traffic:
    """ZeRO-3 of one micro-batch on one rank."""

    layer: LayerShards
    """The first layer of the model; all are alike."""
    gathered: Gathering


def zero_of(plan: Plan) -> Zero:
    """The section ``deepspeed`` of a resolved plan, with its stage and the dtype of accumulated gradients."""
    given = plan.deepspeed.model_dump(exclude={"gradient_accumulation_dtype"})
    return Zero(stage=plan.layout.zero, gradient_accumulation_dtype=plan.precision.gradients, **given)


def programs(plan: Plan, options: Options) -> tuple[Program, ...]:
    """The one program that all ranks run, with what a rank keeps on the host and on NVMe."""
    zero = zero_of(plan)
    with _fields_of_a_plan(plan):
        _check(plan)
        (made,) = deepspeed.programs(plan, options, zero)
        host, nvme = deepspeed.host_bytes(plan, zero)
    model, dp = _model(plan), plan.layout.dp
    assert dp is not None
    sharded = zero.stage == 3
    elements = sum(shard(one.elements, dp) if sharded else one.elements for one in model.parameters)
    return (replace(made, elements=elements, host=host, nvme=nvme),)


def fullest_rank(plan: Plan) -> int:
    """The rank that needs most, whose program the estimate is of."""
    with _fields_of_a_plan(plan):
        return deepspeed.fullest_rank(plan, zero_of(plan))


def program_of_rank(plan: Plan, options: Options, rank: int) -> Program:
    """What ``rank`` runs, which at stages 1 and 2 may need less than the estimate's."""
    with _fields_of_a_plan(plan):
        return deepspeed.program_of_rank(plan, options, zero_of(plan), rank)


def traffic(plan: Plan, program: Program) -> Traffic:
    """What ``program``, of ZeRO-3, gathers and reduces in each micro-batch."""
    model, dp = _model(plan), plan.layout.dp
    assert dp is not None
    tapes = [span.module.first for span in program.spans]
    woven = Woven(tuple(one.forward for one in tapes), tuple(one.backward for one in tapes), None)
    return Traffic(layer_shards(model, zero_of(plan), dp, "layer.0"), gathering(model, woven))


def _model(plan: Plan) -> Model:
    """The model's parameters, as the engine registers them."""
    return _hooked(layer_shape(plan), plan.model.layers, plan.layout.zero)


@lru_cache(maxsize=32)
def _hooked(shape: LayerShape, layers: int, stage: int) -> Model:
    return deepspeed.model_of(shape, layers, Options(), stage, False)


def _check(plan: Plan) -> None:
    """Refuses what the recipes do not cover, beside what ``deepspeed.check`` does."""
    recompute = plan.recompute
    if recompute.mode == "full" and recompute.method != "uniform":
        problem = "must be uniform: transformers recomputes every layer by itself"
        raise PlanError("recompute.method", recompute.method, problem)
    if recompute.mode == "full" and recompute.layers != 1:
        raise PlanError("recompute.layers", recompute.layers, "must be 1: transformers recomputes layers one by one")
    if plan.code != "current":
        raise PlanError("code", plan.code, "must be current with framework deepspeed")


@contextmanager
def _fields_of_a_plan(plan: Plan) -> Iterator[None]:
    """Errors about ``ds_config.json`` name the plan's fields."""
    try:
        yield
    except PlanError as error:
        raise PlanError(field_of(plan, error.field), error.value, error.problem, known=error.known) from None


def field_of(plan: Plan, path: str) -> str:
    """The plan's field for a dotted path of ``ds_config.json``; other paths are fields already."""
    if path == "data_types.grad_accum_dtype":
        own = plan.deepspeed.gradient_accumulation_dtype is not None
        return "deepspeed.gradient_accumulation_dtype" if own else "precision.gradients"
    section, _, name = path.partition(".")
    if section != "zero_optimization":
        return path
    return "layout.zero" if name == "stage" else f"deepspeed.{name.replace('.', '_')}"
