"""From what was said to what is meant: every default filled in, every contradiction refused.

Defaults that depend on other fields are derived here and nowhere else. Resolving twice changes nothing.
"""

from __future__ import annotations

from .checks import (
    check_batch,
    check_code,
    check_ddp,
    check_deepspeed,
    check_environment,
    check_framework,
    check_fsdp,
    check_hardware,
    check_layout,
    check_megatron,
    check_model,
    check_pipeline,
    check_precision,
    check_recompute,
)
from .device_map import check_device_map, equal_shares
from .errors import ABSENT, PlanError
from .framework_sections import Fsdp, Megatron
from .lora import DEFAULT_TARGETS
from .loss_checks import check_loss
from .megatron_layout import stages
from .optimizer_checks import EIGHT_BIT, IMPLEMENTATIONS, check_optimizer
from .plan import (
    AttentionImplementation,
    Batch,
    Hardware,
    Layout,
    Loss,
    LossKind,
    Optimizer,
    Pipeline,
    Plan,
    Precision,
    Recompute,
)
from .sizes import headroom_bytes
from .trainer_checks import check_trainer
from .tuning_checks import check_tuning
from .tuning_sections import Lora, Quantisation

MEGATRONS = ("megatron", "megatron-deepspeed")

EAGER_ONLY = ("gemma2", "gptj", "falcon")
"""Families whose flash attention has no recipe (``layers.coverage``, ``WITHOUT_KERNEL``)."""

DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables that Megatron-Core's deterministic mode sets."""

BLOCK_SIZE, OLD_BLOCK_SIZE = 256, 2048
"""Elements per scale of bitsandbytes' 8-bit states, from its 0.44 of September 2024, and before (``Optimizer2State``,
``init_state``, of ``optim/optimizer.py``)."""

FOLLOW = frozenset({"layout.sequence_parallel", "fsdp.reshard_after_forward"})
"""Fields whose default, once it is written down, says something else than leaving them out: other fields decide."""

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
            "precision": _precision(plan.precision, plan),
            "optimizer": _optimizer(plan.optimizer, plan),
            "recompute": _recompute(plan.recompute, plan),
            "loss": _loss(plan.loss, plan),
            "lora": _lora(plan.lora, plan),
            "quantisation": _quantisation(plan.quantisation, plan),
            "device_map": _device_map(plan, hardware),
            "attention": plan.attention or _attention(plan),
            "pipeline": _pipeline(plan.pipeline, plan, layout),
            "megatron": _megatron(plan.megatron, plan),
            "fsdp": _fsdp(plan.fsdp, plan, layout),
            "torch": plan.torch or _torch(plan),
            "environment": _environment(plan),
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
        check_tuning,
        check_code,
        check_pipeline,
        check_megatron,
        check_ddp,
        check_fsdp,
        check_deepspeed,
        check_trainer,
        check_device_map,
        check_environment,
    ):
        check(plan)
    headroom_bytes(plan.headroom, plan.hardware.capacity)
    return plan


def _hardware_and_layout(plan: Plan) -> tuple[Hardware, Layout]:
    """Number of GPUs and data-parallel size, each from the other; and the capacity of the GPU."""
    hardware, layout = plan.hardware, _with_sequence_parallel(plan, _with_virtual_stages(plan))
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


def _with_virtual_stages(plan: Plan) -> Layout:
    """``pipeline.layout`` says how many chunks a stage has."""
    layout, pipeline = plan.layout, plan.pipeline
    if plan.framework != "megatron" or pipeline.layout is None or layout.vpp > 1:
        return layout
    (first, *_) = stages(plan.model.layers, layout.pp, None, layout=pipeline.layout)
    return layout.model_copy(update={"vpp": len(first)})


def _with_sequence_parallel(plan: Plan, layout: Layout) -> Layout:
    """torchtitan's tensor parallelism always shards norms along the sequence (``SequenceParallel``)."""
    if plan.framework != "fsdp" or layout.tp == 1 or layout.sequence_parallel:
        return layout
    if "sequence_parallel" in layout.model_fields_set:
        problem = "must be true with framework fsdp and tp > 1: torchtitan's tensor parallelism has no other"
        raise PlanError("layout.sequence_parallel", False, problem)
    return layout.model_copy(update={"sequence_parallel": True})


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
    at_once = batch.mbs * visible * layout.dp
    gbs = at_once * (batch.accumulation or layout.pp) if batch.gbs is None else batch.gbs
    seq = plan.model.positions_max if batch.seq is None else batch.seq
    return batch.model_copy(update={"gbs": gbs, "seq": seq})


def _optimizer(optimizer: Optimizer, plan: Plan) -> Optimizer:
    if optimizer.name in EIGHT_BIT:
        older = plan.framework == "megatron-deepspeed" or plan.code == "2020"
        block = optimizer.block_size or (OLD_BLOCK_SIZE if older else BLOCK_SIZE)
        return optimizer.model_copy(update={"block_size": block})
    default = IMPLEMENTATIONS[optimizer.name][0]
    if plan.framework == "megatron" or (plan.framework in MEGATRONS and optimizer.name in ("adam", "adamw")):
        default = "apex"
    if plan.framework == "deepspeed" and optimizer.name in ("adam", "adamw", "lion"):
        default = None
    return optimizer.model_copy(update={"implementation": optimizer.implementation or default})


def _precision(precision: Precision, plan: Plan) -> Precision:
    """Megatron-Core accumulates bf16 gradients in fp32 (``validate_args``); others in the parameters' dtype, DeepSpeed
    unless ``data_types`` says otherwise."""
    if precision.gradients is not None:
        return precision
    if plan.framework == "deepspeed" and plan.deepspeed.gradient_accumulation_dtype is not None:
        return precision.model_copy(update={"gradients": plan.deepspeed.gradient_accumulation_dtype})
    in_fp32 = plan.framework == "megatron" and precision.dtype == "bf16"
    return precision.model_copy(update={"gradients": "fp32" if in_fp32 else precision.stored})


def _recompute(recompute: Recompute, plan: Plan) -> Recompute:
    if recompute.mode == "full" and recompute.method == "uniform" and recompute.layers is None:
        return recompute.model_copy(update={"layers": 1})
    if recompute.mode == "selective" and plan.framework == "megatron" and recompute.modules is None:
        return recompute.model_copy(update={"modules": ("core_attn",)})
    if recompute.mode == "none" and plan.framework == "fsdp" and plan.fsdp.per_operator:
        return recompute.model_copy(update={"mode": "selective"})
    return recompute


def _loss(loss: Loss, plan: Plan) -> Loss:
    parallel = plan.framework in MEGATRONS or (plan.framework == "fsdp" and plan.layout.tp > 1)
    default: LossKind = "vocab-parallel" if parallel else "plain"
    kind = loss.kind or default
    cutoffs = loss.cutoffs
    if kind == "adaptive-softmax" and cutoffs is None:
        cutoffs = tuple(cutoff for cutoff in CUTOFFS if cutoff < plan.model.vocab) or None
    return loss.model_copy(update={"kind": kind, "cutoffs": cutoffs})


def _lora(lora: Lora, plan: Plan) -> Lora:
    """peft's targets for the family, and its adapters' dtype."""
    if lora.rank is None:
        return lora
    targets = DEFAULT_TARGETS.get(plan.model.family) if lora.targets is None else lora.targets
    return lora.model_copy(update={"targets": targets, "dtype": lora.dtype or "fp32"})


def _quantisation(quantisation: Quantisation, plan: Plan) -> Quantisation:
    if quantisation.kind == "none":
        return quantisation
    return quantisation.model_copy(update={"compute": quantisation.compute or plan.precision.dtype})


def _attention(plan: Plan) -> AttentionImplementation:
    """Flash, but for code that is older than it and for fp32, which its kernel does not take; torchtitan's Llama has
    fused kernels alone."""
    if plan.framework == "megatron":
        scores = plan.megatron.attention_backend in ("unfused", "local") or plan.megatron.transformer_impl == "local"
        return "eager" if scores else "flash"
    older = plan.framework == "megatron-deepspeed" or plan.code == "2020"
    fp32 = plan.precision.dtype == "fp32" or plan.quantisation.prepared
    titan = plan.framework == "fsdp" and plan.fsdp.code == "torchtitan"
    without = older or (fp32 and not titan) or plan.model.family in EAGER_ONLY
    return "eager" if without else "flash"


def _environment(plan: Plan) -> dict[str, str]:
    """``--deterministic-mode`` sets what it demands of libraries, unless somebody else has
    (``megatron/training/determinism.py``)."""
    demanded = DETERMINISTIC if plan.framework == "megatron" and plan.megatron.deterministic else {}
    return {**demanded, **plan.environment}


def _torch(plan: Plan) -> str:
    """The PyTorch whose source the recipes of a framework follow."""
    if plan.code == "2020":
        return "1.6"
    return "1.8" if plan.framework == "megatron-deepspeed" else "2.13"


def _pipeline(pipeline: Pipeline, plan: Plan, layout: Layout) -> Pipeline:
    if plan.framework == "megatron" and layout.vpp > 1 and pipeline.group is None:
        return pipeline.model_copy(update={"group": layout.pp})
    return pipeline


def _megatron(megatron: Megatron, plan: Plan) -> Megatron:
    """``attention: eager`` is a way to ask for the unfused back end; ``flash`` leaves the choice among the others."""
    eager = plan.framework == "megatron" and plan.attention == "eager" and megatron.transformer_impl != "local"
    if eager and megatron.attention_backend == "auto":
        return megatron.model_copy(update={"attention_backend": "unfused"})
    return megatron


def _fsdp(fsdp: Fsdp, plan: Plan, layout: Layout) -> Fsdp:
    """torchtitan keeps parameters whole between the micro-batches of a pipeline (``pp_enabled`` in ``apply_fsdp``)."""
    if plan.framework != "fsdp" or layout.pp == 1 or "reshard_after_forward" in fsdp.model_fields_set:
        return fsdp
    return fsdp.model_copy(update={"reshard_after_forward": False})


def _device_map(plan: Plan, hardware: Hardware) -> dict[int, tuple[int, ...]] | None:
    if plan.framework != "device-map" or plan.device_map is not None:
        return plan.device_map
    assert hardware.gpus is not None
    return equal_shares(plan.model.layers, hardware.gpus)
