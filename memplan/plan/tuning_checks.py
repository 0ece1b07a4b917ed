"""What of a model is trained, and by which optimizer: what contradicts that.

Parts of a model can be frozen, adapted or quantised under some frameworks; optimizers are there in some
implementations, with fields that belong together.
"""

from __future__ import annotations

from ..families import family
from ..frameworks import framework, frameworks
from ..optimizers import algorithms
from .checks import listed
from .errors import ABSENT, PlanError
from .lora import ALL_LINEAR, HEAD, WORD, adapted, last_names, linear_layers, linear_sizes, of_experts, saved
from .plan import Optimizer, Plan, ResolvedPlan
from .releases import LIBRARIES, adapters_in_16_bits, parsed, release, shown
from .tuning_sections import Frozen, Lora, Quantisation

_NO_LORA, _NOT_QUANTISED, _NOT_FROZEN = Lora.model_construct(), Quantisation.model_construct(), Frozen.model_construct()


def is_tuned(plan: Plan) -> bool:
    """Whether some parameters are frozen."""
    return (plan.lora, plan.quantisation, plan.frozen) != (_NO_LORA, _NOT_QUANTISED, _NOT_FROZEN)


def check_tuning(plan: ResolvedPlan) -> None:
    """Frozen parameters, LoRA and 4-bit weights: where they are modelled, and together with what."""
    if not is_tuned(plan):
        return
    if not plan.model.has_sizes:
        _check_without_recipe(plan)
    if plan.code != "current":
        _refuse(plan, "must be left out with code 2020")
    own = framework(plan.framework)
    if plan.loss.kind == "chunked" and own.adaptable(plan) is None:
        raise plan.wrong(
            "loss.kind",
            f"must be plain, liger or cut with {first_frozen(plan)}: other losses are not modelled with frozen parts",
        )
    _check_lora(plan)
    _check_quantisation(plan)
    _check_frozen(plan)


def _check_without_recipe(plan: ResolvedPlan) -> None:
    """Of an architecture that traces know, adapters and bitsandbytes' weights are traced in their places."""
    problem = f"not modelled of an architecture without a recipe (model_type {plan.model.family})"
    if plan.quantisation.kind not in ("none", "nf4", "fp4"):
        raise plan.wrong("quantisation.kind", f"must be nf4, fp4 or none: other quantised weights are {problem}")
    if plan.quantisation.prepared and plan.attention != "eager":
        why = "hidden states are fp32, and what sdpa runs of them is not modelled"
        raise plan.wrong("attention", f"must be eager with quantisation.prepared: {why}")


def first_frozen(plan: Plan) -> str:
    """The first field that freezes something."""
    for name, section in (("lora", plan.lora), ("quantisation", plan.quantisation), ("frozen", plan.frozen)):
        for field, _ in section.changed():
            return f"{name}.{field}"
    raise AssertionError("nothing is frozen")


def _refuse(plan: ResolvedPlan, problem: str) -> None:
    raise plan.wrong(first_frozen(plan), problem)


def _check_lora(plan: ResolvedPlan) -> None:
    lora = plan.lora
    if lora.rank is None:
        for name, value in lora.changed():
            raise PlanError(f"lora.{name}", value, "needs lora.rank, as --lora-rank 16")
        return
    if lora.targets is None and not plan.model.has_sizes:
        problem = f"is missing: peft has no default for model_type {plan.model.family}; say --lora-targets "
        raise PlanError("lora.targets", ABSENT, f"{problem}all-linear, or names of linear layers")
    if lora.targets is None:
        names = last_names(plan.model)
        if not names:
            raise plan.wrong("lora.rank", f"must be left out: adapters of family {plan.model.family} are not modelled")
        some = f"{'' if plan.model.experts else 'all-linear, or '}some of {','.join(names)}"
        problem = f"is missing: peft has no default for family {plan.model.family}; say --lora-targets {some}"
        raise PlanError("lora.targets", ABSENT, problem)
    if not lora.targets:
        raise PlanError("lora.targets", [], "must name at least one linear layer")
    own = framework(plan.framework)
    owned = own.adaptable(plan) is not None
    if owned:
        _check_own(plan)
    allowed = {own.adapter_dtype(plan)} if owned else {plan.precision.dtype, "fp32"}
    if lora.dtype not in allowed:
        problem = f"must be {' or '.join(sorted(allowed))}: "
        problem += (
            "adapters are in the model's dtype" if owned else "peft makes them in the model's dtype or casts them"
        )
        if adapters_in_16_bits(plan):
            problem = (
                "is what trl casts adapters beside 4-bit weights to since 0.26, and is not modelled in "
                f"{plan.precision.dtype}: train in bf16 (bf16=True; --dtype bf16), name an earlier release "
                "(--versions trl=0.25.0), or say --lora-dtype fp32"
            )
        raise plan.wrong("lora.dtype", problem)
    adapted(plan)
    if plan.model.has_sizes and not owned:
        saved(plan)
        of_experts(plan)


def _check_own(plan: ResolvedPlan) -> None:
    """What peft alone has."""
    for name, value in plan.lora.changed():
        if name in ("rslora", "modules_to_save", "target_parameters"):
            problem = f"must be left out with framework {plan.framework}, whose adapters are not peft's"
            raise PlanError(f"lora.{name}", value, f"{problem}: not modelled")


def _check_quantisation(plan: ResolvedPlan) -> None:
    quantisation = plan.quantisation
    if quantisation.kind == "none":
        for name, value in quantisation.changed():
            raise PlanError(f"quantisation.{name}", value, "needs quantised weights: quantisation.kind is none")
        return
    if plan.lora.rank is None:
        raise plan.wrong(
            "quantisation.kind", "must be none without adapters: quantised weights cannot be trained; give --lora-rank"
        )
    if quantisation.kind == "gptq":
        _check_gptq(plan)
    elif quantisation.kind == "awq":
        _check_awq(plan)
    elif quantisation.kind == "int8":
        _check_int8(plan)
    elif quantisation.group != _NOT_QUANTISED.group:
        raise plan.wrong("quantisation.group", "needs quantisation.kind gptq or awq")
    if plan.model.has_sizes and (why := family(plan.model.family).no_4bit):
        raise plan.wrong("quantisation.kind", f"must be none for family {plan.model.family}: {why}")


def _check_int8(plan: ResolvedPlan) -> None:
    """``Linear8bitLt``: what belongs to 4-bit weights alone, and releases whose kernels kept other tensors."""
    named = plan.versions.get("bitsandbytes")
    _check_settings(plan, "double", "group")
    if named is not None and parsed(named) < LIBRARIES["bitsandbytes"].newest:
        problem = f"must be {shown(LIBRARIES['bitsandbytes'].newest)} or later with quantisation.kind int8: earlier "
        raise plan.wrong("versions.bitsandbytes", problem + "products keep other tensors")


def _check_gptq(plan: ResolvedPlan) -> None:
    """``QuantLinear`` of auto_gptq's second Triton kernel: fp16, and sizes that pack. peft's word for all linear layers
    finds ``torch.nn.Linear`` and ``Conv1D`` alone (``tuners/tuners_utils.py``, ``_maybe_include_all_linear_layers``),
    and bitsandbytes' are such."""
    if plan.precision.dtype != "fp16":
        raise plan.wrong(
            "precision.dtype", "must be fp16 with quantisation.kind gptq: auto_gptq's kernel makes fp16 weights"
        )
    _check_settings(plan, "double", "prepared")
    if ALL_LINEAR in (plan.lora.targets or ()):
        problem = f"must be names of layers with quantisation.kind gptq: peft's {ALL_LINEAR} finds torch.nn.Linear, "
        raise plan.wrong("lora.targets", f"{problem}and none of these layers")


def _check_settings(plan: ResolvedPlan, *lacking: str) -> None:
    """Refuses settings of quantised weights that this kind has not, and DoRA. A kernel computes in one dtype alone."""
    given, kind = plan.quantisation, f"with quantisation.kind {plan.quantisation.kind}"
    known = {**{name: getattr(_NOT_QUANTISED, name) for name in lacking}, "compute": plan.precision.dtype}
    for name, value in known.items():
        if getattr(given, name) != value:
            raise plan.wrong(f"quantisation.{name}", f"must be left out {kind}, which has no such setting")
    if plan.lora.dora:
        raise plan.wrong("lora.dora", f"must be false {kind}: DoRA is modelled on nf4, fp4 and plain weights")


def _check_awq(plan: ResolvedPlan) -> None:
    """``WQLinear_GEMM`` of autoawq: fp16, and sizes that pack; releases that load it and wrap it."""
    given, kind = plan.quantisation, "with quantisation.kind awq"
    if plan.precision.dtype != "fp16" or plan.precision.autocast:
        field = "dtype" if plan.precision.dtype != "fp16" else "autocast"
        must = "fp16" if field == "dtype" else "false"
        raise plan.wrong(f"precision.{field}", f"must be {must} {kind}: autoawq's kernels make fp16 tensors")
    for name, default in (("double", False), ("prepared", False), ("compute", "fp16")):
        if getattr(given, name) != default:
            raise plan.wrong(f"quantisation.{name}", f"must be left out {kind}, which has none")
    plan.refuse(
        ("lora.dora", plan.lora.dora, f"must be false {kind}: peft refuses DoRA there"),
        (
            "lora.targets",
            ALL_LINEAR in (plan.lora.targets or ()),
            f"must be names of layers {kind}: peft's {ALL_LINEAR} finds only torch.nn.Linear, and none of autoawq's",
        ),
    )
    if plan.kernels.lora == "unsloth":
        raise PlanError("kernels.lora", "unsloth", f"must be eager {kind}: Unsloth's functions are for nf4 and gptq")
    for library, last in AWQ_RELEASES.items():
        if release(plan, library) >= last:
            problem = (
                f"must be below {shown(last)} {kind}: from there on gptqmodel's layers are in the place of autoawq's"
            )
            raise PlanError(f"versions.{library}", plan.versions.get(library, shown(release(plan, library))), problem)
    for name in linear_layers(plan.model):
        k, n = linear_sizes(plan.model).get(name, (given.group, 8))
        if name not in (WORD, HEAD) and (k % given.group or n % 8):
            problem = f"must divide the {k} inputs of {name}, whose {n} outputs 8 divides"
            raise plan.wrong("quantisation.group", f"{problem} {kind}")


AWQ_RELEASES = {"transformers": (5, 0), "peft": (0, 19)}
"""From which on models that AWQ has quantised need gptqmodel, whose kernels depend on its release and the GPU
(transformers ``quantizers/quantizer_awq.py``, peft ``tuners/lora/awq.py``)."""


def _check_frozen(plan: ResolvedPlan) -> None:
    frozen, layers = plan.frozen, plan.model.layers
    if frozen == _NOT_FROZEN:
        return
    if plan.lora.rank is not None:
        name, value = next(frozen.changed())
        raise PlanError(f"frozen.{name}", value, "must be left out with LoRA, which freezes the whole model")
    if frozen.layers > layers:
        raise plan.wrong("frozen.layers", f"must be at most the {layers} layers of the model")


# -- optimizer checks ----------------------------------------------------------------------------------


FIELDS = (
    *("momentum", "weight_decay", "paged", "block_size", "embeddings_32bit"),
    *("precision_aware", "main_parameters", "exp_avg", "exp_avg_sq", "fp8_recipe"),
)
"""Fields that some frameworks have, or some optimizers."""


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
    _check_blocks(optimizer)


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
        raise PlanError(field, value, f"must be left out: {name} has one implementation")
    by_default = supports.default_implementations.get(name)
    refused = supports.implementations_refused
    known = [one for one in own if one in supports.implementations and (name, one) not in refused]
    known += [by_default] if by_default is not None and by_default not in known else []
    if value in known:
        return
    must = f"must be {listed(known) if known else 'left out'} for {name} with framework {plan.framework}"
    why = refused.get((name, value)) or ("" if known else "it has an implementation of its own")
    raise PlanError(field, value, f"{must}: {why}" if why else must)


def _check_blocks(optimizer: Optimizer) -> None:
    """Fields of states in few bits, and of bitsandbytes' optimizers."""
    own = optimizer.algorithm
    if own.block_sizes and optimizer.block_size not in (None, *own.block_sizes):
        problem = f"must be {listed(sorted(own.block_sizes))}: {own.block_sizes_are}"
        raise PlanError("optimizer.block_size", optimizer.block_size, problem)
    if own.eight_bit:
        return
    if optimizer.paged and optimizer.implementation != "bitsandbytes":
        problem = f"must be false: {optimizer.name} is not bitsandbytes'"
        others = "; set --optimizer-implementation bitsandbytes" if "bitsandbytes" in own.implementations else ""
        raise PlanError("optimizer.paged", True, problem + others)
    for field in ("embeddings_32bit",) if own.block_sizes else ("block_size", "embeddings_32bit"):
        value = getattr(optimizer, field)
        if value != Optimizer.model_fields[field].default:
            others = " and ".join(one.name for one in algorithms() if one.eight_bit)
            what = "no states of bitsandbytes'" if own.block_sizes else "no 8-bit states"
            problem = f"must be left out: {optimizer.name} has {what}, unlike {others}"
            raise PlanError(f"optimizer.{field}", value, problem)
