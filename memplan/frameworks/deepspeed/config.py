"""What a plan says of ZeRO, with DeepSpeed's defaults (``runtime/zero/config.py``, 0.19.8), and what of it is refused.

Sizes are in elements unless a name says bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...families import families, family
from ...layers.coverage import TRANSFORMERS, check_covered, check_recompute
from ...plan.errors import PlanError
from ...plan.framework_sections import Deepspeed
from ...plan.lora import refuse_apart
from ...plan.plan import Optimizer, ResolvedPlan
from ..plain import preferences
from ..plain.programs import check_flash, check_release
from ..plain.tuned import check_tuned


class Zero(Deepspeed):
    """A plan's section ``deepspeed`` with the stage. ``gradient_accumulation_dtype``: ``None`` is the parameters' dtype
    (``engine.get_data_types``). Pinned blocks are rounded up to a power of two by PyTorch
    (``ATen/core/CachingHostAllocator.h``), which is not counted."""

    stage: int = 0

    @property
    def overlaps(self) -> bool:
        """``overlap_comm_valid``: by default in stage 3 only."""
        return self.stage == 3 if self.overlap_comm is None else self.overlap_comm


SECTION = "zero_optimization"
"""Of ``ds_config.json``."""


def zero_of(plan: ResolvedPlan) -> Zero:
    """The section ``deepspeed`` of a resolved plan, with its stage and the dtype of accumulated gradients."""
    given = plan.deepspeed.model_dump(exclude={"gradient_accumulation_dtype"})
    return Zero.model_construct(stage=plan.layout.zero, gradient_accumulation_dtype=plan.precision.gradients, **given)


# -- checks -----------------------------------------------------------------------------------------


def check(plan: ResolvedPlan, zero: Zero) -> None:
    """Refuses what DeepSpeed refuses, and what these recipes do not cover."""
    check_zero(zero)
    check_covered(plan.model, TRANSFORMERS, plan.framework)
    check_release(plan)
    known = family(plan.model.family)
    if known.submodules is None:
        others = ", ".join(one.name for one in families() if one.submodules is not None)
        raise plan.wrong("model.family", f"has no table of hooks; {others} have")
    if plan.flash:
        check_flash(plan)
    check_tuned(plan)
    preferences.check(plan)
    plan.refuse(
        (
            "model.labels",
            plan.lora.rank is not None and plan.model.labels and family(plan.model.family).scores is not None,
            "must be left out with adapters under deepspeed: this family's classifier is modelled in single and ddp",
        ),
        (
            "model.labels",
            zero.stage == 3 and plan.model.labels and family(plan.model.family).scores is not None,
            f"must be left out under ZeRO-3: nobody has counted the submodules of {plan.model.family}'s classifier",
        ),
        (
            "loss.kind",
            zero.stage == 3 and plan.loss.kind not in ("plain", "liger"),
            "must be plain or liger at stage 3: how ZeRO-3 gathers the head's weight for others is not modelled",
        ),
    )
    plan.refuse(
        *(
            (f"kernels.{name}", value == "unsloth", "must be eager or liger: Unsloth's are not modelled with deepspeed")
            for name, value in plan.kernels.changed()
        )
    )
    refuse_apart(plan, "under deepspeed")
    check_adapters(plan, zero)
    if plan.recompute.mode == "full":
        check_recompute(plan.model)
    if zero.stage == 3 and plan.model.experts and known.no_zero3_of_experts:
        problem = f"must be 0, 1 or 2 with experts of family {known.name}: {known.no_zero3_of_experts}"
        raise PlanError("layout.zero", 3, problem)
    if known.no_zero3 and zero.stage == 3:
        raise PlanError("layout.zero", 3, f"must be 0, 1 or 2 with family {known.name}: {known.no_zero3}")
    if plan.model.attention_sinks and zero.stage == 3:
        _check_sinks(plan, zero)
    check_settings(plan, zero)


def _check_sinks(plan: ResolvedPlan, zero: Zero) -> None:
    """A parameter of attention itself, around its linear layers, whose gathers are not modelled: it has to persist."""
    least, heads = zero.stage3_param_persistence_threshold, plan.model.heads
    if heads > least:
        raise PlanError(
            "deepspeed.stage3_param_persistence_threshold",
            least,
            f"must be {heads} or more: attention's sinks are modelled as parameters that stay whole",
        )
    if plan.runs_reference and plan.lora.rank is not None:
        raise plan.wrong(
            "trainer.loop",
            "must be another at stage 3 with adapters: the reference's pass releases attention's sinks, too",
        )


def check_adapters(plan: ResolvedPlan, zero: Zero) -> None:
    """Of adapters and quantised weights what the engine runs."""
    plan.refuse(
        (
            "lora.modules_to_save",
            zero.stage == 3 and plan.lora.modules_to_save,
            "must be left out at stage 3, whose hooks at peft's wrapper of whole modules are not modelled",
        ),
        (
            "lora.dora",
            zero.stage == 3 and plan.lora.dora,
            "must be false at stage 3: peft reads weights behind their layer's forward, where they are released",
        ),
        (
            "quantisation.kind",
            plan.quantisation.kind not in ("none", "nf4", "fp4"),
            "must be none, nf4 or fp4 with framework deepspeed: others are modelled in single, ddp and FSDP1",
        ),
        (
            "quantisation.prepared",
            plan.quantisation.prepared,
            "must be false with framework deepspeed: its engine casts what peft has cast to fp32 back",
        ),
    )
    storage, compute = plan.quantisation.storage, plan.precision.dtype
    if zero.stage == 3 and storage not in (None, compute):
        raise plan.wrong(
            "quantisation.storage", f"must be {compute} at stage 3, which gathers parameters in the dtype of training"
        )


def check_settings(plan: ResolvedPlan, zero: Zero) -> None:
    """What holds of any model."""
    check_zero(zero)
    if plan.recompute.mode == "selective":
        raise plan.wrong("recompute.mode", "must be none or full: transformers recomputes whole layers")
    check_client_optimizer(plan.optimizer, zero)
    dtype, accumulates = plan.precision.dtype, zero.gradient_accumulation_dtype
    own, kept = accumulates in (None, dtype), "data_types.grad_accum_dtype"
    _refuse(
        (kept, accumulates, not own and accumulates != "fp32", f"must be {dtype} or fp32"),
        (kept, accumulates, zero.stage == 0 and not own, f"must be {dtype} at stage 0"),
        (
            kept,
            accumulates,
            zero.stage == 1 and accumulates == "fp32" and dtype == "fp16",
            "is not modelled for fp16 at stage 1",
        ),
        (
            f"{SECTION}.contiguous_gradients",
            False,
            zero.stage in (1, 2) and not zero.contiguous_gradients,
            "is not modelled at stages 1 and 2",
        ),
        (f"{SECTION}.overlap_comm", True, zero.stage == 1 and zero.overlaps, "is not modelled at stage 1"),
        (
            kept,
            accumulates,
            zero.stage in (1, 2) and zero.offload_optimizer != "none" and not own,
            "is not modelled beside offload_optimizer",
        ),
    )


def _refuse(*rules: tuple[str, object, bool, str]) -> None:
    """Raises ``PlanError`` for the first rule that is broken: a path in ``ds_config.json``, the value there, whether
    the rule is broken, and what is wrong with the value."""
    for path, value, broken, problem in rules:
        if broken:
            raise PlanError(path, value, problem)


def check_client_optimizer(optimizer: Optimizer, zero: Zero) -> None:
    """Optimizers of others than PyTorch and DeepSpeed: 8-bit states of flat parameters on the device."""
    if zero.stage == 0 and optimizer.algorithm.eight_bit:
        raise PlanError(
            "optimizer.name",
            optimizer.name,
            "is not supported at stage 0, where parameters are not flat; framework ddp supports it",
        )
    made = optimizer.algorithm.deepspeed
    if zero.offload_optimizer != "none" and (made is None or not made.offloads):
        raise PlanError(
            "optimizer.name",
            optimizer.name,
            "must be adam, adamw, lion or sgd with offload_optimizer: CPU steps of other optimizers are not modelled",
        )


def check_zero(zero: Zero) -> None:
    """Refuses what contradicts itself, or is not modelled. Field paths are those of ``ds_config.json``."""
    _refuse(
        (
            f"{SECTION}.offload_param",
            zero.offload_param,
            zero.offload_param != "none" and zero.stage < 3,
            f"needs stage 3, not {zero.stage}",
        ),
        (
            f"{SECTION}.offload_optimizer",
            zero.offload_optimizer,
            zero.offload_optimizer != "none" and zero.stage < 1,
            "needs stage 1, 2 or 3, not 0",
        ),
        (
            f"{SECTION}.offload_optimizer",
            "nvme",
            zero.offload_optimizer == "nvme" and zero.stage < 3,
            f"needs stage 3, not {zero.stage}; cpu is possible",
        ),
        (
            f"{SECTION}.offload_optimizer.ratio",
            zero.offload_optimizer_ratio,
            zero.offload_optimizer_ratio != 1.0,
            "must be 1: partial offload of states is not modelled",
        ),
        (
            f"{SECTION}.reduce_scatter",
            False,
            zero.stage == 3 and not zero.reduce_scatter,
            "is not modelled in stage 3; leave it true",
        ),
        (
            f"{SECTION}.memory_efficient_linear",
            False,
            zero.stage == 3 and not zero.memory_efficient_linear,
            "is not modelled: PyTorch's linear keeps every gathered weight until its backward; leave it true",
        ),
        (
            f"{SECTION}.reduce_bucket_size",
            zero.reduce_bucket_size,
            zero.reduce_bucket_size < 1,
            "must be at least 1",
        ),
        (
            f"{SECTION}.allgather_bucket_size",
            zero.allgather_bucket_size,
            zero.allgather_bucket_size % 2 == 1,
            "must be even",
        ),
    )


def check_model(plan: ResolvedPlan) -> None:
    """Refuses what the recipes do not cover, beside what ``check`` does."""
    recompute = plan.recompute
    plan.refuse(
        (
            "recompute.method",
            recompute.mode == "full" and recompute.method != "uniform",
            "must be uniform: transformers recomputes every layer by itself",
        ),
        (
            "recompute.layers",
            recompute.mode == "full" and recompute.layers != 1,
            "must be 1: transformers recomputes layers one by one",
        ),
        ("code", plan.code != "current", "must be current with framework deepspeed"),
    )


@contextmanager
def fields_of_a_plan(plan: ResolvedPlan) -> Iterator[None]:
    """Errors about ``ds_config.json`` name the plan's fields."""
    try:
        yield
    except PlanError as error:
        raise PlanError(field_of(plan, error.field), error.value, error.problem, known=error.known) from None


def field_of(plan: ResolvedPlan, path: str) -> str:
    """The plan's field for a dotted path of ``ds_config.json``; other paths are fields already."""
    if path == "data_types.grad_accum_dtype":
        own = plan.deepspeed.gradient_accumulation_dtype is not None
        return "deepspeed.gradient_accumulation_dtype" if own else "precision.gradients"
    section, _, name = path.partition(".")
    if section != "zero_optimization":
        return path
    return "layout.zero" if name == "stage" else f"deepspeed.{name.replace('.', '_')}"
