"""BigScience's Megatron-DeepSpeed: tensor-parallel layers under DeepSpeed's pipeline engine.

Layer list: ``megatron/model/gpt_model.py``, ``GPTModelPipe``. Engine:
``deepspeed/runtime/pipe/engine.py`` and ``schedule.py`` (v0.5.x). States: ``states``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from ...layers import megatron as ends
from ...layers.autograd import Recorder, Tensor
from ...layers.coverage import MEGATRON, check_covered
from ...layers.edges import pipe_ends, pipe_receive, pipe_send, with_waiting_gradient
from ...layers.megatron import ParallelShape, layer, softmax_is_fused
from ...layers.module import Interface, Module, Options, Recipe, Run, build, hold_bytes
from ...layers.recompute import recomputed_reentrant
from ...plan.plan import Loss, Plan, ResolvedPlan
from ...plan.spec import of_any_depth
from ...schedules.one_chunk import OneChunk, in_flight
from ...schedules.partition import Entry, partition
from ...tape.events import Category, Hold
from ...tape.program import SLOT, Chunk, Program, Span, module_elements
from ...values import replace
from .states import keep

EMBEDDING, LAYER, HEAD, NORM, LAMBDA = (
    "EmbeddingPipe",
    "ParallelTransformerLayerPipe",
    "EmbeddingPipe",
    "MixedFusedLayerNorm",
    "<lambda>",
)
"""Class and function names of the layer list, as ``type:`` matches them."""


CONVERSIONS = ("to_float16", "to_fp32")
"""Entries that only convert dtypes: no module of their own."""

PASSES_GRADIENT = ("transpose_in", "transpose_out")
"""Entries whose backward hands on the gradient's own storage."""


def padded_vocab(vocab: int, t: int, multiple: int = 128) -> int:
    """``_vocab_size_with_padding``: up to a multiple of ``make_vocab_size_divisible_by`` (128) times t."""
    return -(-vocab // (multiple * t)) * multiple * t


def parallel_shape(plan: Plan) -> ParallelShape:
    """Sizes of one micro-batch on one tensor-parallel rank."""
    spec, t = plan.model, plan.layout.tp
    b, s = plan.batch.mbs, plan.batch.seq
    assert s is not None
    return ParallelShape(
        of_any_depth(spec),
        b,
        s,
        t,
        plan.precision.dtype,
        padded_vocab(spec.vocab, t),
        selective=plan.recompute.mode == "selective",
        fused_softmax=plan.precision.dtype != "fp32" and softmax_is_fused(b, s, spec.heads // t),
    )


# -- modules ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def layer_module(shape: ParallelShape, group: int, options: Options) -> Module:
    """One layer (``group`` 0), or a group of layers under one recompute."""

    def recipe(r: Recorder, x: Tensor) -> Run:
        if not group:
            return Run(layer(r, x, shape))
        return Run(recomputed_reentrant(r, lambda r, hidden: _layers(r, hidden, shape, group), (x,)))

    return build("layer", recipe, Interface(shape.hidden, shape.dtype), options)


def _layers(r: Recorder, hidden: Tensor, shape: ParallelShape, count: int) -> Tensor:
    for i in range(count):
        r.prefix = f"{i}." if count > 1 else ""
        hidden = layer(r, hidden, shape)
    r.prefix = ""
    return hidden


@lru_cache(maxsize=1024)
def end_module(name: str, shape: ParallelShape, loss: Loss, tied_here: bool, options: Options) -> Module:
    """An entry of the layer list that is no transformer layer."""
    b, s, h = shape.b, shape.s, shape.spec.hidden
    outer, inner = (b, s, h), (s, b, h)

    def head(r: Recorder, x: Tensor) -> Run:
        if shape.spec.positions == "learned" and not tied_here:
            r.parameter("position.weight", (shape.spec.positions_max, h), shape.dtype)
        if loss.kind == "adaptive-softmax":
            assert loss.cutoffs is not None
            return Run(None, loss=ends.adaptive_head(r, x, shape, loss.cutoffs, loss.div_value))
        computed, logits = ends.head(r, x, shape)
        return Run(None, slot=logits, loss=computed)

    recipes: dict[str, tuple[Recipe, tuple[int, int, int] | None]] = {
        "embedding": (lambda r, x: Run(ends.embedding(r, shape)), None),
        "transpose_in": (lambda r, x: Run(ends.transposed(r, x, inner)), outer),
        "transpose_out": (lambda r, x: Run(ends.transposed(r, x, outer)), inner),
        "final_norm": (lambda r, x: Run(ends.final_norm(r, x)), outer),
        "head": (head, outer),
    }
    recipe, shape_in = recipes[name]
    present = frozenset({"word.weight"}) if name == "embedding" and tied_here else frozenset()
    return build(name, recipe, Interface(shape_in, shape.dtype), options, present)


# -- layer list and stages --------------------------------------------------------------------------


def layer_list(plan: Plan, shape: ParallelShape) -> list[Entry]:
    """``GPTModelPipe.specs`` with the parameters of each entry on one tensor-parallel rank."""
    options = Options()
    word = shape.vocab // shape.t * shape.spec.hidden
    embedding = module_elements(end_module("embedding", shape, Loss(kind="vocab-parallel"), False, options))
    one = module_elements(layer_module(shape, 0, options))
    positions = embedding if plan.loss.kind != "adaptive-softmax" else embedding - word + _head_elements(plan, shape)
    return [
        Entry("_to_float16", "to_float16", 0),
        Entry(EMBEDDING, "embedding", embedding),
        Entry(LAMBDA, "transpose_in", 0),
        *(Entry(LAYER, f"layer.{i}", one) for i in range(plan.model.layers)),
        Entry(LAMBDA, "transpose_out", 0),
        Entry(NORM, "final_norm", 2 * shape.spec.hidden),
        Entry(HEAD, "head", positions),
        Entry("float16_to_fp32", "to_fp32", 0),
    ]


def _head_elements(plan: Plan, shape: ParallelShape) -> int:
    return module_elements(end_module("head", shape, plan.loss, False, Options()))


def stage_bounds(plan: Plan, shape: ParallelShape) -> tuple[list[Entry], list[int]]:
    """The layer list, and where each stage of it begins."""
    entries = layer_list(plan, shape)
    bounds = partition(plan.pipeline.partition, entries, plan.layout.pp)
    head = len(entries) - 2
    if head + 1 in bounds[1:-1]:
        raise plan.wrong(
            "pipeline.partition", f"cuts between entries {head} (head) and {head + 1} (float16_to_fp32): not modelled"
        )
    for stage, (low, high) in enumerate(pairwise(bounds)):
        if not any(has_module(entry.name) for entry in entries[low:high]):
            held = f"with {' and '.join(entry.name for entry in entries[low:high])} alone" if low < high else "empty"
            raise plan.wrong(
                "pipeline.partition",
                f"leaves stage {stage} {held}: {len(entries)} entries over {plan.layout.pp} stages",
            )
    return entries, bounds


def has_module(name: str) -> bool:
    """Whether an entry computes something; a stage of others alone has nothing to train, and is not modelled."""
    return name not in CONVERSIONS and name not in PASSES_GRADIENT


def check(plan: ResolvedPlan) -> None:
    """Refuses what BigScience's fork of 2021 could not run, or these recipes do not cover."""
    check_covered(plan.model, MEGATRON, plan.framework)
    plan.refuse(
        ("attention", plan.attention != "eager", "must be eager: Megatron-DeepSpeed of 2021 had no flash attention"),
        (
            "loss.kind",
            plan.loss.kind == "plain" and plan.layout.tp > 1,
            f"must be vocab-parallel with tp = {plan.layout.tp}: logits are sharded",
        ),
        (
            "optimizer.embeddings_32bit",
            plan.optimizer.algorithm.eight_bit and plan.layout.zero == 1 and plan.optimizer.embeddings_32bit,
            "must be false with ZeRO-1: states are flat tensors, which cannot treat embeddings separately",
        ),
    )


def programs(plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
    """One program per pipeline stage."""
    check(plan)
    shape = parallel_shape(plan)
    entries, bounds = stage_bounds(plan, shape)
    stages = plan.layout.pp
    return tuple(
        stage_program(plan, shape, stage, entries[bounds[stage] : bounds[stage + 1]], stages, options)
        for stage in range(stages)
    )


def stage_program(
    plan: ResolvedPlan, shape: ParallelShape, stage: int, entries: Sequence[Entry], stages: int, options: Options
) -> Program:
    """What ``stage`` does with ``entries`` of the layer list."""
    spans = _spans(plan, shape, entries, stage, stages, options)
    tensors = tuple(p for span in spans for _ in span.names for p in span.module.parameters)
    kept = keep(plan, tensors)
    layout, microbatches = plan.layout, plan.microbatches
    per_stage = layout.tp * layout.dp
    flight = in_flight(plan.pipeline.schedule, stage, stages, microbatches)
    order = OneChunk((Chunk(spans),), microbatches, flight, moves_gradients=kept.moves_gradients)
    return Program(
        stage=stage,
        ranks=tuple(range(stage * per_stage, (stage + 1) * per_stage)),
        entries=tuple(entry.name for entry in entries),
        order=order,
        states=kept.states,
        extra=(*kept.flat, *_engine_buffers(plan, shape, entries, stage, stages, microbatches)),
        step=kept.step,
        late_step=kept.late_step,
        initialisation=kept.initialisation,
        building=kept.building,
        before=kept.before,
        made=kept.made,
        gradients_kept=kept.gradients_kept,
    )


def _spans(
    plan: ResolvedPlan, shape: ParallelShape, entries: Sequence[Entry], stage: int, stages: int, options: Options
) -> tuple[Span, ...]:
    """The stage's modules with the pipeline's edges around them."""
    first, last = stage == 0, stage == stages - 1
    kinds = [entry.name for entry in entries if entry.name not in CONVERSIONS]
    names = {entry.name for entry in entries}
    tied_here = plan.loss.kind != "adaptive-softmax" and {"embedding", "head"} <= names
    spans: list[Span] = []
    groups = _grouped(plan, kinds)
    for at, group in enumerate(groups):
        kept = not last and all(later[0] in PASSES_GRADIENT for later in groups[at + 1 :])
        role = replace(options, drops_gradient=not kept)
        if group[0].startswith("layer."):
            recompute = _recomputes(plan, group, kinds)
            module = layer_module(shape, len(group) if recompute else 0, role)
        else:
            module = end_module(group[0], shape, plan.loss, tied_here, role)
        label = group[0] if len(group) == 1 else f"{group[0]}–{group[-1].removeprefix('layer.')}"
        if spans and spans[-1].module is module:
            spans[-1] = Span(module, (*spans[-1].names, label))
        else:
            spans.append(Span(module, (label,)))
    if tied_here:
        at = next(at for at, span in enumerate(spans) if span.names == ("head",))
        embedding, head = with_waiting_gradient(spans[0].module, spans[at].module)
        spans[0], spans[at] = replace(spans[0], module=embedding), replace(spans[at], module=head)
    arriving = _hidden_shape(shape, kinds[0] in ("transpose_in", "final_norm", "head"))
    leaving = _hidden_shape(shape, kinds[-1] in ("embedding", "transpose_out", "final_norm"))
    if not last:
        spans.insert(0, Span(pipe_ends(leaving, shape.dtype, shape.t), ("ends",)))
        spans.append(Span(pipe_send(leaving, shape.dtype, shape.t), ("send",)))
    if not first:
        spans.insert(0 if last else 1, Span(pipe_receive(arriving, shape.dtype, shape.t), ("receive",)))
    return tuple(spans)


def _hidden_shape(shape: ParallelShape, batch_first: bool) -> tuple[int, int, int]:
    s, b, h = shape.hidden
    return (b, s, h) if batch_first else (s, b, h)


def _grouped(plan: ResolvedPlan, kinds: Sequence[str]) -> list[list[str]]:
    """Layers that are recomputed together, everything else alone.

    ``PipelineModule.forward`` cuts a stage's functions into chunks of ``activation_checkpoint_interval``
    from its beginning; only a chunk of transformer layers alone is recomputed.
    """
    size = plan.recompute.layers if plan.recompute.mode == "full" and plan.recompute.method == "uniform" else 1
    groups: list[list[str]] = []
    for start in range(0, len(kinds), size or 1):
        chunk = list(kinds[start : start + (size or 1)])
        if all(kind.startswith("layer.") for kind in chunk):
            groups.append(chunk)
        else:
            groups += [[kind] for kind in chunk]
    return groups


def _recomputes(plan: ResolvedPlan, group: Sequence[str], kinds: Sequence[str]) -> bool:
    """Whether a group of layers is recomputed whole."""
    recompute = plan.recompute
    if recompute.mode != "full":
        return False
    if recompute.method == "block":
        layers = [kind for kind in kinds if kind.startswith("layer.")]
        return layers.index(group[0]) < (recompute.layers or len(layers))
    size = recompute.layers or 1
    at = kinds.index(group[0])
    chunk = kinds[at // size * size : at // size * size + size]
    return all(kind.startswith("layer.") for kind in chunk)


def _engine_buffers(
    plan: ResolvedPlan, shape: ParallelShape, entries: Sequence[Entry], stage: int, stages: int, microbatches: int
) -> list[Hold]:
    """What model and engine keep besides parameters: masks, slots of batches, pipe buffers, old logits."""
    b, s, t, dtype = shape.b, shape.s, shape.t, shape.dtype
    names = [entry.name for entry in entries]
    part = hold_bytes((b * s * shape.spec.hidden // t,), dtype)
    buffers, inputs, communication = Category.BUFFERS, Category.INPUTS, Category.COMMUNICATION_BUFFERS
    holds = [Hold(0, hold_bytes((s, s), "bool"), buffers, "attention_mask", (1, 1, s, s), "bool")]
    if shape.spec.positions == "alibi":
        n = b * shape.spec.heads // t
        layers = sum(name.startswith("layer.") for name in names)
        holds += [Hold(0, hold_bytes((n, 1, s), dtype), buffers, "alibi", (n, 1, s), dtype)] * layers
    if stage > 0:
        holds.append(Hold(0, part, communication, "pipe_recv_buf", (), dtype))
    if stage < stages - 1:
        holds.append(Hold(0, part, communication, "grad_layer", (), dtype))
    slots = max(2, min(stages - stage + 1, microbatches))
    if stage == 0:
        for name, size in (("tokens", "int64"), ("position_ids", "int64")):
            holds += [Hold(0, hold_bytes((b, s), size), inputs, name, (b, s), size)] * slots
        holds += [Hold(0, hold_bytes((s, s), "bool"), inputs, "attention_mask_of_slot", (1, 1, s, s), "bool")] * slots
    if stage == stages - 1:
        for name, size in (("labels", "int64"), ("loss_mask", "fp32")):
            holds += [Hold(0, hold_bytes((b, s), size), inputs, name, (b, s), size)] * slots
        if plan.loss.kind != "adaptive-softmax":
            v = shape.vocab // t
            stale = Hold(0, hold_bytes((b, s, v), "fp32"), Category.LOGITS, SLOT, (b, s, v), "fp32")
            holds += [stale] * 2
    return holds
