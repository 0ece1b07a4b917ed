"""The clock that a GPU's power limit leaves, measured on one of the H100's chip.

What a kernel computes and moves takes energy; where a pass would take more than the limit, the multiprocessors' clock
falls until it does not, and with it every rate but the memory's. A lower clock needs a lower voltage, so that an
operation takes less energy, too.
"""

from __future__ import annotations

from functools import lru_cache

from ...values import NamedTuple, replace
from .attention import Fused
from .rates import Rates

STEPS = 100
"""Parts of the full clock that clocks are rounded to, so that few rates are made."""
LOWEST = 0.3


class Drawn(NamedTuple):
    """What a pass takes at the full clock."""

    flops: float = 0.0
    """In 16 bits; of fewer bits their part."""
    bytes: float = 0.0
    bound: float = 0.0
    """Seconds that a lower clock makes longer,"""
    other: float = 0.0
    """and those that it does not."""


def clock(rates: Rates, drawn: Drawn) -> float:
    """The part of its full clock at which a GPU stays within its power limit."""
    power = rates.power
    if power is None or not drawn.bound:
        return 1.0
    low, high = int(LOWEST * STEPS), STEPS
    while low < high:  # the highest that stays within it
        middle = (low + high + 1) // 2
        part = middle / STEPS
        spent = drawn.bound / part + drawn.other
        energy = power.flop * drawn.flops * part**power.exponent + power.byte * drawn.bytes
        low, high = (middle, high) if power.always + energy / spent <= power.limit else (low, middle - 1)
    return low / STEPS


@lru_cache(maxsize=1024)
def at(rates: Rates, part: float) -> Rates:
    """Rates at a part of the full clock."""
    if part == 1:
        return rates

    def slower(one: Fused) -> Fused:
        return one.of(part)

    return replace(
        rates,
        matrix=rates.matrix * part,
        ordinary=rates.ordinary * part,
        odd=rates.odd * part,
        tf32=rates.tf32 * part,
        low=tuple((size, rate * part) for size, rate in rates.low),
        attention_forward=slower(rates.attention_forward),
        attention_backward=slower(rates.attention_backward),
        efficient=(slower(rates.efficient[0]), slower(rates.efficient[1])),
        issue=rates.issue / part,
    )
