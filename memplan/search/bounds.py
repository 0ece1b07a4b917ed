"""What a layout needs at least, before any of its tapes is built.

A stage with n layers and f micro-batches in flight holds the states of its parameters and n f times what one layer
saves for backward. Both are exact for one layer, and everything else (ends, padding, buckets, what a pass takes
while it runs) only adds to them, so the sum is a bound from below: a layout whose bound is too much is never built.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ..frameworks import megatron, megatron_deepspeed
from ..layers.autograd import ITEMSIZE
from ..layers.module import Options
from ..plan.plan import Plan
from ..program import module_elements
from .works import Work, Works

ROUNDING = 64 * 512
"""Bytes by which rounding may make what a layer saves at b = 1 larger than its share at another b: fewer than 64
tensors, and what does not grow with b is among them."""


class LayerNeeds(NamedTuple):
    """One layer on one rank."""

    elements: int
    saved: int
    """Bytes for every micro-batch in flight."""


class States(NamedTuple):
    """Bytes for every parameter: on every rank, and divided among the replicas."""

    whole: int
    divided: int


def layer_needs(plan: Plan) -> LayerNeeds:
    """Of a resolved plan: one layer of a stage in the middle."""
    full = plan.recompute.mode == "full"
    if plan.framework == "megatron":
        job = megatron.stages_of(plan, Options()).job
        options = replace(job.options, keeps_input=False, drops_gradient=True)
        module = megatron.layers_module(job.shape, 1 if full else 0, options)
    else:
        shape = megatron_deepspeed.parallel_shape(plan)
        module = megatron_deepspeed.layer_module(shape, 1 if full else 0, Options())
    return LayerNeeds(module_elements(module), max(0, module.steady.forward_fold.net))


def scaled(needs: LayerNeeds, mbs: int) -> LayerNeeds:
    """At least what a layer needs with ``mbs`` sequences, from what it needs with one."""
    return needs._replace(saved=max(0, needs.saved - ROUNDING) * mbs)


def states(plan: Plan) -> States:
    """Of a resolved plan."""
    if plan.framework == "megatron":
        rules = megatron.rules(plan)
        whole = ITEMSIZE[rules.dtype] + ITEMSIZE[rules.gradients]
        divided = (rules.main_size if rules.mixed else 0) + sum(ITEMSIZE[dtype] for _, dtype in rules.moments)
        return States(whole, divided) if rules.distributed else States(whole + divided, 0)
    dtype, name = plan.precision.dtype, plan.optimizer.name
    moments = {"adam": 8, "adamw": 8, "adam8bit": 2}.get(name, 0)
    whole, divided = 2 * ITEMSIZE[dtype], moments + 4 * (dtype != "fp32")
    shards = plan.layout.zero == 1 or dtype == "bf16"
    return States(whole, divided) if shards else States(whole + divided, 0)


@lru_cache(maxsize=1 << 14)
def flights(pp: int, vpp: int, microbatches: int, stage: int) -> int:
    """Passes of one chunk each that a stage has in flight at once, at most, of 1F1B and its interleaved kind."""
    if vpp == 1:
        return min(pp - stage, microbatches)
    return min((pp - stage - 1) * 2 + (vpp - 1) * pp + 1, microbatches * vpp)


@lru_cache(maxsize=1 << 14)
def loads(works: Works, microbatches: int) -> tuple[tuple[int, int], ...]:
    """Layers of a stage, and of those with micro-batches in flight counted once for each; where another stage has
    more of both, it is left out."""
    pp, vpp = len(works), len(works[0])
    found = {(_layers(stage), _in_flight(stage, at, pp, vpp, microbatches)) for at, stage in enumerate(works)}
    return tuple(one for one in found if not any(one != other and _exceeds(other, one) for other in found))


def _layers(stage: Iterable[Work]) -> int:
    return sum(work.layers for work in stage)


def _in_flight(stage: tuple[Work, ...], at: int, pp: int, vpp: int, microbatches: int) -> int:
    """At least: all passes in flight may be those of the smallest chunk."""
    return min(work.layers for work in stage) * flights(pp, vpp, microbatches, at)


def _exceeds(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] >= other[0] and one[1] >= other[1]


def at_least(needs: LayerNeeds, kept: States, shards: int, load: tuple[tuple[int, int], ...]) -> int:
    """Bytes of the fullest stage."""
    per_layer = needs.elements * (kept.whole * shards + kept.divided) // shards
    return max(layers * per_layer + flying * needs.saved for layers, flying in load)


class Load(NamedTuple):
    """What a bound needs to know of a layout."""

    needs: LayerNeeds
    kept: States
    shards: int
    pp: int
    vpp: int
    microbatches: int

    @property
    def states(self) -> float:
        """Bytes of a layer."""
        return self.needs.elements * (self.kept.whole * self.shards + self.kept.divided) / self.shards

    def saved(self, stage: int) -> float:
        """Bytes that every layer of ``stage`` holds for its passes in flight."""
        return flights(self.pp, self.vpp, self.microbatches, stage) / self.vpp * self.needs.saved


def at_best(load: Load, layers: int) -> float:
    """Bytes of the fullest stage of whatever cut.

    A stage with n layers in v chunks has f passes in flight of chunks with (n - v + 1) / v layers or more, so it needs
    n A + f (n - v + 1) / v S bytes, A for the states of a layer and S for what it saves. If none has more than M bytes,
    a stage holds at most (M + f (v - 1) / v S) / (A + f / v S) of the layers. These add up to all of them, which gives
    the least M.
    """
    states, flying = load.states, [load.saved(stage) for stage in range(load.pp)]
    free = sum(one * (load.vpp - 1) / (states + one) for one in flying)
    return (layers - free) / sum(1 / (states + one) for one in flying)


def most_layers(load: Load, limit: int) -> list[int]:
    """At most so many layers are in each stage if none needs more than ``limit`` bytes (see ``at_best``)."""
    states, flying = load.states, [load.saved(stage) for stage in range(load.pp)]
    return [int((limit + one * (load.vpp - 1)) / (states + one)) for one in flying]


def fewest_recomputed(plain: Load, full: Load, works: Works, limit: int) -> int:
    """At least so many layers of every chunk must be recomputed if no stage is to need more than ``limit`` bytes."""
    most = max(work.layers for stage in works for work in stage)
    for count in range(1, most + 1):
        needed = 0.0
        for at, stage in enumerate(works):
            kept = [max(0, work.layers - count) for work in stage]
            again = [min(work.layers, count) for work in stage]
            passes = flights(plain.pp, plain.vpp, plain.microbatches, at)
            saved = min(
                one * plain.needs.saved + other * full.needs.saved for one, other in zip(kept, again, strict=True)
            )
            needed = max(needed, _layers(stage) * plain.states + passes * saved)
        if needed <= limit:
            return count
    return most
