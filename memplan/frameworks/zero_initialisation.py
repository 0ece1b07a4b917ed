"""What the device holds while DeepSpeed's engine builds ``DeepSpeedZeroOptimizer`` (stages 1 and 2).

``stage_1_and_2.py``, ``__init__`` and ``initialize_optimizer_states``. The model comes whole, in the dtype that it
trains in. Group after group is copied into its flat tensor, after which its own tensors end; the rank's share is
cloned and cast to fp32, and fp32 gradients of every share are made and dropped again. Where the device has no room
for the flat tensor (``available_memory``), parameters go to the host first, and nothing is there twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..layers.autograd import ITEMSIZE
from ..tape import rounded
from .zero_layout import Group
from .zero_weave import Model


def peak(model: Model, groups: Sequence[Group], besides: int, capacity: int | None) -> int:
    """Bytes, counted from nothing. ``besides``: the model's buffers; ``capacity``: the device's, if it is known."""
    size = ITEMSIZE[model.dtype]
    live = highest = besides + sum(parameter.bytes(model.dtype) for parameter in model.parameters)
    for group in groups:
        own = sum(model.bytes(id) for id in group.ids)
        flat, share = rounded(group.padded * size), rounded(group.share * size)
        padding = rounded((group.padded - sum(group.sizes)) * size) if group.padded != sum(group.sizes) else 0
        fits = capacity is None or capacity - live >= flat
        highest = max(highest, live + padding + flat if fits else live)
        live += flat - own
        wide = rounded(4 * group.share)
        highest = max(highest, live + share + (wide if model.dtype != "fp32" else 0))
        live += wide
    return max(highest, live + sum(rounded(4 * group.share) for group in groups))
