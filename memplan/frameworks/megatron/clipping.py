"""Muon's clip of queries and keys behind the step: ``megatron/core/optimizer/qk_clip.py`` (``clip_qk``), ``clip_qk`` of
``transformer/attention.py`` and ``multi_latent_attention.py``.

Where a head's largest score of an iteration is above a threshold, rows of its layer's projections are made smaller: in
place, then once more put together in a copy, which is written over the weight; first of the main parameter, then of the
parameter. That is assumed to happen. With the distributed optimizer a main parameter is a flat shard, which has no such
rows: there Megatron stops at the first clip, so that nothing of it is counted.

Weights in 8 and 4 bits are made anew of main parameters, in the step: Transformer Engine's
``pytorch/tensor/utils.py`` (``quantize_master_weights``), which ``fp8_utils.py`` (``quantize_param_shard``) and
Megatron-FSDP's ``copy_main_weights_to_model_weights`` call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ...layers.autograd import ITEMSIZE, Shape
from ...layers.megatron_core.precision import Low
from ...layers.megatron_core.shape import CoreShape
from ...layers.module import Parameter, hold_bytes
from ...tape.events import Category, Event, Hold, drops, rounded

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


# -- casting -------------------------------------------------------------------------------------------


def cast(shards: Sequence[int], low: Low, weights: Sequence[Shape], ids: Iterator[int]) -> list[Event]:
    """What casting a rank's ``shards``, of so many elements, of ``weights`` takes.

    All shards in 16 bits at once, before Transformer Engine 2.15 those of NVFP4 joined in fp32 first; of all weights
    what ranks find largest, and the scales made of it, but MXFP8's, which are written in place. Then, where products
    want a tensor with one scale transposed, so is each shard while it is written (``convert_and_update_tensor``).
    """
    joined = low.recipe == "nvfp4" and low.te < (2, 15)
    casts = [4 * sum(shards), 2 * sum(shards)] if joined else [2 * elements for elements in shards]
    amaxes = [low.amaxes(shape) for shape in weights]
    scales = {"tensorwise": amaxes, "blockwise": amaxes, "mxfp8": []}.get(low.recipe, [sum(amaxes)])
    held = [("main_param_cast", size) for size in casts] + [("amaxes", sum(amaxes))]
    held += [("scale", size) for size in scales]
    if low.recipe == "nvfp4":
        held += [(name, 4 * len(weights)) for name in ("amax_of_each", "scale_of_each")]
    holds = [_hold(size, name, ids) for name, size in held if size]
    events = list[Event](holds)
    for elements in shards if low.per_tensor and low.turns else ():
        turned = _hold(elements, "shard_transposed", ids)
        events += [turned, turned.end]
    return [*events, *drops(holds)]


def _hold(size: int, name: str, ids: Iterator[int]) -> Hold:
    return Hold(next(ids), rounded(size), Category.TEMPORARIES, name)
