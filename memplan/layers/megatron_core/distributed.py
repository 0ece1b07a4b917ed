"""Layers that are recomputed whole, with a part of their input on each tensor-parallel rank.

``megatron/core/tensor_parallel/random.py``, ``CheckpointFunction`` with ``distribute_saved_activations``: once the
layer has run, the data of its input is replaced by this rank's part of it, a copy
(``split_tensor_into_1d_equal_chunks``); backward gathers the whole again (``utils.py``, ``gather_split_1d_tensor``),
which lives until it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from ...tape.events import Category
from ..autograd import Gradients, Recorder, Tensor
from ..work import NOTHING


def distributed(ranks: int, r: Recorder, region: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    """As ``recompute.recomputed_reentrant``, of one input."""
    (x,) = inputs
    enabled, r.grad_enabled = r.grad_enabled, False
    out = region(r, x)
    r.grad_enabled = enabled
    if not enabled or x.node is None:
        return out
    like, dtype = x.shape, x.dtype
    part = [r.empty((prod(like) // ranks,), dtype, "input_part")]
    r.end(x)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        gradient = gradients[0]
        assert gradient is not None
        start = len(r.events)
        r.seam("recompute")
        whole = r.empty(like, dtype, "input_gathered", Category.COMMUNICATION_BUFFERS)
        part.clear()
        again, leaf = r.leaf(whole)
        made = region(r, again)
        r.settle(start)
        r.backward([made.alias()], [gradient.alias()])
        return [leaf.take()]

    out.node = r.node((x,), (), backward, work=NOTHING)
    return out
