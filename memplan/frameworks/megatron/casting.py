"""Weights in 8 and 4 bits are made anew of main parameters, in the step: Transformer Engine's
``pytorch/tensor/utils.py`` (``quantize_master_weights``), which ``fp8_utils.py`` (``quantize_param_shard``) and
Megatron-FSDP's ``copy_main_weights_to_model_weights`` call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...layers.autograd import Shape
from ...layers.megatron_core.precision import Low
from ...tape.events import Category, Event, Hold, drops, rounded


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
