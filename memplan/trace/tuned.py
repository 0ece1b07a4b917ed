"""What of a model is trained, as plain data for the worker: adapters, 4-bit weights, frozen parts."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan.plan import Plan
from ..plan.tuning_checks import is_tuned


@dataclass(frozen=True, slots=True)
class Tuned:
    """A model of which some parameters are frozen."""

    rank: int | None
    """Of LoRA adapters; ``None`` without them."""
    targets: list[str]
    """Linear layers that have one, as peft takes them."""
    dropout: float
    adapters: str
    """Dtype of adapters."""
    embedding: bool
    """The embedding's tables and norm are frozen."""
    layers: int
    """So many layers from the first are frozen."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Those that a trace needs besides."""
        return ("peft",) if self.rank is not None else ()


def tuned_of(plan: Plan) -> Tuned | None:
    """``None`` where everything is trained."""
    if not is_tuned(plan):
        return None
    lora, frozen = plan.lora, plan.frozen
    return Tuned(
        rank=lora.rank,
        targets=list(lora.targets or ()),
        dropout=lora.dropout,
        adapters=lora.dtype or "fp32",
        embedding=frozen.embedding,
        layers=frozen.layers,
    )
