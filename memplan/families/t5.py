"""T5 as Megatron-Core has it: pre-norm layers with biases, learned positions, GELU, multi-head attention.

``layers`` counts the encoder's, of which the decoder has as many.
"""

from __future__ import annotations

from ..layers.coverage import CORE_T5
from .base import Family

T5 = Family("t5", megatron_core=CORE_T5, shards=False)

FAMILIES = {"t5": T5}
