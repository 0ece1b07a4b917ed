"""From what was said to what is meant: every default filled in, every contradiction refused.

Defaults that depend on other fields are derived here and nowhere else. Resolving twice changes nothing.
"""

from __future__ import annotations

from .checks import (
    check_batch,
    check_code,
    check_environment,
    check_framework,
    check_hardware,
    check_layout,
    check_loss,
    check_model,
    check_optimizer,
    check_pipeline,
    check_precision,
    check_recompute,
)
from .device_map import check_device_map, equal_shares
from .errors import ABSENT, PlanError
from .plan import (
    AttentionImplementation,
    Batch,
    Hardware,
    Layout,
    Loss,
    LossKind,
    Optimizer,
    OptimizerImplementation,
    Plan,
    Recompute,
)
from .sizes import headroom_bytes

BLOCK_SIZE = 2048
"""Elements per scale of bitsandbytes' 8-bit states, as of 2021."""

CUTOFFS = (20_000, 80_000)
"""First tokens of the tail clusters of an adaptive softmax, for vocabularies that are larger.

Word frequencies fall roughly as 1/rank, so a head of 20,000 sees nine tokens of ten; a vocabulary of
250,000 gets two tails, one of 50,000 gets one.
"""


def resolve(plan: Plan) -> Plan:
    """``plan`` with every default filled in, or a ``PlanError`` that names the field that cannot be."""
    check_framework(plan)
    check_model(plan.model)
    hardware, layout = _hardware_and_layout(plan)
    plan = plan.model_copy(
        update={
            "hardware": hardware,
            "layout": layout,
            "batch": _batch(plan.batch, plan, layout, hardware),
            "precision": plan.precision
            if plan.precision.gradients
            else plan.precision.model_copy(update={"gradients": plan.precision.dtype}),
            "optimizer": _optimizer(plan.optimizer, plan),
            "recompute": _recompute(plan.recompute),
            "loss": _loss(plan.loss, plan),
            "device_map": _device_map(plan, hardware),
            "attention": plan.attention or _attention(plan),
        }
    )
    for check in (
        check_hardware,
        check_layout,
        check_batch,
        check_precision,
        check_optimizer,
        check_recompute,
        check_loss,
        check_code,
        check_pipeline,
        check_device_map,
        check_environment,
    ):
        check(plan)
    headroom_bytes(plan.headroom, plan.hardware.capacity)
    return plan


def _hardware_and_layout(plan: Plan) -> tuple[Hardware, Layout]:
    """Number of GPUs and data-parallel size, each from the other; and the capacity of the GPU."""
    hardware, layout = plan.hardware, plan.layout
    one_replica = layout.tp * layout.pp * layout.cp
    gpus, dp = hardware.gpus, layout.dp
    if plan.framework == "device-map":
        dp = 1 if dp is None else dp
        gpus = _devices(plan) if gpus is None else gpus
    elif gpus is None:
        dp = 1 if dp is None else dp
        gpus = one_replica * dp
    elif dp is None:
        if gpus % one_replica:
            problem = f"must be a multiple of tp x pp x cp = {layout.tp} x {layout.pp} x {layout.cp} = {one_replica}"
            raise PlanError("hardware.gpus", gpus, problem)
        dp = gpus // one_replica
    return (
        hardware.model_copy(update={"gpus": gpus, "capacity": _capacity(hardware)}),
        layout.model_copy(update={"dp": dp}),
    )


def _devices(plan: Plan) -> int:
    if not plan.device_map:
        problem = "is missing: device-map needs the number of devices (--gpus 4) or the map itself (device_map)"
        raise PlanError("hardware.gpus", ABSENT, problem)
    return len(plan.device_map)


def _capacity(hardware: Hardware) -> int | None:
    if hardware.gpu is None:
        return hardware.capacity
    from ..gpus import GPUS

    gpu = GPUS.get(hardware.gpu)
    if gpu is None:
        raise PlanError("hardware.gpu", hardware.gpu, f"is not a GPU that is known: {', '.join(GPUS)}", known=GPUS)
    return gpu.capacity_bytes if hardware.capacity is None else hardware.capacity


def _batch(batch: Batch, plan: Plan, layout: Layout, hardware: Hardware) -> Batch:
    visible = hardware.gpus if batch.multiply_by_visible_gpus else 1
    assert layout.dp is not None
    assert visible is not None
    gbs = batch.mbs * visible * layout.dp * layout.pp if batch.gbs is None else batch.gbs
    seq = plan.model.positions_max if batch.seq is None else batch.seq
    return batch.model_copy(update={"gbs": gbs, "seq": seq})


def _optimizer(optimizer: Optimizer, plan: Plan) -> Optimizer:
    if optimizer.name == "adam8bit":
        return optimizer.model_copy(update={"block_size": optimizer.block_size or BLOCK_SIZE})
    default: OptimizerImplementation = "foreach"
    if plan.framework == "megatron-deepspeed" and optimizer.name in ("adam", "adamw"):
        default = "apex"
    return optimizer.model_copy(update={"implementation": optimizer.implementation or default})


def _recompute(recompute: Recompute) -> Recompute:
    if recompute.mode == "full" and recompute.method == "uniform" and recompute.layers is None:
        return recompute.model_copy(update={"layers": 1})
    return recompute


def _loss(loss: Loss, plan: Plan) -> Loss:
    default: LossKind = "vocab-parallel" if plan.framework == "megatron-deepspeed" else "plain"
    kind = loss.kind or default
    cutoffs = loss.cutoffs
    if kind == "adaptive-softmax" and cutoffs is None:
        cutoffs = tuple(cutoff for cutoff in CUTOFFS if cutoff < plan.model.vocab) or None
    return loss.model_copy(update={"kind": kind, "cutoffs": cutoffs})


def _attention(plan: Plan) -> AttentionImplementation:
    """Flash, but for code that is older than it and for fp32, which its kernel does not take."""
    older = plan.framework == "megatron-deepspeed" or plan.code == "2020"
    return "eager" if older or plan.precision.dtype == "fp32" else "flash"


def _device_map(plan: Plan, hardware: Hardware) -> dict[int, tuple[int, ...]] | None:
    if plan.framework != "device-map" or plan.device_map is not None:
        return plan.device_map
    assert hardware.gpus is not None
    return equal_shares(plan.model.layers, hardware.gpus)
