"""A whole model of transformers as ``torch.compile(model)`` runs it: one graph forward and one backward, as Inductor
writes them, or under DDP the parts that ``DDPOptimizer`` cuts at buckets; learnt by ``trace.compiled_model`` at the
plan's own sizes and at three depths.

Between the events of a shallow graph's first and last layers those of one more layer stand as often as there are more
layers. Tensors are numbered in the order in which a direction makes them, so that a layer further adds as many as it
makes. The one node has every gradient when its backward ends, and not before: what is accumulated waits until then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

from ..tape.events import Category
from ..values import dataclass
from .autograd import Gradients, Recorder, Shape, Tensor, incoming
from .module import Run

Stream = Literal["f", "b", "z", "r"]
"""Who made a tensor: what runs forward, what runs backward, or autograd: zeros for the gradient of the logits, and the
loss's gradient. ``r``: one of backward's, a parameter's gradient, does not end but is ready for hooks."""


class Begins(NamedTuple):
    """A tensor that a kernel is given to fill."""

    shape: Shape
    dtype: str
    name: str


class Ends(NamedTuple):
    """The tensor ``number`` of ``stream`` in the shallow graph; with ``moves`` one that a layer further makes later."""

    stream: Stream
    number: int
    moves: bool = False

    def at(self, more: int, made: Mapping[str, int]) -> int:
        """Its number with so many ``more`` layers, of which each makes ``made`` tensors of a stream."""
        return self.number + (more * made[self.stream] if self.moves else 0)


Event = Begins | Ends


@dataclass(frozen=True, slots=True)
class Graph:
    """One direction: events in front of and behind those of one more layer."""

    front: tuple[Event, ...]
    layer: tuple[Event, ...]
    back: tuple[Event, ...]

    @property
    def made(self) -> int:
        """Tensors that one more layer makes."""
        return sum(isinstance(one, Begins) for one in self.layer)

    def events(self, own: Stream, more: int, made: Mapping[str, int]) -> Iterator[Event]:
        """With so many ``more`` layers. Backward comes to layers in the opposite order of forward, so that its first
        further layer is the last one of those that forward made."""
        for event in self.front:
            yield _moved(event, more, made)
        for at in range(more):
            for event in self.layer:
                if isinstance(event, Ends):
                    by = at if event.stream in (own, "r") else more - 1 - at
                    event = event._replace(number=event.number + by * made[event.stream], moves=False)
                yield event
        for event in self.back:
            yield _moved(event, more, made)


def _moved(event: Event, more: int, made: Mapping[str, int]) -> Event:
    return Ends(event.stream, event.at(more, made)) if isinstance(event, Ends) else event


class Weight(NamedTuple):
    """A parameter outside of layers, or that of every layer (``{}`` in its name), and its gradients in the shallow
    graph: those of the ``first`` and of the ``last`` layers, and in between those that more layers make; later layers
    first."""

    name: str
    shape: Shape
    first: tuple[int, ...]
    last: tuple[int, ...]
    middle: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """What was learnt, of at least ``layers`` layers, and of any number of ``step`` more; of ``layers`` alone where
    nothing stands between (``repeats``)."""

    layers: int
    step: int
    forward: Graph
    backward: Graph
    outputs: tuple[Ends, Ends]
    """Loss and logits."""
    logits: Begins
    """What autograd makes zeros like, for the output that the loss does not depend on (``torch.autograd.Function``,
    ``set_materialize_grads``); of several graphs these zeros are among what happens."""
    weights: tuple[tuple[Weight, ...], tuple[Weight, ...], tuple[Weight, ...]]
    """In front of the layers, of a layer, and behind them."""

    def graphs(self) -> tuple[tuple[str, Graph, Stream], ...]:
        """With their names, and as what their tensors are numbered."""
        return ("forward", self.forward, "f"), ("backward", self.backward, "b")

    @property
    def made(self) -> dict[str, int]:
        return {"f": self.forward.made, "b": self.backward.made, "z": 0, "r": self.backward.made}

    @property
    def repeats(self) -> bool:
        """It is of any number of further layers, too."""
        return bool(self.backward.layer)

    @property
    def in_parts(self) -> bool:
        """There are several graphs (``DDPOptimizer``): gradients are ready one after another."""
        return any(isinstance(one, Ends) and one.stream == "r" for part in _parts(self.backward) for one in part)

    def more(self, layers: int) -> int:
        """How often the events of more layers stand in the graph of so many."""
        return (layers - self.layers) // self.step

    def parameters(self, layers: int) -> Iterator[tuple[str, Shape, int]]:
        """Names, shapes, and numbers of their gradients, in the order in which they are registered."""
        more, made = self.more(layers), self.backward.made
        front, of_layer, back = self.weights
        for one in front:
            yield one.name, one.shape, _of_one(one, more * made)
        for layer in range(layers):
            for one in of_layer:
                yield one.name.format(layer), one.shape, _of_layer(one, layer, layers, more, made)
        for one in back:
            yield one.name, one.shape, _of_one(one, more * made)

    def to_json(self) -> dict[str, Any]:
        """As ``from_json`` reads it."""
        return {
            "layers": self.layers,
            "step": self.step,
            **{name: [list(map(_text, part)) for part in _parts(graph)] for name, graph, _ in self.graphs()},
            "outputs": list(map(_text, self.outputs)),
            "logits": _text(self.logits),
            "weights": [[list(one) for one in part] for part in self.weights],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> CompiledModel:
        forward, backward = (
            Graph(*(tuple(map(_event, one)) for one in data[name])) for name in ("forward", "backward")
        )
        loss, logits = map(_ends, data["outputs"])
        weights = [tuple(Weight(name, *map(tuple, rest)) for name, *rest in part) for part in data["weights"]]
        found = _event(data["logits"])
        assert isinstance(found, Begins)
        return CompiledModel(
            data["layers"], data["step"], forward, backward, (loss, logits), found, (weights[0], weights[1], weights[2])
        )


def _parts(graph: Graph) -> tuple[tuple[Event, ...], ...]:
    return graph.front, graph.layer, graph.back


def _of_one(weight: Weight, further: int) -> int:
    return weight.last[0] if weight.last else weight.first[0] + further


def _of_layer(weight: Weight, layer: int, layers: int, more: int, made: int) -> int:
    behind = layers - 1 - layer
    if behind < len(weight.last):
        return weight.last[behind]
    if layer < len(weight.first):
        return weight.first[layer] + more * made
    copy, at = divmod(behind - len(weight.last), len(weight.middle))
    return weight.middle[at] + copy * made


def _text(event: Event) -> str:
    if isinstance(event, Begins):
        return f"{event.dtype} {'*'.join(map(str, event.shape)) or '.'} {event.name}"
    return f"{event.stream}{event.number}{'+' * event.moves}"


def _event(text: str) -> Event:
    dtype, *rest = text.split()
    if not rest:
        return _ends(text)
    return Begins(() if rest[0] == "." else tuple(map(int, rest[0].split("*"))), dtype, rest[1])


def _ends(text: str) -> Ends:
    stream: Any = text[0]
    return Ends(stream, int(text[1:].rstrip("+")), text.endswith("+"))


def model(r: Recorder, learnt: CompiledModel, layers: int, dtype: str) -> Run:
    """The compiled model with so many layers, whose parameters are in ``dtype``. Without gradients it is another graph,
    which saves nothing: no larger than this one, which stands in for it."""
    more, made = learnt.more(layers), learnt.made
    given = [*learnt.parameters(layers)]
    parameters = [r.parameter(name, shape, dtype) for name, shape, _ in given]
    of_gradient = {number: at for at, (_, _, number) in enumerate(given)}
    outputs = [one.at(more, made) for one in learnt.outputs]
    logits_elements = prod(learnt.logits.shape)
    live: dict[tuple[str, int], Tensor] = {}
    returned: dict[int, Tensor] = {}

    def run(events: Iterator[Event], stream: Stream) -> None:
        number = 0
        for event in events:
            if isinstance(event, Begins):
                kind = Category.LOGITS if prod(event.shape) == logits_elements else Category.TEMPORARIES
                live[stream, number] = r.empty(event.shape, event.dtype, event.name, kind)
                if stream == "f" and number in outputs:
                    returned[number] = live[stream, number].alias()
                number += 1
            elif event.stream == "r":
                r.arrives(parameters[of_gradient[event.number]], [live.pop(("b", event.number))])
            else:
                live.pop((event.stream, event.number), None)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        """What was saved is let go of one by one. Of one graph zeros are there before it begins, and every gradient
        when it has ended; of several each when its own has."""
        live["z", 1] = incoming(gradients)
        gradients.clear()
        if not learnt.in_parts:
            live["z", 0] = r.empty(*learnt.logits, Category.LOGITS)
        run(learnt.backward.events("b", more, made), "b")
        live.pop(("z", 1), None)
        arrived = [live.get(("b", number)) for _, _, number in given]
        live.clear()
        return arrived

    run(learnt.forward.events("f", more, made), "f")
    loss, logits = map(returned.pop, outputs)
    live.pop(("f", outputs[0]), None)
    node = r.node(parameters, (), backward)
    if node is None:
        live.clear()
        return Run(None, until_end=[logits], loss=loss)
    return Run(None, until_end=[logits], loss=loss.by(node))
