"""What PyTorch runs of a real transformers model, forward and backward on the CPU: FLOPs of products; kernels of other
operators, and the bytes that they read and write."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
LOOKS_UP = frozenset({"embedding", "nll_loss_forward"})
FILLS = frozenset({"zeros", "zeros_like", "new_zeros", "nll_loss_backward"})
NO_KERNEL = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "_local_scalar_dense", "arange"})


class Ran(NamedTuple):
    """Of one step."""

    flops: int
    kernels: int
    """Without products."""
    bytes: int
    """That those read and write."""

    def __sub__(self, other: Ran) -> Ran:
        return Ran(*(one - two for one, two in zip(self, other, strict=True)))


class _Moved(TorchDispatchMode):
    """Counts operators that make or change a tensor: a kernel reads every operand once and writes every result once."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        given, made = _tensors((args, kwargs)), _tensors(out)
        held = {x.untyped_storage()._cdata for x in given}
        fresh = made if func._schema.is_mutable else [x for x in made if x.untyped_storage()._cdata not in held]
        if fresh and name not in PRODUCTS | NO_KERNEL:
            self.kernels += 1
            self.bytes += (2 if name in LOOKS_UP else 1) * sum(map(_bytes, fresh))
            self.bytes += 0 if name in LOOKS_UP | FILLS else sum(map(_bytes, given))
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def step(kind: str, settings: dict[str, Any], layers: int, b: int, s: int) -> tuple[Ran, Any]:
    """Of a later micro-batch of b sequences of s tokens in bf16, with eager attention; and its configuration."""
    sizes = {**settings, "n_layer" if "n_layer" in settings else "num_hidden_layers": layers}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    made = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    model = made.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").train()
    model.config.use_cache = False
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.zeros((b, s), dtype=torch.int64)
    with FlopCounterMode(display=False) as flops, _Moved() as moved:
        model(input_ids=ids, labels=ids).loss.backward()
    return Ran(flops.get_total_flops(), moved.kernels, moved.bytes), config
