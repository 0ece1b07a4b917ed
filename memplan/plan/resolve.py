"""From what was said to what is meant: every default filled in, every contradiction refused.

Defaults that depend on other fields are derived here, and in the frameworks' objects where they differ
(``Framework.default_…``). Resolving twice changes nothing.

Kernels in the place of transformers' operators: what each set has, and what a piece asks of the rest of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
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
from .lora import adapted, default_targets
from .loss_checks import check_loss
from .model_checks import check_model
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
    ResolvedPlan,
)
from .releases import MASKS, PACKAGES, adapters_in_16_bits, reentrant, release
from .sizes import headroom_bytes
from .spec import ModelSpec
from .traced_spec import TracedSpec
from .tuning_checks import check_optimizer, check_tuning
from .tuning_sections import Kernels, Lora, Quantisation

PIECES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "none": {},
        "liger": {"norm": "liger", "rope": "liger", "mlp": "liger"},
        "fms": {"norm": "unsloth", "rope": "unsloth", "lora": "unsloth"},
    }
)
"""What each set has; the rest is eager. Liger: ``transformers/monkey_patch.py``, the defaults of
``apply_liger_kernel_to_llama``; fms-acceleration: ``framework_plugin_fast_kernels.py``, all switched on."""

LOSSES: Mapping[str, str] = MappingProxyType({"liger": "liger", "fms": "unsloth"})
"""The loss that comes with a set."""

NAMES = ("norm", "rope", "mlp", "lora")


def of_set(plan: Plan) -> Kernels:
    """The section with every piece of the set named; LoRA's functions are for 4-bit weights alone."""
    given = plan.kernels
    pieces = {} if given.set in family(plan.model.family).loss_alone else PIECES[given.set]
    quantised = plan.quantisation.kind != "none"
    update = {name: piece for name, piece in pieces.items() if getattr(given, name) is None}
    return given.model_copy(update={name: piece for name, piece in update.items() if name != "lora" or quantised})


def check_kernels(plan: ResolvedPlan) -> None:
    """Pieces that the family, or the weights, are not patched with."""
    own = family(plan.model.family)
    for name in NAMES:
        if getattr(plan.kernels, name) not in (None, "eager", *own.kernels):
            allowed = " or ".join(("eager", *own.kernels))
            why = "others are not modelled for its layers" if own.kernels else "no kernels are modelled for its layers"
            raise plan.wrong(f"kernels.{name}", f"must be {allowed} for family {own.name}: {why}")
    _check_delta(plan)
    if plan.kernels.mlp not in (None, "eager") and plan.model.experts:
        problem = "must be eager with experts (--mlp-kernel eager): Liger's (LigerExperts) are not modelled"
        raise plan.wrong("kernels.mlp", problem)
    if plan.kernels.lora == "unsloth" and (plan.lora.rank is None or plan.quantisation.kind == "none"):
        raise plan.wrong(
            "kernels.lora", "must be eager without adapters on 4-bit weights, which Unsloth's functions are for"
        )
    if plan.kernels.lora == "unsloth":
        _check_functions(plan)


def _check_delta(plan: ResolvedPlan) -> None:
    """Gated delta nets without flash-linear-attention and causal-conv1d, where what runs inside depends on more."""
    spec, given, fla = plan.model, plan.kernels.delta, "must be fla (with flash-linear-attention and causal-conv1d) "
    channels = 2 * spec.linear_key_heads * spec.linear_key_head_dim
    channels += spec.linear_value_heads * spec.linear_value_head_dim
    elements = plan.batch.mbs * plan.batch.seq * channels
    runs = spec.linear_interval > 0 and framework(plan.framework).runs_transformers(plan)
    eager = runs and given != "fla"
    plan.refuse(
        (
            "kernels.delta",
            given is not None and not runs,
            f"must be left out: transformers' code of {spec.name} has no gated delta nets, or does not run",
        ),
        (
            "kernels.delta",
            eager and plan.precision.dtype == "fp16",
            f"{fla}in fp16, where cuDNN runs the convolution of transformers' own operators: nobody has published what "
            "it takes inside",
        ),
        (
            "kernels.delta",
            eager and plan.precision.dtype == "fp32",
            f"{fla}in fp32 without autocast: transformers' own operators are modelled in bf16 and under autocast",
        ),
        (
            "kernels.delta",
            eager and elements >= LONGEST_CONVOLVED,
            f"{fla}with {elements:,} elements under the convolution: from {LONGEST_CONVOLVED:,} on cuDNN runs that of "
            "transformers' own operators, and nobody has published what it takes inside",
        ),
    )


LONGEST_CONVOLVED = 2**31 - 1
"""Elements from which PyTorch's own kernel convolves no more (``Convolution.cpp``, ``use_cudnn_depthwise``;
``canUse32BitIndexMath``)."""


def _check_functions(plan: ResolvedPlan) -> None:
    """What fms-acceleration's functions do not run with."""

    def refuse(why: str) -> None:
        raise plan.wrong("kernels.lora", f"must be eager {why}")

    adapted_layers, given = adapted(plan), plan.quantisation
    if not plan.precision.autocast:
        refuse("without autocast, which fms-acceleration asks for beside 4-bit weights")
    if given.kind == "int8":
        refuse("with int8 weights: the functions dequantise 4-bit ones")
    if given.kind == "fp4" or (given.kind == "nf4" and not given.double):
        refuse(f"with {given.kind} weights: the functions dequantise nf4 with double quantisation")
    if given.prepared:
        refuse("after prepare_model_for_kbit_training, whose fp32 hidden states are not modelled with it")
    if not {"query", "key", "value"} <= adapted_layers:
        refuse("unless q_proj, k_proj and v_proj all have adapters")
    if plan.lora.dora:
        refuse("with DoRA, whose norms the functions leave out")
    if {"gate", "up", "down"} <= adapted_layers:
        refuse("with adapters on the whole MLP: backward of its function multiplies shapes that do not match")


# -- resolve -------------------------------------------------------------------------------------------


FOLLOW = frozenset({"layout.sequence_parallel", "fsdp.reshard_after_forward", "fsdp.ends_apart", "fsdp.return_outputs"})
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
        problem = "is not a GPU of NVIDIA or AMD; only those are modelled"
        raise PlanError("hardware.gpu", hardware.gpu, problem)
    if gpu is None:
        from ..device.instances import flags_of

        if (flags := flags_of(hardware.gpu)) is not None:
            raise PlanError("hardware.gpu", hardware.gpu, f"is no GPU, but means {flags}")
        series = ", ".join(of_series(hardware.gpu))
        known = f": of its series are {series}" if series else f" (`memplan gpus` lists {len(GPUS)})"
        problem = f"is not a known GPU{known}; for another GPU, give its memory: --capacity 24GiB"
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
    sizes = optimizer.algorithm.block_sizes
    if sizes:
        of_release = OLD_BLOCK_SIZE if plan.code == "2020" else own.default_block_size
        block = optimizer.block_size or (of_release if optimizer.algorithm.eight_bit else sizes[0])
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
    frameworks with layers of their own. From a sliding window on, where transformers before ``MASKS`` hands sdpa masks
    that are not modelled, ``flash_attention_2``, which takes no fp32."""
    in_fp32, runs = plan.precision.dtype == "fp32", framework(plan.framework).runs_transformers(plan)
    prepared = plan.quantisation.prepared and not plan.precision.autocast
    if plan.code == "2020" or (in_fp32 and not runs) or prepared or family(plan.model.family).no_flash:
        return "eager"
    window, seq = plan.model.sliding_window, plan.batch.seq or min(plan.model.positions_max, DEFAULT_SEQ)
    if not runs or window is None or seq < window or release(plan, "transformers") >= MASKS:
        return "flash"
    return "eager" if in_fp32 else "flash_attention_2"
