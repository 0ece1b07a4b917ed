"""What a trace wrote down, without torch: events with the module and phase that they happened in (``Recording``), which
part of the model is which entry of a layer list (``Traced``), and the same as a snapshot that PyTorch's own memory
viewer opens (``torch.cuda._memory_viz``, pytorch.org/memory_viz).

A trace follows storages, not tensors. Each has a number, in order of appearance; what it is for is known
only later (an activation is what forward leaves, a gradient what a parameter ends up with), so categories
are put on the events once all have happened.

The format is that of ``torch.cuda.memory._snapshot()``: segments with their blocks as they are at the end, and
the history of one device. Addresses are given in order and never twice; a frame is the module and the operator.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import field
from functools import cached_property
from typing import Any, NamedTuple

from ..tape.events import Category, Drop, Event, Excursion, Hold, Seam, Tape, compose, fold
from ..values import dataclass

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


class Done(NamedTuple):
    """What an operator did (``operators``), by its sizes; ``how`` is the same whatever these are."""

    what: str
    how: tuple[int, ...]
    sizes: tuple[int, ...]


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
    done: list[tuple[Place, Done]] = field(default_factory=list)
    """What operators did, where that was asked for; likewise."""

    def add(self, event: Hold | Drop, place: Place) -> None:
        self.events.append(event)
        self.places.append(place)
        self.live += event.bytes if isinstance(event, Hold) else -event.bytes

    def clear(self) -> None:
        self.events.clear()
        self.places.clear()
        self.marks.clear()
        self.raw.clear()
        self.done.clear()
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
        return Recording(events, self.places, self.live, self.marks, self.raw, self.done)

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


EMBEDDING, FINAL_NORM, HEAD = "embedding", "final_norm", "head"
_FIRST_ENTRY = {FORWARD: EMBEDDING, BACKWARD: HEAD, EVALUATION: EMBEDDING, OPTIMIZER: "optimizer"}


class Registered(NamedTuple):
    """A parameter as the model registers it."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    """As memplan writes it where it has a name for it: ``bf16``."""
    trained: bool = False
    role: str = ""
    """``word`` for the table of the input, ``position`` for another embedding, ``head`` for the output's."""


class Buffer(NamedTuple):
    """A registered buffer."""

    path: str
    bytes: int
    """Of its storage, not rounded."""
    dtype: str


@dataclass(frozen=True)
class Outline:
    """Paths of modules in a model."""

    blocks: tuple[str, ...]
    """Lists of layers: ``model.layers``; several in an encoder with a decoder."""
    norm: str
    """The norm behind the last layer; empty where there is none."""
    parameters: int
    """Elements."""
    tensors: tuple[Registered, ...] = field(default=(), compare=False)
    """Parameters in their order; known where the trace ran, and not written to JSON."""
    buffers: tuple[Buffer, ...] = field(default=(), compare=False)
    """Likewise."""

    def layer_of(self, module: str) -> str:
        """The layer that ``module`` is in, as ``layer.3`` (the path where there are several lists), or nothing."""
        for prefix in self.blocks:
            if module.startswith(f"{prefix}."):
                number = module[len(prefix) + 1 :].partition(".")[0]
                return f"layer.{number}" if len(self.blocks) == 1 else f"{prefix}.{number}"
        return ""


class Pass(NamedTuple):
    """A pass of a pipeline's stage, or the reduction of its gradients."""

    what: str
    """``forward``, ``loss``, ``backward`` or ``reduce``."""
    stage: int
    microbatch: int
    begin: int
    end: int
    """Events of the recording."""
    opening: str
    """The entry that runs first."""


@dataclass(frozen=True)
class Traced:
    """A recorded step."""

    recording: Recording
    outline: Outline
    torch: str = ""
    transformers: str = ""
    substitutions: tuple[str, ...] = ()
    """Where PyTorch's CPU was made to behave as CUDA."""
    passes: tuple[Pass, ...] = ()
    """Of a pipeline's rank, in order."""
    ready: tuple[str, ...] = ()
    """Paths of parameters in the order in which their gradients were ready; where the trace ran."""

    @cached_property
    def entries(self) -> tuple[str, ...]:
        """The entry of the layer list that each event belongs to, as a recipe has it: what happens between two
        layers belongs to the one that ran last."""
        return self._entries(self.recording.places, {one.begin: one.opening for one in self.passes})

    @cached_property
    def done(self) -> dict[tuple[int, str, str, bool], list[Done]]:
        """What operators did, by micro-batch, phase, entry, and whether it was done again."""
        places = [place for place, _ in self.recording.done]
        result: dict[tuple[int, str, str, bool], list[Done]] = {}
        for (place, done), entry in zip(self.recording.done, self._entries(places, {}), strict=True):
            result.setdefault((place.microbatch, place.phase, entry, place.recompute), []).append(done)
        return result

    def _entries(self, places: Iterable[Place], openings: Mapping[int, str]) -> tuple[str, ...]:
        result = []
        before: tuple[object, ...] = ()
        entry = ""
        for number, place in enumerate(places):
            if number in openings:
                before, entry = place[:2], openings[number]
            elif place[:2] != before:
                before = place[:2]
                entry = _FIRST_ENTRY.get(place.phase, "")
            entry = self._entry(place.module, entry, place.phase)
            result.append(entry)
        return tuple(result)

    def _entry(self, module: str, before: str, phase: str) -> str:
        if phase not in (FORWARD, BACKWARD, EVALUATION):
            return before
        layer = self.outline.layer_of(module)
        if layer:
            return layer
        if self.outline.norm and is_within(module, self.outline.norm):
            return FINAL_NORM
        around = not module or any(is_within(prefix, module) for prefix in self.outline.blocks)
        if before == EMBEDDING or (around and (phase == BACKWARD or before not in (FINAL_NORM, HEAD))):
            return before
        return HEAD if phase != BACKWARD or before == HEAD else EMBEDDING

    @cached_property
    def setup(self) -> Excursion:
        """What is held before the step: parameters, buffers, inputs, optimizer states."""
        return self.recording.of(0, "")

    @cached_property
    def _by_pass(self) -> dict[tuple[int, str, str], list[Hold | Drop]]:
        result: dict[tuple[int, str, str], list[Hold | Drop]] = {}
        for event, place, entry in zip(self.recording.events, self.recording.places, self.entries, strict=True):
            result.setdefault((place.microbatch, place.phase, entry), []).append(event)
        return result

    def events(self, entry: str, phase: str, microbatch: int = 0) -> list[Hold | Drop]:
        """What happened in ``entry`` in one phase of one micro-batch."""
        return self._by_pass.get((microbatch, phase, entry), [])

    def of(self, entries: Iterable[str], phase: str, microbatch: int = 0) -> Excursion:
        """The fold of the events of ``entries``, which ran in that order, in one phase of one micro-batch."""
        order = tuple(entries) if phase == FORWARD else tuple(entries)[::-1]
        return compose(fold(self.events(entry, phase, microbatch)) for entry in order)

    @property
    def tape(self) -> Tape:
        return self.recording.tape()

    @cached_property
    def whole(self) -> Excursion:
        """The fold of everything, from nothing."""
        return fold(self.recording.events)

    def to_json(self) -> dict[str, Any]:
        outline = {"blocks": self.outline.blocks, "norm": self.outline.norm, "parameters": self.outline.parameters}
        return {
            "outline": outline,
            "passes": self.passes,
            "substitutions": self.substitutions,
            **self.recording.to_json(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Traced:
        given = data["outline"]
        outline = Outline(tuple(given["blocks"]), given["norm"], given["parameters"])
        versions = data.get("torch", ""), data.get("transformers", "")
        passes = tuple(Pass(*one) for one in data["passes"])
        return Traced(Recording.from_json(data), outline, *versions, tuple(data.get("substitutions", ())), passes)


STREAM = 0


def snapshot(recording: Recording) -> dict[str, Any]:
    """What ``pickle`` writes and the viewer reads."""
    addresses: dict[int, int] = {}
    alive: dict[int, tuple[Hold, Place]] = {}
    history: list[dict[str, Any]] = []
    end = 0
    for time, (event, place) in enumerate(zip(recording.events, recording.places, strict=True)):
        if isinstance(event, Hold):
            addresses[event.tensor], end = end, end + event.bytes
            alive[event.tensor] = event, place
            history.append(_entry("alloc", addresses[event.tensor], event, place, time))
            continue
        hold, born = alive.pop(event.tensor)
        address = addresses[event.tensor]
        history += [_entry(action, address, hold, born, time) for action in ("free_requested", "free_completed")]
    blocks, at = [], 0
    for number, (hold, place) in alive.items():
        blocks += _gap(at, addresses[number])
        at = addresses[number] + hold.bytes
        block = {"state": "active_allocated", "requested_size": hold.bytes, "frames": _frames(hold, place)}
        blocks.append({**block, "address": addresses[number], "size": hold.bytes})
    blocks += _gap(at, end)
    live = sum(hold.bytes for hold, _ in alive.values())
    segment = {
        "device": 0,
        "address": 0,
        "total_size": end,
        "allocated_size": live,
        "active_size": live,
        "requested_size": live,
        "stream": STREAM,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
    return {"segments": [segment] if end else [], "device_traces": [history], "allocator_settings": {}}


def _gap(start: int, end: int) -> list[dict[str, Any]]:
    if start == end:
        return []
    return [{"address": start, "size": end - start, "requested_size": 0, "state": "inactive", "frames": []}]


def _entry(action: str, address: int, hold: Hold, place: Place, time: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": hold.bytes,
        "stream": STREAM,
        "time_us": time,
        "device": 0,
        "frames": _frames(hold, place),
    }


def _frames(hold: Hold, place: Place) -> list[dict[str, Any]]:
    phase = "recompute" if place.recompute else place.phase or "setup"
    shape = "×".join(map(str, hold.shape))
    return [
        {"name": f"{hold.name} {shape} {hold.dtype} ({hold.category.key})", "filename": place.module, "line": 0},
        {"name": f"{phase} of micro-batch {place.microbatch}", "filename": "memplan trace", "line": 0},
    ]
