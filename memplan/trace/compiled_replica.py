"""A whole model under ``torch.compile`` in ``DistributedDataParallel``: the graphs that ``DDPOptimizer`` cuts it into.

torch 2.13.0, ``torch/_dynamo/convert_frame.py`` (``CatchErrorsWrapper``) hands what Dynamo traces within DDP's forward
to ``backends/distributed.py``, whose ``DDPOptimizer`` goes through the graph from behind and begins a part wherever
parameters fill a bucket. Each part has a min-cut of its own, and what a later one reads leaves it as an output. Dynamo,
the optimizer, AOTAutograd's runtime and autograd run here as they are; what a part's graphs do is Inductor's own code,
run on fake tensors (``inductor``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from ..layers.compiled_model import Begins, Ends, Event
from ..tape.events import Drop, Hold
from .compiled_model import FOUND, Depth, Model, batch, in_one_order, of_depth, short
from .inductor import Numbered, aot, as_fused, code_of
from .job import Job
from .places import UntraceableError
from .recording import FORWARD, Place, Recording

MIB = 2**20
BUFFER = "aten.empty_strided.default"
BUCKET = 25.0
"""MiB of a bucket where nobody says otherwise (``DistributedDataParallel.bucket_bytes_cap``)."""


class Call(NamedTuple):
    """Inductor's code has run, between two places among what was recorded."""

    begin: int
    end: int
    kernels: Sequence[str]
    """What first has each buffer that it makes."""


class Cut(NamedTuple):
    """The parts of a model, as one function of all that Dynamo's graph takes, which stands in ``arguments``."""

    run: Callable[..., Sequence[torch.Tensor]]
    arguments: list[Any]
    recording: Recording
    calls: list[Call]


def cut(function: Any, arguments: Sequence[Any], mode: FakeTensorMode, cap: float) -> Cut:
    """``function`` of fake tensors under ``mode`` in one graph, cut at buckets of so many MiB (``bucket_cap_mb``)."""
    given: list[Any] = []
    runs: list[Any] = []
    recording, calls = Recording(), list[Call]()

    def compiler(backward: bool) -> Callable[[GraphModule, Any], Any]:
        def compiled(graph: GraphModule, _: Any) -> Any:
            made: list[Any] = []

            def run(inputs: list[Any]) -> Any:
                if not made:
                    with _disable_current_modes():
                        made.append(code_of(graph, is_backward=backward))
                (code,) = made
                begin = len(recording.events)
                returned = code.call(inputs)
                calls.append(Call(begin, len(recording.events), code.kernels))
                return returned

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compiled

    def backend(graph: GraphModule, examples: Any) -> Any:
        runs.append(DDPOptimizer(int(cap * MIB), aot(compiler(False), compiler(True))).compile_fn(graph, examples))

        def kept(*inputs: Any) -> Any:
            given.extend(inputs)
            return runs[0](*inputs)

        return kept

    torch._dynamo.reset()
    with mode, as_fused():
        compiled: Any = torch.compile(function, backend=backend, fullgraph=True)
        compiled(*arguments)[0].backward()
    return Cut(runs[0], given, recording, calls)


def depth_of(job: Job, layers: int) -> Depth:
    """Of ``job``, a replica's, with so many layers."""
    assert job.ddp is not None
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model = Model(of_depth(job, layers))
        given = batch(job)
    parts = cut(model, given, fake, job.ddp.bucket_cap_mb or BUCKET)
    return step(parts, model.model, fake)


def step(parts: Cut, model: nn.Module, mode: FakeTensorMode) -> Depth:
    """What ``parts`` do in one micro-batch, whose gradients are the first, once each part is compiled."""
    follow = Numbered(parts.recording, lambda: Place(0, FORWARD, ""))
    follow.launched = []
    named: Any = dict(model.named_parameters())
    ready: list[tuple[int, str, int]] = []
    events = parts.recording.events

    def arrives(name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        ready.append((len(events), name, follow.number(parameter.grad)))

    for name, parameter in named.items():
        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(lambda one, name=name: arrives(name, one))
    with mode, follow:
        follow.calibrate()
        for one in (*parts.arguments, *named.values()):
            if isinstance(one, torch.Tensor):
                follow.adopt(one, "")
        parts.calls.clear()
        gc.collect()
        begins = len(events)
        loss, logits = parts.run(*parts.arguments)
        outputs = follow.number(loss), follow.number(logits)
        like = Begins(tuple(logits.shape), FOUND[str(logits.dtype)[6:]], "logits_zeros")
        del logits
        ends = len(events)
        loss.backward()  # type: ignore[no-untyped-call]
        last = len(events)
    follow.close()
    named_events = _named(events, parts.calls)
    forward, backward = named_events[begins:ends], named_events[ends:last]
    numbers = {
        one.tensor: (stream, at)
        for stream, made in (("f", forward), ("b", backward[1:]))
        for at, one in enumerate(one for one in made if isinstance(one, Hold))
    }
    grad_loss = backward[0]
    assert isinstance(grad_loss, Hold)
    numbers[grad_loss.tensor] = "z", 1
    found = {name: numbers[tensor] for _, name, tensor in ready}
    missing = [name for name in named if found.get(name, ("", 0))[0] != "b"]
    if missing:
        raise UntraceableError(f"{missing[0]} has no gradient of its own in the compiled graphs")
    marks: dict[int, list[Event]] = {}
    for at, name, _ in ready:
        marks.setdefault(at - ends, []).append(Ends("r", found[name][1]))
    streams = {"forward": _events(forward, numbers, {}), "backward": _events(backward, numbers, marks)[1:]}
    shapes = [(name, tuple(one.shape)) for name, one in named.items()]
    gradients = {name: number for name, (_, number) in found.items()}
    return Depth(streams, [numbers[one][1] for one in outputs], gradients, like, shapes)


def _named(events: Sequence[Any], calls: Sequence[Call]) -> list[Hold | Drop]:
    """``events`` whose buffers of Inductor's code have the names of its kernels; what else is made, of operators."""
    found = [
        one._replace(name=one.name.split(".")[-2]) if isinstance(one, Hold) and one.name else one for one in events
    ]
    for call in calls:
        made = (at for at in range(call.begin, call.end) if getattr(events[at], "name", "") == BUFFER)
        for at, name in zip(made, call.kernels, strict=True):
            found[at] = found[at]._replace(name=name)
    return found


def _events(
    happened: Sequence[Hold | Drop], numbers: Mapping[int, tuple[Any, int]], marks: Mapping[int, list[Event]]
) -> list[Event]:
    """As ``CompiledModel`` has them, with ``marks`` in front of the events at their places."""
    made: list[Event] = []
    for at, one in enumerate(happened):
        made += marks.get(at, ())
        if isinstance(one, Hold):
            made.append(Begins(one.shape, FOUND.get(one.dtype, one.dtype), short(one.name.strip("_"))))
        elif one.tensor in numbers:
            made.append(Ends(*numbers[one.tensor]))
    made += marks.get(len(happened), ())
    return in_one_order(made)
