"""A whole model as ``torch.compile(model)`` runs it, learnt (``layers.compiled_model``): Accelerate's
``prepare_model`` compiles what autocast wraps, so that the model's outputs leave the graph in fp32.

Three depths are traced: what one layer adds to the first is what lies between the parts of its graph, and the third
must be what that comes to, event by event.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..layers.compiled_model import Begins, CompiledModel, Ends, Event, Graph, Stream, Weight
from .inductor import Event as Happening, Graphs, code_of, graphs_of, happened
from .job import Job
from .models import made
from .places import UntraceableError

SHALLOW = 4
"""Layers of the first graph."""
STEPS = (1, 3)
"""Layers that are added at once, the first number that will do: kernels of several layers' masks may be one."""
LOSS, ZEROS = 10**7, 10**7 + 1
"""Numbers of what autograd hands to a backward graph: the loss's gradient, and zeros for the logits'."""
LONGEST = 32
"""Letters of a kernel's name."""
FOUND = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "float64": "fp64", "uint8": "uint8", "bool": "bool"}
FOUND |= {"uint64": "int64"}


class Model(nn.Module):
    """Loss and logits of a batch as a collator makes it: with a mask, labels, and how many tokens count."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model, self.job = made(job), job

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        narrow = self.job.autocast is not None
        with torch.autocast("cpu", torch.bfloat16) if narrow else nullcontext():
            out = self.model(input_ids=ids, attention_mask=mask, labels=ids, num_items_in_batch=count)
        return out.loss, out.logits.float() if narrow and self.job.trainer is not None else out.logits


class Depth(NamedTuple):
    """What happens with so many layers."""

    streams: Mapping[str, list[Event]]
    """By the names of ``CompiledModel``'s graphs."""
    outputs: list[int]
    gradients: Mapping[str, int]
    """By the parameters' names."""
    logits: Begins
    parameters: list[tuple[str, tuple[int, ...]]]


def of_depth(job: Job, layers: int) -> Job:
    """``job`` with so many layers."""
    key = next(name for name in ("num_hidden_layers", "n_layer") if name in job.config)
    return replace(job, config={**job.config, key: layers})


def batch(job: Job) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What ``Model`` takes."""
    ids = torch.zeros(job.b, job.s, dtype=torch.int64)
    return ids, torch.ones_like(ids), torch.ones((), dtype=torch.int64)


def depth_of(job: Job, layers: int) -> Depth:
    """Of ``job`` with so many layers."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model = Model(of_depth(job, layers))
        arguments = batch(job)
    graphs = graphs_of(model, arguments, fake)
    forward, kept, outputs = _forward(graphs, fake)
    backward, gradients = _backward(graphs, kept, fake)
    returned = _values(graphs.forward)
    shape = returned[1].meta["val"]
    named = [(name, tuple(one.shape)) for name, one in model.model.named_parameters()]
    by_name = {_path(name): number for name, number in zip(graphs.inputs, gradients, strict=True) if number is not None}
    missing = [name for name, _ in named if name not in by_name]
    if missing:
        raise UntraceableError(f"{missing[0]} has no gradient of its own in the compiled graph")
    logits = Begins(tuple(map(int, shape.shape)), FOUND[str(shape.dtype)[6:]], "logits_zeros")
    return Depth({"forward": forward, "backward": backward}, outputs, by_name, logits, named)


def _values(graph: Any) -> list[Any]:
    (out,) = [node for node in graph.graph.nodes if node.op == "output"]
    return list(out.args[0])


def _forward(graphs: Graphs, fake: FakeTensorMode) -> tuple[list[Event], dict[str, int], list[int]]:
    """Events, numbers of what is saved by name, and those of loss and logits."""
    inputs = [node for node in graphs.forward.graph.nodes if node.op == "placeholder"]
    with fake:
        code = code_of(graphs.forward, is_backward=False)
        ran = happened(code, [fake_of(node) for node in inputs], [0] * len(inputs), {})
    numbers = [None if one is None else one - 1 for one in ran.returned]
    values = _values(graphs.forward)
    kept = {node.name: number for node, number in zip(values, numbers, strict=True) if number is not None}
    outputs = [number for number in numbers[:2] if number is not None]
    return in_one_order(_event(one, "f") for one in ran.events if one != 0), kept, outputs


def _backward(graphs: Graphs, kept: Mapping[str, int], fake: FakeTensorMode) -> tuple[list[Event], list[int | None]]:
    """Events, and numbers of gradients of the function's inputs."""
    inputs = [node for node in graphs.backward.graph.nodes if node.op == "placeholder"]
    tangents = iter((LOSS, ZEROS))
    numbers = [next(tangents) if "tangent" in node.name else kept.get(node.name, -1) + 1 for node in inputs]
    seen: dict[int, torch.Tensor] = {}
    with fake:
        given = [same(seen, number, fake_of(node)) for node, number in zip(inputs, numbers, strict=True)]
        seen.clear()
        ran = happened(code_of(graphs.backward, is_backward=True), given, numbers, {}, above=ZEROS)
    events = in_one_order(_event(one, "b") for one in ran.events if one != 0)
    return events, [None if one is None else one - ZEROS - 1 for one in ran.returned]


def fake_of(node: Any) -> Any:
    """Like the input that ``node`` stands for."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(tuple(map(int, value.shape)), value.stride(), dtype=value.dtype)


def same(seen: dict[int, torch.Tensor], number: int, made: Any) -> Any:
    """A second view of what was saved once."""
    if number and number in seen:
        return seen[number].as_strided(made.shape, made.stride())
    seen[number] = made
    return made


def _event(one: Happening, own: Stream) -> Event:
    if isinstance(one, int):
        if one in (LOSS, ZEROS):
            return Ends("z", ZEROS - one)
        return Ends("f", one - 1) if own == "f" or one < LOSS else Ends("b", one - ZEROS - 1)
    _, shape, *words = one
    dtype, name = map(str, words)
    return Begins(tuple(map(int, shape)), FOUND.get(dtype, dtype), short(name))


def short(name: str) -> str:
    """The first words of what Inductor calls a kernel of many."""
    return name if len(name) <= LONGEST else name[:LONGEST].rpartition("_")[0].rstrip("_")


def in_one_order(events: Iterable[Event]) -> list[Event]:
    """What ends at once, in one order: Inductor lets go of a set of tensors."""
    found: list[Event] = []
    for ends, run in groupby(events, lambda one: isinstance(one, Ends) and one.stream != "r"):
        together = [*run]
        found += sorted(together) if ends else together
    return found


_PLACE = re.compile(r"_(?:modules|parameters)_")
_NUMBER = re.compile(r"\.(\d+)\.")


def _path(name: str) -> str:
    """``model.layers.0.mlp.up_proj.weight`` of Dynamo's ``l_self_modules_model_modules_model_modules_layers_…``."""
    return ".".join(_PLACE.split(name)[2:]).removesuffix("_")


# -- what a layer adds --------------------------------------------------------------------------------


class _Cut(NamedTuple):
    """Where events of one more layer begin, and how many they are."""

    at: int
    events: int


def learnt(
    job: Job,
    layers: int,
    report: Callable[[int], None] = lambda done: None,
    depth: Callable[[Job, int], Depth] = depth_of,
) -> CompiledModel:
    """Of ``job`` with so many layers, of which ``depth`` says what happens: all of them where more layers are not
    always the same, since buckets cut them otherwise, or kernels make masks of more layers than ``STEPS`` at once."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    seen: dict[int, Depth] = {}

    def at(count: int) -> Depth:
        if count not in seen:
            report(len(seen))
            seen[count] = depth(job, count)
        return seen[count]

    for step in STEPS:
        first = SHALLOW + (layers - SHALLOW) % step
        try:
            found = between(at(first), at(first + step), first, step)
            check(found, at(first + 2 * step), first + 2 * step)
            return found
        except UntraceableError:
            continue
    return unrepeated(at(layers), layers)


def unrepeated(depth: Depth, layers: int) -> CompiledModel:
    """Of so many layers alone."""
    forward, backward = (Graph(tuple(depth.streams[name]), (), ()) for name in ("forward", "backward"))
    loss, logits = (Ends("f", one) for one in depth.outputs)
    return CompiledModel(
        layers, 1, forward, backward, (loss, logits), depth.logits, _weights(depth, depth, range(LOSS, LOSS), 0)
    )


def check(found: CompiledModel, depth: Depth, layers: int) -> None:
    """``UntraceableError`` unless ``found`` comes to ``depth`` with so many layers."""
    more, made = found.more(layers), found.made
    for name, graph, own in found.graphs():
        ours = [*graph.events(own, more, made)]
        for at, (mine, theirs) in enumerate(zip(ours, depth.streams[name], strict=False)):
            if mine != theirs:
                raise UntraceableError(f"{name} of {layers} layers is another at {at}: {theirs}, not {mine}")
        if len(ours) != len(depth.streams[name]):
            raise UntraceableError(f"{name} of {layers} layers has {len(depth.streams[name])} events, not {len(ours)}")
    for path, _, number in found.parameters(layers):
        if depth.gradients[path] != number:
            raise UntraceableError(f"the gradient of {path} with {layers} layers is another one")


def between(fewer: Depth, more: Depth, layers: int, step: int) -> CompiledModel:
    """What ``step`` layers add to ``fewer``, which has so many. Where the last place at which their events may stand is
    in the first layer's backward, whose tensors may be others, they stand half way."""
    try:
        return _between(fewer, more, layers, step, 0)
    except UntraceableError:
        return _between(fewer, more, layers, step, 0.5)


def _between(fewer: Depth, more: Depth, layers: int, step: int, early: float) -> CompiledModel:
    cuts = {name: _cut(fewer.streams[name], more.streams[name], early) for name in fewer.streams}
    made = {
        name[0]: sum(isinstance(one, Begins) for one in _block(more.streams[name], cut)) for name, cut in cuts.items()
    }
    made["r"] = made["b"]
    graphs = {name: _graph(fewer.streams[name], more.streams[name], cut, made) for name, cut in cuts.items()}
    loss, logits = (Ends("f", one, other != one) for one, other in zip(fewer.outputs, more.outputs, strict=True))
    front = _front(fewer.streams["backward"], cuts["backward"])
    weights = _weights(fewer, more, range(front, front + made["b"]), step)
    return CompiledModel(layers, step, **graphs, outputs=(loss, logits), logits=fewer.logits, weights=weights)


def _cut(fewer: Sequence[Event], more: Sequence[Event], early: float) -> _Cut:
    """Where the events of one more layer stand in ``more``: as late as may be, or this part of all places earlier."""
    ours, theirs = _signatures(fewer), _signatures(more)
    count = len(theirs) - len(ours)
    same = next((at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), len(ours))
    behind = next(
        (at for at, (one, other) in enumerate(zip(ours[::-1], theirs[::-1], strict=False)) if one != other), len(ours)
    )
    if count <= 0 or same + behind < len(ours):
        raise UntraceableError("a layer more changes what Inductor makes of the others")
    return _Cut(same - int(early * (same + behind - len(ours))), count)


def _signatures(events: Sequence[Event]) -> list[object]:
    """Events without numbers: what ends is known by how it began, or by its maker."""
    begun = [one for one in events if isinstance(one, Begins)]
    own = "b" if any(isinstance(one, Ends) and one.stream == "b" for one in events) else "f"
    return [
        one if isinstance(one, Begins) else (begun[one.number], one.stream) if one.stream in (own, "r") else one.stream
        for one in events
    ]


def _block(events: Sequence[Event], cut: _Cut) -> Sequence[Event]:
    return events[cut.at : cut.at + cut.events]


def _front(events: Sequence[Event], cut: _Cut) -> int:
    """Tensors made in front of the further layer."""
    return sum(isinstance(one, Begins) for one in events[: cut.at])


def _graph(fewer: Sequence[Event], more: Sequence[Event], cut: _Cut, made: Mapping[str, int]) -> Graph:
    def part(ours: Sequence[Event], theirs: Sequence[Event]) -> tuple[Event, ...]:
        return tuple(_moves(one, other, made) for one, other in zip(ours, theirs, strict=True))

    front = part(fewer[: cut.at], more[: cut.at])
    return Graph(front, tuple(_block(more, cut)), part(fewer[cut.at :], more[cut.at + cut.events :]))


def _moves(one: Event, other: Event, made: Mapping[str, int]) -> Event:
    if isinstance(one, Begins) or isinstance(other, Begins) or one.number == other.number:
        return one
    if other.number - one.number != made.get(one.stream):
        raise UntraceableError("a layer more changes which tensors end where")
    return one._replace(moves=True)


def _weights(fewer: Depth, more: Depth, between: range, step: int) -> Any:
    """Gradients by layers: those of the last layers are made in front of the tensors ``between``, which more layers
    make; the rest behind them."""
    rows: tuple[list[Weight], list[Weight], list[Weight]] = ([], [], [])
    for path, shape in fewer.parameters:
        found = _NUMBER.search(path)
        if found is None:
            number = fewer.gradients[path]
            behind = number >= between.start
            row = rows[2] if rows[1] else rows[0]
            row.append(Weight(path, shape, (number,) * behind, (number,) * (not behind), ()))
        elif found[1] == "0":
            name = path.replace(".0.", ".{}.", 1)
            ours, theirs = (_of_layers(depth, name) for depth in (fewer, more))
            first = tuple(number for number in ours if number >= between.start)
            last = tuple(number for number in reversed(ours) if number < between.start)
            middle = tuple(number for number in reversed(theirs) if number in between)
            if len(middle) != step:
                raise UntraceableError(f"{step} layers more make {len(middle)} gradients of {name}")
            rows[1].append(Weight(name, shape, first, last, middle))
    return tuple(map(tuple, rows))


def _of_layers(depth: Depth, name: str) -> list[int]:
    """Gradients of each layer's parameter ``name``, the first layer's first."""
    found: list[int] = []
    while (path := name.format(len(found))) in depth.gradients:
        found.append(depth.gradients[path])
    return found
