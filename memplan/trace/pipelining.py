"""PyTorch's pipeline schedules on one rank: what crosses ranks is replaced, and passes are told apart.

Sends and receives move nothing, and what they return holds on to its tensor as NCCL's does
(``ProcessGroupNCCL::pointToPoint`` keeps it in ``WorkNCCL::outputs_``; a batch of both kinds is one coalesced
work, which keeps none behind ``wait``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.utils._pytree import tree_iter

from .hooked_places import HookedPlaces
from .recording import BACKWARD, BETWEEN, FORWARD, LOSS, OPTIMIZER, REDUCE, Place, Recording
from .traced import Pass

SUBSTITUTIONS = (
    "sends and receives move nothing; the work of a lone send keeps its tensor (NCCL), and a pipeline's stages know "
    "beforehand the shapes of what they receive",
)

SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
}


def schedule_of(name: str, stages: Sequence[PipelineStage], microbatches: int, loss: Callable[..., Any]) -> Any:
    """The schedule called ``name``; several stages of a rank are interleaved."""
    if len(stages) > 1:
        return schedules.ScheduleInterleaved1F1B(list(stages), microbatches, loss_fn=loss)
    return SCHEDULES[name](stages[0], microbatches, loss_fn=loss)


class _Work:
    """A point-to-point operation's, and the tensor it keeps."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor

    def wait(self) -> None:
        return


def _exchanged(operations: list[Any], desc: str | None = None) -> list[_Work]:
    for operation in operations:
        if isinstance(operation.tensor, AsyncCollectiveTensor):  # what sends it waits for it first, as any operator
            operation.tensor = operation.tensor.trigger_wait()  # type: ignore[no-untyped-call]
    if len({operation.op for operation in operations}) > 1:
        return [_Work(None)]
    return [_Work(operation.tensor) for operation in operations]


@contextmanager
def communication() -> Iterator[None]:
    """Nothing is sent, and stages know shapes, as they do from the second iteration on."""

    def known(self: Any, stages: Sequence[Any], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    with (
        patch.object(schedules, "_batch_p2p", _exchanged),
        patch.object(schedules._PipelineSchedule, "_warmup_p2p", known),
    ):
        yield


def received(stage: PipelineStage) -> Iterator[torch.Tensor]:
    """The buffers in which a stage receives, one for each micro-batch."""
    kept: Any = stage
    for information in (kept.args_recv_info, kept.grad_recv_info):
        for one in tree_iter(information, is_leaf=lambda leaf: hasattr(leaf, "buffer")):
            if isinstance(getattr(one, "buffer", None), torch.Tensor):
                yield one.buffer


class PassPlaces(HookedPlaces):
    """Places of the passes of a rank's stages; until ``starts`` all is setup."""

    def __init__(
        self, models: Sequence[torch.nn.Module], openings: Mapping[tuple[str, int], str], recording: Recording
    ) -> None:
        super().__init__(models)
        self.openings = openings
        """The entry of the layer list with which a kind of pass begins in a stage."""
        self.recording = recording
        self.passes: list[Pass] = []
        self.ran = False
        """Autograd has, in this pass."""

    def starts(self) -> None:
        self.phase = BETWEEN

    def steps(self) -> None:
        self.phase = OPTIMIZER

    def __call__(self) -> Place:
        if self.phase != BACKWARD:
            return super().__call__()
        if torch._C._current_graph_task_id() >= 0:
            self.ran = True
        elif self.ran:
            return Place(self.microbatch, BETWEEN, "")  # variables of the stage that end behind autograd's run
        return super().__call__()

    @contextmanager
    def within(self, what: str, stage: int, microbatch: int) -> Iterator[None]:
        """While a pass runs."""
        if not self.phase:
            yield
            return
        begin = len(self.recording.events)
        self.microbatch, self.ran = microbatch, False
        self.phase = FORWARD if what == LOSS else what
        try:
            yield
        finally:
            self.phase = BETWEEN
            opening = self.openings.get((what, stage), "")
            self.passes.append(Pass(what, stage, microbatch, begin, len(self.recording.events), opening))

    def watched(self, stage: PipelineStage) -> PipelineStage:
        """``stage``, whose passes are places."""

        def told(what: str, method: Callable[..., Any]) -> Callable[..., Any]:
            def called(number: int, *args: Any, **kwargs: Any) -> Any:
                microbatch = self.microbatch if what == REDUCE else number
                with self.within(what, stage.stage_index, microbatch):
                    return method(number, *args, **kwargs)

            return called

        one: Any = stage
        one.forward_one_chunk = told(FORWARD, stage.forward_one_chunk)
        one.backward_one_chunk = told(BACKWARD, stage.backward_one_chunk)
        one.perform_reduce_grad = told(REDUCE, stage.perform_reduce_grad)
        return stage

    def watched_loss(self, loss: Callable[..., Any], stage: int) -> Callable[..., Any]:
        """``loss``, which belongs to the forward pass before it."""

        def called(*args: Any) -> Any:
            with self.within(LOSS, stage, self.microbatch):
                return loss(*args)

        return called
