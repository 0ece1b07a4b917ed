"""Linear layers whose products are in fewer than 16 bits: what torchao's formats share in torchtitan.

Shapes: t tokens, or rows of experts with padding, k features in, n features out; a weight is (n, k), of e experts
(e, n, k).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from ..tape.events import Category, Hold
from ..values import dataclass, replace
from .autograd import Gradients, Recorder, Tensor, incoming
from .experts import grouped_product
from .work import Operator, Shape

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
    is_kept: ClassVar[bool] = True
    """Selective recompute may keep a product."""

    @abstractmethod
    def takes(self, name: str, n: int, k: int) -> bool:
        """Whether a layer (n, k) is one of them."""

    def leaving(self, skips: frozenset[str]) -> Self:
        """The same where ``skips`` stay."""
        return replace(self, skips=skips)  # type: ignore[type-var]

    def product(
        self,
        r: Recorder,
        x: Tensor,
        weight: Tensor,
        name: str,
        policy: Policy,
        category: Category = Category.TEMPORARIES,
    ) -> Tensor:
        """x (…, k) times the transposed ``weight`` (n, k), without bias. Selective recompute counts the product among
        those that it keeps every second of, unless the format says otherwise (``is_kept``)."""
        shape, dtype, (n, k) = x.shape, x.dtype, weight.shape
        t, full = prod(shape[:-1]), (*shape[:-1], n)
        held, saved = self.operands(r, x, weight, name, policy)
        kept = self.is_kept and policy.counted()
        made = not (kept and policy.keeps and policy.again)
        held += self.scales(r, t, n, k, name) if made else []

        def multiplied(r: Recorder) -> Tensor:
            return r.empty(full, dtype, name, category)

        out = policy.run(r, multiplied) if kept else multiplied(r)
        held.clear()

        def backward(r: Recorder, gradients: Gradients) -> Sequence[Tensor | None]:
            return self.gradients(r, shape, n, incoming(gradients).dtype, f"grad_{name}")

        return out.by(r.node((x, weight), saved, backward, work=self.work(t, n, k, dtype, made=made)))

    @abstractmethod
    def operands(
        self, r: Recorder, x: Tensor, weight: Tensor, name: str, policy: Policy
    ) -> tuple[list[Any], tuple[Tensor, ...]]:
        """Both operands cast for the product: what ends with it, last first, and what is saved for backward."""

    @abstractmethod
    def scales(self, r: Recorder, t: int, n: int, k: int, name: str) -> list[Tensor]:
        """Those that a product (t, k) by (k, n) makes itself."""

    @abstractmethod
    def gradients(self, r: Recorder, shape: Shape, n: int, dtype: str, name: str) -> Sequence[Tensor | None]:
        """Of an input of ``shape`` and of the weight, of an incoming gradient in ``dtype``."""

    @abstractmethod
    def work(self, t: int, n: int, k: int, dtype: str, *, made: bool) -> Operator:
        """``made``: the product runs, whose result is not kept from before."""

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


def as_given(r: Recorder, made: Tensor, shape: Shape) -> Tensor:
    """The gradient of an input (…, k) that a product made as (t, k)."""
    return made.view(*shape) if len(shape) != 2 and r.views_products else Tensor(made.storage, shape, made.dtype)
