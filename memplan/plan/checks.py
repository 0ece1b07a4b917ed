"""Rules between the fields of a plan whose defaults are filled in. Each says what is allowed.

What a framework has is in its own table (``Framework.supports``); its further rules are in ``Framework.check``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from ..families import family
from ..frameworks import Framework, framework, frameworks
from .environment import REFUSED
from .errors import ABSENT, PlanError
from .model_checks import divisors
from .plan import Plan, ResolvedPlan
from .releases import LIBRARIES, MASKS, OLDEST_TORCH, needed, parsed, release, shown, takes_mask
from .section import MOST_CHUNKS, FrameworkSection
from .training_loops import TRAINING_LOOPS, Releases

SIZES = {
    "tp": "tensor parallelism",
    "pp": "pipeline stages",
    "dp": "data parallelism",
    "cp": "context parallelism",
    "vpp": "virtual stages",
    "ep": "expert parallelism",
}
"""Sizes of the layout that a framework may have, in words."""

MIXTURES = {
    "experts": "experts",
    "latent_kv_rank": "latent attention",
    "index_heads": "an indexer that picks keys",
    "mtp_layers": "multi-token prediction",
    "layer_pattern": "hybrids of Mamba-2, attention, MLP and experts",
    "linear_interval": "gated delta nets",
    "layer_blocks": "layers that differ in size",
}
"""Parts of a model that not every framework has (``Supports.mixtures``), in words."""

DIVIDED = {
    "heads": "attention heads",
    "kv_heads": "key/value heads",
    "ffn": "features of the MLP (ffn)",
    "hidden": "features of the hidden size",
    "vocab": "tokens of the vocabulary",
}
"""Sizes of the model that tensor parallelism may divide (``Supports.tp_divides``), in words."""

MOST_TOKENS = 2**40
"""Tokens in one micro-batch, beyond which a size is surely a slip."""


def listed(names: Sequence[object], last: str = "or") -> str:
    """``a, b or c``."""
    *others, end = map(str, names)
    return f"{', '.join(others)} {last} {end}" if others else end


def require(
    plan: Plan,
    field: str,
    value: object,
    must: str,
    table: str,
    entry: object = None,
    what: str = "it",
    why: str | None = None,
) -> None:
    """``PlanError`` unless a table of what the plan's framework supports has ``entry`` (or anything, by default).

    ``must`` says what ``field`` must be without it; ``what`` is what other frameworks have, in words, unless there is
    a reason ``why`` this one has not.
    """

    def has(one: Framework) -> bool:
        found = getattr(one.supports, table)
        return bool(found) if entry is None else entry in found

    if has(framework(plan.framework)):
        return
    others = [one.name for one in frameworks() if has(one)]
    elsewhere = (
        f"{listed(others, 'and')} {'has' if len(others) == 1 else 'have'} {what}" if others else "no framework has it"
    )
    reason = f"; {elsewhere}" if why is None else f": {why}"
    raise PlanError(field, value, f"must be {must} with framework {plan.framework}{reason}")


def check_mixture(plan: Plan) -> None:
    """Parts of the model that the framework has a recipe for."""
    for field, what in MIXTURES.items():
        if value := getattr(plan.model, field):
            none = "left out" if isinstance(value, (str, tuple)) else "0"
            value = value if field != "layer_blocks" else f"{value[0]},..."
            why = framework(plan.framework).supports.mixtures_refused.get(field)
            require(plan, f"model.{field}", value, none, "mixtures", field, what, why)


def check_layers(plan: Plan) -> None:
    """Parts of the model, and transformers' layers where its code runs, that there is a recipe for."""
    check_mixture(plan)
    known = family(plan.model.family)
    if known.covers is None and not known.no_transformers and framework(plan.framework).runs_transformers(plan):
        raise plan.wrong("model.family", "has no recipe of transformers' code")


def check_sizes(plan: Plan) -> None:
    """Sizes of the layout that the framework has."""
    layout, supports = plan.layout, framework(plan.framework).supports
    check_mixture(plan)
    for size, what in SIZES.items():
        value = getattr(layout, size) or 1
        if value > 1:
            require(plan, f"layout.{size}", value, "1", "sizes", size, what)
    if layout.zero not in supports.zero:
        _refuse_zero(plan)
    if layout.sequence_parallel:
        require(plan, "layout.sequence_parallel", True, "false", "sequence_parallel", what="sequence parallelism")


def _refuse_zero(plan: Plan) -> None:
    """Names the frameworks that shard so beside the plan's other sizes."""
    layout, zero = plan.layout, framework(plan.framework).supports.zero
    used = {size for size in SIZES if (getattr(layout, size) or 1) > 1}
    others = [one for one in frameworks() if used <= one.supports.sizes]
    named = [one.name for one in others if layout.zero in one.supports.zero]
    ways = [f"{listed(named, 'and')} {'has' if len(named) == 1 else 'have'} ZeRO-{layout.zero}"] if named else []
    ways += [one.supports.shards_as_zero[layout.zero] for one in others if layout.zero in one.supports.shards_as_zero]
    must = f"at most {zero[-1]}" if len(zero) > 1 else "0"
    with_sizes = f" beside {listed(sorted(used), 'and')}" if used and not ways else ""
    elsewhere = ", and ".join(ways) or f"no framework has ZeRO-{layout.zero}{with_sizes}"
    raise plan.wrong("layout.zero", f"must be {must} with framework {plan.framework}; {elsewhere}")


def check_layout(plan: ResolvedPlan) -> None:
    """The number of GPUs is the product of the layout's sizes, and these divide the model."""
    gpus, layout, model, supports = plan.hardware.gpus, plan.layout, plan.model, framework(plan.framework).supports
    product = layout.tp * layout.pp * layout.dp * layout.cp
    if gpus != product and not supports.several_gpus_of_a_process:
        sizes = f"{layout.tp} x {layout.pp} x {layout.dp} x {layout.cp} = {product}"
        raise plan.wrong("hardware.gpus", f"must be tp x pp x dp x cp = {sizes}; leave out dp or gpus to derive it")
    if layout.sequence_parallel and layout.tp == 1:
        raise plan.wrong("layout.sequence_parallel", "must be false with tp = 1: there is nothing to shard")
    for name in supports.tp_divides if model.has_sizes else ():
        size = getattr(model, name)
        if size % layout.tp:
            raise plan.wrong("layout.tp", f"must divide the {size} {DIVIDED[name]} ({divisors(size)})")
    if layout.pp > model.layers and not supports.stages_without_layers:
        raise plan.wrong(
            "layout.pp",
            f"must be at most the {model.layers} layers of the model, so that every stage has at least one layer",
        )


def no_padding(plan: ResolvedPlan) -> str:
    """Why a batch with padding is not modelled, as what follows "must be false"; empty where it is."""
    older, spec = release(plan, "transformers"), plan.model
    if not framework(plan.framework).runs_transformers(plan):
        return f"with {plan.framework}: padding is modelled where transformers' layers run"
    if not spec.has_sizes or not family(spec.family).padded:
        return f"for {spec.name}: masks of a batch with padding are not modelled for family {spec.family}"
    why = {
        f"with attention {plan.attention}, which takes tokens without padding: choose sdpa or eager": plan.attention
        not in ("flash", "eager"),
        f"with heads of {spec.head_dim} features, which no fused kernel takes beside a mask: choose eager": plan.flash
        and not takes_mask(plan),
        f"with transformers {shown(older)}: masks of releases before {shown(MASKS)} are not modelled": older < MASKS,
        "with compile: graphs are learnt without padding": plan.compile,
        "with a device map: masks of later devices are not modelled": plan.device_map is not None,
        "with context parallelism, which takes no mask": plan.layout.cp > 1,
        f"with code {plan.code}": plan.code != "current",
        "with model.labels: their scores are modelled without padding": spec.labels,
        f"with trainer.loop {plan.trainer.loop}: padding is modelled in none, transformers and sft": plan.loop.own_loss
        and plan.loop.reduced != "tokens",
    }
    return next((reason for reason, holds in why.items() if holds), "")


def check_batch(plan: ResolvedPlan) -> None:
    """Whole micro-batches on every rank, and sequences that the positions reach."""
    batch, layout, model = plan.batch, plan.layout, plan.model
    if batch.multiply_by_visible_gpus:
        what = "several GPUs in one process"
        require(plan, "batch.multiply_by_visible_gpus", True, "false", "several_gpus_of_a_process", what=what)
    if batch.decoder_seq is not None:
        what = "a decoder's sequence of another length than the encoder's"
        require(plan, "batch.decoder_seq", batch.decoder_seq, "left out", "decoder_lengths", what=what)
    if batch.padding and (why := no_padding(plan)):
        raise plan.wrong("batch.padding", f"must be false {why}")
    at_once = plan.samples * layout.dp
    if batch.gbs % at_once:
        visible = f" x {plan.hardware.gpus} visible GPUs" if plan.samples > batch.mbs else ""
        raise plan.wrong("batch.gbs", f"must be a multiple of mbs {batch.mbs}{visible} x dp {layout.dp} = {at_once}")
    plan.refuse(
        (
            "batch.accumulation",
            batch.accumulation not in (None, plan.microbatches),
            f"must be gbs / (mbs x dp) = {plan.microbatches}; leave out accumulation or gbs",
        ),
        (
            "batch.seq",
            model.positions == "learned" and batch.seq > model.positions_max,
            f"must be at most {model.positions_max}, the number of learned positions of {model.name}",
        ),
        (
            "batch.seq",
            layout.cp > 1 and batch.seq % (2 * layout.cp),
            f"must be a multiple of 2 x cp = {2 * layout.cp}: each rank takes two chunks of a sequence",
        ),
        (
            "batch.seq",
            layout.sequence_parallel and batch.seq // layout.cp % layout.tp,
            f"must be a multiple of cp x tp = {layout.cp * layout.tp} (sequence parallel)",
        ),
        (
            "batch.mbs",
            plan.tokens > MOST_TOKENS,
            f"times seq {batch.seq} is more than {MOST_TOKENS:,} tokens per micro-batch",
        ),
    )


def check_precision(plan: ResolvedPlan) -> None:
    """Gradients have the parameters' dtype, unless a framework accumulates them elsewhere."""
    precision, dtype = plan.precision, plan.precision.stored
    if precision.parameters is not None and not precision.autocast:
        raise plan.wrong(
            "precision.parameters", "needs precision.autocast; without autocast, parameters have precision.dtype"
        )
    if precision.autocast:
        _check_autocast(plan)
    _check_low_precision(plan)
    allowed = sorted({dtype, "fp32"} if framework(plan.framework).supports.gradients_in_fp32 else {dtype})
    if precision.gradients not in allowed:
        raise plan.wrong(
            "precision.gradients", f"must be {listed(allowed)} with framework {plan.framework} and dtype {dtype}"
        )


def _check_low_precision(plan: ResolvedPlan) -> None:
    """Recipes that the framework has; what belongs to them is left out without one."""
    precision = plan.precision
    if precision.fp8 and precision.fp4:
        raise plan.wrong("precision.fp4", "must be left out with precision.fp8")
    for field, recipe in (("fp8", precision.fp8), ("fp4", precision.fp4)):
        if recipe:
            known = [
                one for one in framework(plan.framework).supports.low_precision if (one == "nvfp4") == (field == "fp4")
            ]
            must = f"left out or {listed(known)}" if known else "left out"
            require(plan, f"precision.{field}", recipe, must, "low_precision", recipe, recipe)
    if precision.low:
        return
    fields = ("fp8_format", "fp8_parameters", "first_16bit_layers", "last_16bit_layers", "amax_history")
    for field in fields:
        value = getattr(precision, field)
        if value != type(precision).model_fields[field].default:
            raise PlanError(f"precision.{field}", value, "needs precision.fp8 or precision.fp4")


def _check_autocast(plan: ResolvedPlan) -> None:
    precision, field = plan.precision, "precision.autocast"
    in_fp16 = precision.stored == "fp16" and (plan.lora.rank is None or plan.lora.dtype != "fp32")
    if precision.stored not in ("fp32", precision.dtype) or in_fp16:
        problem = "must be fp32" + (" or bf16" if precision.dtype == "bf16" else ": GradScaler unscales fp32 gradients")
        raise plan.wrong("precision.parameters", problem)
    require(plan, field, True, "false", "autocast")
    if why := framework(plan.framework).no_autocast(plan):
        raise PlanError(field, True, f"must be false {why}")
    if plan.model.has_sizes and (why := family(plan.model.family).no_autocast):
        raise PlanError(field, True, f"must be false for family {plan.model.family}: {why}")
    if precision.dtype == "fp32":
        raise PlanError(field, True, "must be false with dtype fp32: autocast computes in bf16 or fp16")
    if plan.loss.kind not in ("plain", "liger", "cut", "liger-cross-entropy", "unsloth"):
        problem = f"must be false with loss {plan.loss.kind}, which is not modelled under autocast"
        raise PlanError(field, True, problem)
    in_fp32 = precision.stored == "fp32" and plan.fsdp.version != "1"
    fused = plan.loss.kind in ("liger", "cut") and not plan.trainer.kind.own_loss
    if fused and (in_fp32 or plan.quantisation.prepared):
        problem = f"must be false with loss {plan.loss.kind} and fp32 weights: its products of these are not modelled; "
        raise PlanError(field, True, f"{problem}{_without_fp32_weights(plan)}")
    if plan.loss.logits_to_keep is not None:
        raise plan.wrong("loss.logits_to_keep", "must be left out: logits_to_keep is not modelled under autocast")


def _without_fp32_weights(plan: ResolvedPlan) -> str:
    """The way out of a fused loss over fp32 weights under autocast that no later check refuses: ``GradScaler`` takes no
    fp16 gradients, and peft's preparation makes the head fp32 whatever the parameters' dtype is."""
    dtype, unscaled = plan.precision.dtype, plan.lora.rank is not None and plan.lora.dtype == "fp32"
    if not plan.quantisation.prepared and (dtype != "fp16" or unscaled):
        return f"--autocast-parameters {dtype} is"
    return "--loss plain and --loss liger-cross-entropy are"


def check_recompute(plan: ResolvedPlan) -> None:
    """Details of full recompute belong to full recompute, and modules to selective recompute."""
    recompute = plan.recompute
    if recompute.modules is not None:
        given = list(recompute.modules)
        for module in given:
            require(plan, "recompute.modules", given, "left out", "recompute_modules", module)
        if recompute.mode != "selective":
            raise plan.wrong("recompute.modules", f"needs recompute.mode selective, not {recompute.mode}")
    if recompute.mode != "full":
        for name, value in (("layers", recompute.layers), ("method", recompute.method)):
            if value not in (None, "uniform"):
                raise plan.wrong(f"recompute.{name}", f"needs recompute.mode full, not {recompute.mode}")
    _check_reentrance(plan)
    if recompute.mode == "full" and recompute.layers is not None and recompute.layers > plan.model.layers:
        raise plan.wrong("recompute.layers", f"must be at most the {plan.model.layers} layers of the model")


def check_versions(plan: Plan) -> None:
    """Releases that are not followed, or that do not go together."""
    own = framework(plan.framework)
    for name, version in plan.versions.items():
        if name not in LIBRARIES:
            raise plan.wrong(
                f"versions.{name}",
                f"is no library whose releases are followed: {', '.join(LIBRARIES)}",
                known=LIBRARIES,
            )
        parts = version.split(".")
        plan.refuse(
            (
                f"versions.{name}",
                not 2 <= len(parts) <= 3
                or not all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts),
                "must be a release such as 4.48.1",
            ),
            (
                f"versions.{name}",
                not own.runs_transformers(plan),
                f"must be left out with framework {plan.framework}, whose model's code is its own",
            ),
        )
        library, by = LIBRARIES[name], ""
        spans: tuple[Releases, ...] = ((library.oldest, library.newest),)
        if name == "trl" and plan.trainer.kind.run_by_trl:
            spans, by = plan.trainer.kind.follows, f" of trl in trainer.loop {plan.trainer.loop}"
        if not any(oldest <= parsed(version)[:2] <= newest for oldest, newest in spans):
            known = " or ".join(f"{shown(oldest)} to {shown(newest)}" for oldest, newest in spans)
            raise plan.wrong(f"versions.{name}", f"must be {known}: the releases that are followed{by}")
    plan.refuse(
        (
            "torch",
            plan.torch is not None and parsed(plan.torch) < OLDEST_TORCH,
            f"must be {shown(OLDEST_TORCH)} or later: nothing older is modelled",
        ),
        (
            "versions.torch",
            plan.torch is not None and plan.versions.get("torch") not in (None, plan.torch),
            f"must be {plan.torch}, which torch says",
        ),
    )
    for name, version in plan.versions.items():
        for other, lowest in needed(name, parsed(version)).items():
            if other in plan.versions and parsed(plan.versions[other]) < lowest:
                raise plan.wrong(
                    f"versions.{other}", f"must be {shown(lowest)} or later with {name} {version}, which asks for it"
                )


def check_attention(plan: ResolvedPlan) -> None:
    """Implementations whose kernels nobody has described yet."""
    if plan.attention == "flex_attention":
        raise plan.wrong(
            "attention", "is not modelled: PyTorch compiles its kernel; choose flash_attention_2, flash (sdpa) or eager"
        )


def _check_reentrance(plan: ResolvedPlan) -> None:
    """``use_reentrant`` belongs to gradient checkpointing of transformers' layers."""
    value, own = plan.recompute.reentrant, framework(plan.framework)
    if value is None:
        return
    if plan.recompute.mode != "full" or not own.runs_transformers(plan):
        raise plan.wrong("recompute.reentrant", "must be left out without full recompute of transformers' layers")
    if value:
        problem = "with reentrance (transformers before 5 asks for it; --no-use-reentrant leaves it out)"
        require(plan, "recompute.reentrant", value, "false", "reentrant", what=f"recompute {problem}")


def check_code(plan: ResolvedPlan) -> None:
    """The code of October 2020 is known for one model."""
    if plan.code == "current":
        return
    require(plan, "code", plan.code, "current", "code_2020", what="transformers' GPT-2 of 2020")
    plan.refuse(
        (
            "code",
            family(plan.model.family).older is None,
            "must be current: code 2020 is modelled for transformers' GPT-2 only",
        ),
        ("attention", plan.attention != "eager", "must be eager with code 2020, which had no flash attention"),
        ("precision.dtype", plan.precision.dtype != "fp32", "must be fp32 with code 2020"),
    )


def check_pipeline(plan: ResolvedPlan) -> None:
    """A partition that can be read, where there are stages; whether numbers fit is for the framework to say."""
    partition = plan.pipeline.partition
    if isinstance(partition, str):
        _check_method(partition)
    elif any(not isinstance(entry, int) for entry in partition):
        raise plan.wrong(
            "pipeline.partition", "must be a method (uniform, parameters, type:REGEX), or whole numbers such as 0,4,8"
        )
    for name, value in plan.pipeline.changed():
        require(plan, f"pipeline.{name}", value, "left out", "pipeline", name)
    chunks = plan.layout.pp * plan.layout.vpp
    if plan.layout.vpp > 1 and chunks > MOST_CHUNKS:
        raise plan.wrong(
            "layout.vpp",
            f"makes {chunks:,} virtual stages with layout.pp {plan.layout.pp}; at most {MOST_CHUNKS} can be",
        )


def _check_method(method: str) -> None:
    if method.lower() in ("uniform", "parameters"):
        return
    kind, colon, expressions = method.partition(":")
    if kind.lower() != "type" or not colon or not expressions or len(method) > 200:
        problem = "must be uniform, parameters, type:REGEX, type:REGEX:WEIGHT|REGEX:WEIGHT, or numbers such as 0,4,8"
        raise PlanError("pipeline.partition", method, problem, known=("uniform", "parameters", "type:transformer"))
    from .type_terms import type_terms

    type_terms(expressions)


@cache
def framework_sections() -> tuple[str, ...]:
    """Sections of a plan that belong to some frameworks."""
    kinds = ((name, info.annotation) for name, info in Plan.model_fields.items())
    return tuple(name for name, kind in kinds if isinstance(kind, type) and issubclass(kind, FrameworkSection))


def check_sections(plan: ResolvedPlan) -> None:
    """Sections that only other frameworks read are left out."""
    if plan.device_map is not None:
        require(plan, "device_map", ABSENT, "left out", "sections", "device_map", "layers placed by hand")
    if plan.compile and (why := framework(plan.framework).supports.compiled):
        raise plan.wrong("compile", f"must be false with framework {plan.framework}: {why}")
    plan.refuse(
        ("compile_regions", plan.compile_regions and not plan.compile, "must be false without compile"),
        (
            "compile_regions",
            plan.compile_regions and framework(plan.framework).supports.compiled_as != "layers",
            f"must be false with framework {plan.framework}: layers that are compiled one by one are modelled under "
            "fsdp alone (torchtitan's: fsdp.compile)",
        ),
    )
    loop, supports = plan.trainer.loop, framework(plan.framework).supports
    if loop != "none":
        require(plan, "trainer.loop", loop, listed(("none", *supports.loops), "or"), "loops", loop)
    for name in framework_sections():
        for field, value in getattr(plan, name).changed_here():
            require(plan, f"{name}.{field}", value, "left out", "sections", name)


def check_trainer(plan: ResolvedPlan) -> None:
    """The Trainer's loop is today's, and its evaluation belongs to it."""
    trainer = plan.trainer
    _check_loop(plan)
    if trainer.loop == "none":
        for name, value in trainer.changed_here():
            raise PlanError(f"trainer.{name}", value, "needs trainer.loop transformers (--trainer transformers)")
        return
    plan.refuse(
        ("trainer.loop", plan.code != "current", "must be none with code 2020: only today's Trainer is modelled"),
        (
            "trainer.evaluation_batches",
            trainer.evaluation_batches is not None and plan.loss.kind not in ("plain", "liger"),
            f"must be left out with loss {plan.loss.kind}, which has no logits to keep",
        ),
    )


def _check_loop(plan: ResolvedPlan) -> None:
    """What a loop has to be told, and what belongs to another one."""
    trainer = plan.trainer
    for name in dict.fromkeys(name for one in TRAINING_LOOPS.values() for name in one.fields):
        if (value := getattr(trainer, name)) and name not in trainer.kind.fields:
            loops = listed([one.name for one in TRAINING_LOOPS.values() if name in one.fields], "or")
            raise PlanError(f"trainer.{name}", value, f"needs trainer.loop {loops} (--trainer {loops})")
    missing = [
        f"--{name.replace('_', '-')} ({what})"
        for name, what in trainer.kind.needed.items()
        if getattr(trainer, name) is None
    ]
    plan.refuse(
        ("trainer.loop", missing, f"needs {' and '.join(missing)}"),
        (
            "trainer.completion_length",
            trainer.completion_length is not None and trainer.completion_length >= plan.batch.seq,
            f"must be less than the sequence length {plan.batch.seq} (--seq), which counts the prompt, too",
        ),
    )


def check_environment(plan: ResolvedPlan) -> None:
    """Variables under which memory would be another; those that are only unknown get a note."""
    for name in plan.environment:
        if name in REFUSED:
            raise PlanError(f"environment.{name}", plan.environment[name], REFUSED[name])
