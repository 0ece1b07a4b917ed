"""The two parts of a bound from below: what a rank keeps, and what one micro-batch takes while it passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ...tape import ROUND, Excursion

EXACT = 4
"""Sequences up to which a micro-batch is folded; what more of them take lies above a line."""


class Kept(NamedTuple):
    """Bytes of one rank that do not depend on the micro-batch."""

    static: int
    """Between iterations."""
    gradients: int
    """What every micro-batch but the first finds beside that."""
    step: int
    """The largest that the optimizer's step takes beside what is static, gradients among it."""


NONE = Kept(0, 0, 0)


@dataclass(slots=True)
class Growing:
    """Bytes that a micro-batch of so many sequences takes at least, from a function that folds it.

    The peak of a stretch of a pass is the largest of sums of tensors, the same tensors from two sequences on; each is
    of the same size for any number of them or in proportion to it. So but for rounding it is a convex function of the
    number, and beyond ``EXACT`` it lies above the line through 2 and ``EXACT``. Rounding takes less than 512 bytes of
    each tensor away from that for every sequence (``rounded(2 x) <= 2 rounded(x)``). Of several stretches the largest
    line counts: what is large of few sequences need not be what grows.
    """

    measured: Callable[[int], tuple[int, ...]]
    """Peaks of stretches, of so many sequences."""
    tensors: int
    """As many are alive at once, at most."""
    known: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def at(self, sequences: int) -> int:
        if sequences <= EXACT:
            return max(self._measured(sequences))
        two, most = self._measured(2), self._measured(EXACT)
        line = max(low + (sequences - 2) * (high - low) // (EXACT - 2) for low, high in zip(two, most, strict=True))
        return max(*most, line - ROUND * self.tensors * sequences)

    def _measured(self, sequences: int) -> tuple[int, ...]:
        if sequences not in self.known:
            self.known[sequences] = self.measured(sequences)
        return self.known[sequences]


def raised(excursion: Excursion, size: int) -> Excursion:
    """``excursion`` while ``size`` bytes more are held."""
    return replace(excursion, peak=excursion.peak + size) if size else excursion


def peaks(excursions: Sequence[Excursion], early: int) -> tuple[int, int]:
    """Of the first ``early`` ones, one after the other, and of all; what each is for does not matter."""
    level = most = before = 0
    for at, one in enumerate(excursions):
        before = most if at == early else before
        most = max(most, level + one.peak)
        level += one.net
    return before, most
