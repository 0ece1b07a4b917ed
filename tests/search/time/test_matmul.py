from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.search.time import Efficiency, rates_of
from memplan.search.time.attention import Fused
from memplan.search.time.kernels import LAUNCH, matmul

from .plans import plan

WHOLE = Efficiency(1.0, 1.0, Fused(1.0, 1.0), Fused(1.0, 1.0), 1.0, 1.0, 1.0)
A100 = rates_of(plan(model="gpt2", gpu="a100-80gb", dtype="bf16"), WHOLE)
H100 = rates_of(plan(model="gpt2", gpu="h100-80gb", dtype="bf16"), WHOLE)
sizes = st.integers(1, 4000).map(lambda n: 8 * n)


def test_waves_by_hand() -> None:
    """2048 x 5376 in tiles of 256 x 128: 8 x 42 = 336 tiles on 108 multiprocessors are four waves, the last a ninth
    full; each wave computes 2 * 256 * 128 * 14336 FLOP on every one, and the result is written behind the product."""
    wave = 2 * 256 * 128 * 14336 / (312e12 / 108)
    assert matmul(A100, 2048, 5376, 14336) == pytest.approx(4 * wave + 2 * 2048 * 5376 / 2039e9)
    # 108 columns of tiles fill the waves.
    assert matmul(A100, 2048, 108 * 128, 14336) == pytest.approx(8 * wave + 2 * 2048 * 108 * 128 / 2039e9)


@given(m=sizes, n=sizes, k=sizes)
def test_no_product_beats_the_peak_or_the_memory(m: int, n: int, k: int) -> None:
    for rates in (A100, H100):
        seconds = matmul(rates, m, n, k)
        assert seconds >= 2 * m * n * k / rates.matrix * (1 - 1e-9)
        assert seconds >= 2 * (m * k + k * n + m * n) / rates.memory * (1 - 1e-9)
        assert seconds >= LAUNCH


@given(m=sizes, n=sizes, k=st.integers(1, 1000))
def test_more_to_sum_takes_longer(m: int, n: int, k: int) -> None:
    assert matmul(A100, m, n, 8 * (k + 1)) >= matmul(A100, m, n, 8 * k)


def test_rows_of_no_whole_16_bytes_leave_the_tensor_cores() -> None:
    """Heads of 150 features, as BigScience's first trials had them, beside heads of 152."""
    odd, even = (matmul(A100, 2048, 2048, d, 12) for d in (150, 152))
    assert odd > 4 * even


def test_few_tiles_split_the_sum() -> None:
    """512 columns are 64 tiles of 128 x 128 on 108 multiprocessors... and a short, long product is cut in parts."""
    short = matmul(A100, 256, 128, 1 << 17)
    assert short < 2 * 256 * 128 * (1 << 17) / (312e12 / 108) / 4


def test_fp32_accumulation_moves_more() -> None:
    slow = replace(A100, memory=1e9)
    assert matmul(slow, 1024, 1024, 8, 1, 2, 8) > 2 * matmul(slow, 1024, 1024, 8)
