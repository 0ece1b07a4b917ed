"""torchtitan's linear layers with an adapter: ``torchtitan/components/lora.py`` (``LoRALinear.forward``) of 21 August
2026 (commit b5bcd76). Shapes: k inputs, n outputs."""

from __future__ import annotations

from collections.abc import Callable

from . import ops
from .autograd import Recorder, Tensor

Product = Callable[[Recorder, Callable[[Recorder], Tensor]], Tensor]
"""What runs a matrix product, whose output recompute may keep."""


def adapted(r: Recorder, x: Tensor, name: str, n: int, product: Product) -> Tensor:
    """The frozen layer ``name`` of ``n`` outputs, and what its adapter adds, which are variables to the end."""

    def multiplied(x: Tensor, weight: str, of: str, n: int) -> Tensor:
        own = r.parameter(f"{name}{weight}.weight", (n, x.shape[-1]), x.dtype)
        return product(r, lambda r: ops.linear(r, x, own, name=f"{name}{of}"))

    base = multiplied(x, "", "", n)
    added = multiplied(multiplied(x, ".lora_A", "_lora_a", r.adapters.rank), ".lora_B", "_lora_b", n)
    return ops.add(r, base, ops.scale(r, added, f"{name}_lora_scaled"), f"{name}_with_lora")
