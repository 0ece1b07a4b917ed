"""torchtitan's models cut into pipeline stages: what every rank of a pipeline runs under ``fully_shard``.

``torchtitan/parallelisms/pipeline_llama.py`` and ``train.py`` of December 2024 (commit 9dec370); with
``fsdp.ends_apart`` ``torchtitan/distributed/pipeline_parallel.py`` of later releases. All ranks copy tokens and
labels of the whole batch to the device; the schedule splits them into views. A stage's optimizer is one of its own.

Hooks run over all micro-batches of an iteration. ``stage.py`` of torch 2.13: every backward runs without gradient sync
and without resharding (``backward_maybe_with_nosync``), so a unit's gradients stay whole, in the reduction's dtype, and
so do its parameters where ``reshard_after_forward`` is false, as torchtitan has it. Behind the last backward
``perform_reduce_grad`` runs every unit's post-backward in the order of ``named_modules()``. The interleaved
schedule gathers all units of a stage at once, ahead of its first pass (``FSDPModule.unshard(async_op=True)``, on the
default stream), and waits for them when it comes.

With a loss in chunks (``chunked.py``) the last stage's forward ends with the norm, and head and chunks are the
schedule's loss. It reduces the head's gradient with every micro-batch, and the input of that waits for the next one's:
no backward is a last one (``set_is_last_backward``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from ...layers.fused_losses import CHUNKS
from ...layers.module import Module, Options, Parameter, Tapes, hold_bytes
from ...plan.framework_sections import Fsdp
from ...plan.plan import Pipeline, Plan, ResolvedPlan
from ...schedules.partition import of_entries, split_points, weighted
from ...schedules.torch_schedules import Pipelined, Place, folded, rounds, shortened
from ...tape.events import GRAD_OUTPUT, Category, Drop, Event, Hold, Stretch, Tape, insert, renamed
from ...tape.program import Chunk, Hooked, Program, Span, What, named_hold
from ...values import dataclass, replace
from ..plain import programs as plain
from . import chunked
from .hooks import Explicit, Gradient, Role
from .modules import compact_ids, hooked, owned, with_parameters, with_seams
from .passing import pass_through
from .titan_experts import groups_of, places, with_experts, with_groups
from .torchtitan import ActivationCheckpointing, Checkpointing, Recipes, check, recipes
from .units import Cut as CutOfExperts, Sharding, Unit, shard, sharded_states, sharded_step


@dataclass(frozen=True, slots=True)
class Cut:
    """A stage of the whole model, its layers from ``low`` up to ``high``."""

    low: int
    high: int
    first: bool
    last: bool


def check_pipeline(plan: ResolvedPlan, given: Fsdp) -> None:
    """Refuses what a pipeline has no model for."""
    layout, pipeline, count = plan.layout, plan.pipeline, plan.microbatches
    plan.refuse(
        (
            "layout.pp",
            given.code != "torchtitan",
            "must be 1 with transformers' models; only torchtitan's (fsdp.code: torchtitan) are split into stages",
        ),
        (
            "pipeline.schedule",
            layout.vpp > 1 and pipeline.schedule != "1f1b",
            "must be 1f1b with vpp > 1 (Interleaved1F1B): looped BFS is not modelled",
        ),
        (
            "fsdp.reshard_after_forward",
            given.reshard_after_forward,
            "must be false with pipeline parallelism: torchtitan's policy 'always' is not modelled there",
        ),
        (
            "fsdp.gradient_sync",
            not given.gradient_sync,
            "must be true with pipeline parallelism: the schedule itself reduces gradients once",
        ),
        (
            "fsdp.replicas",
            plan.loss.kind == "chunked" and given.replicas > 1,
            "must be 1 with loss.kind chunked in stages: no other is modelled",
        ),
        (
            "pipeline.schedule",
            plan.loss.kind == "chunked" and pipeline.schedule != "1f1b",
            "must be 1f1b with loss.kind chunked: no other is modelled with it (--loss plain takes the logits whole)",
        ),
        (
            "fsdp.offload",
            given.offload,
            "must be false with pipeline parallelism: offload in a pipeline is not modelled",
        ),
        (
            "batch.gbs",
            count > MOST_MICROBATCHES,
            f"gives {count:,} micro-batches of each rank; a pipeline, which has buffers for each, has at most "
            f"{MOST_MICROBATCHES:,}",
        ),
        (
            "batch.gbs",
            layout.vpp == 1 and pipeline.schedule == "1f1b" and count < layout.pp,
            f"gives {count} micro-batches; 1f1b needs at least as many as the {layout.pp} stages",
        ),
        (
            "batch.gbs",
            layout.vpp > 1 and count % rounds(layout.pp, count),
            f"gives {count} micro-batches, which must be a multiple of the {rounds(layout.pp, count)} rounds",
        ),
    )


MOST_MICROBATCHES = 16_384
"""In an iteration of a pipeline."""


def check_no_pipeline(plan: ResolvedPlan, given: Fsdp) -> None:
    """Refuses what belongs to a pipeline where there is none."""
    if plan.layout.vpp > 1:
        raise plan.wrong("layout.vpp", "must be 1 with pp 1: there is nothing to interleave")
    problem = "needs pipeline parallelism (pp > 1)"
    if given.return_outputs:
        raise plan.wrong("fsdp.return_outputs", problem)
    for name, default in Pipeline():
        if getattr(plan.pipeline, name) != default:
            raise plan.wrong(f"pipeline.{name}", problem)


def partition(plan: Plan) -> list[int]:
    """First layer of every stage, and the number of layers."""
    layers, stages, chosen = plan.model.layers, plan.layout.pp * plan.layout.vpp, plan.pipeline.partition
    if not isinstance(chosen, str):
        return of_entries([int(edge) for edge in chosen], layers, stages)
    most = layers + 2 * plan.fsdp.ends_apart
    if stages > most:
        name = "vpp" if plan.layout.vpp > 1 else "pp"
        counted = f"the {layers} layers" + (", embedding and head" if plan.fsdp.ends_apart else "")
        raise plan.wrong(f"layout.{name}", f"makes {stages} stages, which must be at most {most}: {counted}")
    if chosen != Pipeline.model_fields["partition"].default:
        raise plan.wrong(
            "pipeline.partition",
            "must be left out (torchtitan's own split), or list each stage's first entry and the number of entries",
        )
    return weighted(layers, stages) if plan.fsdp.ends_apart else split_points(layers, stages)


def stage_programs(
    plan: ResolvedPlan, options: Options, recompute: ActivationCheckpointing, sharding: Sharding
) -> tuple[Program, ...]:
    """What each rank of a pipeline runs."""
    check_pipeline(plan, plan.fsdp)
    check(plan)
    options = with_seams(options)
    pp, chunks, edges = plan.layout.pp, plan.layout.vpp, partition(plan)
    return tuple(_rank(plan, options, recompute, sharding, Place(rank, pp, chunks), edges) for rank in range(pp))


def _rank(
    plan: ResolvedPlan,
    options: Options,
    recompute: ActivationCheckpointing,
    sharding: Sharding,
    place: Place,
    edges: Sequence[int],
) -> Program:
    made, count = recipes(plan), plan.microbatches
    numbers = [place.stage(chunk) for chunk in range(place.chunks)]
    cuts = [Cut(edges[at], edges[at + 1], not at, at == place.stages - 1) for at in numbers]
    parts: list[Chunk] = []
    before = 0
    """Layers in the rank's parts so far, which recompute of every n-th counts."""
    for cut in cuts:
        modes = tuple(recompute.of(before + at) for at in range(cut.high - cut.low))
        before += cut.high - cut.low
        parts.append(_part(made, options, modes, cut, sharding, plan.fsdp.ends_apart, place.chunks > 1))
    spans = tuple(span for one in parts for span in (*one.spans, *one.losses))
    low = [made.beside(part.spans, cut.low, head=cut.last) for part, cut in zip(parts, cuts, strict=True)]
    tensors = [[one for span in (*part.spans, *part.losses) for one in span.module.parameters] for part in parts]
    order = _order(tuple(parts), place, plan, made)
    ranks = sharding.shards * sharding.replicas * sharding.tensor
    return Program(
        stage=place.rank,
        ranks=tuple(range(place.rank * ranks, (place.rank + 1) * ranks)),
        entries=tuple(name for span in spans for name in span.names),
        order=order,
        states=sharded_states(plan.optimizer, sharding),
        extra=(*_kept(made, cuts, count), *(one for own in low for one in own)),
        step=_steps(tensors, plan, sharding),
        late_states=True,
        elements=sum(shard(one, *sharding.cut(one)).elements for own in tensors for one in own),
    )


def _order(parts: tuple[Chunk, ...], place: Place, plan: ResolvedPlan, made: Recipes) -> Pipelined:
    count, name, outputs = plan.microbatches, plan.pipeline.schedule, plan.fsdp.return_outputs
    actions = folded(place, count, name, outputs), shortened(place, count, name, outputs)
    if not outputs or place.rank < place.ranks - 1:
        return Pipelined(parts, count, *actions)
    b, *rest = made.logits
    merged, dtype = (count * b, *rest), made.shape.dtype
    held = Hold(0, hold_bytes(merged, dtype), Category.LOGITS, "merged_logits", merged, dtype)
    return Pipelined(parts, count, *actions, held, count)


@lru_cache(maxsize=256)
def _part(
    made: Recipes,
    options: Options,
    modes: tuple[Checkpointing, ...],
    cut: Cut,
    sharding: Sharding,
    ends_apart: bool,
    ahead: bool,
) -> Chunk:
    """The modules of one stage. What it receives lies in the stage's buffers, and does not end with a pass."""
    names = plain.layer_names(cut.high)[cut.low :]
    received, returned = replace(options, keeps_input=True), replace(options, drops_gradient=False)

    def chosen(at: int) -> Options:
        own = received if not cut.first and not at else options
        return replace(own, drops_gradient=False) if not cut.last and at == len(names) - 1 else own

    blocks = made.blocks(modes, [chosen(at) for at in range(len(modes))], cut.low)
    spans: list[Span] = []
    loss = None
    if cut.first:
        embedding, *_ = made.ends(options if names or cut.last else returned)
        embedding, *blocks = made.behind(embedding, blocks)
        spans = [Span(embedding, ("embedding",))]
    spans += [Span(block, (name,)) for block, name in zip(blocks, names, strict=True)]
    if cut.last:
        _, norm, head, _ = made.ends(options)
        outside = replace(received, seams=made.chunks is not None, holds_input=False)
        *_, of_chunks, loss = made.ends(outside)  # outside of what is sharded, but for the head of chunks
        if not names:
            _, norm, *_ = made.ends(received)
        spans += [Span(norm, ("final_norm",)), Span(head if made.chunks is None else of_chunks, ("head",))]
    units = stage_units(names, first=cut.first, last=cut.last, ends_apart=ends_apart)
    if sharding.experts is not None:
        units = units_with_experts(units, made, cut, sharding.experts)
    own = with_parameters(spans, units, made.titan.registered)
    if cut.last and made.chunks is not None:
        return part_of(tuple(spans), None, chunked.apart(own, with_norm=True), sharding, ahead)
    return part_of(tuple(spans), loss, own, sharding, ahead)


def units_with_experts(units: Sequence[Unit], made: Recipes, cut: Cut, pieces: CutOfExperts) -> list[Unit]:
    """``units`` of a stage, each layer's experts in one of their own, and what they gather ahead."""
    blocks = [one for one in units if one.name not in ("embedding", "ends")]
    mixed = [made.shape.spec.has_experts(layer) for layer in range(cut.low, cut.high)]
    first, last = ("embedding",) * cut.first, ("ends",) * cut.last
    if made.titan.groups_experts:
        inner = with_groups(blocks, mixed, pieces, first=first, last=last)
        ahead, behind = (groups_of(inner, at) if inner else () for at in (0, -1))
    else:
        inner = with_experts(blocks, mixed, pieces, first=first, last=last)
        ahead, behind = (tuple(one.name for one in blocks[at]) for at in (slice(1), slice(-1, None)))
    opening = [replace(one, next_forward=ahead) for one in units if one.name == "embedding"]
    closing = [replace(one, next_backward=behind) for one in units if one.name == "ends"]
    return [*opening, *inner, *closing]


def _kept(made: Recipes, cuts: Sequence[Cut], count: int) -> list[Hold]:
    """Tokens, labels and what else a batch has of ``count`` micro-batches, and of every stage its model's buffers and
    those for what it receives."""
    shape, hidden = made.shape, made.hidden
    batch = (count * shape.b, shape.s)
    size = hold_bytes(batch, "int64")
    result = [Hold(0, size, Category.INPUTS, name, batch, "int64") for name in ("input_ids", "labels")]
    result += made.titan.given(shape) * count
    if shape.context > 1:  # what was read, of which these are this rank's part
        whole = (count * shape.b, shape.s * shape.context)
        size = hold_bytes(whole, "int64")
        result += [Hold(0, size, Category.INPUTS, name, whole, "int64") for name in ("input_ids", "labels")]
    size = hold_bytes(hidden, shape.dtype)
    for cut in cuts:
        layers = range(cut.low, cut.high)
        result += [*made.titan.buffers(shape.spec, shape.s * shape.context, layers), *places(shape, made.titan, layers)]
        names = ["received_input"] * (not cut.first) + ["received_gradient"] * (not cut.last)
        kind = Category.COMMUNICATION_BUFFERS
        result += [Hold(0, size, kind, name, hidden, shape.dtype) for name in names for _ in range(count)]
    return result


def _steps(tensors: Sequence[Sequence[Parameter]], plan: ResolvedPlan, sharding: Sharding) -> Stretch:
    """Each stage's optimizer in turn."""
    events: list[Event] = []
    for own in tensors:
        events += sharded_step(tuple(own), plan.optimizer, sharding)
    return Stretch(events)


# -- hooks ------------------------------------------------------------------------------------------


class _Stage(Explicit):
    """One stage's hooks from the first micro-batch to the reduction."""

    def reshard(self, at: int, *, forward: bool) -> None:
        if forward or self.role.reduces:
            super().reshard(at, forward=forward)

    def next_microbatch(self) -> None:
        self.role = Role.KEPT
        for state in self.states:
            state.ran = False

    def reduce(self, at: int) -> None:
        """``post_backward`` of the gradients that were kept."""
        self.role = Role.FIRST
        self.post_backward(at)

    def keep(self) -> None:
        """From now on ``gradients`` are those that micro-batches have accumulated."""
        if self.sharding.reduce != self.sharding.compute:
            self.gradients = [[self._copied(one) for one in own] for own in self.gradients]

    def _copied(self, one: Gradient) -> Gradient:
        return replace(one, end=self._kept(one)[1])


class _ChunkedStage(chunked.ChunkedHooks, _Stage):
    """The last stage's, whose head is gathered by the loss.

    From the second micro-batch on its reduction has the gradient of the norm from the one before, too: the norm's
    sharded gradient is then a part of that reduction's output, which is larger than the head's, and stays. It is held
    from the first micro-batch on here, and the norm's whole gradient to the end: an upper bound by the head's shard in
    an iteration of two micro-batches, and by the norm's gradient in others.
    """

    @property
    def adds(self) -> bool:
        return self.role is Role.KEPT

    def post_forward(self, at: int) -> None:
        super().post_forward(at)
        if at == self.chunks and not self.adds:
            reduced = self.units[at].reduced(self.sharding.shards)
            self.closing += (self._named(reduced, self.sharding.trained, self.id("gradient", self.ends)),)

    def reduce(self, at: int) -> None:
        if at == self.ends:
            self.role = Role.STEADY
            self.post_backward(at)
        elif at < self.chunks:
            super().reduce(at)

    def finalise(self) -> None:
        waiting = [] if self.role.reduces else self.reducing
        self.reducing = [one for one in self.reducing if one not in waiting]
        super().finalise()
        self.reducing = waiting


@lru_cache(maxsize=256)
def part_of(
    spans: tuple[Span, ...], loss: Module | None, units: tuple[Unit, ...], sharding: Sharding, ahead: bool
) -> Chunk:
    """A stage of ``spans``, whose parameters the schedule gathers ``ahead`` or its first forward does. The head of a
    loss in chunks is the last span, and that loss."""
    own = owned(spans, units, sharding)
    count = len(own.modules)
    in_chunks = units[-1].name == CHUNKS
    hooks = (_ChunkedStage if in_chunks else _Stage)(units, sharding, own.gradients, Role.KEPT_FIRST)
    outside: dict[What, list[tuple[int, Tape]]] = {}

    def each(what: What) -> list[tuple[int, Tape]]:
        """What the hooks of every unit do, by place."""
        do: dict[What, Callable[[int], None]] = {
            "unshard": hooks.gather,
            "wait": hooks.wait,
            "reshard": hooks.free,
            "reduce": hooks.reduce,
        }
        found = []
        for at, unit in enumerate(units[:-1] if in_chunks else units):
            do[what](at)
            found.append((unit.first, hooks.take()))
        return found

    if ahead:
        outside = {"unshard": each("unshard"), "wait": each("wait"), "reshard": each("reshard")}
        each("unshard")
        each("wait")
    end = count - 1 - in_chunks
    opening = pass_through(hooks, count, end)
    hooks.next_microbatch()
    later = pass_through(hooks, count, end)
    hooks.keep()
    outside["reduce"] = each("reduce")
    hooks.finalise()
    outside["reduce"].append((0, hooks.take()))

    adds = False, sharding.reduce == sharding.compute
    result: list[Span] = []
    ids: list[dict[int, int]] = []
    for place, (module, name) in enumerate(own.modules):
        arounds = opening[place], later[place]
        result.append(Span(hooked(module, own.renamed[place], arounds, adds), (name,)))
        besides = tuple(event for found in outside.values() for at, events in found for event in events if at == place)
        ids.append(dict(compact_ids(module, own.renamed[place], arounds, besides)))
    segments = {
        what: [Hooked(at, own.modules[at][1], renamed(events, ids[at])) for at, events in found]
        for what, found in outside.items()
    }
    losses: tuple[Span, ...] = ()
    if in_chunks:
        *before, norm, head = result
        result = [*before, Span(_given(norm.module, Category.ACTIVATIONS), norm.names)]
        losses = (Span(_kept_loss(_named_loss(head.module)), head.names),)
    elif loss is not None:
        losses = (Span(_kept_loss(loss), ("loss",)),)
        *before, head = result
        result = [*before, Span(_given(head.module, Category.LOGITS), head.names)]
    return Chunk(tuple(result), losses, {what: tuple(found) for what, found in segments.items()})


@lru_cache(maxsize=64)
def _named_loss(module: Module) -> Module:
    """The loss in chunks, whose last sum is what the schedule knows as the loss."""

    def named(tapes: Tapes) -> Tapes:
        last = [event.tensor for event in tapes.forward if isinstance(event, Hold) and event.name == "total_loss"][-1]
        forward = Stretch(
            event._replace(name="loss" if event.tensor == last else "loss_of_chunk")
            if isinstance(event, Hold) and (event.name == "loss" or event.tensor == last)
            else event
            for event in tapes.forward
        )
        return replace(tapes, forward=forward)

    return replace(module, first=named(module.first), steady=named(module.steady))


@lru_cache(maxsize=64)
def _kept_loss(module: Module) -> Module:
    """The loss, which the schedule keeps (``_internal_losses``), and its gradient, which ``torch.autograd.backward``
    does (``_make_grads``)."""
    tapes = module.first
    ids = {named_hold(tapes.forward, "loss").tensor, named_hold(tapes.backward, "grad_loss").tensor}

    return module.changed(backward=lambda tape: insert(tape, lambda seam: (seam,), ids))


@lru_cache(maxsize=64)
def _given(head: Module, category: Category) -> Module:
    """The last module, whose output's gradient the loss has held as ``category``."""

    def given(tape: Tape) -> Tape:
        return tuple(
            event._replace(category=category) if isinstance(event, Drop) and event.tensor == GRAD_OUTPUT else event
            for event in tape
        )

    return head.changed(backward=given)


def stage_units(names: Sequence[str], *, first: bool, last: bool, ends_apart: bool) -> list[Unit]:
    """What ``fully_shard`` manages together in one stage whose layers are ``names`` (``apply_fsdp``,
    ``apply_fsdp_to_decoder``): nothing is resharded after forward. Modules: embedding, layers, norm, head."""
    begin = int(first)
    units = [Unit(name, (), at, at, False) for at, name in enumerate(names, begin)]
    end = begin + len(names) + (2 if last else 0) - 1
    if not ends_apart:
        return [Unit("model", (), 0, end, False, not first), *units] if first or last else units
    embedding = [Unit("embedding", (), 0, 0, False, False)] if first else []
    return [*embedding, *units, *([Unit("ends", (), end - 1, end, False)] if last else [])]
