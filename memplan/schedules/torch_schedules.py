"""What one rank does in one iteration of ``torch.distributed.pipelining``: GPipe, 1F1B and interleaved 1F1B.

Follows ``schedules.py`` and ``stage.py`` of torch 2.13. Besides the order of passes that is the lifetime of what
crosses stages, which ends where the last Python variable that refers to it does:

* an output is in ``fwd_cache`` until its backward has returned, and in the schedule's ``output`` until the next
  forward has; so the last stage has two micro-batches' logits while it runs a forward;
* what is sent is in the list of operations until the next one is made, and in the work that a lone send returns,
  for NCCL's keeps its tensor (``ProcessGroupNCCL::pointToPoint``, ``WorkNCCL::outputs_``). GPipe and the interleaved
  schedule collect the works of all sends until the iteration ends, 1F1B keeps one of its warm-up;
* receive buffers are made once, one for each micro-batch, and stay (``args_recv_info``, ``grad_recv_info``);
* every loss is kept until the caller has summed them, and its gradient of one until its backward has returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Literal

from ..tape.events import ZERO, Category, Excursion, Hold, change, compose, fold
from ..tape.program import Action, Chunk, Exchanged, Role, What
from ..values import NamedTuple, dataclass

REPEATED = 3
"""Periods of a steady phase that stand for all of them."""

PAIRS = 16
"""Without virtual stages a period is one pass of each kind: as many stand for all of them, before and behind those left
out, where ``REPEATED`` times the ranks are more."""

ACTIVE = 3
"""Stages of a rank whose parameters are whole at once (``_add_unshard_reshard``, ``max_active_stages``)."""


class Kept(NamedTuple):
    """A tensor that outlives the pass which makes it."""

    tensor: str
    chunk: int
    microbatch: int


class Place(NamedTuple):
    """Where a rank is in the pipeline."""

    rank: int
    ranks: int
    chunks: int = 1
    """Stages of a rank: number k of rank r is stage ``r + k · ranks``."""

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def stage(self, chunk: int) -> int:
        return self.rank + chunk * self.ranks


class _Run:
    """A schedule's ``step``: its actions so far, and what its variables refer to."""

    def __init__(self, place: Place, microbatches: int, outputs: bool) -> None:
        self.place = place
        self.microbatches = microbatches
        self.outputs = outputs and place.rank == place.ranks - 1
        """``return_outputs``: the last stage keeps its outputs until the next iteration begins."""
        self.actions: list[Action] = []
        self.variables: dict[str, list[Kept]] = {}
        self.references: Counter[Kept] = Counter()
        if self.outputs:  # ``clear_runtime_states``
            self.actions += [Action("end", place.chunks - 1, number, "output") for number in range(microbatches)]

    def assign(self, name: str, *kept: Kept) -> None:
        """A variable refers to ``kept``, and no longer to what it did."""
        self.references.update(kept)
        before = self.variables.pop(name, [])
        if kept:
            self.variables[name] = list(kept)
        for one in before:
            self.references[one] -= 1
            if not self.references[one]:
                del self.references[one]
                self.actions.append(Action("end", one.chunk, one.microbatch, one.tensor))

    def append(self, name: str, *kept: Kept) -> None:
        """A list gets longer."""
        self.references.update(kept)
        self.variables.setdefault(name, []).extend(kept)

    def close(self) -> None:
        """``_step_microbatches`` returns, outputs are merged, and the caller drops them and the losses."""
        for name in [name for name in self.variables if name not in ("losses", "output_chunks")]:
            self.assign(name)
        if self.outputs:
            self.actions.append(Action("merge", self.place.chunks - 1, self.microbatches - 1, "outputs"))
        self.assign("losses")

    def do(self, what: What, chunk: int, microbatch: int = 0) -> None:
        self.actions.append(Action(what, chunk, microbatch))

    def forward(self, microbatch: int, chunk: int = 0) -> tuple[Kept, ...]:
        """``forward_one_chunk`` and ``_maybe_compute_loss``; returns what is sent."""
        last = self.place.stage(chunk) == self.place.stages - 1
        output = Kept("output", chunk, microbatch)
        self.do("forward", chunk, microbatch)
        self.assign(f"fwd_cache[{chunk}][{microbatch}]", output)
        self.assign("output", output)
        if not last:
            return (output,)
        if self.outputs:
            self.append("output_chunks", output)
        self.do("loss", chunk, microbatch)
        self.append("losses", Kept("loss", chunk, microbatch))
        return ()

    def backward(self, microbatch: int, chunk: int = 0) -> tuple[Kept, ...]:
        """``backward_one_chunk``; returns what is sent, which a variable has to refer to at once."""
        self.do("backward", chunk, microbatch)
        self.assign(f"fwd_cache[{chunk}][{microbatch}]")
        if self.place.stage(chunk) == self.place.stages - 1:
            self.assign("grad_tensors", Kept("loss_gradient", chunk, microbatch))
            self.assign("grad_tensors")
        return (Kept("input_gradient", chunk, microbatch),) if self.place.stage(chunk) else ()


@lru_cache(maxsize=256)
def gpipe(place: Place, microbatches: int, outputs: bool = False) -> Sequence[Action]:
    """``ScheduleGPipe``."""
    run = _Run(place, microbatches, outputs)
    for microbatch in range(microbatches):
        run.append("fwd_sends_to_wait", *run.forward(microbatch))
    for microbatch in range(microbatches):
        run.append("bwd_sends_to_wait", *run.backward(microbatch))
    run.do("reduce", 0, microbatches - 1)
    run.close()
    return tuple(run.actions)


@lru_cache(maxsize=256)
def one_forward_one_backward(place: Place, microbatches: int, outputs: bool = False) -> Sequence[Action]:
    """``Schedule1F1B``: as many forward passes as stages follow, this one among them; then a backward and a forward
    in turn; then the remaining backward passes."""
    run = _Run(place, microbatches, outputs)
    warmup = min(microbatches, place.stages - place.rank)
    for microbatch in range(warmup):
        sent = run.forward(microbatch)
        run.assign("fwd_sends", *sent)
        if microbatch < warmup - 1:
            run.assign("send_work", *sent)
    for microbatch in range(microbatches):
        sent = run.backward(microbatch)
        run.assign("bwd_sends", *sent)
        following = microbatch + warmup
        if following < microbatches:
            run.assign("fwd_sends", *run.forward(following))
        else:
            run.assign("send_work", *sent)
    run.do("reduce", 0, microbatches - 1)
    run.close()
    return tuple(run.actions)


# -- interleaved ------------------------------------------------------------------------------------


class Pass(NamedTuple):
    """A pass of one micro-batch through one of a rank's stages."""

    what: Literal["forward", "backward"]
    chunk: int
    microbatch: int


def rounds(ranks: int, microbatches: int) -> int:
    """Rounds that the micro-batches are run in, each of which a stage runs in a row."""
    return max(1, microbatches // ranks)


@lru_cache(maxsize=256)
def passes(place: Place, microbatches: int) -> Sequence[Pass]:
    """``ScheduleInterleaved1F1B._calculate_single_rank_operations``."""
    chunks, group = place.chunks, microbatches // rounds(place.ranks, microbatches)
    total = microbatches * chunks
    warmup = min((chunks - 1) * group + 2 * (place.ranks - 1 - place.rank), total)
    following = {"forward": Counter[int](), "backward": Counter[int]()}

    def one(what: Literal["forward", "backward"], step: int) -> Pass:
        position = step // group % chunks
        chunk = position if what == "forward" else chunks - 1 - position
        microbatch = following[what][chunk]
        following[what][chunk] += 1
        return Pass(what, chunk, microbatch)

    result: list[Pass] = []
    for step in range(total + warmup):
        if step < total:
            result.append(one("forward", step))
        if step >= warmup:
            result.append(one("backward", step - warmup))
    return tuple(result)


@lru_cache(maxsize=256)
def interleaved(place: Place, microbatches: int, outputs: bool = False) -> Sequence[Action]:
    """``ScheduleInterleaved1F1B`` as ``_PipelineScheduleRuntime`` runs it: parameters of a stage are gathered ahead,
    and waited for before its first pass; works of sends are waited for in the end."""
    run = _Run(place, microbatches, outputs)
    order = passes(place, microbatches)
    left = Counter(dict.fromkeys(range(place.chunks), microbatches))
    active: set[int] = set()
    waiting: set[int] = set()
    for (what, chunk, microbatch), ahead in zip(order, _ahead(order), strict=True):
        for other in active.difference(ahead):
            active.discard(other)
            if left[other]:
                run.do("reshard", other)
        for other in ahead:
            if other not in active:
                active.add(other)
                waiting.add(other)
                run.do("unshard", other)
        if chunk in waiting:
            waiting.discard(chunk)
            run.do("wait", chunk)
        if what == "forward":
            run.append("send_ops", *run.forward(microbatch, chunk))
            run.assign("output")
            continue
        run.append("send_ops", *run.backward(microbatch, chunk))
        left[chunk] -= 1
        if not left[chunk]:
            run.do("reduce", chunk, microbatches - 1)
    run.close()
    return tuple(run.actions)


def _ahead(order: Sequence[Pass]) -> list[tuple[int, ...]]:
    """In front of each pass, the stages that run next, each once; this pass's first."""
    found: tuple[int, ...] = ()
    result: list[tuple[int, ...]] = []
    for one in reversed(order):
        found = (one.chunk, *(chunk for chunk in found if chunk != one.chunk))
        result.append(found[:ACTIVE])
    return result[::-1]


# -- choice -----------------------------------------------------------------------------------------


def schedule(place: Place, microbatches: int, name: str, outputs: bool = False) -> Sequence[Action]:
    """``name`` as in a plan: several stages of a rank are interleaved. ``outputs``: ``return_outputs``."""
    if place.chunks > 1:
        return interleaved(place, microbatches, outputs)
    run = gpipe if name == "gpipe" else one_forward_one_backward
    return run(place, microbatches, outputs)


def shortened(place: Place, microbatches: int, name: str, outputs: bool = False) -> Sequence[Action]:
    """The schedule without most periods of its steady phase; what their micro-batches would leave begins there."""
    left, actions, steady = _cut(place, microbatches, name, outputs)
    return _joined(place, left, actions[:steady], actions[steady:], outputs)


MOST_WHOLE = 512
"""Micro-batches up to which a schedule is folded action by action."""


def folded(place: Place, microbatches: int, name: str, outputs: bool = False) -> Sequence[Action]:
    """The schedule as it is folded: of many micro-batches the ``shortened`` one, whose last periods have their own
    numbers. What micro-batches leave behind only grows, so no other period peaks higher than its first or its last."""
    if microbatches <= MOST_WHOLE:
        return schedule(place, microbatches, name, outputs)
    left, actions, steady = _cut(place, microbatches, name, outputs)
    late = [
        one if one.what in ("unshard", "wait", "reshard") else one._replace(microbatch=one.microbatch + left)
        for one in actions[steady:]
    ]
    return _joined(place, left, actions[:steady], late, outputs)


def _joined(
    place: Place, left: int, early: Sequence[Action], late: Sequence[Action], outputs: bool
) -> Sequence[Action]:
    """``early`` and ``late`` actions, with what ``left`` micro-batches between them leave until the iteration ends."""
    if not left:
        return (*early, *late)
    kept = _left_behind(place)
    begun = [Action("begin_all", chunk, left, tensor) for chunk, tensor in kept]
    ended = [Action("end_all", chunk, left, tensor) for chunk, tensor in kept]
    before: list[Action] = []
    if outputs and place.rank == place.ranks - 1:
        before = [Action("end_all", place.chunks - 1, left, "output")]
        begun.append(Action("begin_all", place.chunks - 1, left, "output"))
    sent = [one for one in ended if one.tensor != "loss"]
    losses = [one for one in ended if one.tensor == "loss"]
    merge = next((at for at, action in enumerate(late) if action.what == "merge"), len(late))
    return (*before, *early, *begun, *late[:merge], *sent, *late[merge:], *losses)


@lru_cache(maxsize=256)
def _cut(place: Place, microbatches: int, name: str, outputs: bool) -> tuple[int, Sequence[Action], int]:
    """How many micro-batches are left out, the schedule without them, and the action before which they would be."""
    period = place.ranks if place.chunks > 1 else 1
    warmup = (place.chunks - 1) * place.ranks + 2 * (place.ranks - 1 - place.rank)
    few = (-(-warmup // (place.ranks * place.chunks)) + REPEATED) * place.ranks
    at = warmup + 2 * place.ranks * place.chunks
    before = place.stages - place.rank
    if place.chunks == 1 and few > before + 2 * PAIRS:
        few, at = before + 2 * PAIRS, before + 2 * PAIRS
    left = (microbatches - few) // period * period
    if left <= 0 or name == "gpipe":
        return 0, schedule(place, microbatches, name, outputs), 0
    actions = schedule(place, microbatches - left, name, outputs)
    passes = [at for at, action in enumerate(actions) if action.what in ("forward", "backward")]
    return left, actions, passes[at]


def _left_behind(place: Place) -> list[tuple[int, str]]:
    """What each micro-batch leaves until the iteration ends, with the chunk."""
    found: list[tuple[int, str]] = []
    for chunk in range(place.chunks):
        stage = place.stage(chunk)
        if stage == place.stages - 1:
            found.append((chunk, "loss"))
        elif place.chunks > 1:
            found.append((chunk, "output"))
        if stage and place.chunks > 1:
            found.append((chunk, "input_gradient"))
    return found


# -- on a rank --------------------------------------------------------------------------------------

MADE: Mapping[What, tuple[str, ...]] = MappingProxyType(
    {"forward": ("output",), "loss": ("loss",), "backward": ("input_gradient", "loss_gradient")}
)
"""What passes hand to the schedule."""


@dataclass(frozen=True, eq=False)
class Pipelined:
    """What a rank's schedule does with its stages."""

    chunks: tuple[Chunk, ...]
    microbatches: int
    actions: Sequence[Action]
    """As they are folded: of many micro-batches those that show every peak."""
    shortened: Sequence[Action]
    """As many of the actions as show everything that repeats, for the allocator's replay."""
    merged: Hold | None = None
    """The outputs of all micro-batches in one tensor, where they are kept (``return_outputs``)."""
    kept: int = 0
    """Outputs that the iteration before has left."""
    exchanged = Exchanged(MADE)

    def role(self, microbatch: int) -> Role:
        return "steady" if microbatch else "first"

    def begun(self, chunk: int, tensor: str) -> Hold:
        """The outputs of all micro-batches in one, or what one that is left out would leave."""
        if tensor == "outputs":
            assert self.merged is not None
            return self.merged
        lasting = self.chunks[chunk].lasting(tensor, False)
        assert lasting is not None
        return lasting.hold

    def excursion(self, action: Action) -> Excursion:
        chunk = self.chunks[action.chunk]
        if action.tensor is None:
            return chunk.excursion(action.what, action.microbatch == 0).within(str(action.microbatch))
        if action.what == "end":
            return chunk.ends[action.tensor]
        if action.what == "end_all":
            return chunk.ends[action.tensor].times(action.microbatch)
        hold = self.begun(action.chunk, action.tensor)
        if action.what in ("begin", "begin_all"):
            return change(hold.bytes * (action.microbatch if action.what == "begin_all" else 1), hold.category)
        merged = (hold, hold.end)
        return fold(merged).within(f"{action.microbatch}/forward/outputs")

    @cached_property
    def carried(self) -> Excursion:
        """What one iteration leaves to the next."""
        output = self.begun(-1, "output") if self.kept else None
        return ZERO if output is None else change(self.kept * output.bytes, output.category)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Bytes beyond the static ones in front of each action."""
        result, level = [], 0
        for action in self.actions:
            result.append(level)
            level += self.excursion(action).net
        return tuple(result)

    @cached_property
    def whole(self) -> Excursion:
        """All passes; what is left are the gradients."""
        total = compose(map(self.excursion, self.actions))
        left = [Category(at).key for at, size in enumerate(total.net_by) if size and at != Category.GRADIENTS]
        assert not left, f"an iteration leaves {', '.join(left)} behind"
        return total

    @cached_property
    def after_forward(self) -> int:
        """Bytes beyond the static ones behind the first forward pass."""
        at = next(at for at, action in enumerate(self.actions) if action.what == "forward")
        return self.levels[at + 1]

    @property
    def in_flight(self) -> int:
        """Micro-batches of one stage whose activations are alive at once, at most; the largest sum over stages."""
        alive = most = 0
        for action in self.actions:
            alive += (action.what == "forward") - (action.what == "backward")
            most = max(most, alive)
        return most
