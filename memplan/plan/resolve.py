"""From what was said to what is meant: every default filled in, every contradiction refused.

Defaults that depend on other fields are derived here, and in the frameworks' objects where they differ
(``Framework.default_…``). Resolving twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..families import family
from ..frameworks import Framework, framework
from ..frameworks.base import OLD_BLOCK_SIZE
from .assumed_releases import with_assumed
from .checks import (
    SIZES,
    check_attention,
    check_batch,
    check_code,
    check_environment,
    check_layout,
    check_pipeline,
    check_precision,
    check_recompute,
    check_sections,
    check_sizes,
    check_trainer,
    check_versions,
    require,
)
from .errors import PlanError
from .kernels import LOSSES, check_kernels, of_set
from .lora import default_targets
from .loss_checks import check_loss
from .model_checks import check_model
from .optimizer_checks import check_optimizer
from .plan import (
    DEFAULT_SEQ,
    AttentionImplementation,
    Batch,
    Hardware,
    Layout,
    Loss,
    Optimizer,
    Plan,
    Precision,
    Recompute,
)
from .releases import PACKAGES, adapters_in_16_bits, reentrant
from .resolved import ResolvedPlan
from .sizes import headroom_bytes
from .spec import ModelSpec
from .traced_spec import TracedSpec
from .tuning_checks import check_tuning
from .tuning_sections import Lora, Quantisation

FOLLOW = frozenset({"layout.sequence_parallel", "fsdp.reshard_after_forward"})
"""Fields whose default, once it is written down, says something else than leaving them out: other fields decide."""

CUTOFFS = (20_000, 80_000)
"""First tokens of the tail clusters of an adaptive softmax, for vocabularies that are larger.

Word frequencies fall roughly as 1/rank, so a head of 20,000 sees nine tokens of ten; a vocabulary of
250,000 gets two tails, one of 50,000 gets one.
"""

CHECKS = (
    check_sizes,
    check_layout,
    check_batch,
    check_precision,
    check_optimizer,
    check_recompute,
    check_attention,
    check_sections,
    check_kernels,
    check_loss,
    check_tuning,
    check_code,
    check_pipeline,
    check_trainer,
    check_environment,
)


def resolve(plan: Plan) -> ResolvedPlan:
    """``plan`` with every default filled in, or a ``PlanError`` that names the field that cannot be."""
    check_model(plan.model)
    check_versions(plan)
    plan = with_assumed(plan)
    plan = plan.model_copy(update={"model": _model(plan)})
    own = framework(plan.framework)
    precision = _precision(plan)
    plan = plan.model_copy(update={"precision": precision})
    layout = own.default_layout(plan)
    gpus, dp = _ranks(plan.hardware, layout, own.default_gpus(plan))
    hardware = plan.hardware.model_copy(update={"gpus": gpus, "capacity": _capacity(plan.hardware)})
    if layout.dp is None and 1 < dp == gpus:  # nobody named its size
        require(plan, "hardware.gpus", gpus, "1", "sizes", "dp", SIZES["dp"])
    layout = layout.model_copy(update={"dp": dp})
    sections = own.default_sections(plan, hardware, layout)
    resolved = _with(
        plan,
        {
            "hardware": hardware,
            "layout": layout,
            "batch": _batch(plan, gpus, dp),
            "precision": precision.model_copy(update={"gradients": precision.gradients or own.default_gradients(plan)}),
            "optimizer": _optimizer(plan, own),
            "recompute": _recompute(plan, own),
            "loss": _loss(plan, own),
            "lora": _lora(plan, own, {"layout": layout, **sections}),
            "quantisation": _quantisation(plan),
            "kernels": of_set(plan),
            "attention": _named(plan, own) or own.default_attention(plan) or _attention(plan),
            "torch": plan.torch or plan.versions.get("torch") or ("1.6" if plan.code == "2020" else own.default_torch),
            **sections,
        },
    )
    for check in CHECKS:
        check(resolved)
    own.check(resolved)
    headroom_bytes(resolved.headroom, resolved.hardware.capacity)
    return resolved


def _with(plan: Plan, changed: dict[str, Any]) -> ResolvedPlan:
    """``plan`` with other values, as a resolved one."""
    resolved = ResolvedPlan.__new__(ResolvedPlan)
    resolved.__setstate__(plan.model_copy(update=changed).__getstate__())
    return resolved


def _model(plan: Plan) -> ModelSpec:
    """With a head of one score where the loop's loss is of scores (``RewardTrainer.__init__``: ``num_labels``), and of
    as many as the plan says where the model has a loss of labels."""
    spec, loop = plan.model, plan.loop
    if loop.loss_of not in ("scores", "labels"):
        if spec.labels:
            raise plan.wrong(
                "model.labels",
                "needs trainer.loop none, transformers or reward: no other trains a classifier; --labels 0 is the "
                "language model",
            )
        return spec
    own = framework(plan.framework)
    if loop.loss_of == "labels" and not ("reward" in own.supports.loops and own.runs_transformers(plan)):
        raise plan.wrong(
            "model.labels",
            f"must be left out with framework {plan.framework}, whose models of sequences are not modelled",
        )
    known = family(spec.family)
    pairs_of_own = loop.loss_of == "scores" and known.scores is not None
    if isinstance(spec, TracedSpec) or not (spec.causal or known.scores) or not known.classifies or pairs_of_own:
        problem = f"must be another one: no class for sequence classification of family {spec.family} is modelled"
        field, value = ("model.labels", spec.labels) if spec.labels else ("trainer.loop", loop.name)
        raise PlanError(field, value, problem)
    labels = spec.labels if loop.loss_of == "labels" else 1
    return spec.model_copy(update={"labels": labels, "tied_embeddings": False})


def _ranks(hardware: Hardware, layout: Layout, gpus: int | None) -> tuple[int, int]:
    """Number of GPUs (``gpus``, if the framework decides it) and data-parallel size, each from the other."""
    one_replica = layout.tp * layout.pp * layout.cp
    if gpus is not None:
        return gpus, layout.dp or 1
    if hardware.gpus is None:
        return one_replica * (layout.dp or 1), layout.dp or 1
    if layout.dp is None and hardware.gpus % one_replica:
        below = hardware.gpus - hardware.gpus % one_replica
        near = " and ".join(f"{count:,}" for count in (below, below + one_replica) if count)
        sizes = f"{layout.tp} x {layout.pp} x {layout.cp} = {one_replica}"
        problem = f"must be a multiple of tp x pp x cp = {sizes}: {near} GPUs work{_dividing(layout, hardware.gpus)}"
        raise PlanError("hardware.gpus", hardware.gpus, problem)
    return hardware.gpus, layout.dp or hardware.gpus // one_replica


def _dividing(layout: Layout, gpus: int) -> str:
    """Of the one size that is at fault, the nearest that do divide ``gpus``."""
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp}
    split = [name for name, size in sizes.items() if size > 1]
    if len(split) != 1:
        return ""
    (name,) = split
    fitting = [size for size in range(1, gpus + 1) if gpus % size == 0]
    below = max(size for size in fitting if size < sizes[name])
    above = next((size for size in fitting if size > sizes[name]), None)
    return f", or on {gpus:,} GPUs {name} {below}" + (f" or {above}" if above is not None else "")


def _capacity(hardware: Hardware) -> int | None:
    if hardware.gpu is None:
        return hardware.capacity
    from ..device.gpus import GPUS, NO_GPU, SHARED, alike, of_series

    gpu = GPUS.get(hardware.gpu)
    if gpu is None and hardware.gpu in SHARED:
        problem = f"is not listed, for {SHARED[hardware.gpu]}: say what a job may have in its place: --capacity 110GiB"
        raise PlanError("hardware.gpu", hardware.gpu, problem)
    if gpu is None and NO_GPU.match(hardware.gpu):
        problem = "is neither of NVIDIA nor of AMD, whose GPUs alone are modelled"
        raise PlanError("hardware.gpu", hardware.gpu, problem)
    if gpu is None:
        from ..device.instances import flags_of

        if (flags := flags_of(hardware.gpu)) is not None:
            raise PlanError("hardware.gpu", hardware.gpu, f"is no GPU, but means {flags}")
        series = ", ".join(of_series(hardware.gpu))
        known = f": of its series are {series}" if series else f" (`memplan gpus` lists {len(GPUS)})"
        problem = f"is not a known GPU{known}; of another one give the memory instead: --capacity 24GiB"
        raise PlanError("hardware.gpu", hardware.gpu, problem, known=alike(hardware.gpu))
    return gpu.process_bytes if hardware.capacity is None else hardware.capacity


def _batch(plan: Plan, gpus: int, dp: int) -> Batch:
    batch = plan.batch
    at_once = batch.mbs * (gpus if batch.multiply_by_visible_gpus else 1) * dp
    gbs = at_once * (batch.accumulation or plan.layout.pp) if batch.gbs is None else batch.gbs
    seq = min(plan.model.positions_max, DEFAULT_SEQ) if batch.seq is None else batch.seq
    return batch.model_copy(update={"gbs": gbs, "seq": seq})


def _optimizer(plan: Plan, own: Framework) -> Optimizer:
    optimizer = plan.optimizer
    if optimizer.algorithm.eight_bit:
        block = optimizer.block_size or (OLD_BLOCK_SIZE if plan.code == "2020" else own.default_block_size)
        return optimizer.model_copy(update={"block_size": block})
    default = own.supports.default_implementations.get(optimizer.name, optimizer.algorithm.implementations[0])
    return optimizer.model_copy(update={"implementation": optimizer.implementation or default})


def _recompute(plan: Plan, own: Framework) -> Recompute:
    """The framework's, with or without reentrance where layers are transformers'."""
    recompute = own.default_recompute(plan)
    if recompute.mode != "full" or recompute.reentrant is not None or not own.runs_transformers(plan):
        return recompute
    return recompute.model_copy(update={"reentrant": reentrant(plan)})


def _loss(plan: Plan, own: Framework) -> Loss:
    kind, cutoffs = plan.loss.kind or LOSSES.get(plan.kernels.set) or own.default_loss(plan), plan.loss.cutoffs
    if kind == "adaptive-softmax" and cutoffs is None:
        cutoffs = tuple(cutoff for cutoff in CUTOFFS if cutoff < plan.model.vocab) or None
    return plan.loss.model_copy(update={"kind": kind, "cutoffs": cutoffs})


def _precision(plan: Plan) -> Precision:
    """bitsandbytes' models are loaded in 16 bits, under autocast, too (``BitsAndBytesConfig``)."""
    precision = plan.precision
    if plan.quantisation.kind == "none" or not precision.autocast or precision.parameters is not None:
        return precision
    return precision.model_copy(update={"parameters": precision.dtype})


def _lora(plan: Plan, own: Framework, resolved: Mapping[str, object]) -> Lora:
    """peft's targets for the family, and its adapters' dtype: fp32, but that newer trl casts those beside 4-bit weights
    to bf16. A framework's own adapters are in the model's, on layers that ``resolved`` sections tell."""
    lora = plan.lora
    if lora.rank is None:
        return lora
    if (known := own.adaptable(plan.model_copy(update=resolved))) is not None:
        every = tuple(name for name, layers in known.items() if any(one.unasked for one in layers))
        named = every if lora.targets is None else lora.targets
        return lora.model_copy(update={"targets": named, "dtype": lora.dtype or own.adapter_dtype(plan)})
    targets = default_targets(plan.model) if lora.targets is None else lora.targets
    made = "bf16" if adapters_in_16_bits(plan) else "fp32"
    return lora.model_copy(update={"targets": targets, "dtype": lora.dtype or made})


def _quantisation(plan: Plan) -> Quantisation:
    quantisation = plan.quantisation
    if quantisation.kind == "none":
        return quantisation
    return quantisation.model_copy(update={"compute": quantisation.compute or plan.precision.dtype})


def _named(plan: Plan, own: Framework) -> AttentionImplementation | None:
    """The attention that the plan names. A package's kernel is the framework's own where that has one, of the second
    release as long as nothing else of the plan says another."""
    if plan.attention not in PACKAGES or own.runs_transformers(plan):
        return plan.attention
    if plan.attention != "flash_attention_2":
        problem = f"is transformers' name of a kernel, which {own.name} does not take: choose flash"
        with_release = "; under Megatron-Core --flash-attention-release 3 or 4 says which release is installed"
        raise plan.wrong("attention", problem + with_release)
    return "flash"


def _attention(plan: Plan) -> AttentionImplementation:
    """PyTorch's fused kernels, but for code that is older than they, for families without them, and in fp32 for
    frameworks with layers of their own. From a sliding window on, where sdpa has a mask and leaves those kernels,
    ``flash_attention_2``, which takes no fp32."""
    in_fp32, runs = plan.precision.dtype == "fp32", framework(plan.framework).runs_transformers(plan)
    prepared = plan.quantisation.prepared and not plan.precision.autocast
    if plan.code == "2020" or (in_fp32 and not runs) or prepared or family(plan.model.family).no_flash:
        return "eager"
    window, seq = plan.model.sliding_window, plan.batch.seq or min(plan.model.positions_max, DEFAULT_SEQ)
    if not runs or window is None or seq < window:
        return "flash"
    return "eager" if in_fp32 else "flash_attention_2"
