"""Linear layers whose products are in fewer than 16 bits: what torchao's formats share in torchtitan.

Shapes: t tokens, or rows of experts with padding, k features in, n features out; a weight is (n, k), of e experts
(e, n, k).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from ..tape.events import Category, Hold
from ..values import dataclass, replace
from .autograd import Recorder, Tensor
from .experts import grouped_product
from .work import Shape

if TYPE_CHECKING:
    from typing_extensions import Self

    from .torchtitan import Policy


class LowLinear(ABC):
    """Linear layers whose products are in fewer than 16 bits."""

    __slots__ = ()
    skips: frozenset[str]
    """Layers that stay, by their names here."""
    rows: int
    """Each expert's rows are padded to a multiple of this; 0: products of experts stay in 16 bits."""
    gathered: bool = False
    """Weights arrive in 8 bits."""

    @abstractmethod
    def takes(self, name: str, n: int, k: int) -> bool:
        """Whether a layer (n, k) is one of them."""

    @abstractmethod
    def leaving(self, skips: frozenset[str]) -> LowLinear:
        """The same where ``skips`` stay."""

    @abstractmethod
    def product(
        self,
        r: Recorder,
        x: Tensor,
        weight: Tensor,
        name: str,
        policy: Policy,
        category: Category = Category.TEMPORARIES,
    ) -> Tensor:
        """x (…, k) times the transposed ``weight`` (n, k), without bias."""

    def grouped(self, r: Recorder, x: Tensor, weight: Tensor, offsets: Tensor, name: str) -> Tensor:
        """Rows (L, k) of experts times their transposed weights (e, n, k): in 16 bits."""
        return grouped_product(r, x, weight, offsets, name)

    def beside(self, count: int) -> tuple[Hold, ...]:
        """What a rank with ``count`` such layers keeps beside their weights: nothing, but the scales that gathered
        weights bring."""
        return ()


@dataclass(frozen=True, slots=True)
class Blocks(LowLinear):
    """Layers whose operands have a scale for each block of a row or column."""

    skips: frozenset[str] = frozenset()
    rows: int = 0
    multiple: ClassVar[int]
    """Tokens, and features in and out, that kernels have a multiple of; others raise an error."""

    def takes(self, name: str, n: int, k: int) -> bool:
        """All but those that stay, whatever their sizes: torchtitan looks at names alone."""
        return name not in self.skips

    def leaving(self, skips: frozenset[str]) -> Self:
        return replace(self, skips=skips)


def as_given(r: Recorder, made: Tensor, shape: Shape) -> Tensor:
    """The gradient of an input (…, k) that a product made as (t, k)."""
    return made.view(*shape) if len(shape) != 2 and r.views_products else Tensor(made.storage, shape, made.dtype)
