"""``DTensor``s and functional collectives followed operator by operator, as they behave on devices.

A collective's input is held until its output has been waited for (``ProcessGroupNCCL.cpp``,
``stashed_for_allocator_safety_``), and waiting gives back the output itself. On fake tensors PyTorch would take itself
to be compiling, and copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import _functional_collectives
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, debug
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_map

from ..tape import Category
from .storages import DEVICE, Follow, local

SUBSTITUTIONS = (
    "collectives of tensor parallelism are asynchronous; each holds its input until its output is waited for (NCCL)",
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
