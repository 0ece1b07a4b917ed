"""Megatron-Core: tensor-, context- and pipeline-parallel layers over contiguous gradient buffers.

Stages and their layers: ``plan.megatron_layout``. Order of calls: ``schedules.megatron_schedule``. States:
``states``. What a chunk runs: ``megatron/core/models/gpt/gpt_model.py`` and ``bert/bert_model.py``,
``transformer/transformer_block.py`` (``_checkpointed_forward`` for full recompute).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ...device.gpus import GPUS, MULTIPROCESSORS
from ...device.measured import cublas_workspaces
from ...layers.autograd import Recorder, Shape, Tensor
from ...layers.coverage import MEGATRON_CORE, check_covered
from ...layers.megatron_core import (
    bert,
    block,
    dispatch,
    ends,
    graphs,
    latent,
    local,
    mtp,
    offload,
    overlapped,
    replaced,
    t5,
    te_facts,
)
from ...layers.megatron_core.distributed import distributed
from ...layers.megatron_core.ends import Role
from ...layers.megatron_core.precision import Low, Recipe
from ...layers.megatron_core.shape import CoreAttention, CoreShape, ExpertShape, Overlap, Version
from ...layers.megatron_core.te_attention import backend
from ...layers.module import Interface, Module, Options, Parameter, Run, build, hold_bytes
from ...layers.recompute import RERUN, recomputed_reentrant
from ...plan import megatron_layout
from ...plan.errors import PlanError
from ...plan.layer_blocks import LayerBlock
from ...plan.module_precision import wide_modules
from ...plan.plan import Pipeline, Recompute
from ...plan.resolved import ResolvedPlan
from ...plan.spec import of_any_depth
from ...schedules.megatron_beside_fold import BesideOrder
from ...schedules.megatron_fold import MegatronOrder, layers_in_flight
from ...schedules.megatron_schedule import Schedule, schedule
from ...tape.events import Category, Hold, Hook, Stretch
from ...tape.program import Chunk, Kept, Program, Span
from ...values import dataclass
from . import captures, clipping
from .fsdp import Sharding, buckets_of
from .fsdp import keep as keep_sharded
from .fsdp_hooks import ahead, persistent, with_hooks
from .gradients import received, with_fp32
from .layer_offload import with_offload
from .states import BUCKET_ALIGNMENT, WIDE_ALIGNMENT, Rules, bucket_size, keep, saved
from .states import Chunk as KeptChunk
from .torch_fsdp import HEAD, LOSS, TorchFsdp, options_of, torch_fsdp_of
from .torch_fsdp import keep as keep_torch_sharded
from .torch_fsdp import with_hooks as with_torch_hooks

if TYPE_CHECKING:
    from ...plan.resolved import ResolvedLayout

DECODER, DECODER_EMBEDDING = "decoder.", "decoder_embedding"
"""Entries of a decoder behind an encoder: its layers begin so."""

HOPPER = (9, 0)
"""Compute capability that is assumed where no GPU is named."""

RECIPES: dict[str, Recipe] = {
    "delayed": "delayed", "tensorwise": "tensorwise", "blockwise": "blockwise", "mxfp8": "mxfp8", "nvfp4": "nvfp4"
}  # fmt: skip


def padded_vocab(plan: ResolvedPlan) -> int:
    """``vocab_size_with_padding``: up to a multiple of ``make_vocab_size_divisible_by`` times t."""
    multiple = plan.megatron.vocab_multiple * plan.layout.tp
    return -(-plan.model.vocab // multiple) * multiple


def core_shape(plan: ResolvedPlan) -> CoreShape:
    """Sizes and choices of one micro-batch on one rank."""
    megatron, layout, spec = plan.megatron, plan.layout, plan.model
    te = _transformer_engine(megatron.transformer_engine)
    recompute, local_layers = plan.recompute, megatron.transformer_impl == "local"
    ends_16bit = plan.precision.first_16bit_layers, plan.precision.last_16bit_layers
    return CoreShape(
        spec=of_any_depth(spec),
        b=1 if megatron.packed else plan.batch.mbs,
        s=plan.batch.seq // layout.cp * (plan.batch.mbs if megatron.packed else 1),
        packed=plan.batch.mbs if megatron.packed else 0,
        t=layout.tp,
        dtype=plan.precision.dtype,
        vocab=padded_vocab(plan),
        cp=layout.cp,
        cp_communication=megatron.cp_communication,
        sequence_parallel=layout.sequence_parallel,
        implementation=megatron.transformer_impl,
        te=te,
        deterministic=megatron.deterministic,
        deterministic_attention=_deterministic_attention(plan),
        gradient_fusion=megatron.gradient_accumulation_fusion,
        bias_activation_fusion=megatron.bias_swiglu_fusion
        if spec.activation == "swiglu"
        else megatron.bias_gelu_fusion and spec.activation != "relu2",
        weighted_fusion=plan.experts.squared_relu_fusion,
        bias_dropout_fusion=megatron.bias_dropout_fusion,
        rope_fusion=megatron.rope_fusion,
        rotary_interleaved=megatron.rotary_interleaved,
        masked_softmax_fusion=megatron.masked_softmax_fusion,
        softmax_in_fp32=megatron.attention_softmax_in_fp32 or megatron.query_key_layer_scaling,
        query_key_layer_scaling=megatron.query_key_layer_scaling,
        cross_entropy="unfused" if megatron.cross_entropy_fusion == "none" else megatron.cross_entropy_fusion,
        fp32_residual=megatron.fp32_residual,
        recompute_modules=(recompute.modules or ()) if recompute.mode == "selective" else (),
        offload=megatron.offload_modules or (),
        offload_least=megatron.offload_least,
        graphs=(megatron.cuda_graph_modules or ()) if megatron.cuda_graphs == "transformer_engine" else None,
        defers=megatron.defer_embedding_wgrad,
        attention_mask=megatron.attention_mask_in_dataloader and not megatron.packed,
        clones_embedding=megatron.clone_scattered_embedding,
        per_token_loss=megatron.per_token_loss,
        logits=megatron.logits_dtype,
        largest_logit=_largest_logit(plan),
        detaches_heads=megatron.detaches_heads and spec.mtp_layers > 0,
        mixes_states=megatron.mixes_states and spec.mtp_layers > 0,
        te_activation=megatron.te_activation,
        fuses_operations=megatron.fuses_operations,
        norm_takes_residual=megatron.norm_takes_residual,
        joint_latent_down=megatron.joint_latent_down,
        mlp_chunks=megatron.mlp_chunks,
        mamba_apart=megatron.mamba_apart,
        mamba_states=megatron.mamba_states,
        distributes=megatron.distribute_saved,
        decoder=plan.batch.decoder_seq or 0,
        experts=expert_shape(plan),
        core=_version(plan.experts.megatron_core),
        low=low_of(plan, te),
        precision_of=megatron.precision_of or (),
        starts=_chunk_starts(plan) if megatron.precision_of else (),
        sixteen_bit=ends_16bit,
        layers=spec.layers if any(ends_16bit) else 0,
        attention=_attention(plan, te),
        overlap=_overlap(plan),
        multiprocessors=132 if local_layers else MULTIPROCESSORS.get(plan.hardware.gpu or "", 132),
    )


def _chunk_starts(plan: ResolvedPlan) -> tuple[int, ...]:
    """The first layer of every chunk that has one."""
    chunks = (chunk for stage in stage_entries(plan) for chunk in stage)
    layers = ([int(name[6:]) for name in chunk if name.startswith("layer.")] for chunk in chunks)
    return tuple(sorted(chunk[0] for chunk in layers if chunk))


def _attention(plan: ResolvedPlan, te: Version) -> CoreAttention:
    """What the layers' implementation attends with."""
    megatron, spec = plan.megatron, plan.model
    if megatron.transformer_impl == "local":
        return "local"
    if plan.precision.dtype == "fp32" and not spec.causal:
        problem = "must be bf16 or fp16 with Transformer Engine's attention of padded tokens, whose fp32 has no recipe"
        raise PlanError("precision.dtype", "fp32", problem)
    assert megatron.attention_backend != "local"
    gpu = GPUS[plan.hardware.gpu] if plan.hardware.gpu is not None else None
    return backend(
        megatron.attention_backend,
        te=te,
        capability=(gpu.compute_capability if gpu is not None else None) or HOPPER,
        dtype=plan.precision.dtype,
        head_dim=spec.head_dim,
        value_dim=spec.value_head_dim,
        dropout=spec.attention_dropout,
        deterministic=_deterministic_attention(plan),
        sinks=spec.attention_sinks,
        flash_installed=not _largest_logit(plan),
    )


def _largest_logit(plan: ResolvedPlan) -> bool:
    """Whether attention returns the largest score of each head."""
    return plan.megatron.largest_logit or plan.megatron.clips_queries


def _overlap(plan: ResolvedPlan) -> Overlap | None:
    """Of the exchange of tokens beside another micro-batch."""
    given = plan.experts
    if not given.overlap_exchange:
        return None
    return Overlap(given.delay_wgrad, given.early_attention_release, plan.megatron.fsdp != "none")


def _deterministic_attention(plan: ResolvedPlan) -> bool:
    return plan.environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"


def low_of(plan: ResolvedPlan, te: Version) -> Low | None:
    """In what linear layers multiply, if that is not the plan's dtype. MXFP8 and NVFP4 mean a Blackwell where no GPU is
    named."""
    given, recipe = plan.precision, plan.precision.low
    if recipe is None:
        return None
    gpu = GPUS[plan.hardware.gpu] if plan.hardware.gpu is not None else None
    capability = (gpu.compute_capability if gpu is not None else None) or te_facts.LOW_PRECISION_SINCE.get(
        recipe, HOPPER
    )
    turns = not ((10, 0) <= capability < (12, 0) or capability >= (13, 0))
    return Low(RECIPES[recipe], turns, te, given.fp8_parameters, given.amax_history)


def expert_shape(plan: ResolvedPlan) -> ExpertShape | None:
    """Choices of layers with experts, where the model has them."""
    given, layout = plan.experts, plan.layout
    if not plan.model.experts:
        return None
    etp = layout.etp or layout.tp
    named = {"balanced": 1.0, "worst": float(layout.ep)}
    factors = [named.get(one) or float(one) for one in given.imbalance.split(",")]
    return ExpertShape(
        ep=layout.ep,
        etp=etp,
        dispatcher=given.flex_backend if given.dispatcher == "flex" else given.dispatcher,
        grouped=given.grouped_gemm,
        permute_fusion=given.permute_fusion,
        shared_overlap=given.shared_expert_overlap,
        capacity_factor=given.capacity_factor,
        padded=given.pad_to_capacity,
        imbalance=factors[-1],
        imbalances=tuple(factors) if len(factors) > 1 else (),
        apart=layout.ep > 1 or etp != layout.tp,
        router_pads=given.router_padding,
        jitters=given.input_jitter,
        router_fusion=given.router_fusion,
        wgrad_beside=given.wgrad_beside_dispatch,
    )


def _transformer_engine(text: str) -> Version:
    version = _version(text)
    if not te_facts.OLDEST <= version <= te_facts.NEWEST:
        oldest, newest = (".".join(map(str, known)) for known in (te_facts.OLDEST, te_facts.NEWEST))
        raise PlanError("megatron.transformer_engine", text, f"must be a version from {oldest} to {newest}")
    return version


def _version(text: str) -> Version:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def rules(plan: ResolvedPlan) -> Rules:
    """How the plan's states are kept."""
    layout, megatron, optimizer = plan.layout, plan.megatron, plan.optimizer
    ranks = layout.dp * layout.cp
    size = megatron.bucket_size if megatron.bucket_size is not None else bucket_size(ranks)
    cut = megatron.overlap_grad_reduce and not megatron.gather_in_step  # ``disable_bucketing`` (``dist_utils.py``)
    return Rules(
        dtype=plan.precision.dtype,
        gradients=plan.precision.gradients,
        distributed=layout.zero == 1,
        shards=ranks // megatron.distributed_optimizer_instances,
        bucket=size if cut else None,
        buckets=megatron.buckets if cut else None,
        optimizer=optimizer.name,
        precision_aware=optimizer.precision_aware,
        main_parameters=optimizer.main_parameters,
        exp_avg=optimizer.exp_avg,
        exp_avg_sq=optimizer.exp_avg_sq,
        counts_zeros=megatron.log_num_zeros_in_grad,
        te=_transformer_engine(megatron.transformer_engine),
        low=low_of(plan, _transformer_engine(megatron.transformer_engine)),
        fp8_recipe=optimizer.fp8_recipe or plan.precision.fp8,
        expert_shards=max(1, expert_replicas(plan) // megatron.distributed_optimizer_instances),
        sharded=megatron.fsdp != "none",
        alignment=WIDE_ALIGNMENT if megatron.pad_buckets else BUCKET_ALIGNMENT,
        offload=megatron.optimizer_offload,
        clips=megatron.clips_queries,
        registers=megatron.registers_buffers,
        sums_in_fp32=megatron.sums_in_fp32 and plan.precision.gradients != "fp32",
        wide_gradients=megatron.fp32_gradients_of or (),
    )


def sharding_of(plan: ResolvedPlan) -> Sharding | None:
    """Megatron-FSDP's, where it runs."""
    given, own = plan.megatron, rules(plan)
    if given.fsdp == "none":
        return None
    return Sharding(
        strategy=given.fsdp,
        ranks=own.shards,
        expert_ranks=own.expert_shards,
        outer=given.distributed_optimizer_instances if given.fsdp_outer == "optim" else 1,
        communication=given.fsdp_communication or own.gradients,
        bucket=own.bucket,
        capacity=given.fsdp_unit_size,
        double_buffer=given.fsdp_double_buffer,
        meta=given.fsdp_meta_device,
        stops=given.log_params_norm,
        fused=given.gradient_accumulation_fusion,
    )


def expert_replicas(plan: ResolvedPlan) -> int:
    """Ranks that have the same experts: the expert-data-parallel size, of tp cp dp = etp ep edp."""
    layout = plan.layout
    return layout.tp * layout.cp * layout.dp // (layout.ep * (layout.etp or layout.tp))


# -- modules ----------------------------------------------------------------------------------------

End = Callable[..., Tensor]


class Ends(NamedTuple):
    """What a kind of model has beside layers."""

    batch: Callable[[CoreShape, Role], Module]
    embedding: End
    head: End
    masks_in_middle: bool = True
    """Stages in the middle are given masks."""
    others: Mapping[str, End] = MappingProxyType({})
    """Recipes of further entries, and of those that differ, by name."""


GPT = Ends(ends.batch, ends.gpt_embedding, ends.gpt_head, masks_in_middle=False)
ENDS = {
    "bert": Ends(
        lambda shape, role: bert.batch(shape, first=role in ("only", "first")), bert.bert_embedding, bert.bert_head
    ),
    "t5": Ends(
        lambda shape, role: t5.batch(shape),
        t5.encoder_embedding,
        t5.t5_head,
        others={
            "encoder_norm": t5.encoder_norm,
            DECODER_EMBEDDING: t5.decoder_embedding,
            "final_norm": t5.decoder_norm,
        },
    ),
}
"""Those of families whose model is not GPT's."""


def ends_of(shape: CoreShape) -> Ends:
    return ENDS.get(shape.spec.family, GPT)


@lru_cache(maxsize=1024)
def layers_module(shapes: tuple[CoreShape, ...], options: Options, *, recomputed: bool = False) -> Module:
    """One layer, or a group of layers under one recompute (``_checkpointed_forward``)."""

    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        if not recomputed:
            return Run(_layers(r, x, shapes))
        if all(map(replaced.is_empty, shapes)):
            return Run(replaced.recomputed_nothing(r, x))
        run = partial(distributed, shapes[0].t) if shapes[0].distributes else recomputed_reentrant
        out = run(r, partial(_again, shapes=shapes), (x,))
        ends.keep_mask(r, shapes[0])
        return Run(out)

    return build("layer", recipe, Interface(shapes[0].hidden, _hidden_dtype(shapes[0])), options)


def _again(r: Recorder, hidden: Tensor, *, shapes: Sequence[CoreShape]) -> Tensor:
    """A region that is recomputed, with the seam behind its second pass, which alone has a graph."""
    out = _layers(r, hidden, shapes)
    if r.seams and r.grad_enabled:
        r.seam(RERUN, Hook.AFTER_FORWARD)
    return out


def _layers(r: Recorder, hidden: Tensor, shapes: Sequence[CoreShape]) -> Tensor:
    for i, shape in enumerate(shapes):
        r.prefix = f"{i}." if len(shapes) > 1 else ""
        hidden = overlapped.layer(r, hidden, shape)
    r.prefix = ""
    return hidden


def _hidden_dtype(shape: CoreShape) -> str:
    return "fp32" if shape.fp32_residual else shape.dtype


@lru_cache(maxsize=1024)
def end_module(name: str, shape: CoreShape, tied_here: bool, options: Options) -> Module:
    """Embedding, final norm, head with loss, or what an empty chunk runs."""

    known = ends_of(shape)

    def recipe(r: Recorder, x: Tensor | None) -> Run:
        if name == "embedding":
            return Run(known.embedding(r, shape, tied_here=tied_here))
        assert x is not None
        if name == "head" and shape.overlap is not None:
            r.seam(overlapped.TAIL, Hook.PIECE)
        if name in known.others:
            return Run(known.others[name](r, x, shape))
        if name == "final_norm":
            return Run(ends.final_norm(r, x, shape))
        if name == "output_layer":
            return Run(ends.output_layer(r, x, shape))
        if name == LOSS:
            return Run(None, loss=ends.gpt_loss_of(r, x, shape))
        if name == "passthrough":  # a chunk without layers (``TransformerBlock.forward``)
            return Run(ends.cloned(r, x, "hidden_cloned"))
        if shape.spec.mtp_layers:
            return Run(None, loss=mtp.head(r, x, shape))
        return Run(None, loss=known.head(r, x, shape, tied_here=tied_here))

    behind = name == "head" and shape.spec.mtp_layers
    hidden = None if name == "embedding" else mtp.hidden_of_all(shape) if behind else shape.hidden
    if shape.decoder and name in ("final_norm", "head"):
        hidden = t5.decoder_shape(shape).hidden
    interface = Interface(hidden, _hidden_dtype(shape))
    logits = Category.LOGITS
    if name == "output_layer":
        interface = replace(interface, gradient=logits)
    if name == LOSS:
        whole = (shape.s, shape.b, shape.vocab // shape.t)
        interface = Interface(whole, shape.logits or _hidden_dtype(shape), category=logits)
    present = frozenset({ends.WORD}) if name == "head" and tied_here else frozenset()
    if name == DECODER_EMBEDDING:
        present = frozenset({ends.WORD, "position.weight"})
    return build(name, recipe, interface, options, present)


@lru_cache(maxsize=1024)
def mtp_module(shape: CoreShape, layer_shape: CoreShape, embedded_here: bool, options: Options) -> Module:
    """Layers of multi-token prediction. Their embedding is the stage's own where this has one."""

    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        return Run(mtp.block(r, x, shape, layer_shape, overlapped.layer))

    present = frozenset({ends.WORD, "position.weight"}) if embedded_here else frozenset()
    return build("mtp", recipe, Interface(shape.hidden, _hidden_dtype(shape)), options, present)


@dataclass(frozen=True, eq=False)
class _Job:
    """What the modules of every stage depend on; one object for equal ones, so that caches need not look inside."""

    shape: CoreShape
    recompute: Recompute
    options: Options
    head_apart: bool = False
    """The output layer is a module of its own, and so is what is behind it."""


@lru_cache(maxsize=1024)
def _job(shape: CoreShape, recompute: Recompute, options: Options, head_apart: bool = False) -> _Job:
    own = options_of(options) if head_apart else replace(options, consumes_gradients=True)
    return _Job(shape, recompute, own, head_apart)


@lru_cache(maxsize=1024)
def _placed(options: Options, keeps_input: bool, drops_gradient: bool) -> Options:
    return replace(options, keeps_input=keeps_input, drops_gradient=drops_gradient)


Keeping = tuple[tuple[str, tuple[str, ...]], ...]
"""Of entries of a chunk, modules whose saved tensors do not go to the host in the first micro-batch."""


@lru_cache(maxsize=1 << 14)
def _chunk(job: _Job, entries: tuple[str, ...], keeping: Keeping = (), at_once: bool = False) -> Chunk:
    """A chunk's modules: the batch, what its entries run, and the batch's end. Of GPT's only the first and the last
    have a batch, and with it a mask. ``at_once``: every backward follows its forward, so that ``keeping`` is of all
    micro-batches (``should_bulk_offload``)."""
    role = _role(entries)
    shape = replace(job.shape, attention_mask=False) if _makes_masks(job.shape, role) else job.shape
    receives, sends = "embedding" not in entries, "head" not in entries
    tied_here = shape.spec.tied_embeddings and {"embedding", "head"} <= set(entries)
    groups = _grouped(job.recompute, entries) or [["passthrough"]]
    if job.head_apart:
        groups.append([LOSS])
    layer_shape, end_shape = module_shapes(shape)
    _check_work(layer_shape, entries)
    spans: list[Span] = []
    for at, group in enumerate(groups):
        own = _placed(job.options, receives and at == 0, not (sends and at == len(groups) - 1))
        if group[0].startswith("layer."):
            shapes = tuple(_layer_shape(layer_shape, name, keeping, at_once) for name in group)
            module = layers_module(shapes, own, recomputed=_recomputes(job.recompute, group, entries))
        elif group[0].startswith(DECODER):
            decoder = t5.decoder_shape(layer_shape)
            module = layers_module((decoder,), own)
        elif group[0] == "mtp":
            own_shape = _layer_shape(layer_shape, "mtp", keeping, at_once)
            module = mtp_module(end_shape, own_shape, "embedding" in entries, own)
        else:
            apart = job.head_apart and group[0] == HEAD
            module = end_module("output_layer" if apart else group[0], end_shape, tied_here, own)
        label = group[0] if len(group) == 1 else f"{group[0]}–{group[-1].removeprefix('layer.')}"
        if spans and spans[-1].module is module:
            spans[-1] = Span(module, (*spans[-1].names, label))
        else:
            spans.append(Span(module, (label,)))
    saved = frozenset(id for span in spans for id in span.module.saved_shared)
    batch = ends_of(shape).batch(shape, role)
    released, ended = ends.batch_released(batch, saved), ends.batch_ends(batch, saved)
    edges = [Span(released, ("batch",)), Span(batch, ("batch",)), *spans, Span(ended, ("batch",))]
    return Chunk(tuple(edges), first_differs=bool(keeping) and not at_once)


def _check_work(shape: CoreShape, entries: Sequence[str]) -> None:
    """A chunk has more than empty layers, or none: its output would be its input itself."""
    layers = [layer_shape_of(shape, int(name[6:])) for name in entries if name.startswith("layer.")]
    if layers and len(layers) == len(entries) and all(map(replaced.is_empty, layers)):
        problem = f"leaves a pipeline stage with {' and '.join(entries[:2])} alone, which are empty: not modelled yet"
        raise PlanError("model.layer_blocks", ",".join(shape.spec.layer_blocks), problem)


def _layer_shape(shape: CoreShape, name: str, keeping: Keeping = (), at_once: bool = False) -> CoreShape:
    """``shape`` as the entry ``name`` has it, and with those modules whose saved tensors go to the host there."""
    stack = shape.spec.mtp_pattern
    further = replace(shape, kind=stack, graphs=None) if stack else shape
    own = further if name == "mtp" else layer_shape_of(shape, int(name.removeprefix("layer.")))
    if not shape.offload:
        return own
    groups, kept = offload.groups_of(own, experts=own.experts is not None), dict(keeping).get(name, ())
    if at_once:
        return replace(own, offload=tuple(group for group in groups if group not in kept))
    return replace(own, offload=groups, offload_kept=kept)


def kept_first(shape: CoreShape, chunks: Sequence[Sequence[str]]) -> tuple[Keeping, ...]:
    """The last group of every name in the chunk whose backward is first stays in the first micro-batch
    (``post_warmup_callback``); of a name that this chunk has not, that in the next one."""
    found: list[dict[str, tuple[str, ...]]] = [{} for _ in chunks]
    left = set(shape.offload)
    for at in reversed(range(len(chunks)) if left else ()):
        for name in reversed([one for one in chunks[at] if one == "mtp" or one.startswith("layer.")]):
            own = _layer_shape(shape, name).offload
            mine = tuple(group for group in own if group in left)
            left -= set(mine)
            if mine:
                found[at][name] = mine
    return tuple(tuple(one.items()) for one in found)


@lru_cache(maxsize=1024)
def module_shapes(shape: CoreShape) -> tuple[CoreShape, CoreShape]:
    """Of layers, which have no loss, and of ends, which are not recomputed: equal ones are recorded once."""
    layers = replace(shape, cross_entropy="unfused", per_token_loss=False, logits=None, defers=False)
    layers = replace(layers, detaches_heads=False, mixes_states=False)
    ends_shape = replace(shape, recompute_modules=(), experts=None, sixteen_bit=(0, 0), layers=0)
    ends_shape = replace(ends_shape, offload=(), graphs=None, defers=False, mlp_chunks=1, largest_logit=False)
    ends_shape = replace(ends_shape, precision_of=(), starts=())
    ends_shape = replace(ends_shape, distributes=False, fuses_operations=False, mamba_apart=False, mamba_states=None)
    return layers, replace(ends_shape, te_activation=False, norm_takes_residual=False, joint_latent_down=False)


def layer_shape_of(shape: CoreShape, layer: int) -> CoreShape:
    """``shape`` as ``layer``, numbered from 0, has it: with experts or without, in 8 bits or in 16. One object for
    layers that are alike."""
    spec, experts, turns = shape.spec, shape.experts, shape.turns
    first, last = shape.sixteen_bit
    wide = layer < first or layer >= shape.layers - last
    if interval := spec.nope_interval:
        turns = (layer + 1) % interval != 0
    imbalance = None
    if experts is not None and not spec.has_experts(layer):
        experts = None
    elif experts is not None and experts.imbalances:
        imbalance = experts.imbalances[sum(map(spec.has_experts, range(layer)))]
    wide, routed = bool(shape.layers) and wide, experts is not None
    own = replace(shape, wide=_wide(shape, layer), precision_of=(), starts=()) if shape.precision_of else shape
    return _alike(own, wide, spec.kind_of(layer), turns, routed, imbalance, spec.block_of(layer))


def _wide(shape: CoreShape, layer: int) -> frozenset[str]:
    """Modules of ``layer`` in 16 bits: their names number the layers of a chunk."""
    start = max((one for one in shape.starts if one <= layer), default=0)
    return wide_modules(shape.precision_of, layer - start)


@lru_cache(maxsize=1 << 12)
def _alike(
    shape: CoreShape,
    wide: bool,
    kind: str,
    turns: bool,
    has_experts: bool,
    imbalance: float | None,
    block: LayerBlock | None,
) -> CoreShape:
    """``shape`` as all layers have it that agree in this."""
    shape = shape if block is None else shape.with_block(block)
    experts = shape.experts if has_experts else None
    if experts is not None and imbalance is not None:
        experts = replace(experts, imbalance=imbalance, imbalances=())
    low = None if wide else shape.low
    shape = replace(shape, wide=shape.wide if low is not None else frozenset())
    return replace(shape, sixteen_bit=(0, 0), layers=0, low=low, kind=kind or shape.kind, turns=turns, experts=experts)


def _makes_masks(shape: CoreShape, role: Role) -> bool:
    """Local layers of a stage in the middle, which is given no mask, make their own."""
    return role == "middle" and shape.implementation == "local" and not ends_of(shape).masks_in_middle


def _grouped(recompute: Recompute, entries: Sequence[str]) -> list[list[str]]:
    """Layers that are recomputed together, everything else alone (``_checkpointed_forward``, uniform)."""
    size = recompute.layers or 1 if recompute.mode == "full" and recompute.method == "uniform" else 1
    groups: list[list[str]] = []
    for entry in entries:
        together = groups and entry.startswith("layer.") and groups[-1][0].startswith("layer.")
        if together and len(groups[-1]) < size:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return groups


def _recomputes(recompute: Recompute, group: Sequence[str], entries: Sequence[str]) -> bool:
    if recompute.mode != "full":
        return False
    layers = [entry for entry in entries if entry.startswith("layer.")]
    return recompute.method == "uniform" or layers.index(group[0]) < (recompute.layers or len(layers))


# -- programs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stages:
    """What the programs of all stages depend on; ``program`` makes each from the entries that it holds."""

    job: _Job
    layout: ResolvedLayout
    pipeline: Pipeline
    microbatches: int
    rules: Rules
    libraries: _Libraries
    sharding: Sharding | None = None
    torch_fsdp: TorchFsdp | None = None
    offloaded: int = 0
    """Layers whose saved tensors the host keeps."""
    deferral_limit: int = 0
    captures_first: bool = False
    """CUDA graphs of layers are captured before the first iteration."""
    overlaps: bool = False
    """Gradients are reduced beside the last micro-batch's passes."""
    empties: int = 0
    """When the allocator's cache is emptied (``Program.empties``)."""
    step_pool: int = 0
    """The stream of a captured step's memory."""

    @cached_property
    def _rules_behind(self) -> Rules:
        return replace(self.rules, bucket=None, buckets=None)

    def program(self, stage: int, entries: tuple[tuple[str, ...], ...]) -> Program:
        """``entries``: names of what each chunk of ``stage`` holds."""
        layout, pipeline = self.layout, self.pipeline
        order = schedule(
            stage,
            layout.pp,
            self.microbatches,
            len(entries),
            pipeline.group,
            pipeline.overlap_p2p,
            pipeline.overlap_p2p_warmup,
            self.job.shape.overlap is not None,
        )
        # buckets are the first stage's (``DistributedDataParallel.__init__``)
        own = self.rules if stage == 0 else self._rules_behind
        tied = self.job.shape.spec.tied_embeddings and layout.pp > 1
        per_stage = layout.tp * layout.cp * layout.dp
        held = _stage(self.job, entries, order.last and bool(self.job.shape.offload))
        if self.offloaded:
            chunk, host = with_offload(held.chunks[0], self.offloaded)
            made = _program(replace(held, chunks=(chunk,)), order, per_stage, own, tied, self.libraries)
            return replace(made, host=made.host + host)
        if self.sharding is not None:
            return _sharded(held, order, per_stage, own, self.sharding, self.libraries)
        if self.torch_fsdp is not None:
            return _torch_sharded(held, order, per_stage, own, self.torch_fsdp, self.libraries)
        made = _program(held, order, per_stage, own, tied, self.libraries)
        if self.overlaps:
            made = self._receiving(made, received(tuple(map(_parameters, held.chunks)), own, tied).early)
        if self.job.shape.detaches_heads and "mtp" in held.names:
            size = mtp.DETACHED * hold_bytes(self.job.shape.hidden, self.job.shape.dtype)
            assert isinstance(made.order, MegatronOrder)
            made = replace(made, order=replace(made.order, detached=size))
        if self.step_pool:
            assert made.kept is not None
            made = replace(made, kept=replace(made.kept, pool=self.step_pool))
        if self.job.shape.defers and order.last:
            made = self._deferring(made)
        if self.job.shape.graphs is None:
            return made
        made = self._with_graphs(made, order, entries)
        first = self.captures_first and captures.separable(self.job.shape)
        return captures.captured_first(made, self.job.shape) if first else made

    def _receiving(self, program: Program, size: int) -> Program:
        """With a bucket of gradients that arrives beside the passes: beside all of them, which is a bound."""
        order = program.order
        assert isinstance(order, MegatronOrder)
        return replace(program, order=replace(order, received=size)) if size else program

    def _deferring(self, program: Program) -> Program:
        """With gradients of logits, and inputs of the head, that wait for ``drain_embedding_wgrad_compute``."""
        shape, limit, order = self.job.shape, self.deferral_limit, program.order
        assert isinstance(order, MegatronOrder)
        count = min(limit, self.microbatches - 1) if limit else self.microbatches - 1
        size = hold_bytes((shape.s, shape.b, shape.vocab // shape.t), shape.dtype)
        return replace(program, order=replace(order, deferred=(count, size + hold_bytes(shape.hidden, shape.dtype))))

    def _with_graphs(self, program: Program, order: Schedule, entries: tuple[tuple[str, ...], ...]) -> Program:
        """With what CUDA graphs of layers keep; a layer of further tokens is one, too."""
        layers = module_shapes(self.job.shape)[0]
        of = [[_layer_shape(layers, name) for name in chunk if name.startswith(("layer.", "mtp"))] for chunk in entries]
        graphed = [[one for one in chunk if graphs.graphed(one)] for chunk in of]
        masked = [sum(map(graphs.attends, chunk)) for chunk in graphed]
        with_mask = layers_in_flight(order, masked)
        without = layers_in_flight(order, [len(chunk) - some for chunk, some in zip(graphed, masked, strict=True)])
        kinds = frozenset(one for chunk in graphed for one in chunk)
        assert program.kept is not None
        holds = [*program.kept.workspaces, *graphs.kept(kinds, with_mask, without, self.libraries.cublas)]
        return replace(program, kept=replace(program.kept, workspaces=_numbered(holds)))


def stages_of(plan: ResolvedPlan, options: Options) -> Stages:
    """The stages of a resolved plan, whatever layers they hold."""
    check_covered(plan.model, MEGATRON_CORE, plan.framework)
    layout = plan.layout
    shape = core_shape(plan)
    full = plan.recompute.mode == "full"
    for reason in (
        *block.uncovered(shape),
        *mtp.uncovered(shape, recomputes_layers=full),
        *overlapped.uncovered(shape),
    ):
        raise PlanError("framework", plan.framework, f"has no recipe for {reason}")
    capability = GPUS[plan.hardware.gpu].compute_capability if plan.hardware.gpu is not None else None
    pool = graphs.POOL if plan.megatron.cuda_graphs == "full_iteration" else 0
    torch_fsdp = torch_fsdp_of(plan)
    seams = plan.megatron.fsdp != "none" or plan.megatron.offload_layers > 0
    own = replace(options, seams=seams, pool=pool)
    return Stages(
        _job(shape, plan.recompute, own, torch_fsdp is not None),
        layout,
        plan.pipeline,
        plan.microbatches,
        rules(plan),
        _Libraries(capability, cublas_workspaces(plan)),
        sharding_of(plan),
        torch_fsdp,
        plan.megatron.offload_layers,
        plan.megatron.wgrad_deferral_limit,
        plan.megatron.cuda_graph_warmup == 0,
        plan.megatron.overlap_grad_reduce,
        plan.megatron.empty_cache,
        graphs.STEP_POOL if plan.megatron.optimizer_graph else 0,
    )


def programs(plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
    """One program per pipeline stage."""
    made = stages_of(plan, options)
    found = (made.program(stage, entries) for stage, entries in enumerate(stage_entries(plan)))
    return tuple(replace(one, empties=made.empties) if made.empties else one for one in found)


def stage_entries(plan: ResolvedPlan) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Names of the entries of every chunk of every stage."""
    layers = plan.model.layers
    if plan.batch.decoder_seq is not None:
        encoder = ("embedding", *(f"layer.{at}" for at in range(layers)), "encoder_norm")
        decoder = (DECODER_EMBEDDING, *(f"{DECODER}{at}" for at in range(layers)), "final_norm", "head")
        return (((*encoder, *decoder),),)
    has_mtp = plan.model.mtp_layers > 0
    return _named_entries(plan.model.layers, plan.layout.pp, plan.layout.vpp, plan.pipeline, has_mtp)


@lru_cache(maxsize=1024)
def _named_entries(
    layers: int, stages: int, chunks: int, pipeline: Pipeline, has_mtp: bool
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    found = megatron_layout.stages(
        layers,
        stages,
        chunks,
        first_layers=pipeline.first_layers,
        last_layers=pipeline.last_layers,
        count_embedding=pipeline.count_embedding,
        count_loss=pipeline.count_loss,
        layout=pipeline.layout,
    )
    apart = any(chunk.further for stage in found for chunk in stage)
    return tuple(tuple(_entries(chunk, layers, has_mtp, apart) for chunk in stage) for stage in found)


def _entries(chunk: megatron_layout.Chunk, layers: int, has_mtp: bool, apart: bool) -> tuple[str, ...]:
    """The final norm is where the head is; before multi-token prediction, where the last layer is
    (``has_final_layernorm_in_this_stage``). That is where the head is, or ``apart``, where a layout string says."""
    normed = layers - 1 in chunk.layers if has_mtp else chunk.head
    return (
        *(("embedding",) if chunk.embedding else ()),
        *(f"layer.{i}" for i in chunk.layers),
        *(("final_norm",) if normed else ()),
        *(("mtp",) if has_mtp and (chunk.further if apart else chunk.head) else ()),
        *(("head",) if chunk.head else ()),
    )


class _Libraries(NamedTuple):
    """What decides the workspaces of libraries."""

    capability: tuple[int, int] | None
    cublas: tuple[Hold, ...]
    """PyTorch's, where a rank multiplies matrices through it."""


@dataclass(frozen=True, eq=False)
class _Stage:
    """The chunks of one stage; one object for equal ones."""

    job: _Job
    chunks: tuple[Chunk, ...]
    names: tuple[str, ...]
    received: int
    sent: int
    """Bytes of hidden states from other stages and to others: behind multi-token prediction those of all depths."""


@lru_cache(maxsize=1 << 14)
def _stage(job: _Job, entries: tuple[tuple[str, ...], ...], last: bool) -> _Stage:
    keeping = kept_first(module_shapes(job.shape)[0], entries)
    at_once = [last and at == len(entries) - 1 for at in range(len(entries))]
    chunks = tuple(map(_chunk, [job] * len(entries), entries, keeping, at_once))
    return _Stage(
        job,
        chunks,
        tuple(name for chunk in entries for name in chunk),
        *(hold_bytes(one, _hidden_dtype(job.shape)) for one in _between(job.shape, entries)),
    )


def _between(shape: CoreShape, entries: tuple[tuple[str, ...], ...]) -> tuple[Shape, Shape]:
    """What a stage receives and what it sends (``mtp_standalone``: shapes are exchanged, too)."""
    names = {name for chunk in entries for name in chunk}
    if not shape.spec.mtp_layers or ("mtp" in names) is ("head" in names):
        return shape.hidden, shape.hidden
    every = mtp.hidden_of_all(shape)
    return (shape.hidden, every) if "mtp" in names else (every, shape.hidden)


@lru_cache(maxsize=1 << 14)
def _parameters(chunk: Chunk) -> KeptChunk:
    """Equal neighbours together, however their activations differ, so that layouts with equal states share them."""
    found: list[tuple[tuple[Parameter, ...], int]] = []
    for span in chunk.spans:
        own, count = span.module.parameters, len(span.names)
        if found and found[-1][0] == own:
            found[-1] = own, found[-1][1] + count
        elif own:
            found.append((own, count))
    return tuple(found)


@lru_cache(maxsize=1 << 14)
def _kept(stage: _Stage, states: Rules, tied: bool, libraries: _Libraries) -> Kept:
    chunks = tuple(_parameters(chunk) for chunk in stage.chunks)
    workspaces = _workspaces(stage.job.shape, stage.names, len(stage.chunks), libraries, copies_of(chunks))
    layers = sum(name.startswith("layer.") for name in stage.names)
    workspaces += clipping.factors(stage.job.shape, layers, states)
    kept = with_fp32(keep(chunks, states, tied), chunks, states, tied)
    return _with_static(kept, workspaces, stage)


def _with_static(kept: Kept, holds: Sequence[Hold], stage: _Stage) -> Kept:
    """With what the first iteration leaves, and dispatchers of experts from one iteration to the next: while these run
    again, backward holds the order of tokens anyway."""
    shape, every, orders = stage.job.shape, [*holds], list[Hold]()
    layers = [layer_shape_of(shape, int(name[6:])) for name in stage.names if name.startswith("layer.")]
    if "mtp" in stage.names:
        layers += [next((one for one in layers if one.experts), shape)] * shape.spec.mtp_layers
    remembered = {layer: dispatch.remembered(layer) for layer in set(layers)}
    for layer in layers:
        stays, order = remembered[layer]
        every += stays
        orders += order
    numbered = _numbered([*every, *orders])
    workspaces, carried = numbered[: len(every)], numbered[len(every) :]
    return replace(
        kept,
        workspaces=Stretch(workspaces),
        step=Stretch([*carried, *kept.step]),
        carried=Stretch([*kept.carried, *carried]),
    )


def _program(
    stage: _Stage, order: Schedule, per_stage: int, states: Rules, tied: bool, libraries: _Libraries
) -> Program:
    return _made(stage, stage.chunks, order, per_stage, states, _kept(stage, states, tied, libraries))


def _sharded(
    stage: _Stage, order: Schedule, per_stage: int, states: Rules, sharding: Sharding, libraries: _Libraries
) -> Program:
    """With Megatron-FSDP's hooks around the modules of the one chunk."""
    (chunk,), dtype = stage.chunks, states.dtype
    buckets = buckets_of(chunk.spans, sharding)
    kept = keep_sharded(buckets, states, sharding, ahead(buckets, sharding, dtype))
    copies = copies_of((_parameters(chunk),))
    holds = [*_workspaces(stage.job.shape, stage.names, 1, libraries, copies), *persistent(buckets, sharding, dtype)]
    kept = _with_static(kept, holds, stage)
    recomputed = stage.job.recompute.mode == "full"
    spans = with_hooks(chunk.spans, buckets, sharding, dtype, recomputed)
    return _made(stage, (replace(chunk, spans=spans),), order, per_stage, states, kept)


def _torch_sharded(
    stage: _Stage, order: Schedule, per_stage: int, states: Rules, given: TorchFsdp, libraries: _Libraries
) -> Program:
    """With FSDP2's hooks around the modules of the one chunk."""
    (chunk,) = stage.chunks
    hooked, units = with_torch_hooks(chunk, given)
    workspaces = _workspaces(stage.job.shape, stage.names, 1, libraries, ())
    kept = _with_static(keep_torch_sharded(units, states, given), workspaces, stage)
    elements = sum(sum(unit.shard_elements(given.sharding.shards)) for unit in units)
    return replace(_made(stage, (hooked,), order, per_stage, states, kept), elements=elements)


def _made(
    stage: _Stage, chunks: tuple[Chunk, ...], order: Schedule, per_stage: int, states: Rules, kept: Kept
) -> Program:
    return Program(
        stage=order.stage,
        ranks=tuple(range(order.stage * per_stage, (order.stage + 1) * per_stage)),
        entries=stage.names,
        order=_order(stage, chunks, order),
        initialisation=kept.construction.excursion.peak,
        kept=kept,
        saving=saved(kept, states),
        host=kept.host,
    )


def _order(stage: _Stage, chunks: tuple[Chunk, ...], order: Schedule) -> MegatronOrder:
    beside = stage.job.shape.overlap
    if beside is None:
        return MegatronOrder(order, chunks, stage.received, stage.sent)
    return BesideOrder(order, chunks, stage.received, stage.sent, early=beside.early)


def _role(entries: Sequence[str]) -> Role:
    """A stage with multi-token prediction has all of the batch (``mtp_on_this_rank``)."""
    first, last = "embedding" in entries or "mtp" in entries, "head" in entries or "mtp" in entries
    return "only" if first and last else "first" if first else "last" if last else "middle"


def copies_of(chunks: Sequence[KeptChunk]) -> list[Hold]:
    """Quantised copies of weights, which modules keep from micro-batch to micro-batch, and from step to step
    (``_fp8_workspaces``); with delayed scaling scales and amaxes of five tensors of every layer."""
    found: list[Hold] = []
    for chunk in chunks:
        for own, times in chunk:
            weights = [one for one in own if one.low is not None]
            once: list[Hold] = []
            for weight in weights:
                assert weight.low is not None
                parts = weight.low.state
                if not weight.low.parameters:
                    parts = (*weight.low.kept_of_weight(weight.shape), *parts)
                once += [
                    Hold(0, hold_bytes(one.shape, one.dtype), Category.BUFFERS, f"{weight.name}_{one.name}", *one[1:])
                    for one in parts
                ]
            found += once * times
    return found


def _workspaces(
    shape: CoreShape, names: tuple[str, ...], chunks: int, libraries: _Libraries, copies: Sequence[Hold]
) -> list[Hold]:
    """Static tensors that the first iteration makes. Every chunk has rotary tables of its own."""
    holds: list[Hold] = [*copies]
    layers = [int(name.removeprefix("layer.")) for name in names if name.startswith("layer.")]
    kinds = {layer_shape_of(shape, layer) for layer in layers}
    kinds |= {t5.decoder_shape(kind) for kind in kinds if kind.decoder}
    dtype, has_layers, has_head = shape.dtype, bool(kinds), "head" in names
    shape = next((kind for kind in kinds if kind.experts is not None), replace(shape, experts=None))
    if shape.spec.latent_kv_rank:
        holds += latent.tables(shape, len(layers) + shape.spec.mtp_layers * ("mtp" in names))
    elif shape.spec.positions == "rotary":
        holds += ends.rotary_table(shape) * chunks
    gathered = [local.memory_buffer(shape)] * has_layers + [ends.gather_buffer(shape)] * has_head
    gathered += [dispatch.gather_buffer(shape)]
    drained = ends.gather_buffer(shape) if has_head and shape.defers else (0,)
    if drained != (0,):  # two, in turn (``drain_embedding_wgrad_compute``)
        holds += [
            Hold(0, hold_bytes(drained, dtype), Category.COMMUNICATION_BUFFERS, "drain_buffer", drained, dtype)
        ] * 2
    sizes = [hold_bytes(size, dtype) for size in gathered if size != (0,)]
    if sizes:
        holds.append(Hold(0, max(sizes), Category.COMMUNICATION_BUFFERS, "global_memory_buffer", (), dtype))
    weights = {size for kind in kinds for size in block.dummy_gradients(kind)}
    if "mtp" in names and shape.gradient_fusion:
        further = replace(shape, kind=shape.spec.mtp_pattern)
        weights |= {mtp.projection(shape), *(block.dummy_gradients(further) if further.kind else ())}
    head = ends.dummy_gradient(shape) if has_head else None
    weights |= {head} if head is not None else set()
    if shape.implementation == "transformer_engine":
        major = (libraries.capability or HOPPER)[0]
        for name, size in te_facts.kept(shape, major, sorted(weights)).items():
            category = Category.WORKSPACES if name.endswith("workspace") else Category.BUFFERS
            if libraries.capability is not None or category is not Category.WORKSPACES:
                holds.append(Hold(0, size, category, name))
    else:
        buffers = Category.BUFFERS
        holds += [Hold(0, hold_bytes(one, dtype), buffers, "dummy_gradient", one, dtype) for one in sorted(weights)]
    if has_head or (has_layers and shape.attention in ("local", "unfused")) or shape.implementation == "local":
        holds += libraries.cublas
    return holds


def _numbered(holds: Sequence[Hold]) -> Stretch:
    return Stretch(hold._replace(tensor=-1 - at) for at, hold in enumerate(holds))
