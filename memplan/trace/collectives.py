"""What crosses ranks, followed as it behaves on devices: ``DTensor``s and functional collectives operator by operator,
and PyTorch's pipeline schedules on one rank, whose passes are told apart.

A collective's input is held until its output has been waited for (``ProcessGroupNCCL.cpp``,
``stashed_for_allocator_safety_``), and waiting gives back the output itself. On fake tensors PyTorch would take itself
to be compiling, and copy.

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
from torch.distributed import _functional_collectives
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, debug
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_iter, tree_map

from ..tape.events import Category
from .places import HookedPlaces
from .recording import (
    BACKWARD,
    BETWEEN,
    FORWARD,
    LOSS,
    OPTIMIZER,
    REDUCE,
    Pass,
    Place,
    Recording,
)
from .storages import DEVICE, Follow, local

SUBSTITUTIONS = (
    "collectives of tensor parallelism are asynchronous; each holds its input until its output is waited for (NCCL)",
    "sends and receives move nothing; the work of a lone send keeps its tensor (NCCL), and a pipeline's stages know "
    "beforehand the shapes of what they receive",
)

_FUNCTIONAL = torch.ops._c10d_functional
_GATHER = _FUNCTIONAL.all_gather_into_tensor.default
_COLLECTIVES = (_GATHER, _FUNCTIONAL.reduce_scatter_tensor.default)
"""Those that do not copy their input first."""
_WRAPPERS = (DTensor, AsyncCollectiveTensor)


class FollowLocal(Follow):  # type: ignore[no-untyped-call]
    """Lets wrappers run first, so that what they make of local tensors is seen."""

    _stashed: dict[int, torch.Tensor]
    """Inputs of collectives by their output's storage."""
    _paused: bool
    _sums_apart: bool
    """Within the sum of two ``DTensor``s."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stashed, self._paused, self._sums_apart = {}, False, False

    def adopt(self, tensor: torch.Tensor, *args: Any) -> None:
        if tensor.dtype is not torch.int32:  # the ranks of a mesh, which are on the host
            super().adopt(tensor, *args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if types and any(issubclass(one, _WRAPPERS) for one in types):
            return self._unwrapped(func, args, kwargs or {})
        if self._paused or func is torch.ops.aten.lift_fresh.default:  # a number, which stays on the host
            return func(*args, **(kwargs or {}))
        if func is _FUNCTIONAL.wait_tensor.default:
            if not self.fake:
                func(*args, **(kwargs or {}))
            self._stashed.pop(args[0].untyped_storage()._cdata, None)
            return args[0]
        if func is _FUNCTIONAL._wrap_tensor_autograd.default:
            return AsyncCollectiveTensor(args[0])
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func in _COLLECTIVES:
            self._stashed[out.untyped_storage()._cdata] = args[0]
            self._is_communicated(out if func is _GATHER else args[0], args[1] if func is _GATHER else 0)
        return out

    def _is_communicated(self, tensor: torch.Tensor, ranks: int) -> None:
        """What is sent is a copy; what is received is one of several sequences, else the result itself."""
        if tensor.shape[0] > ranks:
            self.suppose(tensor, Category.COMMUNICATION_BUFFERS)

    def _unwrapped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the wrapper makes of ``func``. Gradients of a subclass are never summed in place
        (``input_buffer.cpp``, ``can_accumulate_inplace``)."""
        if not kwargs and is_foreach(func, args):
            with self:
                return each_local(func, args)
        if func is not torch.ops.aten.add.Tensor or self._sums_apart or not self.sums_in_place:
            return NotImplemented
        self._sums_apart, self.sums_in_place = True, False
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            self._sums_apart, self.sums_in_place = False, True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is written down."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


def clear_caches() -> None:
    """Forgets placements that ``DTensor`` has found for meshes whose process groups are gone."""
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def is_foreach(func: Any, args: tuple[Any, ...]) -> bool:
    """An operator that takes lists of ``DTensor``s element by element, whose placements are the same from list to list:
    an optimizer's."""
    if not func._schema.name.startswith("aten::_foreach_"):
        return False
    placed = [[(each.device_mesh, each.placements) for each in one] for one in args if _is_list(one)]
    return _is_list(args[0]) and all(one == placed[0] for one in placed)


def _is_list(argument: Any) -> bool:
    return isinstance(argument, list) and bool(argument) and all(isinstance(one, DTensor) for one in argument)


def each_local(func: Any, args: tuple[Any, ...]) -> Any:
    """``func`` on local tensors. That is what ``DTensor`` comes to, once it has searched the placements of each
    parameter in turn, which would take most of a step's time."""
    given: list[Any] = args[0]
    out = func(*tree_map(lambda one: local(one) if isinstance(one, DTensor) else one, args))
    if out is None:
        return None
    if func._schema.is_mutable:
        return given
    wrap: Any = DTensor
    return [wrap(tensor, like._spec, requires_grad=False) for tensor, like in zip(out, given, strict=True)]


@contextmanager
def on_devices(follow: FollowLocal) -> Iterator[None]:
    """Collectives are asynchronous, though tensors are fake, and the fake tensors with which ``DTensor`` finds out
    shapes are not followed."""
    propagator: Any = ShardingPropagator
    propagate = propagator._propagate_tensor_meta_non_cached

    def propagated(*args: Any) -> Any:
        with follow.paused():
            return propagate(*args)

    with (
        patch.object(_functional_collectives, "_are_we_tracing", lambda: False),
        patch.object(propagator, "_propagate_tensor_meta_non_cached", propagated),
    ):
        yield


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
    from torch.distributed.pipelining._utils import InferenceMode

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
