"""Sums of gradients in fp32 beside buffers in 16 bits.

``megatron/core/distributed/reduce_scatter_with_fp32_accumulation.py``: in place of a reduce-scatter every rank receives
its shard of a bucket from all others, as much as the bucket, and adds them up in an fp32 tensor of the shard's size.
``param_and_grad_buffer.py`` (``_ParamAndGradBuffer.__init__``): parameters whose names match a pattern accumulate in an
fp32 tensor of their own, which is copied into the buffer before that is reduced (``_copy_back_extra_main_grads``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from itertools import count

from ...layers.autograd import ITEMSIZE
from ...layers.module import Parameter
from ...plan.errors import PlanError
from ...tape.events import Category, Event, Hold, Stretch, rounded
from ...tape.program import Kept
from ...values import NamedTuple, replace
from .states import Chunk, Rules, buffers_of

FIRST = 1 << 41
"""First id of a tensor here, above those of states."""

NUMBERS = 100
"""Numbers of layers that a pattern must not tell apart."""


class Received(NamedTuple):
    """Bytes of what a rank receives to sum in fp32."""

    most: int
    """Of the largest bucket."""
    summed: int
    """Its shard in fp32."""
    early: int
    """Of the largest of each buffer that arrives while backward goes on: not the last, behind which all is done."""


@lru_cache(maxsize=1 << 12)
def received(chunks: tuple[Chunk, ...], rules: Rules, tied: bool) -> Received:
    """With one chunk of layers, each buffer's next bucket waits for the one before (``start_grad_sync``)."""
    if not (rules.sums_in_fp32 and rules.in_buffers):
        return Received(0, 0, 0)
    size, found, early = ITEMSIZE[rules.gradients], [(0, 0)], 0
    for _, shared, _, buckets in buffers_of(chunks, rules, tied):
        ends = [bucket.end for bucket in buckets]
        found.append((rounded(max(ends) * size), rounded(4 * (max(ends) // shared.shards))))
        early += rounded(max(ends[:-1]) * size) if len(ends) > 1 else 0
    return Received(*max(found), early)


def with_fp32(kept: Kept, chunks: tuple[Chunk, ...], rules: Rules, tied: bool) -> Kept:
    """``kept`` with what summing and accumulating in fp32 take; the sum is behind the last micro-batch, before the step
    begins (``finalize_model_grads``)."""
    most, summed, _ = received(chunks, rules, tied)
    ids = count(FIRST)
    made: list[Hold] = []
    if most:
        made.append(Hold(next(ids), most, Category.COMMUNICATION_BUFFERS, "gradients_received"))
        made.append(Hold(next(ids), summed, Category.TEMPORARIES, "gradients_summed"))
    ends: list[Event] = [one.end for one in made]
    own = [
        Hold(next(ids), rounded(4 * one.elements), Category.GRADIENTS, "main_grad_in_fp32", one.shape, "fp32")
        for chunk in chunks
        for parameters, times in chunk
        for one in parameters
        if _matches(one, rules.wide_gradients)
        for _ in range(times)
    ]
    if not made and not own:
        return kept
    step = Stretch([*made, *ends, *kept.step])
    return replace(kept, construction=Stretch([*kept.construction, *own]), step=step)


def _matches(parameter: Parameter, patterns: Sequence[str]) -> bool:
    for pattern in patterns:
        found = {pattern == "all" or fnmatch(name, pattern) for name in _names(parameter.name)}
        if len(found) > 1:
            raise PlanError(
                "megatron.fp32_gradients_of",
                pattern,
                "must not tell layers apart by their numbers: such patterns are not modelled",
            )
        if found == {True}:
            return True
    return False


ENDS = {
    "word.weight": "embedding.word_embeddings.weight",
    "position.weight": "embedding.position_embeddings.weight",
    "head.weight": "output_layer.weight",
    "final_norm.weight": "decoder.final_layernorm.weight",
    "final_norm.bias": "decoder.final_layernorm.bias",
}
"""Of parameters outside layers (``GPTModel``)."""
FURTHER = ("enorm", "hnorm", "eh_proj", "final_layernorm")
"""Modules of ``MultiTokenPredictionLayer`` beside its layer."""


def _names(name: str) -> Iterator[str]:
    """What ``named_parameters`` of ``Float16Module`` calls it, with every number that its layer may have."""
    if name in ENDS:
        yield f"module.{ENDS[name]}"
        return
    if name.startswith("mtp."):
        _, depth, rest = name.split(".", 2)
        inner = "" if rest.startswith(FURTHER) else "mtp_model_layer."
        yield f"module.mtp.layers.{depth}.{inner}{rest}"
        return
    for number in range(NUMBERS):
        yield f"module.decoder.layers.{number}.{name}"
