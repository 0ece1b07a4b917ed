"""``CheckpointWithoutOutput`` (``megatron/core/tensor_parallel/random.py``): a region whose outputs end once they have
been read, and are there again when backward needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..autograd import Gradients, Leaf, Recorder, Tensor
from ..work import NOTHING

Discard = Callable[[Recorder, Tensor], None]

Region = Callable[..., tuple[Tensor, ...]]


def without_output(r: Recorder, inputs: Sequence[Tensor], region: Region) -> tuple[tuple[Tensor, ...], Discard]:
    """The outputs of ``region``, whose memory ends in forward with ``discard`` and is there again when the gradient of
    the tensor that this is given arrives, until the region's own backward is done.
    """
    enabled, r.grad_enabled = r.grad_enabled, False
    outputs = region(r, *inputs)
    r.grad_enabled = enabled
    parts = [(x.shape, x.dtype) for x in inputs]
    held: list[tuple[list[Tensor], list[Leaf]]] = []

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        again, leaves = held.pop()
        given = [one and one.alias() for one in gradients]
        if len(again) == 1 and given[0] is not None:
            r.backward([again.pop()], [given.pop()])  # type: ignore[list-item]
        else:
            r.backward([_joined(r, again, given)], [r.outside((), "fp32")])
        again.clear()
        return [leaf.take() for leaf in leaves]

    node = r.node(inputs, inputs, backward, outputs=len(outputs), work=NOTHING)
    for slot, out in enumerate(outputs):
        out.node, out.slot = node, slot

    def recompute(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        start = len(r.events)
        r.seam("recompute")
        assert node is not None
        again = [r.leaf(Tensor(saved, *part)) for saved, part in zip(r.saved_by(node), parts, strict=True)]
        held.append((list(region(r, *(x for x, _ in again))), [leaf for _, leaf in again]))
        r.settle(start)
        return gradients

    def discard(r: Recorder, later: Tensor) -> None:
        for out in outputs:
            r.end(out)
        later.node = r.node((later,), (), recompute, work=NOTHING)

    return outputs, discard


def _joined(r: Recorder, outputs: Sequence[Tensor], gradients: Gradients) -> Tensor:
    """A root above several ``outputs``, whose backward hands each its gradient (``torch.autograd.backward``)."""
    given = [*gradients]

    def backward(r: Recorder, _: Gradients) -> Sequence[Tensor | None]:
        handed = [*given]
        given.clear()
        return handed

    gradients.clear()
    root = r.outside((), "fp32")
    root.node = r.node(outputs, (), backward, work=NOTHING)
    return root
