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
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_iter

from ..tape.events import Category, Drop, Hold, rounded
from .operators import done_by
from .places import note
from .recording import BACKWARD, FORWARD, Done, Place, Recording

_aten: Any = torch.ops.aten
FILLED: dict[Any, Any] = {
    _aten.index_put.default: _aten.index_put_.default,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.index_add.default: _aten.index_add_.default,
    _aten.scatter.src: _aten.scatter_.src,
    _aten.put.default: _aten.put_.default,
}
"""What fills zeros that a backward formula has just made, and what does it in place: indexing, ``gather``,
``index_select``, ``topk``/``sort``/``max`` and ``take`` (``FunctionsManual.cpp``, ``index_backward``,
``index_select_backward``, ``value_selecting_reduction_backward``; ``TensorAdvancedIndexing.cpp``, ``gather_backward``).
While a mode sees operators, ``isTensorSubclassLike`` holds of every tensor and they fill a copy."""


STATISTICS = (_aten.native_layer_norm.default, _aten.native_batch_norm.default)
"""Operators whose mean and reciprocal deviation are fp32 on CUDA (``layer_norm_kernel.cu``, ``Normalization.cuh``)."""


FOREIGN = "foreign"
"""Name of a storage that is not the program's."""

LOCAL = "_local_tensor"
"""A ``DTensor``'s attribute."""

DEVICE = torch.ops.prim.device.default


class _Followed(NamedTuple):
    finalizer: Any
    hold: Hold
    nbytes: int
    """Of the storage, when last seen."""


class Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator below autograd, in forward and backward, and writes into ``recording``."""

    def __init__(
        self,
        recording: Recording,
        place: Callable[[], Place],
        *,
        sums_in_place: bool = True,
        device: str = "cpu",
        fake: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording
        self.place = place
        self.device = device
        """The type of the device whose storages count."""
        self.fake = fake
        """Tensors are, and operators return what CUDA's would."""
        self.host = False
        """Storages of zero-dimensional tensors that begin now are on the host, and not counted."""
        self.reads_ones = False
        """Numbers that are read back now, as an optimizer does from the device, are one."""
        self.notes_work = False
        """What operators of passes do is written down, too."""
        self.vocab = 0
        """Columns of logits."""
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
        for part in parts(tensor):
            if category is not None:
                self._take_back(part)
            self._adopt(part, name)
            if category is not None:
                self.mark(part, category)

    def _adopt(self, tensor: torch.Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._followed:
            on_host = tensor.device.type != self.device or (self.host and not tensor.dim())
            size = 0 if on_host else storage.nbytes()
            dtype = str(tensor.dtype).removeprefix("torch.")
            hold = Hold(0, size, Category.TEMPORARIES, name, tuple(tensor.shape), dtype)
            self._follow(storage, hold)

    def mark(self, tensor: torch.Tensor, category: Category) -> None:
        """Says what the storage of ``tensor`` is for."""
        for part in parts(tensor):
            hold = self._followed[part.untyped_storage()._cdata].hold
            self.recording.marks[hold.tensor] = category

    def suppose(self, tensor: torch.Tensor, category: Category) -> None:
        """Says what the storage of ``tensor`` is for, unless that is known."""
        followed = self._followed.get(local(tensor).untyped_storage()._cdata)
        if followed is not None:
            self.recording.marks.setdefault(followed.hold.tensor, category)

    def suppose_all(self, category: Category) -> None:
        """Says what all storages that there are now are for, of which it is not known."""
        for followed in self._followed.values():
            self.recording.marks.setdefault(followed.hold.tensor, category)

    def _take_back(self, tensor: torch.Tensor) -> None:
        """A storage that was left alone turns out to be of the program."""
        key = tensor.untyped_storage()._cdata
        if key in self._followed and self._followed[key].hold.name == FOREIGN:
            self._followed.pop(key).finalizer.detach()

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
        if func is DEVICE and isinstance(args[0], FakeTensor):  # half of all calls: not worth the way to its mode
            return args[0].fake_device
        if self.fake and self.reads_ones and func is _aten._local_scalar_dense.default:
            return 1.0
        if any(is_traceable_wrapper_subclass_type(kind) and not hasattr(kind, LOCAL) for kind in types):
            return (
                NotImplemented  # what it does with the tensors inside is seen; a ``DTensor`` looks for placements, too
            )
        try:
            out = self._as_on_a_gpu(func, args, kwargs or {})
        except Exception as error:
            note(error, self.place())
            raise
        if self.fake:
            out = _as_of_cuda(func, out)
        if not self.fake and func.is_view:
            self._leave_alone(args[0])
        if self.notes_work:
            self.did(done_by(func, args, kwargs or {}, out, self.vocab))
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor):
                self.adopt(leaf, str(func))
                self.resized(leaf.untyped_storage())
        return out

    def did(self, done: Done | None) -> None:
        """An operator of a pass, wherever that now is."""
        if done is None or not self.notes_work:
            return
        place = self.place()
        if place.phase in (FORWARD, BACKWARD):
            self.recording.done.append((place, done))

    def _leave_alone(self, tensor: torch.Tensor) -> None:
        """What is viewed and was never seen is a buffer inside a library, gloo's, which no GPU has: not counted,
        unless it is adopted later."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._followed:
            self._follow(storage, Hold(0, 0, Category.TEMPORARIES, FOREIGN))

    # -- what autograd does in place where no mode sees operators -----------------------------------

    def _as_on_a_gpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What ``func`` returns; in place where autograd would have worked in place."""
        if self.sums_in_place and torch._C._current_autograd_node() is not None:
            if func is torch.ops.aten.add.Tensor and self._sums(args, kwargs):
                total = self._in_place(args)
                if total is not None:
                    return total
            if func in FILLED and self._is_fresh(args[0]):
                return FILLED[func](*args, **kwargs)
        if self.fake and func is _aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return grouped_product(*args[:3])
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


def grouped_product(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """What CUDA's ``_grouped_mm`` returns of fp16 and fp32 (``GroupedBlas.cpp``), which fake tensors' takes of bf16
    alone."""
    groups = offsets.shape if x.dim() == y.dim() else ()
    return x.new_empty(*groups, x.shape[-2], y.shape[-1])


def _as_of_cuda(func: Any, out: Any) -> Any:
    """What CUDA's kernel of ``func`` would have returned beside its result."""
    if func in STATISTICS and out[0].dtype in (torch.float16, torch.bfloat16):
        return out[0], out[1].float(), out[2].float()
    if func is _aten.log_sigmoid_forward.default:
        return out[0], out[1].new_empty(0)
    return out


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a ``DTensor``; other tensors as they are."""
    part = getattr(tensor, LOCAL, tensor)
    assert isinstance(part, torch.Tensor)
    return part


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors inside one that wraps others; other tensors as they are."""
    tensor = local(tensor)
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from parts(getattr(tensor, name))


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


DEVIATION = 0.02
"""Of weights' first values: GPT-2's and Llama's."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made now have parameters without memory; buffers are as ever."""
    register: Any = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", registered):
        yield


def materialise(model: nn.Module, device: str, *, host: bool = False) -> None:
    """Gives parameters and buffers on ``meta`` memory on ``device``; ``host``: parameters have it there."""
    whole: Any = model

    def given(tensor: torch.Tensor) -> torch.Tensor:
        where = "cpu" if host and isinstance(tensor, nn.Parameter) else device
        return torch.empty_like(tensor, device=where) if tensor.is_meta else tensor

    whole._apply(given)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """First values: normally distributed matrices, biases of nothing, norms of ones. What is quantised stays."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        part = local(parameter)
        if not part.is_floating_point():
            continue
        if part.dim() > 1:
            part.normal_(0.0, DEVIATION)
        else:
            part.fill_(0.0 if name.endswith("bias") else 1.0)
