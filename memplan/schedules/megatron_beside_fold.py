"""One iteration of Megatron-Core on one rank whose forward passes run beside backward passes of other micro-batches.

``megatron/core/models/common/model_chunk_schedule_plan.py``: ``TransformerModelChunkSchedulePlan.run`` (layer i of one
with the last but i of the other) and ``TransformerLayerSchedulePlan.run`` (parts of both layers).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Literal

from ..layers.megatron_core.overlapped import COMBINE, DISPATCH, FRONT, MLP, MLP_DW, PRE, PRE_DW, TAIL
from ..tape.events import ZERO, Category, Excursion, Hold, change
from ..tape.program import WHOLE, Action, Piece, Whole
from ..values import NamedTuple, dataclass
from .megatron_fold import CATEGORIES, MADE, NAMES, MegatronOrder, reduced
from .megatron_schedule import trace

Turn = Literal["forward", "backward"]

TURNS: tuple[tuple[Turn, str], ...] = (
    ("backward", COMBINE), ("forward", PRE), ("backward", MLP), ("forward", DISPATCH), ("backward", MLP_DW),
    ("backward", DISPATCH), ("forward", MLP), ("forward", COMBINE), ("backward", PRE), ("backward", PRE_DW),
)  # fmt: skip
"""Of two layers beside one another: ``combine`` of one and ``pre`` of the other, and so on."""

EARLY: tuple[tuple[Turn, str], ...] = (*TURNS[:6], TURNS[8], *TURNS[6:8], TURNS[9])
"""With attention's backward before the other micro-batch's experts (``ep_overlap_early_attn_memory_release``)."""


EMBEDDED = "embedded_tokens"
"""The embedding's output, which the state of a chunk keeps until the step of both passes has ended
(``ModelChunkState.decoder_input``), longer than the first layer does."""


class _Parts(NamedTuple):
    """How many pieces of a pass come before its layers, are of each label of each layer in the order in which it
    runs them, and come behind."""

    before: int
    layers: tuple[dict[str, int], ...]
    behind: int


def _forward(pieces: Sequence[Piece]) -> _Parts:
    labels = [piece.label for piece in pieces]
    starts = [at for at, label in enumerate(labels) if label == PRE]
    if not starts:
        return _Parts(len(labels), (), 0)
    end = labels.index(TAIL) if TAIL in labels else len(labels)
    layers = tuple(dict.fromkeys(labels[start:stop], 1) for start, stop in zip(starts, [*starts[1:], end], strict=True))
    return _Parts(starts[0], layers, len(labels) - end)


def _backward(pieces: Sequence[Piece]) -> _Parts:
    """What lies between two layers belongs to the first that runs; behind the last one it is the embedding."""
    labels = [piece.label for piece in pieces]
    fronts = [at for at, label in enumerate(labels) if label == FRONT]
    if not fronts:
        return _Parts(len(labels), (), 0)
    first = next(at for at, label in enumerate(labels) if label in (COMBINE, MLP))
    layers = []
    for start, front in zip([first, *(at + 1 for at in fronts)], fronts, strict=False):
        counts = dict.fromkeys(labels[start:front], 1)
        layers.append(counts | {PRE_DW: counts[PRE_DW] + (front != fronts[-1])})
    return _Parts(first, tuple(layers), len(labels) - fronts[-1])


def _layers(ahead: _Parts, back: _Parts, early: bool) -> Iterator[Turn]:
    """Turns through the layers of both passes, but for the products that the first layer's backward has delayed."""
    for at in range(max(len(ahead.layers), len(back.layers))):
        own = {
            "forward": ahead.layers[at] if at < len(ahead.layers) else {},
            "backward": back.layers[at] if at < len(back.layers) else {},
        }
        if at == len(back.layers) - 1:
            own["backward"] = {label: count for label, count in own["backward"].items() if label != PRE_DW}
        for turn, label in EARLY if early else TURNS:
            yield from [turn] * own[turn].get(label, 0)


@dataclass(frozen=True)
class BesideOrder(MegatronOrder):
    """As ``MegatronOrder``, where passes take turns."""

    early: bool = field(default=False, kw_only=True)
    """Attention's backward comes before the other micro-batch's experts."""

    @cached_property
    def _counted(self) -> list[tuple[_Parts, _Parts]]:
        return [(_forward(one.pieces["forward"]), _backward(one.pieces["backward"])) for one in self.chunks]

    def _in_turns(self, actions: Sequence[Action]) -> Iterator[Action]:
        """Every piece of two passes that take turns. What goes to other stages begins where it is made."""
        at, through = 0, False
        while at < len(actions):
            first = actions[at]
            at += 1
            if first.what == "backward" and not self.schedule.receives(first.chunk):
                yield from self._alone(first.chunk, first.microbatch)
                continue
            if first.what != "forward_piece":
                yield first
                continue
            pair: dict[Turn, Action] = {"forward": first, "backward": actions[at]}
            at += 1
            ahead, back = self._counted[first.chunk][0], self._counted[pair["backward"].chunk][1]
            if through:  # the rest of both
                chunk, number = pair["backward"].chunk, pair["backward"].microbatch
                embeds = not self.schedule.receives(chunk)
                if embeds:
                    yield Action("begin", chunk, number, EMBEDDED)
                yield from [pair["backward"]] * (back.layers[-1][PRE_DW] if back.layers else 0)
                yield from [pair["forward"]] * ahead.behind
                yield from [pair["backward"]] * back.behind
                if embeds:
                    yield Action("end", chunk, number, EMBEDDED)
            else:
                made: dict[Turn, Action] = {}
                while at < len(actions) and actions[at].what == "begin" and actions[at].tensor in MADE:
                    made["forward" if actions[at].tensor == "output" else "backward"] = actions[at]
                    at += 1
                turns = [*["forward"] * ahead.before, *["backward"] * back.before, *_layers(ahead, back, self.early)]
                last = {turn: len(turns) - 1 - turns[::-1].index(turn) for turn in made if turn in turns}
                for place, turn in enumerate(turns):
                    yield pair[turn]  # type: ignore[index]
                    if last.get(turn) == place:  # type: ignore[call-overload]
                        yield made[turn]  # type: ignore[index]
            through = not through

    def _alone(self, chunk: int, number: int) -> Iterator[Action]:
        """A backward pass to the embedding with no other beside it."""
        pieces, behind = len(self.chunks[chunk].pieces["backward"]), self._counted[chunk][1].behind
        piece = Action("backward_piece", chunk, number)
        yield from [piece] * (pieces - behind)
        yield Action("begin", chunk, number, EMBEDDED)
        yield from [piece] * behind
        yield Action("end", chunk, number, EMBEDDED)

    @property
    def _passes(self) -> Excursion:
        short = reduced(self.schedule)
        left_out = (self.schedule.microbatches - short.microbatches) * self.sizes.report * self.schedule.last
        return change(left_out, CATEGORIES["report"]).then(self._composed(self._in_turns(trace(short))))

    def _composed(self, actions: Iterable[Action]) -> Excursion:
        total, at, inside = ZERO, "0/forward", False
        under_way: dict[tuple[Whole, int, int], Iterator[Piece]] = {}
        for what, chunk, number, tensor in actions:
            if tensor is not None:
                hold = self.begun(chunk, tensor)
                size = hold.bytes if what == "begin" else -hold.bytes
                if not (inside and what == "begin" and tensor in MADE):
                    total = total.then(change(size, hold.category, f"{at}/pipeline/{NAMES.get(tensor, tensor)}"))
                inside = False
                continue
            if what in WHOLE:
                whole = WHOLE[what]
                key = whole, chunk, number
                pieces = under_way.setdefault(key, iter(self._of(chunk, number)[whole]))
                done = next(pieces).excursion
            elif what in ("forward", "backward"):
                passes = self.chunks[chunk].passes if number else self.chunks[chunk].first_passes
                whole, done = what, passes.forward if what == "forward" else passes.backward
            else:
                continue
            total = total.then(done.within(str(number)))
            at, inside = f"{number}/{whole}", True
        return total

    def _of(self, chunk: int, number: int) -> Mapping[Whole, tuple[Piece, ...]]:
        return self.chunks[chunk].pieces if number else self.chunks[chunk].first_pieces

    def begun(self, chunk: int, tensor: str) -> Hold:
        return Hold(0, self.hidden, Category.ACTIVATIONS) if tensor == EMBEDDED else super().begun(chunk, tensor)

    @property
    def shortened(self) -> list[Action]:
        plan = self.schedule
        short = reduced(plan, reports=False)
        reports = plan.microbatches - short.microbatches if plan.last else 0
        run = [action for action in self._in_turns(trace(short)) if action.what != "reduce"]
        return [Action("begin_all", 0, reports, "report"), *run] if reports else run
