"""Rules between the fields of a plan whose defaults are filled in. Each says what is allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from .environment import refused
from .errors import PlanError
from .framework_sections import Ddp, Deepspeed, Fsdp, Megatron
from .plan import Pipeline, Plan
from .spec import ModelSpec

MODELLED = ("single", "ddp", "device-map", "megatron", "megatron-deepspeed", "deepspeed", "fsdp")
"""Frameworks whose memory is modelled; the other names are kept for the day that theirs is."""

PIPELINE_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "megatron-deepspeed": ("schedule", "partition"),
        "fsdp": ("schedule", "partition"),
        "megatron": (
            "first_layers",
            "last_layers",
            "count_embedding",
            "count_loss",
            "layout",
            "group",
            "overlap_p2p",
            "overlap_p2p_warmup",
        ),
    }
)
"""Fields of the section ``pipeline`` that a framework has."""

MOST_TOKENS = 2**40
"""Tokens in one micro-batch, beyond which a size is surely a slip."""


def check_framework(plan: Plan) -> None:
    """Refuses what has a name and no model yet, saying what has one."""
    layout = plan.layout
    if plan.framework not in MODELLED:
        problem = f"is not modelled yet; {', '.join(MODELLED[:-1])} and {MODELLED[-1]} are"
        raise PlanError("framework", plan.framework, problem)
    if layout.ep > 1:
        problem = "must be 1: expert parallelism is not modelled yet, nor are models with experts; dense ones are"
        raise PlanError("layout.ep", layout.ep, problem)
    if layout.zero >= 2 and plan.framework != "deepspeed":
        problem = f"must be less than 2 with framework {plan.framework}; deepspeed has ZeRO stages 2 and 3"
        raise PlanError("layout.zero", layout.zero, problem)
    if plan.framework == "megatron":
        return
    for name, what in (("cp", "context parallelism is"), ("vpp", "virtual stages are")):
        if name == "vpp" and plan.framework == "fsdp":
            continue
        if getattr(layout, name) > 1:
            problem = f"must be 1 with framework {plan.framework}: {what} modelled under megatron"
            raise PlanError(f"layout.{name}", getattr(layout, name), problem)
    if layout.sequence_parallel and plan.framework != "fsdp":
        problem = f"must be false with framework {plan.framework}: sequence parallelism is modelled under megatron"
        raise PlanError("layout.sequence_parallel", True, problem)


def check_model(model: ModelSpec) -> None:
    """Sizes of the architecture that must fit one another."""
    if model.heads % model.kv_heads:
        problem = f"must divide the {model.heads} attention heads ({_divisors(model.heads)})"
        raise PlanError("model.kv_heads", model.kv_heads, problem)
    if model.positions == "rotary" and model.head_dim % 2:
        raise PlanError("model.head_dim", model.head_dim, "must be even: rotary positions turn features in pairs")


def check_hardware(plan: Plan) -> None:
    """The number of GPUs is the product of the layout's sizes."""
    gpus, layout = plan.hardware.gpus, plan.layout
    assert gpus is not None
    assert layout.dp is not None
    product = layout.tp * layout.pp * layout.dp * layout.cp
    if plan.framework != "device-map" and gpus != product:
        sizes = f"{layout.tp} x {layout.pp} x {layout.dp} x {layout.cp} = {product}"
        raise PlanError(
            "hardware.gpus", gpus, f"must be tp x pp x dp x cp = {sizes}; leave out dp or gpus to derive it"
        )


def check_layout(plan: Plan) -> None:
    """What the framework can parallelise, and what divides what."""
    framework, layout, model = plan.framework, plan.layout, plan.model
    if framework not in ("megatron", "megatron-deepspeed"):
        _check_undivided(plan)
        return
    if framework == "megatron" and model.kv_heads < layout.tp and layout.tp % model.kv_heads == 0:
        problem = f"must be at most the {model.kv_heads} key/value heads: more ranks than those are not modelled yet"
        raise PlanError("layout.tp", layout.tp, problem)
    for size, what in (
        (model.heads, "attention heads"),
        (model.kv_heads, "key/value heads"),
        (model.ffn, "features of the MLP (ffn)"),
        (model.hidden, "features of the hidden size"),
    ):
        if size % layout.tp:
            raise PlanError("layout.tp", layout.tp, f"must divide the {size} {what} ({_divisors(size)})")
    if layout.sequence_parallel and layout.tp == 1:
        raise PlanError("layout.sequence_parallel", True, "must be false with tp = 1: there is nothing to shard")
    if layout.pp > model.layers and framework != "megatron":
        problem = f"must be at most the {model.layers} layers of the model, so that every stage can have one"
        raise PlanError("layout.pp", layout.pp, problem)


def _check_undivided(plan: Plan) -> None:
    """``single``, ``ddp`` and ``device-map`` keep every parameter whole, ZeRO-1 of ``ddp`` shards states; ``fsdp`` says
    itself what it cuts."""
    framework, layout = plan.framework, plan.layout
    if layout.sequence_parallel and layout.tp == 1:
        raise PlanError("layout.sequence_parallel", True, "must be false with tp = 1: there is nothing to shard")
    if framework == "fsdp":
        _check_tensor_parallel(plan)
    for name in ("tp", "pp") if framework != "fsdp" else ():
        if getattr(layout, name) > 1:
            problem = f"must be 1 with framework {framework}; megatron and megatron-deepspeed split a model"
            raise PlanError(f"layout.{name}", getattr(layout, name), problem)
    if layout.zero and framework not in ("deepspeed", "ddp"):
        problem = f"must be 0 with framework {framework}; ddp, deepspeed, megatron and megatron-deepspeed have ZeRO"
        raise PlanError("layout.zero", layout.zero, problem)
    if framework == "single" and plan.hardware.gpus != 1:
        field, value = ("layout.dp", layout.dp) if plan.hardware.gpus == layout.dp else ("hardware.gpus", None)
        value = plan.hardware.gpus if value is None else value
        raise PlanError(field, value, "must be 1 with framework single, which is one process on one GPU; ddp uses more")
    if framework == "device-map" and layout.dp != 1:
        raise PlanError("layout.dp", layout.dp, "must be 1 with framework device-map, which is one process")


def _check_tensor_parallel(plan: Plan) -> None:
    """``fsdp``: torchtitan's Llama has tensor parallelism, in equal parts."""
    t, model = plan.layout.tp, plan.model
    if t > 1 and plan.fsdp.code != "torchtitan":
        problem = "must be 1 with framework fsdp and transformers' code, whose tp_plan is not modelled; torchtitan's is"
        raise PlanError("layout.tp", t, problem)
    for size, what in (
        (model.heads, "attention heads"),
        (model.kv_heads, "key/value heads"),
        (model.ffn, "features of the MLP (ffn)"),
        (model.vocab, "tokens of the vocabulary"),
    ):
        if size % t:
            raise PlanError("layout.tp", t, f"must divide the {size} {what} ({_divisors(size)})")


def check_batch(plan: Plan) -> None:
    """Whole micro-batches on every rank, and sequences that the positions reach."""
    batch, layout, model = plan.batch, plan.layout, plan.model
    assert batch.gbs is not None
    assert batch.seq is not None
    assert layout.dp is not None
    assert plan.hardware.gpus is not None
    if batch.multiply_by_visible_gpus and plan.framework != "device-map":
        problem = f"must be false with framework {plan.framework}: only a single process sees several GPUs (device-map)"
        raise PlanError("batch.multiply_by_visible_gpus", True, problem)
    visible = plan.hardware.gpus if batch.multiply_by_visible_gpus else 1
    at_once = batch.mbs * visible * layout.dp
    if batch.gbs % at_once:
        sizes = f"mbs {batch.mbs}" + (f" x {visible} visible GPUs" if visible > 1 else "") + f" x dp {layout.dp}"
        raise PlanError("batch.gbs", batch.gbs, f"must be a multiple of {sizes} = {at_once}")
    if batch.accumulation is not None and batch.gbs != at_once * batch.accumulation:
        problem = f"must be gbs / (mbs x dp) = {batch.gbs // at_once}; leave one of them out"
        raise PlanError("batch.accumulation", batch.accumulation, problem)
    if model.positions == "learned" and batch.seq > model.positions_max:
        problem = f"must be at most {model.positions_max}, the learned positions of {model.name}"
        raise PlanError("batch.seq", batch.seq, problem)
    if layout.cp > 1 and batch.seq % (2 * layout.cp):
        problem = f"must be a multiple of 2 cp = {2 * layout.cp}: each rank takes two chunks of a sequence"
        raise PlanError("batch.seq", batch.seq, problem)
    if layout.sequence_parallel and batch.seq // layout.cp % layout.tp:
        raise PlanError(
            "batch.seq", batch.seq, f"must be a multiple of cp x tp = {layout.cp * layout.tp} (sequence parallel)"
        )
    if batch.mbs * visible * batch.seq > MOST_TOKENS:
        raise PlanError("batch.mbs", batch.mbs, f"times seq {batch.seq} is more than {MOST_TOKENS:,} tokens at once")


def check_precision(plan: Plan) -> None:
    """Gradients have the parameters' dtype, unless a framework accumulates them elsewhere."""
    dtype, gradients = plan.precision.stored, plan.precision.gradients
    _check_autocast(plan)
    wide = plan.framework in ("megatron", "megatron-deepspeed", "deepspeed")
    allowed = {dtype, "fp32"} if wide else {dtype}
    if gradients not in allowed:
        problem = f"must be {' or '.join(sorted(allowed))} with framework {plan.framework} and dtype {dtype}"
        from_config = plan.framework == "deepspeed" and plan.deepspeed.gradient_accumulation_dtype == gradients
        field = "deepspeed.gradient_accumulation_dtype" if from_config else "precision.gradients"
        raise PlanError(field, gradients, problem)


AUTOCAST = ("single", "ddp", "device-map")
"""Frameworks in which PyTorch's autocast is modelled; the others have a mixed precision of their own."""


def _check_autocast(plan: Plan) -> None:
    precision, field = plan.precision, "precision.autocast"
    if precision.parameters is not None and not precision.autocast:
        problem = "belongs to autocast; without it parameters are in precision.dtype"
        raise PlanError("precision.parameters", precision.parameters, problem)
    if not precision.autocast:
        return
    if precision.stored not in ("fp32", precision.dtype) or precision.stored == "fp16":
        problem = "must be fp32" + (" or bf16" if precision.dtype == "bf16" else ": GradScaler unscales fp32 gradients")
        raise PlanError("precision.parameters", precision.parameters, problem)
    if plan.framework not in AUTOCAST:
        known = f"{', '.join(AUTOCAST[:-1])} and {AUTOCAST[-1]}"
        problem = f"must be false with framework {plan.framework}; {known} have it"
        raise PlanError(field, True, problem)
    if plan.precision.dtype == "fp32":
        raise PlanError(field, True, "must be false with dtype fp32: autocast computes in bf16 or fp16")
    if plan.loss.kind != "plain":
        problem = f"must be false with loss {plan.loss.kind}: of the losses, only plain is modelled under autocast"
        raise PlanError(field, True, problem)
    if plan.loss.logits_to_keep is not None:
        problem = "must be left out: heads on the last tokens are not modelled under autocast"
        raise PlanError("loss.logits_to_keep", plan.loss.logits_to_keep, problem)


def check_recompute(plan: Plan) -> None:
    """Details of full recompute belong to full recompute."""
    recompute = plan.recompute
    if recompute.modules is not None and (recompute.mode != "selective" or plan.framework != "megatron"):
        problem = "belongs to framework megatron and recompute.mode selective"
        raise PlanError("recompute.modules", list(recompute.modules), problem)
    if recompute.mode != "full":
        for name, value in (("layers", recompute.layers), ("method", recompute.method)):
            if value not in (None, "uniform"):
                problem = f"belongs to full recompute, and recompute.mode is {recompute.mode}"
                raise PlanError(f"recompute.{name}", value, problem)
    elif recompute.layers is not None and recompute.layers > plan.model.layers:
        problem = f"must be at most the {plan.model.layers} layers of the model"
        raise PlanError("recompute.layers", recompute.layers, problem)


def check_code(plan: Plan) -> None:
    """The code of October 2020 is known for one model."""
    if plan.code == "current":
        return
    if plan.model.family != "gpt2" or plan.framework == "megatron-deepspeed":
        problem = "must be current: of 2020, only transformers' GPT-2 is modelled (single, ddp and device-map)"
        raise PlanError("code", plan.code, problem)
    if plan.attention != "eager":
        raise PlanError("attention", plan.attention, "must be eager with code 2020, which had no other")
    if plan.precision.dtype != "fp32":
        raise PlanError("precision.dtype", plan.precision.dtype, "must be fp32 with code 2020")


def check_pipeline(plan: Plan) -> None:
    """A partition that can be read, where there are stages; whether numbers fit is for the framework to say."""
    partition = plan.pipeline.partition
    if isinstance(partition, str):
        _check_method(partition)
    elif any(not isinstance(entry, int) for entry in partition):
        problem = "must be a method (uniform, parameters, type:REGEX), or whole numbers such as 0,4,8"
        raise PlanError("pipeline.partition", list(partition), problem)
    known = PIPELINE_FIELDS.get(plan.framework, ())
    for name, default in Pipeline():
        value = getattr(plan.pipeline, name)
        if value != default and name not in known:
            having = [other for other, names in PIPELINE_FIELDS.items() if name in names]
            has = " and ".join(having) + (" have it" if len(having) > 1 else " has it")
            raise PlanError(f"pipeline.{name}", value, f"must be left out with framework {plan.framework}; {has}")
    if plan.framework == "megatron" and plan.layout.vpp == 1:
        for name in ("group", "overlap_p2p", "overlap_p2p_warmup"):
            value = getattr(plan.pipeline, name)
            if value != Pipeline.model_fields[name].default:
                raise PlanError(f"pipeline.{name}", value, "belongs to virtual stages (vpp > 1)")


def check_megatron(plan: Plan) -> None:
    """Choices that only Megatron-Core has, and those of them that fit together."""
    megatron = plan.megatron
    if plan.framework != "megatron":
        for name, default in Megatron():
            value = getattr(megatron, name)
            if value != default:
                problem = f"must be left out with framework {plan.framework}; megatron has it"
                raise PlanError(f"megatron.{name}", value, problem)
        return
    dp, instances = plan.layout.dp, megatron.distributed_optimizer_instances
    assert dp is not None
    field = "megatron.distributed_optimizer_instances"
    if instances > 1 and plan.layout.zero != 1:
        raise PlanError(field, instances, "must be 1 without the distributed optimizer (zero: 1)")
    if dp * plan.layout.cp % instances:
        raise PlanError(field, instances, f"must divide dp x cp = {dp * plan.layout.cp}")
    if megatron.overlap_param_gather and plan.layout.zero != 1:
        problem = "must be false without the distributed optimizer (zero: 1)"
        raise PlanError("megatron.overlap_param_gather", True, problem)
    if megatron.overlap_param_gather and not megatron.overlap_grad_reduce:
        problem = "must be false without megatron.overlap_grad_reduce"
        raise PlanError("megatron.overlap_param_gather", True, problem)
    if megatron.deterministic and megatron.cross_entropy_fusion != "none":
        problem = "must be none with megatron.deterministic: no fused one is"
        raise PlanError("megatron.cross_entropy_fusion", megatron.cross_entropy_fusion, problem)
    local = megatron.transformer_impl == "local"
    if megatron.attention_backend == "local" and not local:
        problem = "must be auto, flash, fused or unfused with transformer_impl transformer_engine"
        raise PlanError("megatron.attention_backend", "local", problem)
    if local and megatron.attention_backend in ("flash", "fused"):
        problem = "must be auto, unfused or local with transformer_impl local, which has its own attention"
        raise PlanError("megatron.attention_backend", megatron.attention_backend, problem)
    has_scores = local or megatron.attention_backend in ("unfused", "local")
    if has_scores != (plan.attention == "eager"):
        what = "transformer_impl local" if local else f"attention_backend {megatron.attention_backend}"
        problem = f"must be {'eager' if has_scores else 'flash'} with {what}"
        raise PlanError("attention", plan.attention, problem)
    if local and plan.layout.cp > 1:
        raise PlanError("layout.cp", plan.layout.cp, "must be 1 with transformer_impl local")
    heads = min(plan.model.heads, plan.model.kv_heads) // plan.layout.tp
    if megatron.cp_communication == "a2a" and heads % plan.layout.cp:
        problem = f"must divide the {heads} key/value heads of a rank, which a2a deals out; p2p need not"
        raise PlanError("layout.cp", plan.layout.cp, problem)


def check_ddp(plan: Plan) -> None:
    """Arguments of ``DistributedDataParallel`` belong to it."""
    if plan.framework == "ddp":
        return
    for name, default in Ddp():
        value = getattr(plan.ddp, name)
        if value != default:
            raise PlanError(f"ddp.{name}", value, f"must be left out with framework {plan.framework}; ddp has it")


def check_fsdp(plan: Plan) -> None:
    """Arguments of ``fully_shard`` belong to it; whether they fit together is for the framework to say."""
    if plan.framework == "fsdp":
        return
    for name, default in Fsdp():
        value = getattr(plan.fsdp, name)
        if value != default:
            raise PlanError(f"fsdp.{name}", value, f"must be left out with framework {plan.framework}; fsdp has it")


def check_deepspeed(plan: Plan) -> None:
    """``ds_config.json`` belongs to DeepSpeed; whether its fields fit together is for the framework to say."""
    given = plan.deepspeed
    if plan.framework == "deepspeed":
        sums = given.gradient_accumulation_dtype
        if sums is not None and sums != plan.precision.gradients:
            problem = f"must be {plan.precision.gradients}, as precision.gradients: both name one dtype"
            raise PlanError("deepspeed.gradient_accumulation_dtype", sums, problem)
        return
    for name, default in Deepspeed():
        value = getattr(given, name)
        if value != default:
            problem = f"must be left out with framework {plan.framework}; deepspeed has it"
            raise PlanError(f"deepspeed.{name}", value, problem)


def check_environment(plan: Plan) -> None:
    """Variables under which memory would be another; those that are only unknown get a note."""
    for name, problem in refused(plan):
        raise PlanError(f"environment.{name}", plan.environment[name], problem)


def _check_method(method: str) -> None:
    if method.lower() in ("uniform", "parameters"):
        return
    kind, colon, expressions = method.partition(":")
    if kind.lower() != "type" or not colon or not expressions or len(method) > 200:
        problem = "must be uniform, parameters, type:REGEX, type:REGEX:WEIGHT|REGEX:WEIGHT, or numbers such as 0,4,8"
        raise PlanError("pipeline.partition", method, problem, known=("uniform", "parameters", "type:transformer"))
    try:
        re.compile(expressions)
    except re.error as error:
        raise PlanError("pipeline.partition", method, f"is not a regular expression: {error}") from None


def _divisors(number: int) -> str:
    """Divisors of ``number`` in words, the first ten."""
    found = [divisor for divisor in range(1, min(number, 4096) + 1) if number % divisor == 0]
    return ", ".join(str(divisor) for divisor in found[:10]) + (", …" if len(found) > 10 else "")
