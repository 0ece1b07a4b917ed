"""torchtitan's Llama cut into pipeline stages: what every rank of a pipeline runs under ``fully_shard``.

``torchtitan/parallelisms/pipeline_llama.py`` and ``train.py`` of December 2024 (commit 9dec370); with
``fsdp.ends_apart`` ``torchtitan/distributed/pipeline_parallel.py`` of later releases. All ranks copy tokens and
labels of the whole batch to the device; the schedule splits them into views. A stage's optimizer is one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..layers.module import Options, Parameter, hold_bytes
from ..pipeline.torch_schedules import Place, rounds, schedule, shortened
from ..pipeline.torchtitan_partition import of_entries, split_points, weighted
from ..plan.errors import PlanError
from ..plan.framework_sections import Fsdp
from ..plan.plan import Pipeline, Plan
from ..program import Program, Span
from ..tape import Category, Event, Hold, Stretch
from ..timeline import Part, Timeline
from . import plain
from .fsdp import sharded_states, sharded_step, with_parameters
from .fsdp_pipeline import part, stage_units
from .fsdp_torchtitan import ActivationCheckpointing, Checkpointing, Recipes, check, recipes
from .fsdp_units import Sharding, shard


@dataclass(frozen=True, slots=True)
class Cut:
    """A stage of the whole model, its layers from ``low`` up to ``high``."""

    low: int
    high: int
    first: bool
    last: bool


def check_pipeline(plan: Plan, given: Fsdp) -> None:
    """Refuses what a pipeline has no model for."""
    layout, pipeline, count = plan.layout, plan.pipeline, microbatches(plan)
    if given.code != "torchtitan":
        problem = "must be 1 with transformers' models; torchtitan's (fsdp.code: torchtitan) is cut into stages"
        raise PlanError("layout.pp", layout.pp, problem)
    if layout.vpp > 1 and pipeline.schedule != "1f1b":
        problem = "must be 1f1b with vpp > 1 (Interleaved1F1B): looped BFS is not modelled"
        raise PlanError("pipeline.schedule", pipeline.schedule, problem)
    if given.reshard_after_forward:
        problem = "must be false with pipeline parallelism: torchtitan's policy 'always' is not modelled there"
        raise PlanError("fsdp.reshard_after_forward", True, problem)
    if not given.gradient_sync:
        problem = "must be true with pipeline parallelism: a schedule reduces once by itself"
        raise PlanError("fsdp.gradient_sync", False, problem)
    if given.offload:
        raise PlanError("fsdp.offload", True, "must be false with pipeline parallelism: together they are not modelled")
    if layout.vpp == 1 and pipeline.schedule == "1f1b" and count < layout.pp:
        problem = f"gives {count} micro-batches; 1f1b needs at least as many as the {layout.pp} stages"
        raise PlanError("batch.gbs", plan.batch.gbs, problem)
    if layout.vpp > 1 and count % rounds(layout.pp, count):
        problem = f"gives {count} micro-batches, which must be a multiple of the {rounds(layout.pp, count)} rounds"
        raise PlanError("batch.gbs", plan.batch.gbs, problem)


def check_no_pipeline(plan: Plan, given: Fsdp) -> None:
    """Refuses what belongs to a pipeline where there is none."""
    if plan.layout.vpp > 1:
        raise PlanError("layout.vpp", plan.layout.vpp, "must be 1 with pp 1: there is nothing to interleave")
    problem = "belongs to pipeline parallelism (pp > 1)"
    if given.return_outputs:
        raise PlanError("fsdp.return_outputs", True, problem)
    for name, default in Pipeline():
        value = getattr(plan.pipeline, name)
        if value != default:
            raise PlanError(f"pipeline.{name}", value, problem)


def microbatches(plan: Plan) -> int:
    batch, dp = plan.batch, plan.layout.dp
    assert batch.gbs is not None
    assert dp is not None
    return batch.gbs // (batch.mbs * dp)


def partition(plan: Plan) -> list[int]:
    """First layer of every stage, and the number of layers."""
    layers, stages, chosen = plan.model.layers, plan.layout.pp * plan.layout.vpp, plan.pipeline.partition
    if not isinstance(chosen, str):
        return of_entries([int(edge) for edge in chosen], layers, stages)
    most = layers + 2 * plan.fsdp.ends_apart
    if stages > most:
        name = "vpp" if plan.layout.vpp > 1 else "pp"
        counted = f"the {layers} layers" + (", embedding and head" if plan.fsdp.ends_apart else "")
        problem = f"makes {stages} stages, which must be at most {most}: {counted}"
        raise PlanError(f"layout.{name}", getattr(plan.layout, name), problem)
    if chosen != Pipeline.model_fields["partition"].default:
        problem = "must be left out, which is torchtitan's own split, or the first entry of every stage and the end"
        raise PlanError("pipeline.partition", chosen, problem)
    return weighted(layers, stages) if plan.fsdp.ends_apart else split_points(layers, stages)


def stage_programs(
    plan: Plan, options: Options, recompute: ActivationCheckpointing, sharding: Sharding
) -> tuple[Program, ...]:
    """What each rank of a pipeline runs."""
    check_pipeline(plan, plan.fsdp)
    check(plan)
    pp, chunks, edges = plan.layout.pp, plan.layout.vpp, partition(plan)
    return tuple(_rank(plan, options, recompute, sharding, Place(rank, pp, chunks), edges) for rank in range(pp))


def _rank(
    plan: Plan,
    options: Options,
    recompute: ActivationCheckpointing,
    sharding: Sharding,
    place: Place,
    edges: Sequence[int],
) -> Program:
    made, count = recipes(plan), microbatches(plan)
    numbers = [place.stage(chunk) for chunk in range(place.chunks)]
    cuts = [Cut(edges[at], edges[at + 1], not at, at == place.stages - 1) for at in numbers]
    parts: list[Part] = []
    before = 0
    """Layers in the rank's parts so far, which recompute of every n-th counts."""
    for cut in cuts:
        modes = tuple(recompute.of(before + at) for at in range(cut.high - cut.low))
        before += cut.high - cut.low
        parts.append(_part(made, options, modes, cut, sharding, plan.fsdp.ends_apart, place.chunks > 1))
    spans = tuple(span for one in parts for span in (*one.spans, *one.losses))
    tensors = [[parameter for span in one.spans for parameter in span.module.parameters] for one in parts]
    timeline = _timeline(tuple(parts), place, plan, made)
    ranks = sharding.shards * sharding.replicas * sharding.tensor
    return Program(
        stage=place.rank,
        ranks=tuple(range(place.rank * ranks, (place.rank + 1) * ranks)),
        entries=tuple(name for span in spans for name in span.names),
        spans=spans,
        states=sharded_states(plan.optimizer, sharding),
        extra=tuple(_kept(made, cuts, count)),
        step=_steps(tensors, plan, sharding),
        flight=timeline.flight,
        microbatches=count,
        late_states=True,
        streams=True,
        elements=sum(shard(one, sharding.shards).elements for own in tensors for one in own),
        timeline=timeline,
    )


def _timeline(parts: tuple[Part, ...], place: Place, plan: Plan, made: Recipes) -> Timeline:
    count, name, outputs = microbatches(plan), plan.pipeline.schedule, plan.fsdp.return_outputs
    actions = schedule(place, count, name, outputs), shortened(place, count, name, outputs)
    if not outputs or place.rank < place.ranks - 1:
        return Timeline(parts, *actions)
    b, *rest = made.logits
    merged, dtype = (count * b, *rest), made.shape.dtype
    held = Hold(0, hold_bytes(merged, dtype), Category.LOGITS, "merged_logits", merged, dtype)
    return Timeline(parts, *actions, held, count)


@lru_cache(maxsize=256)
def _part(
    made: Recipes,
    options: Options,
    modes: tuple[Checkpointing, ...],
    cut: Cut,
    sharding: Sharding,
    ends_apart: bool,
    ahead: bool,
) -> Part:
    """The modules of one stage. What it receives lies in the stage's buffers, and does not end with a pass."""
    names = plain.layer_names(cut.high)[cut.low :]
    received, returned = replace(options, keeps_input=True), replace(options, drops_gradient=False)

    def chosen(at: int) -> Options:
        own = received if not cut.first and not at else options
        return replace(own, drops_gradient=False) if not cut.last and at == len(names) - 1 else own

    blocks = [made.block(mode, chosen(at)) for at, mode in enumerate(modes)]
    spans: list[Span] = []
    loss = None
    if cut.first:
        embedding, *_ = made.ends(options if names or cut.last else returned)
        embedding, *blocks = made.behind(embedding, blocks)
        spans = [Span(embedding, ("embedding",))]
    spans += [Span(block, (name,)) for block, name in zip(blocks, names, strict=True)]
    if cut.last:
        _, norm, head, _ = made.ends(options)
        *_, loss = made.ends(received)
        if not names:
            _, norm, *_ = made.ends(received)
        spans += [Span(norm, ("final_norm",)), Span(head, ("head",))]
    units = stage_units(names, first=cut.first, last=cut.last, ends_apart=ends_apart)
    return part(tuple(spans), loss, with_parameters(spans, units, "torchtitan"), sharding, ahead)


def _kept(made: Recipes, cuts: Sequence[Cut], count: int) -> list[Hold]:
    """Tokens and labels of ``count`` micro-batches, and of every stage its table of rotations and its buffers for
    what it receives."""
    shape, hidden = made.shape, made.hidden
    batch, table = (count * shape.b, shape.s), (shape.s, shape.spec.head_dim // 2)
    size = hold_bytes(batch, "int64")
    result = [Hold(0, size, Category.INPUTS, name, batch, "int64") for name in ("input_ids", "labels")]
    size = hold_bytes(hidden, shape.dtype)
    for cut in cuts:
        result.append(Hold(0, hold_bytes((*table, 2), "fp32"), Category.BUFFERS, "freqs_cis", table, "complex64"))
        names = ["received_input"] * (not cut.first) + ["received_gradient"] * (not cut.last)
        kind = Category.COMMUNICATION_BUFFERS
        result += [Hold(0, size, kind, name, hidden, shape.dtype) for name in names for _ in range(count)]
    return result


def _steps(tensors: Sequence[Sequence[Parameter]], plan: Plan, sharding: Sharding) -> Stretch:
    """Each stage's optimizer in turn."""
    events: list[Event] = []
    for own in tensors:
        events += sharded_step(tuple(own), plan.optimizer, sharding)
    return Stretch(events)
