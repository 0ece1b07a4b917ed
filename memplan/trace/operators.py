"""What an operator below autograd does on a GPU, by its shapes alone: a product, attention, or bytes that it moves.

One call is one kernel; a memory-bound one reads every operand once and writes every result once, as recipes count
(``layers.work``). What makes no tensor and changes none (views, ``empty``) runs nothing.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter

from .recording import Done

NOTHING = frozenset(
    {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_local_scalar_dense"}
    | {"_unsafe_view", "_reshape_alias", "detach", "alias", "lift_fresh"}
)
"""Operators that run no kernel."""
FILLS = ("zero_", "fill_", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "zeros_like", "full_like")
"""They read nothing of what they write."""
LOOKS_UP = ("embedding", "index", "index_select", "gather", "nll_loss_forward")
"""Of their first operand, they read as much as they write."""
NO_LOSS = ("embedding", "embedding_dense_backward", "nll_loss_forward")
"""Not slowed down by logits, whatever sizes their tensors have."""
SCATTERS = ("nll_loss_backward",)
"""They write zeros, and then a number for each token."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
ATTENTION = {
    "_scaled_dot_product_flash_attention": False,
    "_scaled_dot_product_efficient_attention": False,
    "_scaled_dot_product_flash_attention_backward": True,
    "_scaled_dot_product_efficient_attention_backward": True,
}
"""Fused kernels, and whether they go backward."""


@lru_cache(maxsize=4096)
def _named(func: Any) -> tuple[str, tuple[str, ...]]:
    """Name, and names of arguments."""
    schema = func._schema
    return schema.name.removeprefix("aten::"), tuple(one.name for one in schema.arguments)


def done_by(func: Any, args: Any, kwargs: Any, out: Any, vocab: int = 0) -> Done | None:
    """``vocab``: what has so many columns is logits."""
    if func.namespace != "aten" or func.is_view:
        return None
    name, names = _named(func)
    if name in NOTHING:
        return None
    given = dict(zip(names, args, strict=False)) | kwargs
    if name in ATTENTION:
        return _attention(given, backward=ATTENTION[name])
    if name in PRODUCTS:
        return _product(name, given)
    if name in ("convolution", "convolution_backward"):
        return None  # no language model's layer; its time is not known
    return _moved(name, given, out, vocab)


def note_moved(*tensors: torch.Tensor, kernels: int = 1) -> None:
    """``kernels`` that are put in the place of other operators read or write ``tensors``: whoever follows notes it."""
    for mode in _get_current_dispatch_mode_stack():
        noted = getattr(mode, "did", None)
        if noted is not None:
            noted(Done("stream", (kernels,), (sum(map(_bytes, tensors)),)))


def _bytes(tensor: torch.Tensor) -> int:
    """Of what is there: an expanded tensor's elements are read from the cache."""
    size = tensor.element_size()
    return size * prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step or n < 2)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_iter(values) if isinstance(one, torch.Tensor)]


def _moved(name: str, given: dict[str, Any], out: Any, vocab: int) -> Done | None:
    """A backward formula with several results runs a kernel for each, which reads the gradient again."""
    operands, results = _tensors(given), _tensors(out)
    known = {one.untyped_storage()._cdata for one in operands}
    made = [one for one in results if one.untyped_storage()._cdata not in known] or results
    kernels = len(made) if name.endswith("_backward") else 1
    read = [] if name in FILLS else [_bytes(one) for one in operands]
    if name == "copy_":
        read = read[1:]
    written = sum(map(_bytes, made))
    if name in LOOKS_UP and read:
        read[0] = written
    if name in SCATTERS:
        kernels, read = 2, []
    size = written + sum(read) + (kernels - 1) * sum(read[:1])
    if not size:
        return None
    is_loss = vocab > 1 and any(one.dim() > 1 and one.shape[-1] == vocab for one in (*operands, *results))
    return Done("loss" if is_loss and name not in NO_LOSS else "stream", (kernels,), (size,))


def _product(name: str, given: dict[str, Any]) -> Done:
    if name in ("baddbmm",):
        x, y = given["batch1"], given["batch2"]
    elif name == "addmm":
        x, y = given["mat1"], given["mat2"]
    else:
        x, y = given["self"], given["mat2"]
    element = int(x.element_size())
    if name == "_grouped_mm":
        return _grouped(x, y, element, given["offs"].shape[0])
    m, k, n = x.shape[-2], x.shape[-1], y.shape[-1]
    return Done("product", (element,), (m, n, k, x.shape[0] if x.dim() == 3 else 1))


def _grouped(x: torch.Tensor, y: torch.Tensor, element: int, groups: int) -> Done:
    """Rows of ``x`` go to one of the groups of ``y``; of two matrices the inner dimension is cut."""
    what = "grouped rows" if y.dim() == 3 else "grouped sums"
    return Done(what, (element,), (x.shape[-2], y.shape[-1], x.shape[-1], groups))


def _attention(given: dict[str, Any], *, backward: bool) -> Done:
    query, key, value = given["query"], given["key"], given["value"]
    b, a, s, d = query.shape
    causal = bool(given.get("is_causal", False))
    sizes = (b, s, a, d, key.shape[1], key.shape[2], value.shape[3])
    return Done("attention", (int(query.element_size()), int(causal), int(backward)), sizes)
