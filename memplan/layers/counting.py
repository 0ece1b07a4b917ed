"""What a recorder counts in place of a tape: the kernels that run (``layers.work``), and the bytes that they move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from ..tape.events import Category
from ..values import dataclass
from .graph import Gradients, Tensor, bytes_of
from .work import NO_CALLS, Calls, Kernel, Stream, Work, calls

GRAPHS = 8
"""Stream of what CUDA graphs hold."""

BESIDE = frozenset({Category.WORKSPACES, Category.COMMUNICATION_BUFFERS})
"""Categories of tensors that kernels fill beside their results, or that arrive."""


@dataclass
class Counting:
    """The part of a recorder that counts."""

    counts: bool = False
    """Record what kernels do in place of a tape."""
    work: list[Kernel] = field(default_factory=list)
    forwards: int = 0
    """Kernels of the forward pass."""
    replayed: Calls = NO_CALLS
    """What a CUDA graph calls in the host's place,"""
    forward_replayed: Calls = NO_CALLS
    """and of it the forward pass' part."""
    made: int = 0
    """Bytes of the tensors that the operator has made,"""
    launches: int = 0
    """how many they are,"""
    of_loss: bool = False
    """and whether some of them are logits."""
    pool: int = 0
    """The stream whose memory tensors take."""

    def makes(self, size: int, category: Category) -> None:
        """The operator makes a tensor of ``size`` bytes."""
        if category not in BESIDE:
            self.made += size
            self.launches += 1
            self.of_loss |= category is Category.LOGITS

    def ran(self, kernel: Kernel) -> None:
        """A kernel that makes no tensor."""
        if self.counts:
            self.work.append(kernel)
            self._called((kernel,))

    def _called(self, work: Work) -> None:
        if self.pool == GRAPHS:
            self.replayed = self.replayed.plus(*map(calls, work))

    def _did(
        self,
        given: Gradients | Sequence[Tensor],
        launches: int,
        work: Work | None,
        saved: int = 0,
        issue: int = 0,
    ) -> None:
        """What the operator that ends here has done: ``work``, or ``launches`` kernels that write what was made, each
        reading what is ``given``, and all of them so many bytes of what was ``saved``. A view has made nothing."""
        if not self.counts:
            return
        if work is None and self.launches:
            read = launches * sum(bytes_of(x) for x in given if x is not None) + saved
            work = (Stream(read + self.made, launches, self.of_loss, issue),)
        self.work += work or ()
        self._called(work or ())
        self.made, self.launches, self.of_loss = 0, 0, False
