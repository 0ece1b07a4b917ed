"""What a trace wrote down, without torch: events with the module and phase that they happened in.

A trace follows storages, not tensors. Each has a number, in order of appearance; what it is for is known
only later (an activation is what forward leaves, a gradient what a parameter ends up with), so categories
are put on the events once all have happened.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..tape import Category, Drop, Event, Excursion, Hold, Seam, Tape, fold

FORWARD, BACKWARD, OPTIMIZER, EVALUATION = "forward", "backward", "step", "evaluation"
ITERATION = "iteration"
"""All passes of a pipeline's iteration, which is no event's phase."""
LOSS, REDUCE, BETWEEN = "loss", "reduce", "between"
"""In a pipeline: the loss that follows a forward pass, the reduction of gradients behind the last backward, and
what a schedule does between passes."""


class Place(NamedTuple):
    """Where an event happened."""

    microbatch: int
    phase: str
    """``forward``, ``backward``, ``step``, ``evaluation`` (``reduce`` and ``between`` in a pipeline), or empty before
    the first."""
    module: str
    """Dotted path in the model, such as ``model.layers.1.mlp``; empty outside of any."""
    recompute: bool = False
    """Forward again, within backward."""


SETUP = Place(0, "", "")


@dataclass
class Recording:
    """Events in order; ``places`` has one entry for each."""

    events: list[Hold | Drop] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    live: int = 0
    """Bytes held now, each storage rounded up to 512."""
    marks: dict[int, Category] = field(default_factory=dict)
    """What is known of storages for certain, by number."""
    raw: dict[int, int] = field(default_factory=dict)
    """Bytes of storages before rounding, by number; known where the trace ran, and not written to JSON."""

    def add(self, event: Hold | Drop, place: Place) -> None:
        self.events.append(event)
        self.places.append(place)
        self.live += event.bytes if isinstance(event, Hold) else -event.bytes

    def clear(self) -> None:
        self.events.clear()
        self.places.clear()
        self.marks.clear()
        self.raw.clear()
        self.live = 0

    def categorised(self, vocab: int = 0) -> Recording:
        """The same with a category on every event: marked ones, logits (a score for each of ``vocab`` tokens),
        activations (what a forward pass leaves behind), and temporaries."""
        kept = dict(self.marks)
        for event in self.events if vocab else ():
            if isinstance(event, Hold) and len(event.shape) > 1 and event.shape[-1] == vocab:
                kept.setdefault(event.tensor, Category.LOGITS)
        for number in self._left_by_forward():
            kept.setdefault(number, Category.ACTIVATIONS)
        events = [event._replace(category=kept.get(event.tensor, Category.TEMPORARIES)) for event in self.events]
        return Recording(events, self.places, self.live, self.marks, self.raw)

    def _left_by_forward(self) -> set[int]:
        left: set[int] = set()
        alive: set[int] = set()
        phase = (0, "")
        for event, place in zip(self.events, self.places, strict=True):
            if (place.microbatch, place.phase) != phase:
                if phase[1] == FORWARD:
                    left |= alive
                alive.clear()
                phase = (place.microbatch, place.phase)
            if isinstance(event, Hold):
                alive.add(event.tensor)
            else:
                alive.discard(event.tensor)
        return left

    def tape(self) -> Tape:
        """All events, with a seam wherever micro-batch, phase or module change."""
        result: list[Event] = []
        before: Place | None = None
        for event, place in zip(self.events, self.places, strict=True):
            if place != before:
                result.append(Seam(f"{place.microbatch}/{place.phase}/{place.module}".rstrip("/")))
                before = place
            result.append(event)
        return tuple(result)

    def of(self, microbatch: int, phase: str, modules: Iterable[str] = ()) -> Excursion:
        """The fold of one phase of a micro-batch, of the events within ``modules`` alone if there are any."""
        prefixes = tuple(modules)
        return fold(
            event
            for event, place in zip(self.events, self.places, strict=True)
            if place[:2] == (microbatch, phase)
            if not prefixes or any(is_within(place.module, prefix) for prefix in prefixes)
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "events": [
                [1, *event[1:2], int(event.category), event.tensor, event.name, list(event.shape), event.dtype]
                if isinstance(event, Hold)
                else [-1, event.bytes, int(event.category), event.tensor]
                for event in self.events
            ],
            "places": [list(place) for place in self.places],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Recording:
        result = Recording()
        for (sign, size, category, tensor, *rest), place in zip(data["events"], data["places"], strict=True):
            event: Hold | Drop = Drop(tensor, size, Category(category))
            if sign > 0:
                name, shape, dtype = rest
                event = Hold(tensor, size, Category(category), name, tuple(shape), dtype)
            result.add(event, Place(*place))
        return result


def is_within(module: str, prefix: str) -> bool:
    """Whether the path ``module`` is ``prefix`` or below it."""
    return module == prefix or module.startswith(f"{prefix}.")


def as_lines(recording: Recording) -> str:
    """One JSON object a line: what was held or dropped, how many bytes, what for, and where."""
    lines = []
    for event, place in zip(recording.events, recording.places, strict=True):
        is_hold = isinstance(event, Hold)
        line: dict[str, Any] = {"event": "hold" if is_hold else "drop", "tensor": event.tensor, "bytes": event.bytes}
        line["category"] = event.category.key
        if isinstance(event, Hold):
            line |= {"operator": event.name, "shape": list(event.shape), "dtype": event.dtype}
        line |= {"microbatch": place.microbatch, "phase": place.phase or "setup", "module": place.module}
        lines.append(json.dumps({**line, "recompute": place.recompute}))
    return "".join(f"{line}\n" for line in lines)
