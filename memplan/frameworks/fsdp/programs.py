"""PyTorch's ``fully_shard`` (FSDP2): what a user says about it, checked, and the program that every rank runs.

Of a model of transformers every layer is a unit, and so is the whole model, which manages what no layer does:
embedding, final norm and head. Loss and logits are made inside the model's forward, as transformers does with labels.
"""

from __future__ import annotations

from functools import lru_cache

from ...families import family
from ...layers.coverage import TRANSFORMERS, check_covered, elsewhere
from ...layers.module import Module, Options, Parameter
from ...layers.tuning import ADAPTERS
from ...plan.framework_sections import Fsdp
from ...plan.plan import ResolvedPlan
from ...plan.releases import shown
from ...schedules.one_chunk import one_chunk
from ...tape.events import Category, Stretch
from ...tape.program import Program, Span
from ...values import replace
from ..plain import preferences, programs as plain
from ..plain.programs import buffers, inputs
from ..plain.recipes import keeps_embedded
from ..plain.tuned import shared_table
from . import chunked, graphs, reference, titan_lora
from .modules import MODEL, Model, sharded, unsynced, with_parameters, with_seams, with_stored
from .reference import sharded_pass, sharded_reference, with_pass, without_pass
from .stages import check_no_pipeline, stage_programs
from .titan_experts import check_expert_ranks, crosswise, cut_of_experts
from .torchtitan import (
    ActivationCheckpointing,
    check as check_titan,
    local_shape,
    torchtitan_model,
)
from .units import (
    FULLY_SHARD,
    Sharding,
    Unit,
    host_bytes,
    lacks_fully_shard,
    shard,
    sharded_states,
    sharded_step,
)


def check(plan: ResolvedPlan, given: Fsdp) -> None:
    """Refuses what contradicts itself or is not covered."""
    if given.code == "torchtitan":
        check_titan(plan)
        check_settings(plan, given)
        return
    check_covered(plan.model, TRANSFORMERS, plan.framework)
    known = family(plan.model.family)
    if not known.shards:
        raise plan.wrong("model.family", f"has no recipe in framework fsdp yet; {elsewhere(known)}")
    check_settings(plan, given)


def check_settings(plan: ResolvedPlan, given: Fsdp) -> None:
    """Refuses settings, whatever the model is."""
    dp, layout = plan.layout.dp, plan.layout
    plan.refuse(
        (
            "fsdp.gradient_sync",
            layout.tp > 1 and not given.gradient_sync,
            "must be true with tensor parallelism: torchtitan reduces gradients with every micro-batch",
        ),
        (
            "layout.cp",
            layout.cp > 1 and given.code != "torchtitan",
            "must be 1 with transformers' code; torchtitan's has context parallelism",
        ),
        ("fsdp.replicas", dp % given.replicas, f"must divide dp, which is {dp}"),
    )
    shards, to = dp // given.replicas, given.reshard_to
    if (layout.etp or 1) > 1 and not plan.model.experts:
        raise plan.wrong("layout.etp", f"must be 1: {plan.model.name} has no experts")
    if layout.ep > 1:
        check_expert_ranks(plan, given, shards * layout.cp)
    plan.refuse(
        (
            "fsdp.reshard_to",
            to is not None and not given.reshard_after_forward,
            "must be left out where fsdp.reshard_after_forward is false",
        ),
        ("fsdp.reshard_to", to is not None and shards % to, f"must be a divisor of the {shards} shards"),
        (
            "fsdp.reshard_to",
            given.code == "torchtitan" and to is not None,
            "must be left out: torchtitan's reshard_after_forward is true or false",
        ),
    )
    storage, compute = plan.quantisation.storage, plan.precision.dtype
    plan.refuse(
        (
            "quantisation.storage",
            storage not in (None, "uint8", compute),
            f"must be {compute}, or uint8 for weights that stay whole: fully_shard casts others to {compute}",
        ),
        (
            "quantisation.prepared",
            plan.quantisation.prepared,
            "must be false with framework fsdp: trl and peft leave 4-bit models that are sharded unprepared",
        ),
    )
    if given.code == "torchtitan":
        titan_lora.check(plan)
        _check_recompute(plan, given)
    plan.refuse(
        (
            "torch",
            lacks_fully_shard(plan),
            f"must be {shown(FULLY_SHARD)} or later, which has fully_shard (FSDP2); before, PyTorch has FSDP1 "
            "(--fsdp-version 1)",
        ),
        (
            "compile",
            plan.compile and given.code == "torchtitan",
            "must be false with torchtitan's code, whose layers are compiled by themselves (--compile)",
        ),
        (
            "fsdp.cuda_graphs",
            plan.compile and given.cuda_graphs,
            "must be false with torch.compile (compile): not modelled",
        ),
    )
    compiled = "compile" if given.compile else "compile_loss" if given.compile_loss else ""
    if given.code != "torchtitan" and compiled:
        problem = "must be false: it is torchtitan's setting (--framework torchtitan); for transformers' models it is"
        raise plan.wrong(f"fsdp.{compiled}", f"{problem} --torch-compile")
    if given.code != "torchtitan" and (given.per_operator or given.recompute_every != 1 or given.newest):
        raise plan.wrong("fsdp.code", "must be torchtitan for fsdp.per_operator, recompute_every and newest")


def _check_recompute(plan: ResolvedPlan, given: Fsdp) -> None:
    """torchtitan's modes: none, full, and selective, which is per operator or every n-th layer."""
    mode, every = plan.recompute.mode, given.recompute_every
    plan.refuse(
        (
            "recompute.mode",
            given.per_operator and mode == "full",
            "must be selective with fsdp.per_operator, which keeps attention and every second matrix product",
        ),
        (
            "fsdp.recompute_every",
            given.per_operator and every != 1,
            "must be 1 with fsdp.per_operator: torchtitan takes either of the two",
        ),
        (
            "recompute.mode",
            mode == "selective" and not given.per_operator and every == 1,
            "needs --recompute-per-operator, or fsdp.recompute_every of 2 or more (torchtitan's two selective modes)",
        ),
        ("fsdp.recompute_every", mode == "none" and every != 1, "must be 1 where recompute.mode is none"),
    )


def sharding_of(plan: ResolvedPlan, given: Fsdp) -> Sharding:
    shards, compute = plan.layout.dp // given.replicas * plan.layout.cp, plan.precision.dtype
    apart = plan.layout.ep > 1 or (given.code == "torchtitan" and crosswise(plan))
    return Sharding(
        shards,
        given.replicas,
        given.parameters,
        compute,
        given.reduce,
        given.offload,
        plan.layout.tp,
        divides=given.code == "torchtitan",  # over one rank; with more NCCL divides, if anything
        adapters=plan.lora.dtype or "",
        whole_4bit=leaves_4bit(plan),
        experts=cut_of_experts(plan) if apart else None,
        scaled_before=given.float8_scales,
    )


def leaves_4bit(plan: ResolvedPlan) -> bool:
    """Whether 4-bit weights stay whole on every rank: Accelerate leaves storage that is no floating point to nobody
    (``fsdp2_prepare_model``, from 1.14 on)."""
    return plan.quantisation.storage == "uint8"


def model_of(plan: ResolvedPlan, options: Options, given: Fsdp) -> Model:
    if given.code == "transformers":
        reshard = given.reshard_to or given.reshard_after_forward
        root, apart = given.reshard_root, given.ends_apart
        return transformers_model(plan, options, reshard=reshard, reshard_root=root, ends_apart=apart)
    return torchtitan_model(
        plan,
        options,
        recompute_of(plan, given),
        reshard=given.reshard_after_forward,
        ends_apart=given.ends_apart,
        reshard_ends=given.reshard_root,
    )


def transformers_model(
    plan: ResolvedPlan,
    options: Options,
    *,
    reshard: bool | int = True,
    reshard_root: bool = False,
    ends_apart: bool = False,
) -> Model:
    """``fully_shard`` on every layer, then on the model. ``plan.precision.dtype`` is the dtype of compute.

    ``reshard``: ``reshard_after_forward`` of the layers; ``reshard_root`` that of the root, which PyTorch
    by itself keeps (``_lazy_init``). ``ends_apart``: before the model, embedding and head have units (``reference.py``)
    """
    spans = model_spans(plan, with_seams(options))
    modules = [(span.module, name) for span in spans for name in span.names]
    names = [name for _, name in modules]
    among = None if isinstance(reshard, bool) else reshard
    units = [Unit(MODEL, (), 0, len(names) - 1, reshard_root, False)]
    units += [
        Unit(name, (), at, at, bool(reshard), bool(module.first.grad_input), among=among)
        for at, (module, name) in enumerate(modules)
        if name.startswith("layer.")
    ]
    if ends_apart:
        spans = reference.with_seams(plan, spans)
        units = reference.units(plan, spans, units, reshard=bool(reshard), among=among)
    storage = "" if leaves_4bit(plan) else plan.precision.dtype
    owned = with_parameters(spans, units, family(plan.model.family).registered, storage)
    if ends_apart and reference.gathers_itself(plan, units):
        spans, owned = (
            reference.with_gathered_head(plan, spans),
            tuple(one for one in owned if one.name != chunked.ENDS),
        )
    return Model(spans, owned, names[-1], tuple(buffers(plan, 0)))


def model_spans(plan: ResolvedPlan, options: Options) -> tuple[Span, ...]:
    """The model as one device runs it, in the dtype of compute; buffers have that of the shards."""
    stored = plan.lora.dtype
    (single,) = plain.programs(without_pass(_of_one_device(plan)), options)
    spans = single.spans
    if family(plan.model.family).conv1d:
        spans = tuple(replace(one, module=transposed(one.module)) if _is_layer(one) else one for one in spans)
    if stored is None:
        return spans
    return tuple(Span(with_stored(one.module, plan.fsdp.parameters, stored), one.names) for one in spans)


def _of_one_device(plan: ResolvedPlan) -> ResolvedPlan:
    """What is trained is in the dtype of compute, once it is gathered."""
    compute = plan.precision.dtype
    precision = plan.precision.model_copy(update={"gradients": compute})
    lora = plan.lora.model_copy(update={"dtype": compute}) if plan.lora.dtype is not None else plan.lora
    return plan.model_copy(update={"framework": "fsdp", "precision": precision, "lora": lora})


def _is_layer(span: Span) -> bool:
    return span.module.name == "layer"


@lru_cache(maxsize=1024)
def transposed(layer: Module) -> Module:
    """A layer of GPT-2, whose ``Conv1D`` weights are (in, out): the dimension that is cut is the other one."""

    def turned(one: Parameter) -> Parameter:
        return one if one.name.endswith(ADAPTERS) else replace(one, shape=one.shape[::-1])

    return replace(layer, parameters=tuple(map(turned, layer.parameters)))


def recompute_of(plan: ResolvedPlan, given: Fsdp) -> ActivationCheckpointing:
    """torchtitan's activation checkpointing."""
    if given.per_operator:
        return ActivationCheckpointing("op")
    if plan.recompute.mode != "none":
        return ActivationCheckpointing("full", given.recompute_every)
    return ActivationCheckpointing("none")


def program(plan: ResolvedPlan, model: Model, sharding: Sharding) -> Program:
    """What every rank runs, each micro-batch reducing its gradients."""
    graphed = plan.fsdp.cuda_graphs
    spans = sharded(model.spans, model.units, model.end, sharding, adds=graphed)
    return _program(plan, model, graphs.pooled(spans) if graphed else spans, sharding)


def unsynced_program(plan: ResolvedPlan, model: Model, sharding: Sharding) -> Program:
    """What every rank runs where gradients are reduced once (``set_requires_gradient_sync``, ``no_sync`` of
    Accelerate): all micro-batches but the last, and the last one's modules. With one micro-batch see ``program``."""
    spans, last = unsynced(model.spans, model.units, model.end, sharding)
    return _program(plan, model, spans, sharding, last)


def _program(
    plan: ResolvedPlan, model: Model, spans: tuple[Span, ...], sharding: Sharding, last: tuple[Span, ...] = ()
) -> Program:
    ranks = sharding.shards * sharding.replicas
    shape = plain.layer_shape(plan)
    tensors = tuple(one for span in spans for _ in span.names for one in span.module.parameters)
    given = inputs(shape, 0, plan.loop.inputs)
    graphed = plan.fsdp.cuda_graphs
    if plan.layout.cp > 1:  # what was read, and this rank's part of it (``cp_shard``)
        given += inputs(local_shape(plan), 0, plan.loop.inputs)
    extra = [*given, *model.buffers, *(shared_table(plan) if sharding.adapters else ())]
    if graphed:  # the batch that was captured
        extra += [*given, *(one for one in model.buffers if one.category is Category.INPUTS)]
    extra += [*preferences.beside(plan, (shape.b, shape.s)), *sharded_reference(plan, model.units, sharding)]
    if model.reference:
        keeps = keeps_embedded(shape)
        spans, last = (with_pass(plan, one, model.reference, keeps) if one else one for one in (spans, last))
    return Program(
        stage=0,
        ranks=tuple(range(ranks * sharding.tensor)),
        entries=tuple(name for span in spans if span.module.name not in plain.EDGES for name in span.names),
        order=one_chunk(spans, plan.microbatches, last=last),
        states=() if sharding.offload else sharded_states(plan.optimizer, sharding),
        extra=tuple(extra),
        step=Stretch() if sharding.offload else sharded_step(tensors, plan.optimizer, sharding),
        late_states=True,
        late_extra=graphs.gradients(model.units, sharding) if graphed else (),
    )


def programs(plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
    """The one program that all ranks run, ``last`` the last micro-batch's modules where they differ; or one for each
    pipeline stage."""
    given = plan.fsdp
    check(plan, given)
    if plan.layout.pp > 1:
        return stage_programs(plan, options, recompute_of(plan, given), sharding_of(plan, given))
    check_no_pipeline(plan, given)
    model, sharding = model_of(plan, options, given), sharding_of(plan, given)
    if plan.runs_reference:
        own = sharded_pass(_of_one_device(plan), with_seams(options), model.units, sharding)
        if plan.lora.rank is not None and reference.holds_gathered_head(model.spans):  # the policy's own, once more
            own = reference.with_gathered_head(plan, own)
        model = replace(model, reference=own)
    made = program(plan, model, sharding)
    if not given.gradient_sync and made.microbatches > 1:
        made = unsynced_program(plan, model, sharding)
    tensors = made.parameter_tensors()
    elements = sum(shard(one, *sharding.cut(one)).elements for one in tensors)
    return (replace(made, elements=elements, host=host_bytes(tensors, plan.optimizer, sharding)),)
