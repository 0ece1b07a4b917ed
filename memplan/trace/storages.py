"""Follows storages of real PyTorch code: allocation, aliasing, resizing, death by garbage collection.

A storage is counted once, when it first appears as the output of an operator, at its size rounded up to
512 B (``c10/cuda/CUDACachingAllocator.cpp``, ``round_size``), until Python and autograd let it go. Views and
in-place results share a storage and count once. A storage that grows is copied into a new one before the old
one ends (``aten/src/ATen/native/cuda/Resize.cpp``, ``resize_bytes_cuda``); FSDP frees by resizing to nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..tape import Category, Drop, Hold, rounded
from .recording import Place, Recording


class _Followed(NamedTuple):
    finalizer: Any
    hold: Hold
    nbytes: int
    """Of the storage, when last seen."""


class Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator below autograd, in forward and backward, and writes into ``recording``."""

    def __init__(self, recording: Recording, place: Callable[[], Place], *, sums_in_place: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording
        self.place = place
        self.host = False
        """Storages of zero-dimensional tensors that begin now are on the host, and not counted."""
        self._followed: dict[int, _Followed] = {}
        """Every live storage, by its address."""
        self._count = 0
        self.sums_in_place = sums_in_place
        """As on a GPU; a mode like this one keeps PyTorch from it."""
        self._alone: tuple[int, int, int] | None = None

    def calibrate(self) -> None:
        """Learns what references a gradient has that nobody else refers to, from a sum of two such; to be called
        under this mode, before anything is followed."""
        x = torch.ones(1, requires_grad=True) * 2
        (x.sin() + x.cos()).sum().backward()  # type: ignore[no-untyped-call]
        del x
        self.close()
        self.recording.clear()

    def adopt(self, tensor: torch.Tensor, name: str, category: Category | None = None) -> None:
        """Follows the storage of ``tensor``, unless it is already; ``category`` is what it is for."""
        tensor = local(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in self._followed:
            size = 0 if self.host and not tensor.dim() else storage.nbytes()
            dtype = str(tensor.dtype).removeprefix("torch.")
            hold = Hold(0, size, Category.TEMPORARIES, name, tuple(tensor.shape), dtype)
            self._follow(storage, hold)
        if category is not None:
            self.mark(tensor, category)

    def mark(self, tensor: torch.Tensor, category: Category) -> None:
        """Says what the storage of ``tensor`` is for."""
        hold = self._followed[local(tensor).untyped_storage()._cdata].hold
        self.recording.marks[hold.tensor] = category

    def _follow(self, storage: torch.UntypedStorage, hold: Hold) -> Hold:
        """Follows ``storage``, described by ``hold`` but for its number; the hold that is written down."""
        self._count += 1
        self.recording.raw[self._count] = hold.bytes
        hold = hold._replace(tensor=self._count, bytes=rounded(hold.bytes) if hold.bytes else 0)
        if hold.bytes:
            self.recording.add(hold, self.place())
        finalizer = weakref.finalize(storage, self._gone, storage._cdata)
        finalizer.atexit = False
        self._followed[storage._cdata] = _Followed(finalizer, hold, storage.nbytes())
        return hold

    def _gone(self, key: int) -> None:
        self._end(self._followed.pop(key).hold)

    def _end(self, hold: Hold) -> None:
        if hold.bytes:
            self.recording.add(Drop(hold.tensor, hold.bytes, hold.category), self.place())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """``storage`` may have another size than when it was last seen."""
        followed = self._followed.get(storage._cdata)
        if followed is None or followed.nbytes == storage.nbytes():
            return
        followed.finalizer.detach()
        new = self._follow(storage, followed.hold._replace(bytes=storage.nbytes()))
        marks = self.recording.marks
        if followed.hold.tensor in marks:
            marks[new.tensor] = marks[followed.hold.tensor]
        self._end(followed.hold)

    def close(self) -> None:
        """What ends from here on is not written down."""
        for followed in self._followed.values():
            followed.finalizer.detach()
        self._followed.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._as_on_a_gpu(func, args, kwargs or {})
        if func is torch.ops.aten.native_layer_norm.default:
            out = (out[0], out[1].float(), out[2].float())  # CUDA's statistics are fp32
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor):
                self.adopt(leaf, str(func))
                self.resized(leaf.untyped_storage())
        return out

    # -- what autograd does in place where no mode sees operators -----------------------------------

    def _as_on_a_gpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What ``func`` returns; in place where autograd would have worked in place."""
        if self.sums_in_place and torch._C._current_autograd_node() is not None:
            if func is torch.ops.aten.add.Tensor and self._sums(args, kwargs):
                total = self._in_place(args)
                if total is not None:
                    return total
            if func is torch.ops.aten.index_put.default and self._is_fresh(args[0]):
                return torch.ops.aten.index_put_.default(*args, **kwargs)  # ``FunctionsManual.cpp``, index_backward
        return func(*args, **kwargs)

    def _is_fresh(self, tensor: torch.Tensor) -> bool:
        """Nothing else shares its storage."""
        return self._alone is not None and references(tensor)[1] == self._alone[1]

    def _sums(self, args: Any, kwargs: Any) -> bool:
        """Whether this is autograd's own sum of two gradients that meet (``InputBuffer::add``)."""
        return (
            not kwargs
            and all(isinstance(one, torch.Tensor) for one in args)
            and args[0].shape == args[1].shape
            and args[0].dtype == args[1].dtype
        )

    def _in_place(self, args: Any) -> torch.Tensor | None:
        """The sum in the first tensor that nobody else refers to (``input_buffer.cpp``,
        ``can_accumulate_inplace``), which PyTorch forgoes while a mode like this one sees operators."""
        for one, other in (args, args[::-1]):
            found = references(one)
            self._alone = self._alone or found
            if found == self._alone:
                return torch.ops.aten.add_.Tensor(one, other)  # type: ignore[no-any-return]
        return None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a ``DTensor``; other tensors as they are."""
    part = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(part, torch.Tensor)
    return part


def references(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Who refers to ``tensor`` and its storage: counts that depend on the versions of Python and PyTorch."""
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), storage, sys.getrefcount(tensor)  # type: ignore[attr-defined]


@contextmanager
def resizes_followed(follow: Follow) -> Iterator[None]:
    """Calls of ``storage.resize_``, which is no operator, are seen too."""
    base = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        result = base(self, size)
        follow.resized(self)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del torch.UntypedStorage.resize_
