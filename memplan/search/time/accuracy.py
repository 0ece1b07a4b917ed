"""How far predicted steps were from measured ones, by the medians of ``benchmarks/timing.py`` (docs/timing.md), and the
fastest steps that anybody published."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .hardware import Figure

PUBLISHED_ERRORS: Mapping[str, float] = MappingProxyType(
    {"a100-40gb": 0.028, "a100-80gb": 0.026, "h100-80gb": 0.079, "b200": 0.071}
)
"""Median of the absolute relative errors of dense steps in 16 bits, by GPU."""


def published_error(gpu: str) -> float:
    """Median relative error of a step's time on ``gpu``; the largest published one where no step on it was compared."""
    return PUBLISHED_ERRORS.get(gpu, max(PUBLISHED_ERRORS.values()))


_FOUNDRY = "MPT-7B on 8 GPUs, https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"
BEST_MFU: Mapping[str, Figure] = MappingProxyType(
    {
        "a100-40gb": Figure(0.642, _FOUNDRY),
        "a100-80gb": Figure(0.642, _FOUNDRY),
        "h100-80gb": Figure(
            0.54,
            "GPT-3 175B on 128 GPUs, https://newsletter.semianalysis.com/p/h100-vs-gb200-nvl72-training-benchmarks",
        ),
        "b200": Figure(0.382, "Llama 3 70B of 12 layers on 8 GPUs, https://github.com/MooreThreads/SimuMax"),
    }
)
"""The highest MFU of dense training in 16 bits that was found, by GPU; of an A100 the chip's, whatever its memory."""

BEST_MFU_OF_EXPERTS: Mapping[str, Figure] = MappingProxyType(
    {"h100-80gb": Figure(0.493, "Mixtral 8x22B in Megatron-Core, https://arxiv.org/abs/2504.14960")}
)
"""The same of models with experts."""


def best_published(gpu: str, dtype: str, mfu: float, *, experts: bool = False) -> Figure | None:
    """The highest published MFU of ``gpu``, of models with ``experts`` or without, where ``mfu`` in ``dtype`` is above
    it."""
    best = (BEST_MFU_OF_EXPERTS if experts else BEST_MFU).get(gpu) if dtype in ("bf16", "fp16") else None
    return best if best is not None and mfu > best.value else None
