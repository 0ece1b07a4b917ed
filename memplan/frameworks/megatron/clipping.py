"""Muon's clip of queries and keys behind the step: ``megatron/core/optimizer/qk_clip.py`` (``clip_qk``), ``clip_qk`` of
``transformer/attention.py`` and ``multi_latent_attention.py``.

Where a head's largest score of an iteration is above a threshold, rows of its layer's projections are made smaller: in
place, then once more put together in a copy, which is written over the weight; first of the main parameter, then of the
parameter. That is taken to happen. With the distributed optimizer a main parameter is a flat shard, which has no such
rows: there Megatron stops at the first clip, so that nothing of it is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...layers.autograd import ITEMSIZE, Shape
from ...layers.megatron_core.shape import CoreShape
from ...layers.module import Parameter, hold_bytes
from ...tape.events import Category, Hold

if TYPE_CHECKING:
    from .states import Rules

CLIPPED = ("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
"""Modules of attention whose weights are clipped; those of multi-token prediction are not (``decoder.layers``)."""


def factors(shape: CoreShape, layers: int, rules: Rules) -> list[Hold]:
    """Factors in fp32 that every layer keeps: of each latent head one; else of each group of heads, and of each of its
    queries' features."""
    if not rules.clips or rules.in_buffers:
        return []
    spec, a, g = shape.spec, shape.spec.heads // shape.t, max(shape.spec.kv_heads // shape.t, 1)
    sizes: list[Shape] = [(a, 1, 1)] if spec.latent_kv_rank else [(g, 1, 1), (g, a // g * spec.head_dim, 1)]
    return [Hold(0, hold_bytes(one, "fp32"), Category.BUFFERS, "clip_factors", one, "fp32") for one in sizes] * layers


def largest(parameters: Iterable[Parameter], rules: Rules) -> int:
    """Bytes of the largest copy that a clip makes."""
    if not rules.clips or rules.in_buffers:
        return 0
    sizes = [
        one.elements
        for one in parameters
        if not one.name.startswith("mtp.") and one.name.removesuffix(".weight").endswith(CLIPPED)
    ]
    return max(sizes, default=0) * (4 if rules.mixed else ITEMSIZE[rules.dtype])
