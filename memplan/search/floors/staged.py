"""``fully_shard`` in a pipeline: one bound for each rank, from the layers of its stages and the passes in flight.

From its first micro-batch until its reduction a stage keeps its parameters whole, and from its first backward pass on
its gradients (``frameworks.fsdp_pipeline``). Every pass in flight keeps what its layers save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from ...frameworks import fsdp_programs, fsdp_stages, fsdp_torchtitan
from ...frameworks.fsdp import sharded_states, sharded_step
from ...frameworks.fsdp_stages import Cut
from ...frameworks.fsdp_torchtitan import Checkpointing
from ...frameworks.fsdp_units import Sharding, shard, size
from ...layers.autograd import ITEMSIZE
from ...layers.module import Module, Options, Parameter, Tapes, hold_bytes
from ...pipeline.torch_schedules import ACTIVE, Place, passes
from ...plan.plan import Plan
from ...program import module_states
from .parts import Growing, peaks

TENSORS = 64
"""More than a layer saves, or norm, head and loss hold."""


class Saved(NamedTuple):
    """Of one micro-batch, by the number of sequences."""

    layers: dict[Checkpointing, Growing]
    """What a layer saves, by how it is recomputed."""
    turn: dict[Checkpointing, Growing]
    """What the backward pass that follows takes at its peak, of a stage that ends with such a layer."""
    ends: Growing
    """What norm, head and loss save."""
    loss: dict[Checkpointing, Growing]
    """What norm, head and loss take, and that pass behind them."""


class Rank(NamedTuple):
    """What does not depend on the micro-batch."""

    cuts: tuple[Cut, ...]
    static: int
    step: int
    """What the step takes beside it, gradients among it."""
    whole: int
    """Gathered parameters of the stages that have them at once."""
    gradients: int
    """Gradients as they are before they are reduced."""


class Flight(NamedTuple):
    """A moment of a rank's schedule."""

    passes: tuple[int, ...]
    """Of each chunk, that have gone forward and not yet backward."""
    gradients: bool
    """Every chunk has had a backward pass."""
    loss: bool
    """The last of them has just gone forward through the last chunk."""
    sent: tuple[int, ...]
    """Of each chunk, passes that are over, and whose output and input's gradient the schedule still holds."""


def least(plan: Plan, ranks: Sequence[Rank], known: Saved) -> int:
    """Bytes of the fullest rank of a resolved plan."""
    made, recompute = fsdp_torchtitan.recipes(plan), fsdp_programs.recompute_of(plan, plan.fsdp)
    count, pp, chunks = fsdp_stages.microbatches(plan), plan.layout.pp, plan.layout.vpp
    layers = {mode: one.at(plan.batch.mbs) for mode, one in known.layers.items()}
    turn = min(one.at(plan.batch.mbs) for one in known.turn.values())
    loss = min(one.at(plan.batch.mbs) for one in known.loss.values())
    ends = known.ends.at(plan.batch.mbs)
    hidden = hold_bytes(made.hidden, made.shape.dtype)
    most = 0
    for number, rank in enumerate(ranks):
        static = rank.static + sum(hold.bytes for hold in fsdp_stages._kept(made, rank.cuts, count))
        most = max(most, static + rank.step)
        before, saved = 0, []
        for cut in rank.cuts:
            held = cut.high - cut.low
            saved.append(sum(layers[recompute.of(before + at)] for at in range(held)))
            before += held
        for flight in flights(Place(number, pp, chunks), count, plan.pipeline.schedule):
            flying = sum(many * one for many, one in zip(flight.passes, saved, strict=True))
            sent = zip(flight.sent, rank.cuts, strict=True)
            flying += hidden * sum(many * (2 - cut.first - cut.last) for many, cut in sent)
            top = turn
            if number == pp - 1:
                top = loss if flight.loss else 0
                flying += ends * (flight.passes[-1] - flight.loss)
            most = max(most, static + rank.whole + flight.gradients * rank.gradients + flying + top)
    return most


# -- of a micro-batch -----------------------------------------------------------------------------------


def saved(plan: Plan, of: Callable[[int], Plan]) -> Saved:
    """For a resolved ``plan``, of which ``of`` is another with so many sequences in a micro-batch."""
    recompute = fsdp_programs.recompute_of(plan, plan.fsdp)
    modes = {recompute.of(at) for at in range(plan.model.layers)}

    def block(mode: Checkpointing, sequences: int) -> Tapes:
        return fsdp_torchtitan.recipes(of(sequences)).block(mode, Options()).steady

    def growing(measured: Callable[[Checkpointing, int], tuple[int, ...]]) -> dict[Checkpointing, Growing]:
        return {mode: Growing(partial(measured, mode), TENSORS) for mode in modes}

    def layer(mode: Checkpointing, sequences: int) -> tuple[int, ...]:
        return (max(0, block(mode, sequences).forward_fold.net),)

    def turn(mode: Checkpointing, sequences: int) -> tuple[int, ...]:
        return (block(mode, sequences).backward_fold.peak,)

    def behind(sequences: int) -> list[Tapes]:
        _, *modules = fsdp_torchtitan.recipes(of(sequences)).ends(Options())
        return [one.steady for one in modules]

    def ends(sequences: int) -> tuple[int, ...]:
        return (max(0, sum(one.forward_fold.net for one in behind(sequences))),)

    def loss(mode: Checkpointing, sequences: int) -> tuple[int, ...]:
        tapes = behind(sequences)
        back = [one.backward_fold for one in (*reversed(tapes), block(mode, sequences))]
        return peaks([*(one.forward_fold for one in tapes), *back], len(tapes) + 1)

    return Saved(growing(layer), growing(turn), Growing(ends, TENSORS), growing(loss))


@lru_cache(maxsize=1 << 14)
def flights(place: Place, count: int, schedule: str) -> tuple[Flight, ...]:
    """When a rank has most passes in flight."""
    if place.chunks == 1:
        flying = count if schedule == "gpipe" else min(count, place.ranks - place.rank)
        again = count > flying
        return Flight((flying,), False, True, (0,)), Flight((flying if again else flying - 1,), True, again, (0,))
    flying_of, ended = [0] * place.chunks, [0] * place.chunks
    best: dict[bool, Flight] = {}
    for what, chunk, _ in passes(place, count):
        flying_of[chunk] += 1 if what == "forward" else -1
        ended[chunk] += what == "backward"
        if max(ended) == count:
            break  # that stage's parameters and gradients are reduced
        has_all = all(ended)
        if has_all not in best or sum(flying_of) >= sum(best[has_all].passes):
            at_loss = what == "forward" and chunk == place.chunks - 1
            best[has_all] = Flight(tuple(flying_of), has_all, at_loss, tuple(ended))
    return tuple(best.values())


# -- of a rank ------------------------------------------------------------------------------------------


def ranks_of(plan: Plan) -> tuple[Rank, ...]:
    """Every rank of a resolved plan's pipeline."""
    fsdp_stages.check_pipeline(plan, plan.fsdp)
    pp, chunks, edges = plan.layout.pp, plan.layout.vpp, fsdp_stages.partition(plan)
    made = fsdp_torchtitan.recipes(plan)
    made = replace(made, shape=replace(made.shape, b=1, s=2 * made.tensor))  # parameters do not depend on it
    layer, ends = made.block("none", Options()), made.ends(Options())
    result = []
    for rank in range(pp):
        numbers = [rank + chunk * pp for chunk in range(chunks)]
        cuts = tuple(Cut(edges[at], edges[at + 1], not at, at == pp * chunks - 1) for at in numbers)
        result.append(_rank(plan, cuts, [_modules(cut, layer, ends) for cut in cuts]))
    return tuple(result)


Modules = tuple[tuple[Module, int], ...]
"""Modules of a stage, and how many of each."""


def _modules(cut: Cut, layer: Module, ends: Sequence[Module]) -> Modules:
    embedding, norm, head, _ = ends
    return (
        *(((embedding, 1),) if cut.first else ()),
        (layer, cut.high - cut.low),
        *(((norm, 1), (head, 1)) if cut.last else ()),
    )


def _rank(plan: Plan, cuts: tuple[Cut, ...], stages: Sequence[Modules]) -> Rank:
    sharding = fsdp_programs.sharding_of(plan, plan.fsdp)
    states = sharded_states(plan.optimizer, sharding)
    tensors = [[one for module, count in own for _ in range(count) for one in module.parameters] for own in stages]
    every = [one for own in tensors for one in own]
    shards = sum(shard(one, sharding.shards).elements for one in every) * ITEMSIZE[sharding.parameters]
    step = max(sharded_step(tuple(own), plan.optimizer, sharding).excursion.peak for own in tensors)
    whole = sorted(_gathered(sharding, own) for own in tensors)
    return Rank(
        cuts,
        static=sum(sum(module_states(module, states)) * count for own in stages for module, count in own),
        step=shards + step,
        whole=sum(whole[:ACTIVE]),
        gradients=sum(size(one.elements, sharding.reduce) for one in every),
    )


def _gathered(sharding: Sharding, tensors: Sequence[Parameter]) -> int:
    """Whether or not they have been copied out."""
    shards = sharding.shards
    return sum(shard(one, shards).elements * shards for one in tensors) * ITEMSIZE[sharding.compute]
