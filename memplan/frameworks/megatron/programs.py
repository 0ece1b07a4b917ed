"""Megatron-Core: tensor-, context- and pipeline-parallel layers over contiguous gradient buffers.

Stages and their layers: ``plan.megatron_layout``. Order of calls: ``schedules.megatron_schedule``. States:
``states``. What a chunk runs: ``megatron/core/models/gpt/gpt_model.py`` and ``bert/bert_model.py``,
``transformer/transformer_block.py`` (``_checkpointed_forward`` for full recompute).
"""

from __future__ import annotations

from collections.abc import Sequence, Set as AbstractSet
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from ...device.gpus import GPUS
from ...device.measured import cublas_workspaces
from ...layers.autograd import Shape
from ...layers.coverage import MEGATRON_CORE, check_covered
from ...layers.megatron_core import (
    coverage,
    ends,
    graphs,
    mtp,
    overlapped,
    replaced,
    t5,
)
from ...layers.megatron_core.shape import CoreShape
from ...layers.module import Module, Options, Parameter, hold_bytes
from ...plan.errors import PlanError
from ...plan.plan import Pipeline, Recompute, ResolvedPlan
from ...schedules.megatron_beside_fold import BesideOrder
from ...schedules.megatron_fold import MegatronOrder, graphed_in_flight
from ...schedules.megatron_schedule import Schedule, schedule
from ...tape.events import Stretch
from ...tape.program import Chunk, Kept, Program, Span
from ...values import dataclass, replace
from . import captures, clipping
from .adapters import tuning_of
from .fsdp import Sharding, buckets_of, keep as keep_sharded
from .fsdp_hooks import ahead, persistent, with_hooks
from .gradients import received, with_fp32
from .layer_offload import with_offload
from .states import Chunk as KeptChunk, Rules, keep, saved
from .workspaces import Contents, Libraries, contents_of, copies_of, with_static, workspaces_of

if TYPE_CHECKING:
    from ...plan.plan import ResolvedLayout
    from .torch_fsdp import TorchFsdp

from .from_plan import core_shape, rules, sharding_of
from .modules import (
    DECODER,
    HEAD,
    LOSS,
    Keeping,
    end_module,
    ends_of,
    hidden_dtype,
    is_layer,
    kept_first,
    layer_shape_in,
    layer_shapes,
    layers_module,
    makes_masks,
    module_shapes,
    mtp_module,
    recompute_groups,
    recomputed,
    role_of,
    stage_entries,
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
    if head_apart:
        from .torch_fsdp import options_of

        own = options_of(options)
    else:
        own = replace(options, consumes_gradients=True)
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
    if not groups or ({*entries} <= {"mtp", "head"} and shape.overlap is None):
        groups = [["passthrough"], *groups]
    if job.head_apart:
        groups.append([LOSS])
    layer_shape, end_shape = module_shapes(shape)
    kinds = dict(zip(filter(is_layer, entries), layer_shapes(layer_shape, entries), strict=True))
    empty = {name for name, kind in kinds.items() if replaced.is_empty(kind)}
    _check_work(layer_shape, entries, empty)
    if layer_shape.offload:
        kinds = {name: layer_shape_in(layer_shape, name, keeping, at_once) for name in kinds}
    again = recomputed(job.recompute, entries)
    leaf = "embedding" in entries and leaves_input(job.options)
    passing = [empty.issuperset(group) for group in groups]
    """Groups whose output is their input; recomputed, they copy its gradient."""
    first = passing.index(False)
    last = max(at for at, group in enumerate(groups) if not passing[at] or group[0] in again)
    runs: list[tuple[Module, list[str]]] = []
    before: tuple[object, ...] = ()
    for at, group in enumerate(groups):
        keeps_input, drops_gradient = receives and at <= first, not (sends and at >= last)
        shapes = tuple([kinds[name] for name in group if name in kinds])
        like = shapes, keeps_input, drops_gradient, group[0] in again, leaf
        label = group[0] if len(group) == 1 else f"{group[0]}–{group[-1].removeprefix('layer.')}"
        if shapes and like == before:
            runs[-1][1].append(label)
            continue
        before, own = like, _placed(job.options, keeps_input, drops_gradient)
        if shapes:
            module = layers_module(shapes, own, recomputed=group[0] in again, requires_grad=not leaf)
            leaf = leaf and not module.first.backward
        elif group[0].startswith(DECODER):
            module = layers_module((t5.decoder_shape(layer_shape),), own)
        elif group[0] == "mtp":
            own_shape = layer_shape_in(layer_shape, "mtp", keeping, at_once)
            embedded = "embedding" in entries
            module = mtp_module(end_shape, own_shape, embedded, own, recomputed="mtp" in again)
        else:
            apart = job.head_apart and group[0] == HEAD
            every = shape.spec.mtp_layers > 0 and entries == ("head",)
            module = end_module("output_layer" if apart else group[0], end_shape, tied_here, own, every=every)
        if runs and runs[-1][0] is module:
            runs[-1][1].append(label)
        else:
            runs.append((module, [label]))
    spans = [Span(module, tuple(names)) for module, names in runs]
    saved = frozenset(id for span in spans for id in span.module.saved_shared)
    batch = ends_of(shape).batch(shape, role)
    released, ended = ends.batch_released(batch, saved), ends.batch_ends(batch, saved)
    edges = [Span(released, ("batch",)), Span(batch, ("batch",)), *spans, Span(ended, ("batch",))]
    return Chunk(tuple(edges), first_differs=bool(keeping) and not at_once)


def leaves_input(options: Options) -> bool:
    """The embedding's output requires no gradient."""
    return options.tuning is not None and not options.tuning.input_requires_grad


def _check_work(shape: CoreShape, entries: Sequence[str], empty: AbstractSet[str]) -> None:
    """A chunk has more than ``empty`` layers, or none: its output would be its input itself."""
    if entries and empty >= {*entries}:
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
    libraries: Libraries
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
        return replace(program, kept=replace(program.kept, workspaces=Stretch(holds)))


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
        *coverage.uncovered(shape),
        *mtp.uncovered(shape, recomputes_layers=plan.recompute.mode == "full"),
        *overlapped.uncovered(shape),
    ):
        raise plan.wrong("framework", f"has no recipe for {reason}")
    capability = GPUS[plan.hardware.gpu].compute_capability if plan.hardware.gpu is not None else None
    pool = graphs.POOL if plan.megatron.cuda_graphs == "full_iteration" else 0
    torch_fsdp = None
    if plan.megatron.torch_fsdp != "none":  # FSDP's own modules take a fortieth of a start
        from .torch_fsdp import torch_fsdp_of

        torch_fsdp = torch_fsdp_of(plan)
    seams = plan.megatron.fsdp != "none" or plan.megatron.offload_layers > 0
    own = replace(options, seams=seams, pool=pool, tuning=tuning_of(plan))
    return Stages(
        _job(shape, plan.recompute, own, torch_fsdp is not None),
        layout,
        plan.pipeline,
        plan.microbatches,
        rules(plan),
        Libraries(capability, cublas_workspaces(plan)),
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


@dataclass(frozen=True, eq=False)
class _Stage:
    """The chunks of one stage; one object for equal ones."""

    job: _Job
    chunks: tuple[Chunk, ...]
    names: tuple[str, ...]
    contents: Contents
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
        contents_of(job.shape, entries),
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
def _kept(stage: _Stage, states: Rules, tied: bool, libraries: Libraries) -> Kept:
    chunks = tuple(_parameters(chunk) for chunk in stage.chunks)
    return _kept_of(stage.contents, chunks, _of_adapters(stage.job, chunks), states, tied, libraries)


@lru_cache(maxsize=1 << 12)
def _kept_of(
    contents: Contents,
    chunks: tuple[KeptChunk, ...],
    trained: frozenset[Shape] | None,
    states: Rules,
    tied: bool,
    libraries: Libraries,
) -> Kept:
    workspaces = workspaces_of(contents, libraries, copies_of(chunks), trained)
    workspaces += clipping.factors(contents.shape, contents.depth, states)
    kept = with_fp32(keep(chunks, states, tied), chunks, states, tied)
    return with_static(kept, workspaces, contents)


def _program(
    stage: _Stage, order: Schedule, per_stage: int, states: Rules, tied: bool, libraries: Libraries
) -> Program:
    return _made(stage, stage.chunks, order, per_stage, states, _kept(stage, states, tied, libraries))


def _sharded(
    stage: _Stage, order: Schedule, per_stage: int, states: Rules, sharding: Sharding, libraries: Libraries
) -> Program:
    """With Megatron-FSDP's hooks around the modules of the one chunk."""
    (chunk,), dtype = stage.chunks, states.dtype
    buckets = buckets_of(chunk.spans, sharding)
    kept = keep_sharded(buckets, states, sharding, ahead(buckets, sharding, dtype))
    copies = copies_of((_parameters(chunk),))
    holds = [*workspaces_of(stage.contents, libraries, copies), *persistent(buckets, sharding, dtype)]
    kept = with_static(kept, holds, stage.contents)
    spans = with_hooks(chunk.spans, buckets, sharding, dtype)
    return _made(stage, (replace(chunk, spans=spans),), order, per_stage, states, kept)


def _torch_sharded(
    stage: _Stage, order: Schedule, per_stage: int, states: Rules, given: TorchFsdp, libraries: Libraries
) -> Program:
    """With FSDP2's hooks around the modules of the one chunk."""
    from . import torch_fsdp

    (chunk,) = stage.chunks
    hooked, units = torch_fsdp.with_hooks(chunk, given)
    workspaces = workspaces_of(stage.contents, libraries, ())
    kept = with_static(torch_fsdp.keep(units, states, given), workspaces, stage.contents)
    elements = sum(sum(unit.shard_elements(given.sharding.shards)) for unit in units)
    return replace(_made(stage, (hooked,), order, per_stage, states, kept), elements=elements)


def _held_in_evaluation(stage: _Stage) -> int:
    """Bytes that callers hold beside a forward pass without a graph, as in a first stage's allocations on an H200: what
    the micro-batch before sent (``output_tensor`` in ``schedules.py``), and the embedding's output while layers behind
    the first run (``decoder_input`` in ``GPTModel.forward``)."""
    held = stage.contents
    embedded = stage.hidden if "embedding" in held.others and held.depth > 1 else 0
    sent = max((sent for _, sent in stage.edges), default=stage.hidden)
    return embedded + (sent if "head" not in held.others else 0)


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


def _of_adapters(job: _Job, chunks: Sequence[KeptChunk]) -> frozenset[Shape] | None:
    """Shapes of the weights that are trained, where that are not all."""
    if job.options.tuning is None:
        return None
    return frozenset(one.shape for chunk in chunks for own, _ in chunk for one in own if one.trained)
