"""``fully_shard``'s hooks, run over a model's modules in order: what they hold and drop at every seam.

Follows ``_fully_shard/_fsdp_state.py`` (``FSDPState``: which hook runs when), ``_fsdp_param_group.py``
(``FSDPParamGroup``: what it does) and ``_fsdp_collectives.py`` (the buffers) of torch 2.13. A unit's life:

* *pre-forward*: its shards are cast into one flat tensor, gathered into one flat output, and copied out into
  a tensor for each parameter. The output stays until the next unit has been gathered, so that this
  unit's copy can run beside that unit's gather (``wait_for_unshard``, ``comm_ctx.all_gather_state``).
* *post-forward*: the parameters end (``reshard``), unless the unit is the root or told not to.
* *pre-backward*: gathered again if they ended, the output ends at once; then the unit that ran before this
  one is gathered ahead, though not copied out (``_backward_prefetch``).
* *post-backward*: parameters end, the previous unit's reduce-scatter input ends, and gradients are copied
  into one flat input in the reduction's dtype, after which they end; its output is the sharded gradient.

Gathering runs on a stream of its own, and so does the output of the reduce-scatter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field
from enum import Enum
from functools import cached_property, partial
from itertools import compress

from ...layers.autograd import ITEMSIZE
from ...layers.float8 import cast_shard
from ...tape.events import Category, Drop, Event, Hold, Scope, Tape
from ...values import dataclass
from .units import Sharding, Unit, size

GATHERING, REDUCING = 1, 2
"""Streams besides the default one."""

OUTPUT, CAST, INPUT, REDUCED, SHARDED, DIVIDED, INNER, UNITS = 0, 2, 4, 6, 7, 8, 10, 20
"""Numbers of buffers among the hooks' (``Scope.HOOKS``). Of the first three there are two, which take turns; from the
last one on are those that a unit of several modules has for itself. Units of experts have outputs and inputs of their
own (``INNER``)."""

SCALES, PIECES = 1 << 20, 1 << 21
"""Numbers from which on are scales of what is gathered in 8 bits, and copies of what is cut along another dimension
than the first: for each parameter of a unit one."""

WHOLE, RESHARDED, GRADIENT, FROM_HOST, LOW = (kind << 16 for kind in range(5))
WITHIN = 1 << 15
"""Numbers from which on are tensors of a unit that one module holds (``Scope.MODULE``): for each parameter one."""

BUFFERS, GATHERED, GRADIENTS = Category.COMMUNICATION_BUFFERS, Category.GATHERED_PARAMETERS, Category.GRADIENTS


class Role(Enum):
    """What a micro-batch does with gradients (``set_requires_gradient_sync``)."""

    FIRST = "reduces them; the sharded gradients appear"
    STEADY = "reduces them and adds to the sharded gradients"
    KEPT_FIRST = "keeps them whole"
    KEPT = "adds to those that were kept whole"
    LAST = "reduces its own and what was kept; the sharded gradients appear"

    @property
    def adds(self) -> bool:
        """Whole gradients are there already."""
        return self in (Role.KEPT, Role.LAST)

    @property
    def reduces(self) -> bool:
        return self not in (Role.KEPT_FIRST, Role.KEPT)


@dataclass(frozen=True, slots=True)
class Gradient:
    """A parameter's gradient as autograd leaves it."""

    end: Drop
    elements: int
    """Of the parameter, as this rank has it."""
    whole: int
    """Of the gradient: more, where tensor parallelism leaves it whole."""
    kept: int
    """Id of its copy in the reduction's dtype, where it is not reduced at once; in the same placement."""
    placed: int | None = None
    """Id of what is reduced, where tensor parallelism leaves the gradient in another placement than its parameter's
    (``unsharded_grad_data``, ``unsharded_accumulated_grad_data``)."""


@dataclass(slots=True)
class _State:
    """Where a unit is; the holds are those that a later hook drops."""

    gathered: Hold | None = None
    """An all-gather's output that nobody has copied out."""
    whole: list[Hold] = field(default_factory=list)
    """Unsharded parameters."""
    scales: list[Hold] = field(default_factory=list)
    """Of what was gathered in 8 bits."""
    resharded: list[Hold] = field(default_factory=list)
    """Pieces for fewer ranks, between forward and backward."""
    ran: bool = False
    """Its post-backward has run."""


class Hooks:
    """One micro-batch of a model whose units are given in the order of ``named_modules()``, the root first. In the
    first one ``beside`` a steady one, what that does otherwise is recorded, too."""

    def __init__(
        self,
        units: Sequence[Unit],
        sharding: Sharding,
        gradients: Sequence[Sequence[Gradient]],
        role: Role,
        *,
        beside: bool = False,
    ) -> None:
        self.units = units
        self.sharding = sharding
        self.gradients = [*gradients]
        """Of each unit, what autograd leaves at its parameters, in their order."""
        self.role = role
        self.states = [_State() for _ in units]
        self.order: list[int] = []
        """Units as their forward ended."""
        self.previous: Hold | None = None
        """The output of the last all-gather that was copied out in forward."""
        self.reducing: list[Hold] = []
        """The inputs of the last reduce-scatters: of one, or of both groups of a unit."""
        self.reduced: list[Hold] = []
        """Outputs that all-reduces across replicas hold on to."""
        self.events: list[Event] = []
        self.beside = beside
        self.others: list[tuple[int, int, list[Event]]] = []
        """Of ``events``, parts in whose places the steady micro-batch beside has others: where, how many, and those;"""
        self.steady: dict[int, Tape] = {}
        """what it does where any differ, by the identity of the tape that was taken,"""
        self.reduced_beside: list[Hold] = []
        """and its ``reduced``."""
        self.ids: dict[tuple[str, int, int], int] = {}
        self.known: dict[object, tuple[Hold, ...]] = {}
        """Unsharded parameters of units."""
        counts: Counter[bool] = Counter()
        self.turns: list[int] = []
        """Of each unit, which of its kind's two buffers is its own."""
        for unit in units:
            self.turns.append(counts[unit.of_experts] % 2 + (INNER if unit.of_experts else 0))
            counts[unit.of_experts] += 1

    # -- tensors ----------------------------------------------------------------------------------

    def hold(self, id: int, elements: int, dtype: str, category: Category, name: str, stream: int = 0) -> Hold:
        hold = Hold(id, size(elements, dtype), category, name, (elements,), dtype, stream)
        self.events.append(hold)
        return hold

    def drop(self, hold: Hold) -> None:
        self.events.append(hold.end)

    def id(self, kind: str, unit: int, index: int = 0) -> int:
        """Of a tensor that only this unit's hooks know, if one module holds the unit; else one for the whole model."""
        first = {"whole": WHOLE, "resharded": RESHARDED, "gradient": GRADIENT}.get(kind)
        if first is not None and self.units[unit].alone:
            return Scope.MODULE.id(first + index + (WITHIN if self.units[unit].of_experts else 0))
        return self.ids.setdefault((kind, unit, index), Scope.HOOKS.id(UNITS + len(self.ids)))

    def take(self) -> Tape:
        """What has been recorded since it was last called."""
        events = tuple(self.events)
        if self.others:
            for start, count, theirs in reversed(self.others):
                self.events[start : start + count] = theirs
            self.steady[id(events)] = tuple(self.events)
            self.others.clear()
            self.beside = self.beside and bool(events)  # all empty tapes are one: the steady micro-batch runs by itself
        self.events.clear()
        return events

    def by_role(self, do: Callable[[], None]) -> None:
        """``do`` records what depends on the role: for a steady micro-batch beside, too."""
        start = len(self.events)
        do()
        if not self.beside:
            return
        own, role = self.events[start:], self.role
        del self.events[start:]
        self.role, self.reduced, self.reduced_beside = Role.STEADY, self.reduced_beside, self.reduced
        do()
        self.role, self.reduced, self.reduced_beside = role, self.reduced_beside, self.reduced
        theirs, self.events[start:] = self.events[start:], own
        if theirs != own:
            self.others.append((start, len(own), theirs))

    # -- gathering --------------------------------------------------------------------------------

    def unshard(self, at: int) -> None:
        """``foreach_all_gather``: the flat output; before it, the shards in the dtype of compute."""
        unit, state, sharding = self.units[at], self.states[at], self.sharding
        if state.gathered is not None or state.whole or self.shards(at) == 1:
            return
        ranks, shards = self._ranks(at), self.shards(at)
        pieces = [one * shards // ranks for one in unit.shard_elements(sharding.shards)]
        low = any(one.gathered for one in unit.parameters)
        converted = sum(compress(pieces, [sharding.casts(one) and not one.gathered for one in unit.parameters]))
        cast: list[Hold] = []
        if sharding.offload and not state.resharded:
            cast = self._from_host(unit, pieces)
        else:
            cast = self._in_8_bits(at, pieces) if low else []
            cast += (
                [self.hold(Scope.HOOKS.id(CAST), converted, sharding.compute, BUFFERS, "all_gather_input", GATHERING)]
                if converted
                else []
            )
        output, flat, dtype = Scope.HOOKS.id(OUTPUT + self.turns[at]), sum(pieces), sharding.compute
        if low:  # of more than one dtype: as bytes
            sizes = (ITEMSIZE[sharding.gathers(one)] for one in unit.parameters)
            flat, dtype = sum(piece * one for piece, one in zip(pieces, sizes, strict=True)), "uint8"
        state.gathered = self.hold(output, flat * ranks, dtype, BUFFERS, "all_gather_output", GATHERING)
        for one in cast:
            self.drop(one)

    def _in_8_bits(self, at: int, pieces: Sequence[int]) -> list[Hold]:
        """Shards cast one by one (``all_gather_inputs`` of an extension), each by tensors that end before those of the
        next one begin, but for the result and its scale."""
        unit, sharding, kept = self.units[at], self.sharding, list[Hold]()
        for index, (parameter, elements) in enumerate(zip(unit.parameters, pieces, strict=True)):
            if not parameter.gathered:
                continue
            events, data, scale = cast_shard(elements, sharding.parameters, scaled_before=sharding.scaled_before)
            ids = {data: Scope.MODULE.id(LOW + index), scale: self._scale_id(at, index)}
            for event in events:
                id = ids.get(event.tensor, Scope.MODULE.id(LOW + WITHIN + event.tensor))
                if not isinstance(event, Hold):
                    self.events.append(event._replace(tensor=id, category=BUFFERS))
                    continue
                self.events.append(hold := event._replace(tensor=id, category=BUFFERS, stream=GATHERING))
                if event.tensor == data:
                    kept.append(hold)
                elif event.tensor == scale:
                    self.states[at].scales.append(hold)
        return kept

    def _scale_id(self, at: int, index: int) -> int:
        """Of one between a unit's gathering and its copying out, which takes turns as the output does."""
        return Scope.HOOKS.id(SCALES + (self.turns[at] << 10) + index)

    def _from_host(self, unit: Unit, pieces: Sequence[int]) -> list[Hold]:
        """Shards copied to the device one by one, and cast there (``FSDPParam.all_gather_inputs``)."""
        sharding, result = self.sharding, []
        for index, (parameter, elements) in enumerate(zip(unit.parameters, pieces, strict=True)):
            first, dtype = FROM_HOST + 2 * index, parameter.dtype or sharding.parameters
            copied = self.hold(Scope.MODULE.id(first), elements, dtype, BUFFERS, "shard_from_host", GATHERING)
            if not sharding.casts(parameter):
                result.append(copied)
                continue
            result.append(
                self.hold(
                    Scope.MODULE.id(first + 1), elements, sharding.compute, BUFFERS, "all_gather_input", GATHERING
                )
            )
            self.drop(copied)
        return result

    def _ranks(self, at: int) -> int:
        """Ranks that a unit's pieces are gathered from."""
        width = self.sharding.width(self.units[at].resharding)
        return width if self.states[at].resharded and width is not None else self.shards(at)

    def shards(self, at: int) -> int:
        """Ranks that share a unit's parameters."""
        return self.units[at].ranks(self.sharding.shards)

    def _padded(self, at: int, index: int) -> int:
        """Elements of an unsharded parameter, with the padding of its shards."""
        return self.units[at].shard_elements(self.sharding.shards)[index] * self.shards(at)

    def wait_for_unshard(self, at: int, *, forward: bool) -> None:
        """Copied out: one tensor for each parameter. Forward leaves the output to the next unit's turn."""
        state = self.states[at]
        if state.whole:
            return
        state.whole = [*self._whole(at)]
        if self.shards(at) > 1 and not any(self.units[at].crosswise):
            self.events += state.whole
        else:
            self._copy_out(at, state.whole)
        self.events += [piece.end for piece in state.resharded]
        state.resharded.clear()
        if forward:
            self.flush()  # a local variable keeps it until here
            self.previous = state.gathered
        elif state.gathered is not None:
            self.drop(state.gathered)
        state.gathered = None
        self.events += [scale.end for scale in state.scales]  # takes the place of the last one's
        state.scales.clear()

    def _whole(self, at: int) -> tuple[Hold, ...]:
        """A unit's unsharded parameters: the same tensors for all units of one module with the same parameters."""
        unit, sharding = self.units[at], self.sharding
        key = (id(unit.parameters), unit.cut, unit.of_experts) if unit.alone else at
        found = self.known.get(key)
        if found is None:
            holds = []
            for index, parameter in enumerate(unit.parameters):
                elements, own, dtype = self._padded(at, index), self.id("whole", at, index), sharding.gathers(parameter)
                holds.append(Hold(own, size(elements, dtype), GATHERED, parameter.name, (elements,), dtype))
            found = self.known[key] = tuple(holds)
        return found

    def _copy_out(self, at: int, whole: Sequence[Hold]) -> None:
        """``whole`` begins, beside what it is copied from where one rank casts it or pieces are of another dimension
        than the first."""
        sharding, unit = self.sharding, self.units[at]
        cast: Hold | None = None
        beside: list[Hold] = []
        for index, parameter in enumerate(unit.parameters):
            elements = self._padded(at, index)
            before, cast = cast, None
            if self.shards(at) == 1 and sharding.casts(parameter):
                cast = self.hold(
                    Scope.HOOKS.id(CAST + index % 2), elements, sharding.compute, BUFFERS, "cast_parameter"
                )
            if before is not None:
                self.drop(before)
            self.events.append(whole[index])
            if unit.crosswise[index]:  # ``foreach_all_gather_copy_out``
                number = Scope.HOOKS.id(PIECES + index)
                beside.append(self.hold(number, elements, sharding.compute, BUFFERS, "pieces_by_rank"))
        if cast is not None:
            self.drop(cast)
        self.events += [one.end for one in beside]

    def flush(self) -> None:
        """Ends the output that forward left."""
        if self.previous is not None:
            self.drop(self.previous)
        self.previous = None

    def reshard(self, at: int, *, forward: bool) -> None:
        state, unit = self.states[at], self.units[at]
        if forward:
            width = self.sharding.width(unit.resharding)
            if width is None:
                return
            if width != self.sharding.shards:
                self._reshard_to(at, width)
                return
        self.events += [one.end for one in (*state.whole, *state.resharded)]
        state.whole.clear()
        state.resharded.clear()

    def _reshard_to(self, at: int, width: int) -> None:
        """``to_sharded_post_forward``: a piece of each parameter is cloned, then the parameter ends."""
        state, compute = self.states[at], self.sharding.compute
        for index, whole in enumerate(state.whole):
            elements = self._padded(at, index) // width
            piece = self.hold(self.id("resharded", at, index), elements, compute, GATHERED, f"{whole.name}/resharded")
            state.resharded.append(piece)
            self.drop(whole)
        state.whole.clear()

    # -- hooks ------------------------------------------------------------------------------------

    def pre_forward(self, at: int) -> None:
        self.unshard(at)
        self.wait_for_unshard(at, forward=True)
        for name in self.units[at].next_forward:
            self.unshard(self.named[name])

    def post_forward(self, at: int) -> None:
        self.reshard(at, forward=True)
        self.order.append(at)

    def pre_backward(self, at: int) -> None:
        self.unshard(at)
        self.wait_for_unshard(at, forward=False)
        if ahead := self.units[at].next_backward:
            for name in ahead:
                self.unshard(self.named[name])
            return
        before = self.order.index(at) - 1
        if before >= 0:
            self.unshard(self.order[before])

    @cached_property
    def named(self) -> dict[str, int]:
        """Units by their names."""
        return {unit.name: at for at, unit in enumerate(self.units)}

    def post_backward(self, at: int) -> None:
        """``post_backward`` and ``foreach_reduce``."""
        self.states[at].ran = True
        sharding, role = self.sharding, self.role
        cast = sharding.reduce != sharding.compute
        found = self.gradients[at]
        ends = [one.end for one in found]
        if role.adds and cast:  # ``accumulate_unsharded_grad_if_needed``
            self.events += ends
            ends = [self._kept(one)[1] for one in found]
        if role.reduces:
            ends = [self._placed(one, end) for one, end in zip(found, ends, strict=True)]
        self.reshard(at, forward=False)
        if not role.reduces:
            if cast and not role.adds:  # ``to_accumulated_grad_if_needed``
                for one in found:
                    self.events += [self._kept(one)[0], one.end]
            return
        if not any(unit.beside for unit in self.units[at + 1 : at + 2]):  # the last group of its unit, which runs first
            for sent in self.reducing:
                self.drop(sent)
            self.reducing = []
        if not ends:
            return
        elements = self.units[at].reduced(sharding.shards)
        whole = elements * self.shards(at)
        turn = self.turns[at] + (2 if self.units[at].of_experts else INPUT)
        last = ends[-1:] if self.shards(at) > 1 else []  # a loop's variable keeps it
        copies: list[Hold] = []
        if any(self.units[at].crosswise):
            copies, ends, last = self._by_rank(at, ends)
        self.reducing.append(self.hold(Scope.HOOKS.id(turn), whole, sharding.reduce, BUFFERS, "reduce_scatter_input"))
        for copy in copies:
            self.drop(copy)
        self.events += [one for one in ends if one not in last]
        self.by_role(partial(self._reduced, at, elements))
        self.events += last

    def _by_rank(self, at: int, ends: Sequence[Drop]) -> tuple[list[Hold], list[Drop], list[Drop]]:
        """Gradients that are cut along another dimension than the first, copied one by one to lie rank after rank
        (``foreach_reduce``): the copies, what is left to end, and of that what a variable keeps until the end.

        A copy takes its gradient's place in a list; ``chunks`` keeps it until the next is cut, and the tuples that
        ``enumerate(zip(…))`` reuses in turn keep every second one a turn longer.
        """
        unit = self.units[at]
        turns = [index for index, crossed in enumerate(unit.crosswise) if crossed]
        copies: list[Hold] = []
        waiting: list[int] = []
        for index in turns:
            self.events += [ends[one] for one in waiting if one + 2 - one % 2 <= index]
            waiting = [one for one in waiting if one + 2 - one % 2 > index]
            elements = unit.parameters[index].elements
            number = Scope.HOOKS.id(PIECES + index)
            copies.append(self.hold(number, elements, self.sharding.compute, BUFFERS, "gradient_by_rank"))
            waiting.append(index)
        *over, final = waiting
        self.events += [ends[one] for one in over]
        ended = {*turns} - {final}
        last = sorted({final, len(ends) - 1})
        return copies, [one for place, one in enumerate(ends) if place not in ended], [ends[one] for one in last]

    def _placed(self, one: Gradient, end: Drop) -> Drop:
        """The end of a gradient in its parameter's placement; ``end`` is that of one as autograd left it."""
        if one.placed is None:
            return end
        dtype = self.sharding.reduce if end.tensor == one.kept else self.sharding.compute
        hold = self.hold(one.placed, one.elements, dtype, GRADIENTS, "redistributed_gradient")
        self.events.append(end)
        return hold.end

    def _kept(self, one: Gradient) -> tuple[Hold, Drop]:
        """A gradient's copy in the reduction's dtype, which waits for a micro-batch that reduces."""
        dtype = self.sharding.reduce
        hold = Hold(one.kept, size(one.whole, dtype), GRADIENTS, "unsharded_gradient", (one.whole,), dtype)
        return hold, hold.end

    def _reduced(self, at: int, elements: int) -> None:
        """The reduce-scatter's output becomes the sharded gradient, or is added to it, or goes to the host."""
        sharding = self.sharding
        cast = sharding.reduce != sharding.trained
        keeps = self.role is not Role.STEADY and not sharding.offload
        category = GRADIENTS if keeps and not cast else BUFFERS
        replicated = sharding.replicas > 1
        own = self.id("gradient", at) if keeps and not cast else Scope.HOOKS.id(REDUCED)
        if replicated and not (keeps and not cast):
            own = self.id("all_reduced", at)
        output = self.hold(own, elements, sharding.reduce, category, "reduce_scatter_output", REDUCING)
        if sharding.divides and self.shards(at) == 1:
            self.drop(
                self.hold(Scope.HOOKS.id(DIVIDED), elements, sharding.reduce, BUFFERS, "divided_gradients", REDUCING)
            )
        result = output
        if cast:
            id = self.id("gradient", at) if keeps else Scope.HOOKS.id(SHARDED)
            category = GRADIENTS if keeps else BUFFERS
            result = self.hold(id, elements, sharding.trained, category, "sharded_gradient", REDUCING)
            if not replicated:
                self.drop(output)
        if not keeps and (cast or not replicated):
            self.drop(result)
        if replicated and not (keeps and not cast):
            self.reduced.append(output)

    def finalise(self) -> None:
        """``_root_post_backward_final_callback``: what backward itself did not reach."""
        for at, state in enumerate(self.states):
            if not state.ran:
                self.post_backward(at)
            if state.gathered is not None:
                self.drop(state.gathered)
                state.gathered = None
        self.by_role(self._end_reduced)
        self.events += [one.end for one in self.reducing]
        self.reducing = []

    def _end_reduced(self) -> None:
        self.events += [one.end for one in self.reduced]
        self.reduced = []


class Explicit(Hooks):
    """Units may also be gathered, waited for and resharded by calls."""

    def gather(self, at: int) -> None:
        """``unshard``, whose output waits on the default stream."""
        state = self.states[at]
        begun = len(self.events)
        self.unshard(at)
        if state.gathered is None:
            return
        known = {state.gathered.tensor: self.id("gathered", at)}
        for place in range(begun, len(self.events)):
            event = self.events[place]
            if isinstance(event, Hold):
                self.events[place] = event._replace(stream=0, tensor=known.get(event.tensor, event.tensor))
        state.gathered = state.gathered._replace(stream=0, tensor=self.id("gathered", at))

    def wait(self, at: int) -> None:
        """``UnshardHandle.wait``."""
        self.wait_for_unshard(at, forward=False)

    def free(self, at: int) -> None:
        """``FSDPModule.reshard``."""
        Hooks.reshard(self, at, forward=False)
