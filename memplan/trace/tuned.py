"""What of a model is trained, as plain data for the worker: adapters, 4-bit weights, frozen parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..plan.plan import Plan
from ..plan.tuning_checks import is_tuned


@dataclass(frozen=True, slots=True)
class FourBitWeights:
    """bitsandbytes' quantisation of linear layers."""

    kind: str
    """``nf4`` or ``fp4``."""
    double: bool
    compute: str
    """Dtype in which quantised layers compute."""
    prepared: bool
    """``prepare_model_for_kbit_training``."""


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
    four_bit: FourBitWeights | None = None

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Tuned:
        four_bit = data["four_bit"]
        return Tuned(**{**data, "four_bit": FourBitWeights(**four_bit) if four_bit is not None else None})

    @property
    def packages(self) -> tuple[str, ...]:
        """Those that a trace needs besides."""
        return (*(("peft",) * (self.rank is not None)), *(("bitsandbytes",) * (self.four_bit is not None)))


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
        four_bit=_four_bit(plan),
    )


def _four_bit(plan: Plan) -> FourBitWeights | None:
    given = plan.quantisation
    if given.kind == "none":
        return None
    return FourBitWeights(given.kind, given.double, given.compute or plan.precision.dtype, given.prepared)
