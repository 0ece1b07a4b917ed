"""A small independent witness: what real PyTorch code holds, followed on fake tensors.

Runs code under ``FakeTensorMode`` and follows storages (not tensors): each is counted once when it
first appears as the output of an operator, at its size rounded up to 512 B, until Python and
autograd let it go. Tensors are on the CPU; five of its behaviours are replaced by CUDA's:

* dropout is ``native_dropout``, whose mask has one byte an element;
* scaled-dot-product attention is the flash-attention operator, which takes fewer key heads as they are; in fp32, with a
  mask, with heads of more than 256 features and where values have heads of another size, the memory-efficient one,
  which does not;
* layer norm of 16-bit tensors gives its statistics in fp32;
* zeros that backward of an indexing fills are filled in place;
* grouped products take fp16 and fp32, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from memplan.tape.events import rounded

from .autocast import cast_by_autocast


class Change(NamedTuple):
    """A storage comes to life (+1) or ends (−1). The operator, shape and dtype are those of its first tensor."""

    sign: int
    bytes: int
    op: str
    shape: tuple[int, ...]
    dtype: str
    storage: int
    """Its number, in order of appearance."""


@dataclass
class Trace:
    """What was held, in order."""

    changes: list[Change] = field(default_factory=list)
    live: int = 0
    storages: int = 0
    host: bool = False
    """Storages of zero-dimensional tensors that begin now are on the host, and not followed."""

    def add(self, change: Change) -> None:
        """Records ``change``; storages of no bytes are none."""
        if change.bytes:
            self.changes.append(change)
            self.live += change.sign * change.bytes


aten: Any = torch.ops.aten
FILLED = {
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_add.default: aten.index_add_.default,
}
"""What backward formulas fill zeros with, and what they do where no mode sees operators (``isTensorSubclassLike``)."""


ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)


def grouped_mm(x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The result of ``_grouped_mm``, which takes bf16 alone of fake tensors."""
    groups = offsets.shape if x.dim() == y.dim() else ()
    return x.new_empty(*groups, x.shape[-2], y.shape[-1])


def as_scores(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """What ``attention.cpp`` makes of booleans (b, 1, s, s): numbers (``convert_boolean_attn_mask``), in rows of a
    multiple of 8 (``preprocess_mask``)."""
    mask = torch.where(mask, *(torch.scalar_tensor(one, dtype=query.dtype) for one in (0.0, float("-inf"))))
    if mask.shape[-1] % 8:
        mask = torch.nn.functional.pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
    return mask.expand(*query.shape[:-1], -1)


class Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator below autograd, in forward and backward."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self.seen: dict[int, Any] = {}
        self.zeros = 0
        """The storage of zeros that backward made last."""

    def adopt(self, tensor: torch.Tensor, op: str) -> None:
        """Follows the storage of ``tensor``, unless it is already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.seen:
            return
        nothing = not storage.nbytes() or (self.trace.host and not tensor.dim())
        size = 0 if nothing else rounded(storage.nbytes())
        self.trace.storages += 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        change = Change(1, size, op, tuple(tensor.shape), dtype, self.trace.storages)
        self.trace.add(change)
        finalizer = weakref.finalize(storage, self._gone, key, change._replace(sign=-1))
        finalizer.atexit = False
        self.seen[key] = finalizer

    def end(self, tensor: torch.Tensor) -> None:
        """The storage of ``tensor`` loses its memory, though it is still referred to."""
        storage = tensor.untyped_storage()
        _, _, (key, change), _ = self.seen[storage._cdata].detach()
        self.trace.add(change)
        self.seen[key] = weakref.finalize(storage, self.seen.pop, key)

    def _gone(self, key: int, change: Change) -> None:
        del self.seen[key]
        self.trace.add(change)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: no switch around each operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all calls, which would go through its mode
        filling = FILLED.get(func)
        if filling is not None and args[0].untyped_storage()._cdata != self.zeros:
            filling = None
        is_wide = func is aten._grouped_mm.default and args[0].dtype is not torch.bfloat16
        out = grouped_mm(*args[:3]) if is_wide else (filling or func)(*args, **(kwargs or {}))
        if torch._C._current_autograd_node() is not None and func in ZEROS:
            self.zeros = out.untyped_storage()._cdata
        if func is torch.ops.aten.native_layer_norm.default:
            out = (out[0], out[1].float(), out[2].float())
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor):
                self.adopt(leaf, str(func))
        return out


class AddsInPlace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mask's sum, which is in place where no mode sees operators (``areAnyTensorSubclassLike``)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor:
            return torch.ops.aten.add_.Tensor(*args)
        return func(*args, **kwargs or {})


@contextmanager
def cuda_behaviour() -> Iterator[None]:
    """Dropout and scaled-dot-product attention as CUDA runs them."""
    functional: Any = torch.nn.functional
    dropout, sdpa = functional.dropout, functional.scaled_dot_product_attention

    def native_dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0.0:
            return dropout(input, p, training, inplace)  # type: ignore[no-any-return]
        return torch.native_dropout(input, p, True)[0]

    def fused(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        query, key, value = cast_by_autocast(query, key, value)
        if attn_mask is not None:
            assert query.shape[-3] == key.shape[-3], "heads were to be repeated"
            assert query.shape[-1] % (16 // query.element_size()) == 0, "the math kernel with a mask is not here"
        if query.dtype is torch.float32 and (query.shape[-3] != key.shape[-3] or query.shape[-1] % 4):
            math: Any = torch.ops.aten._scaled_dot_product_attention_math
            with AddsInPlace():
                out = math(query, key, value, None, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)
            return out[0]  # type: ignore[no-any-return]
        wide = query.shape[-1] > 256 or query.shape[-1] != value.shape[-1]
        if attn_mask is not None or query.dtype is torch.float32 or wide:
            trains = torch.is_grad_enabled() and query.requires_grad
            if attn_mask is not None:
                attn_mask = as_scores(attn_mask, query)
            efficient = torch.ops.aten._scaled_dot_product_efficient_attention
            return efficient(query, key, value, attn_mask, trains, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
        operator = torch.ops.aten._scaled_dot_product_flash_attention
        return operator(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]

    functional.dropout, functional.scaled_dot_product_attention = native_dropout, fused
    try:
        yield
    finally:
        functional.dropout, functional.scaled_dot_product_attention = dropout, sdpa


def run(body: Callable[[Trace, Follow], None]) -> Trace:
    """The trace of ``body``, which makes its tensors itself."""
    trace = Trace()
    with FakeTensorMode(allow_non_fake_inputs=True), cuda_behaviour(), Follow(trace) as follow:
        body(trace, follow)
    return trace
