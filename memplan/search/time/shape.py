"""What the time of a step depends on: the shape of a layer's work, what stages hold, and the FLOPs of products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ...frameworks import framework
from ...layers.module import Passes, grown
from ...layers.shapes import ITEMSIZE as ITEMSIZE
from ...plan.errors import PlanError
from ...plan.resolved import ResolvedPlan
from ...plan.spec import ModelSpec, of_any_depth
from ...values import dataclass


class Entries(NamedTuple):
    """What the kernels of a model's modules do for one micro-batch on one rank."""

    embedding: Passes
    layer: Passes
    recomputed: Passes
    """A layer whose forward pass backward runs again, whole or in part, if the plan recomputes any."""
    final_norm: Passes
    head: Passes
    """Output layer and loss."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One micro-batch on one rank. Equal shapes take equal time."""

    spec: ModelSpec
    entries: Entries
    t: int
    c: int
    """Context-parallel size."""
    tokens: int
    """Of a rank, in regions that tensor parallelism does not shard."""
    element: int
    """Bytes of an element of activations."""
    vocab: int
    """With padding."""
    sequence_parallel: bool
    scattered_sends: bool
    """Between stages every rank sends its ``1 / t`` of a hidden state."""
    overlapped_sends: bool
    """Sends between interleaved stages run beside their passes."""
    blocking: bool
    """The host waits for every kernel (``CUDA_LAUNCH_BLOCKING``)."""

    @property
    def hidden_bytes(self) -> int:
        """Of the hidden state of one micro-batch."""
        return self.tokens * self.spec.hidden * self.element


def shape_of(plan: ResolvedPlan) -> Shape:
    """The shape of a resolved plan. ``PlanError`` for what takes a time that is not modelled."""
    _check(plan)
    layout, own = plan.layout, framework(plan.framework)
    return Shape(
        spec=of_any_depth(plan.model),
        entries=own.time.entries(plan),
        t=layout.tp,
        c=layout.cp,
        tokens=plan.sequences * plan.batch.seq // layout.cp,
        element=ITEMSIZE[plan.precision.dtype],
        vocab=plan.padded_vocab,
        sequence_parallel=layout.sequence_parallel,
        scattered_sends=own.time.scattered_sends(plan),
        overlapped_sends=own.time.overlapped_sends(plan, layout.vpp),
        blocking=plan.environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
    )


ROUNDED = frozenset({"liger", "adaptive-softmax"})
"""Losses whose work does not grow in step with the tokens: chunks are powers of two, clusters get whole tokens."""


class Shapes:
    """The shapes of a resolved plan by the size of its micro-batch, which ``accumulates`` or not."""

    def __init__(self, plan: ResolvedPlan, accumulates: bool) -> None:
        self.plan, self.times = plan, 2 if accumulates else 1
        self.linear = plan.loss.kind not in ROUNDED
        self.known: dict[int, Shape] = {}

    def of(self, b: int) -> Shape:
        """Of ``b`` sequences. Recorded of 1, 2, 4 and odd numbers; others follow from 2 and 4."""
        if b not in self.known:
            self.known[b] = (self._grown(b) if self.linear and b > 4 and b % 2 == 0 else None) or self._recorded(b)
        return self.known[b]

    def _recorded(self, b: int) -> Shape:
        batch = self.plan.batch.model_copy(update={"mbs": b, "gbs": b * self.times})
        return shape_of(self.plan.model_copy(update={"batch": batch}))

    def _grown(self, b: int) -> Shape | None:
        two, four = self.of(2), self.of(4)
        entries = [grown(one, other, b) for one, other in zip(two.entries, four.entries, strict=True)]
        if None in entries:
            return None
        made = Entries(*(one for one in entries if one is not None))
        return replace(two, entries=made, tokens=two.tokens * b // 2)


def _check(plan: ResolvedPlan) -> None:
    if plan.frozen.embedding or plan.frozen.layers:
        problem = "must be 0 where time is asked for: frozen layers are not timed"
        raise PlanError("frozen.layers", plan.frozen.layers, problem)
    if plan.fsdp.recompute_every > 1:
        problem = "must be 1 where time is asked for"
        raise PlanError("fsdp.recompute_every", plan.fsdp.recompute_every, problem)


class StageWork(NamedTuple):
    """Entries of one chunk of a stage."""

    layers: int
    recomputed: int = 0
    """Layers whose forward pass backward runs again, whole or in part."""
    embedding: bool = False
    final_norm: bool = False
    head: bool = False


Work = tuple[tuple[StageWork, ...], ...]
"""By stage, then by chunk."""


def work_of(plan: ResolvedPlan) -> Work:
    """The stages of a resolved plan, as its framework cuts it. ``PlanError`` where it cannot."""
    return framework(plan.framework).time.stages(plan)


def named(names: Sequence[str], plan: ResolvedPlan) -> StageWork:
    """Entries of these ``names``."""
    layers = sum(name.startswith("layer.") for name in names)
    return StageWork(layers, recomputed(plan, layers), "embedding" in names, "final_norm" in names, "head" in names)


def recomputed(plan: ResolvedPlan, layers: int) -> int:
    """Of ``layers`` of a chunk."""
    recompute = plan.recompute
    if recompute.mode == "none":
        return 0
    if recompute.mode == "full" and recompute.method == "block" and recompute.layers is not None:
        return min(layers, recompute.layers)
    return layers


@lru_cache(maxsize=4096)
def elements(entries: Entries, work: tuple[StageWork, ...]) -> tuple[int, int]:
    """Parameters of a stage on one rank, and those of them that are trained. Ends that share a weight have it once."""
    ends = {
        parameter.name: parameter
        for chunk in work
        for present, entry in (
            (chunk.embedding, entries.embedding),
            (chunk.final_norm, entries.final_norm),
            (chunk.head, entries.head),
        )
        for parameter in entry.parameters * present
    }
    held = (*entries.layer.parameters * sum(chunk.layers for chunk in work), *ends.values())
    return sum(one.elements for one in held), sum(one.elements for one in held if one.trained)


def model_flops(plan: ResolvedPlan) -> float:
    """FLOPs of a step's products, forward and backward: 6 for each weight of a matrix and token, 12 for each layer,
    feature and score (arXiv 2205.05198, appendix A)."""
    spec, batch = plan.model, plan.batch
    head = spec.vocab * spec.hidden
    mlp = (3 if spec.gated else 2) * spec.ffn
    layer = spec.hidden * (spec.qkv_features + spec.attention_features + mlp)
    attended = 12.0 * spec.layers * spec.attention_features * batch.seq
    return batch.gbs * batch.seq * (6.0 * (spec.layers * layer + head) + attended)


def recomputed_flops(plan: ResolvedPlan, entries: Entries, work: Sequence[Sequence[StageWork]]) -> float:
    """FLOPs of products that backward computes again, on all ranks."""
    layout, layers = plan.layout, sum(chunk.recomputed for stage in work for chunk in stage)
    each = entries.recomputed.flops - entries.layer.flops
    return layers * each * plan.microbatches * layout.tp * layout.cp * (layout.dp or 1)
