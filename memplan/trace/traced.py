"""What a trace found: the recording, and which part of the model is which entry of a layer list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..tape import Drop, Excursion, Hold, Tape, compose, fold
from .recording import BACKWARD, EVALUATION, FORWARD, OPTIMIZER, Recording, is_within

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
        result = []
        before: tuple[object, ...] = ()
        entry = ""
        openings = {one.begin: one.opening for one in self.passes}
        for number, place in enumerate(self.recording.places):
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
        return {"outline": outline, "passes": self.passes, **self.recording.to_json()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Traced:
        given = data["outline"]
        outline = Outline(tuple(given["blocks"]), given["norm"], given["parameters"])
        versions = data.get("torch", ""), data.get("transformers", "")
        passes = tuple(Pass(*one) for one in data["passes"])
        return Traced(Recording.from_json(data), outline, *versions, tuple(data.get("substitutions", ())), passes)
