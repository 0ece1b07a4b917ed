"""A model of transformers whose graph hooks cut at every layer, as ``torch.compile`` runs it: each layer, the final
norm, and what follows it are graphs of their own, as Inductor writes them; learnt by ``trace.compiled_parts`` at the
plan's own sizes.

Every layer runs the one graph. A part's tensors have numbers: those that it is given as ``ROLES`` says, parameters from
``PARAMETERS`` on, and above ``MADE`` those that it makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ..tape.events import Category
from ..values import dataclass
from .autograd import Gradients, Recorder, Shape, Tensor, incoming

ROLES = {"gradient": 0, "input": 1, "zeros": 2, "mask": 3, "cos": 4, "sin": 5, "labels": 6, "count": 7}
"""Numbers of what a part is given: the gradient of its first output, zeros for that of the second, its input, and what
others made."""
PARAMETERS, MADE = 10, 1000


class Begins(NamedTuple):
    """A tensor that a kernel is given to fill."""

    number: int
    shape: Shape
    dtype: str
    name: str


Event = Begins | int
"""A tensor begins, or the one with that number ends."""


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """One graph forward and one backward."""

    forward: tuple[Event, ...]
    outputs: tuple[int, ...]
    saved: tuple[int, ...]
    backward: tuple[Event, ...]
    input_gradient: int
    parameters: tuple[tuple[str, Shape, int], ...]
    """As the model registers them: their names in it, shapes, and numbers of their gradients."""
    zeros: tuple[Shape, str] | None = None
    """What autograd makes for the gradient of the second output (``set_materialize_grads``)."""

    def to_json(self) -> dict[str, Any]:
        return {
            "forward": [*map(_text, self.forward)],
            "outputs": self.outputs,
            "saved": self.saved,
            "backward": [*map(_text, self.backward)],
            "input_gradient": self.input_gradient,
            "parameters": self.parameters,
            "zeros": self.zeros,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Part:
        zeros = data["zeros"]
        return Part(
            tuple(map(_event, data["forward"])),
            tuple(data["outputs"]),
            tuple(data["saved"]),
            tuple(map(_event, data["backward"])),
            data["input_gradient"],
            tuple((name, tuple(shape), number) for name, shape, number in data["parameters"]),
            zeros and (tuple(zeros[0]), zeros[1]),
        )


def _text(event: Event) -> str:
    if isinstance(event, int):
        return str(event)
    return f"{event.number} {event.dtype} {'*'.join(map(str, event.shape)) or '.'} {event.name}"


def _event(text: str) -> Event:
    number, *rest = text.split()
    if not rest:
        return int(number)
    dtype, sizes, name = rest
    return Begins(int(number), () if sizes == "." else tuple(map(int, sizes.split("*"))), dtype, name)


@dataclass(frozen=True, eq=False, slots=True)
class CompiledParts:
    """The graphs of a model, whatever its number of layers: ``layer`` and ``norm``, and ``head`` with the loss where it
    is one."""

    parts: Mapping[str, Part]

    def to_json(self) -> dict[str, Any]:
        return {name: part.to_json() for name, part in self.parts.items()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> CompiledParts:
        return CompiledParts({name: Part.from_json(part) for name, part in data.items()})


def run(
    r: Recorder,
    x: Tensor,
    part: Part,
    parameters: Sequence[Tensor],
    shared: Mapping[str, Tensor | None],
    logits: int = 0,
) -> list[Tensor]:
    """The outputs of ``part`` of ``x``. What it is given besides is held by others: ``shared``, by ``ROLES``, and what
    is not followed here. Tensors of ``logits`` elements are logits."""
    live = {ROLES["input"]: x}
    live |= {ROLES[role]: one for role, one in shared.items() if one is not None}
    kept = [one for number, one in live.items() if number in part.saved and number != ROLES["input"]]

    def follow(r: Recorder, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, int):
                live.pop(event, None)
            else:
                kind = Category.LOGITS if prod(event.shape) == logits else Category.TEMPORARIES
                live[event.number] = r.empty(event.shape, event.dtype, event.name, kind)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        """What was saved is let go of one by one (``maybe_clear_saved_tensors``)."""
        live[ROLES["gradient"]] = incoming(gradients)
        gradients.clear()
        if part.zeros is not None:
            live[ROLES["zeros"]] = r.empty(*part.zeros, "logits_zeros", Category.LOGITS)
        follow(r, part.backward)
        returned = [live.get(part.input_gradient), *(live.get(number) for _, _, number in part.parameters)]
        live.clear()
        return returned

    follow(r, part.forward)
    outputs = [live[number] for number in part.outputs]
    node = r.node((x, *parameters), (), backward)
    if node is not None:  # what was saved is in ``live``, and ends as backward comes to it
        r.saved_outside |= {one.storage.id for one in kept}
    for number in live.keys() - set(part.saved):
        del live[number]
    if node is None:
        live.clear()
    return [outputs[0].by(node), *(one.alias() for one in outputs[1:])]
