"""Recompute: a region keeps its input in forward and runs again in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import ref

from .autograd import Gradients, Node, Recorder, Storage, Tensor
from .work import NOTHING

RERUN = "rerun"
"""Seam behind a whole module's second forward pass, before its backward."""


class _StopRecompute(Exception):  # noqa: N818 - not an error
    """The last saved tensor has been recomputed."""


class Frame:
    """A region recomputed as ``torch.utils.checkpoint(use_reentrant=False)`` does.

    Forward builds the graph and keeps none of its saved tensors, only the region's input. The first
    node that needs one runs the region again, up to the last tensor that was saved
    (``checkpoint.py``, ``_checkpoint_hook``, ``_recomputation_hook``, early stop); each recomputed
    tensor dies when its node has used it. What nodes had saved that ended in forward is not kept again (a graph that
    leads nowhere).
    """

    __slots__ = ("again", "early_stop", "nodes", "region")

    def __init__(self, region: Callable[[], Tensor], *, early_stop: bool = True) -> None:
        self.region = region
        self.early_stop = early_stop
        """``set_checkpoint_early_stop``: not a kernel more than needed; else it runs to its end."""
        self.nodes: list[ref[Node]] = []
        """Nodes that saved something, in forward order."""
        self.again: list[tuple[Storage, ...]] | None = None

    def node(self, node: Node, saved: Sequence[Tensor]) -> Node:
        """Called for each node that the region makes, in forward and when recomputed."""
        if not saved:
            return node
        if self.again is None:
            node.frame = self
            self.nodes.append(ref(node))
            return node
        storages = tuple(x.storage for x in saved)  # variables of a C++ function die last to first
        if self.nodes[len(self.again)]() is None:
            node.saved, storages = storages[::-1], ()
        self.again.append(storages)
        if self.early_stop and len(self.again) == len(self.nodes):
            raise _StopRecompute
        return node

    def keeps_apart(self, held: list[Tensor]) -> None:
        """No node of a region does."""

    def unpack(self, recorder: Recorder, node: Node) -> None:
        """Gives ``node`` its saved tensors, running the region again if nobody has."""
        if self.again is None:
            self.again = []
            self.recompute(recorder)
            for target, storages in zip(self.nodes, self.again, strict=True):
                if (alive := target()) is not None:
                    alive.saved = storages
            self.nodes, self.again = [], []

    def recompute(self, recorder: Recorder) -> None:
        start = len(recorder.events)
        outer, recorder.frame = recorder.frame, self
        cache, recorder.casts = recorder.casts, {}  # autocast is entered anew, and its cache ends with it
        recorder.seam("recompute")
        with suppress(_StopRecompute):
            self.region()
        recorder.frame = outer
        recorder.casts = cache
        recorder.settle(start)


def recomputed(recorder: Recorder, region: Callable[[], Tensor]) -> Tensor:
    """``region`` without its saved tensors; see ``Frame``."""
    outer, recorder.frame = recorder.frame, Frame(region)
    out = region()
    recorder.frame = outer
    return out


def recomputed_reentrant(recorder: Recorder, region: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
    """``region`` as ``CheckpointFunction`` recomputes it (Megatron ``mpu/random.py``, DeepSpeed
    ``runtime/activation_checkpointing/checkpointing.py``, ``torch.utils.checkpoint`` reentrant).

    Forward runs without a graph and saves the inputs themselves. Backward runs the whole region
    again with one, then its backward, while the incoming gradient and the output are held.
    """
    enabled, recorder.grad_enabled = recorder.grad_enabled, False
    out = region(recorder, *inputs)
    recorder.grad_enabled = enabled
    parts = tuple((x.storage, x.shape, x.dtype) for x in inputs)

    def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
        gradient = gradients[0]
        assert gradient is not None
        start = len(r.events)
        r.seam("recompute")
        leaves = [r.leaf(Tensor(*part), "input") for part in parts]
        cache, r.casts = r.casts, {}  # autocast is entered anew, and its cache ends with it
        outer, r.contexts = r.contexts, []  # the output holds the region's own graph until it has returned
        again = region(r, *(x for x, _ in leaves))
        r.casts = cache
        r.settle(start)
        r.backward([again.alias()], [gradient.alias()])
        r.contexts = outer
        return [leaf.take() for _, leaf in leaves]

    out.node = recorder.node(inputs, (), backward, work=NOTHING)
    for x in inputs:
        if x.storage.at < 0:
            recorder.saved_outside.add(x.storage.id)
    return out
