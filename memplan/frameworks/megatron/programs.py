"""Megatron-Core: tensor-, context- and pipeline-parallel layers over contiguous gradient buffers.

Stages and their layers: ``plan.megatron_layout``. Order of calls: ``schedules.megatron_schedule``. States:
``states``. What a chunk runs: ``megatron/core/models/gpt/gpt_model.py`` and ``bert/bert_model.py``,
``transformer/transformer_block.py`` (``_checkpointed_forward`` for full recompute).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ...device.gpus import GPUS
from ...device.measured import cublas_workspaces
from ...layers.autograd import Shape
from ...layers.coverage import MEGATRON_CORE, check_covered
from ...layers.megatron_core import (
    block,
    dispatch,
    ends,
    graphs,
    latent,
    local,
    mtp,
    overlapped,
    replaced,
    t5,
    te_facts,
    te_low_attention,
)
from ...layers.megatron_core.shape import CoreShape
from ...layers.module import Options, Parameter, hold_bytes
from ...plan.errors import PlanError
from ...plan.plan import Pipeline, Recompute
from ...plan.resolved import ResolvedPlan
from ...schedules.megatron_beside_fold import BesideOrder
from ...schedules.megatron_fold import MegatronOrder, graphed_in_flight
from ...schedules.megatron_schedule import Schedule, schedule
from ...tape.events import Category, Hold, Stretch
from ...tape.program import Chunk, Kept, Program, Span
from ...values import dataclass, replace
from . import captures, clipping
from .adapters import tuning_of
from .fsdp import Sharding, buckets_of
from .fsdp_buffers import persistent
from .fsdp_hooks import ahead, with_hooks
from .fsdp_states import keep as keep_sharded
from .gradients import received, with_fp32
from .layer_offload import with_offload
from .states import Chunk as KeptChunk
from .states import Rules, keep, saved
from .torch_fsdp import HEAD, LOSS, TorchFsdp, options_of, torch_fsdp_of
from .torch_fsdp import keep as keep_torch_sharded
from .torch_fsdp import with_hooks as with_torch_hooks

if TYPE_CHECKING:
    from ...plan.resolved import ResolvedLayout

from .entries import stage_entries
from .from_plan import HOPPER, core_shape, rules, sharding_of
from .modules import (
    DECODER,
    Keeping,
    end_module,
    ends_of,
    hidden_dtype,
    kept_first,
    layer_shape_in,
    layer_shape_of,
    layers_module,
    makes_masks,
    module_shapes,
    mtp_module,
    recompute_groups,
    recomputed,
    role_of,
)


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


@lru_cache(maxsize=1 << 14)
def _chunk(job: _Job, entries: tuple[str, ...], keeping: Keeping = (), at_once: bool = False) -> Chunk:
    """A chunk's modules: the batch, what its entries run, and the batch's end. Of GPT's only the first and the last
    have a batch, and with it a mask. ``at_once``: every backward follows its forward, so that ``keeping`` is of all
    micro-batches (``should_bulk_offload``)."""
    role = role_of(entries)
    shape = replace(job.shape, attention_mask=False) if makes_masks(job.shape, role) else job.shape
    receives, sends = "embedding" not in entries, "head" not in entries
    tied_here = shape.spec.tied_embeddings and {"embedding", "head"} <= set(entries)
    groups = recompute_groups(job.recompute, entries)
    if {*entries} <= {"mtp", "head"} and shape.overlap is None:
        groups = [["passthrough"], *groups]
    if job.head_apart:
        groups.append([LOSS])
    layer_shape, end_shape = module_shapes(shape)
    _check_work(layer_shape, entries)
    again = recomputed(job.recompute, entries)
    leaf = "embedding" in entries and leaves_input(job.options)
    passing = [_passes_on(layer_shape, group) for group in groups]
    """Groups whose output is their input; recomputed, they copy its gradient."""
    first = passing.index(False)
    last = max(at for at, group in enumerate(groups) if not passing[at] or group[0] in again)
    spans: list[Span] = []
    for at, group in enumerate(groups):
        own = _placed(job.options, receives and at <= first, not (sends and at >= last))
        if group[0].startswith("layer."):
            shapes = tuple(layer_shape_in(layer_shape, name, keeping, at_once) for name in group)
            module = layers_module(shapes, own, recomputed=group[0] in again, requires_grad=not leaf)
            leaf = leaf and not module.first.backward
        elif group[0].startswith(DECODER):
            decoder = t5.decoder_shape(layer_shape)
            module = layers_module((decoder,), own)
        elif group[0] == "mtp":
            own_shape = layer_shape_in(layer_shape, "mtp", keeping, at_once)
            embedded = "embedding" in entries
            module = mtp_module(end_shape, own_shape, embedded, own, recomputed="mtp" in again)
        else:
            apart = job.head_apart and group[0] == HEAD
            every = shape.spec.mtp_layers > 0 and entries == ("head",)
            module = end_module("output_layer" if apart else group[0], end_shape, tied_here, own, every=every)
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


def _passes_on(shape: CoreShape, group: Sequence[str]) -> bool:
    """All of it are empty layers."""
    layers = [layer_shape_of(shape, int(name[6:])) for name in group if name.startswith("layer.")]
    return len(layers) == len(group) and all(map(replaced.is_empty, layers))


def leaves_input(options: Options) -> bool:
    """The embedding's output requires no gradient."""
    return options.tuning is not None and not options.tuning.input_requires_grad


def _check_work(shape: CoreShape, entries: Sequence[str]) -> None:
    """A chunk has more than empty layers, or none: its output would be its input itself."""
    if entries and _passes_on(shape, entries):
        raise PlanError(
            "model.layer_blocks",
            ",".join(shape.spec.layer_blocks),
            f"leaves a pipeline stage with {' and '.join(entries[:2])} alone, which are empty: not modelled yet",
        )


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
    own_captures: captures.Captures | None = None
    """Megatron-Core's own graphs are captured behind its passes."""
    overlaps: bool = False
    """Gradients are reduced beside the last micro-batch's passes."""
    empties: int = 0
    """When the allocator's cache is emptied (``Program.empties``)."""
    step_pool: int = 0
    """The stream of a captured step's memory."""

    @cached_property
    def _without_loss(self) -> _Job:
        """Of stages without a loss, which are the same whatever that is."""
        job = self.job
        return _job(replace(job.shape, cross_entropy="unfused"), job.recompute, job.options, job.head_apart)

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
        job = self.job if any("head" in chunk for chunk in entries) else self._without_loss
        held = _stage(job, entries, order.last and bool(self.job.shape.offload))
        host = 0
        if self.offloaded:
            chunk, host = with_offload(held.chunks[0], self.offloaded, self.sharding is not None)
            held = replace(held, chunks=(chunk,))
        if self.sharding is not None:
            made = _sharded(held, order, per_stage, own, self.sharding, self.libraries)
        elif self.offloaded:
            made = _program(held, order, per_stage, own, tied, self.libraries)
        if self.offloaded or self.sharding is not None:
            return replace(made, host=made.host + host)
        if self.torch_fsdp is not None:
            return _torch_sharded(held, order, per_stage, own, self.torch_fsdp, self.libraries)
        made = _program(held, order, per_stage, own, tied, self.libraries)
        if self.overlaps:
            made = self._receiving(made, received(tuple(map(_parameters, held.chunks)), own, tied).early)
        if self.job.shape.detaches_heads and "mtp" in held.names:
            size = mtp.DETACHED * hold_bytes(self.job.shape.hidden, self.job.shape.dtype)
            made = _with_order(made, detached=size)
        if self.step_pool:
            assert made.kept is not None
            made = replace(made, kept=replace(made.kept, pool=self.step_pool))
        if self.job.shape.defers and order.last:
            made = self._deferring(made)
        if self.job.shape.graphs is None:
            return made
        if self.own_captures is not None:
            return captures.captured_behind(made, self.own_captures)
        made = self._with_graphs(made, order, entries)
        first = self.captures_first and captures.separable(self.job.shape)
        return captures.captured_first(made, self.job.shape) if first else made

    def _receiving(self, program: Program, size: int) -> Program:
        """With a bucket of gradients that arrives beside the passes: beside all of them, which is a bound."""
        return _with_order(program, received=size) if size else program

    def _deferring(self, program: Program) -> Program:
        """With gradients of logits, and inputs of the head, that wait for ``drain_embedding_wgrad_compute``."""
        shape, limit = self.job.shape, self.deferral_limit
        count = min(limit, self.microbatches - 1) if limit else self.microbatches - 1
        size = hold_bytes((shape.s, shape.b, shape.vocab // shape.t), shape.dtype)
        return _with_order(program, deferred=(count, size + hold_bytes(shape.hidden, shape.dtype)))

    def _with_graphs(self, program: Program, order: Schedule, entries: tuple[tuple[str, ...], ...]) -> Program:
        """With what CUDA graphs of layers keep; a layer of further tokens is one, too."""
        layers = module_shapes(self.job.shape)[0]
        of = [
            [layer_shape_in(layers, name) for name in chunk if name.startswith(("layer.", "mtp"))] for chunk in entries
        ]
        graphed = [[one for one in chunk if graphs.graphed(one)] for chunk in of]
        masked = [sum(map(graphs.attends, chunk)) for chunk in graphed]
        bare = [len(chunk) - some for chunk, some in zip(graphed, masked, strict=True)]
        with_mask, without = (graphed_in_flight(order, one) for one in (masked, bare))
        kinds = frozenset(one for chunk in graphed for one in chunk)
        assert program.kept is not None
        holds = [*program.kept.workspaces, *graphs.kept(kinds, with_mask, without, self.libraries.cublas)]
        return replace(program, kept=replace(program.kept, workspaces=_numbered(holds)))


def _with_order(program: Program, **changes: Any) -> Program:
    """``program`` whose passes hold more."""
    assert isinstance(program.order, MegatronOrder)
    return replace(program, order=replace(program.order, **changes))


def stages_of(plan: ResolvedPlan, options: Options) -> Stages:
    """The stages of a resolved plan, whatever layers they hold."""
    check_covered(plan.model, MEGATRON_CORE, plan.framework)
    layout = plan.layout
    shape = core_shape(plan)
    for reason in (
        *block.uncovered(shape),
        *mtp.uncovered(shape, recomputes_layers=plan.recompute.mode == "full"),
        *overlapped.uncovered(shape),
    ):
        raise plan.wrong("framework", f"has no recipe for {reason}")
    capability = GPUS[plan.hardware.gpu].compute_capability if plan.hardware.gpu is not None else None
    pool = graphs.POOL if plan.megatron.cuda_graphs == "full_iteration" else 0
    torch_fsdp = torch_fsdp_of(plan)
    seams = plan.megatron.fsdp != "none" or plan.megatron.offload_layers > 0
    own = replace(options, seams=seams, pool=pool, tuning=tuning_of(plan))
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
        _own_captures(plan, shape),
        plan.megatron.overlap_grad_reduce,
        plan.megatron.empty_cache,
        graphs.STEP_POOL if plan.megatron.optimizer_graph else 0,
    )


def _own_captures(plan: ResolvedPlan, shape: CoreShape) -> captures.Captures | None:
    if plan.megatron.cuda_graphs != "local":
        return None
    tried = plan.megatron.cuda_graph_warmup > 0 or plan.recompute.mode != "none"
    return captures.Captures(shape, rules(plan).gradients, tried)


def programs(plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
    """One program per pipeline stage."""
    made = stages_of(plan, options)
    found = (made.program(stage, entries) for stage, entries in enumerate(stage_entries(plan)))
    return tuple(replace(one, empties=made.empties) if made.empties else one for one in found)


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
    hidden: int
    """Bytes of a hidden state;"""
    edges: tuple[tuple[int, int], ...]
    """of what each chunk receives and sends, where they differ: behind multi-token prediction, of all depths."""


@lru_cache(maxsize=1 << 14)
def _stage(job: _Job, entries: tuple[tuple[str, ...], ...], last: bool) -> _Stage:
    keeping = kept_first(module_shapes(job.shape)[0], entries)
    at_once = [last and at == len(entries) - 1 for at in range(len(entries))]
    chunks = tuple(map(_chunk, [job] * len(entries), entries, keeping, at_once))
    return _Stage(
        job,
        chunks,
        tuple(name for chunk in entries for name in chunk),
        hold_bytes(job.shape.hidden, hidden_dtype(job.shape)),
        _edges(job.shape, entries),
    )


def _edges(shape: CoreShape, entries: tuple[tuple[str, ...], ...]) -> tuple[tuple[int, int], ...]:
    """Bytes of what each chunk receives and what it sends, where not all are hidden states of one depth
    (``mtp_standalone``: shapes are exchanged before, ``_communicate_shapes``)."""
    apart = [("mtp" in chunk, "head" in chunk) for chunk in entries]
    if not shape.spec.mtp_layers or all(further is head for further, head in apart):
        return ()
    one, every = (hold_bytes(size, hidden_dtype(shape)) for size in (shape.hidden, mtp.hidden_of_all(shape)))
    return tuple((every if head and not further else one, every if further else one) for further, head in apart)


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
    workspaces = _workspaces(
        stage.job.shape, stage.names, len(stage.chunks), libraries, copies_of(chunks), _of_adapters(stage.job, chunks)
    )
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
    spans = with_hooks(chunk.spans, buckets, sharding, dtype)
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


def _held_in_evaluation(stage: _Stage) -> int:
    """Bytes that callers hold beside a forward pass without a graph, as in a first stage's allocations on an H200: what
    the micro-batch before sent (``output_tensor`` in ``schedules.py``), and the embedding's output while layers behind
    the first run (``decoder_input`` in ``GPTModel.forward``)."""
    layers = sum(name.startswith("layer.") for name in stage.names)
    embedded = stage.hidden if "embedding" in stage.names and layers > 1 else 0
    sent = max((sent for _, sent in stage.edges), default=stage.hidden)
    return embedded + (sent if "head" not in stage.names else 0)


def _made(
    stage: _Stage, chunks: tuple[Chunk, ...], order: Schedule, per_stage: int, states: Rules, kept: Kept
) -> Program:
    return Program(
        stage=order.stage,
        ranks=tuple(range(order.stage * per_stage, (order.stage + 1) * per_stage)),
        entries=stage.names,
        order=_order(stage, chunks, order),
        initialisation=kept.construction.excursion.peak,
        evaluated=(_held_in_evaluation(stage), 0),
        kept=kept,
        saving=saved(kept, states),
        host=kept.host,
    )


def _order(stage: _Stage, chunks: tuple[Chunk, ...], order: Schedule) -> MegatronOrder:
    beside = stage.job.shape.overlap
    if beside is None:
        return MegatronOrder(order, chunks, stage.hidden, stage.edges)
    return BesideOrder(order, chunks, stage.hidden, stage.edges, early=beside.early)


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


def _of_adapters(job: _Job, chunks: Sequence[KeptChunk]) -> frozenset[Shape] | None:
    """Shapes of the weights that are trained, where that are not all."""
    if job.options.tuning is None:
        return None
    return frozenset(one.shape for chunk in chunks for own, _ in chunk for one in own if one.trained)


def _workspaces(
    shape: CoreShape,
    names: tuple[str, ...],
    chunks: int,
    libraries: _Libraries,
    copies: Sequence[Hold],
    trained: frozenset[Shape] | None = None,
) -> list[Hold]:
    """Static tensors that the first iteration makes. Every chunk has rotary tables of its own. ``trained``: shapes of
    weights with a gradient, if not all have one; a frozen head gathers its input into a tensor of its own."""
    holds: list[Hold] = [*copies]
    layers = [int(name.removeprefix("layer.")) for name in names if name.startswith("layer.")]
    own = [layer_shape_of(shape, layer) for layer in layers]
    kinds = set(own)
    holds += [
        Hold(0, hold_bytes(one.shape, one.dtype), Category.BUFFERS, f"attention_{one.name}", *one[1:])
        for kind in own
        if kind.low_attention and "attn" in graphs.blocks(kind)
        for one in te_low_attention.state(kind)
    ]
    kinds |= {t5.decoder_shape(kind) for kind in kinds if kind.decoder}
    dtype, has_layers, has_head = shape.dtype, bool(kinds), "head" in names
    shape = next((kind for kind in kinds if kind.experts is not None), replace(shape, experts=None))
    if shape.spec.latent_kv_rank:
        holds += latent.tables(shape, len(layers) + shape.spec.mtp_layers * ("mtp" in names))
    elif shape.spec.positions == "rotary":
        holds += ends.rotary_table(shape) * chunks
    gathered = [local.memory_buffer(shape)] * has_layers + [ends.gather_buffer(shape)] * (has_head and trained is None)
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
    if trained is not None:
        weights = {*trained} if shape.gradient_fusion else set()
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
    return Stretch(Hold(-1 - at, *hold[1:]) for at, hold in enumerate(holds))
