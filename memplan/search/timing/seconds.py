"""Seconds of a part of a layer, in the two directions."""

from __future__ import annotations

from typing import NamedTuple

from .matmul import streamed
from .operators import Moved
from .rates import Rates


class Seconds(NamedTuple):
    """Of one part of a layer."""

    forward: float = 0.0
    backward: float = 0.0
    forward_parallel: float = 0.0
    backward_parallel: float = 0.0
    forward_kernels: int = 0
    backward_kernels: int = 0

    def __add__(self, other: object) -> Seconds:
        assert isinstance(other, Seconds)
        return Seconds(
            self.forward + other.forward,
            self.backward + other.backward,
            self.forward_parallel + other.forward_parallel,
            self.backward_parallel + other.backward_parallel,
            self.forward_kernels + other.forward_kernels,
            self.backward_kernels + other.backward_kernels,
        )

    def times(self, count: int) -> Seconds:
        """The same ``count`` times."""
        return Seconds(
            count * self.forward,
            count * self.backward,
            count * self.forward_parallel,
            count * self.backward_parallel,
            count * self.forward_kernels,
            count * self.backward_kernels,
        )


def streams(rates: Rates, moved: Moved, elements: float) -> Seconds:
    """A memory-bound operator on so many elements."""
    forward = streamed(rates, moved.forward * elements, moved.kernels)
    backward = streamed(rates, moved.backward * elements, moved.backward_kernels)
    return Seconds(forward, backward, 0.0, 0.0, moved.kernels, moved.backward_kernels)
