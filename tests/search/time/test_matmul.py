from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.layers.work import Scan
from memplan.search.time import Efficiency, rates_of
from memplan.search.time.attention import Fused
from memplan.search.time.kernels import LAUNCH, alone, matmul
from memplan.search.time.shape import shape_of

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


@pytest.mark.parametrize(
    ("low", "size", "rate"),
    [("tensorwise", 1.0, 0.648 * 5e15), ("mxfp8", 1.0, 0.739 * 5e15), ("nvfp4", 0.5, 0.334 * 15e15)],
)
def test_what_low_precision_reaches_on_gb300(low: str, size: float, rate: float) -> None:
    """A product of 8,192^3 takes no longer than its rate says, but for the last wave: 2,048 tiles of 152
    multiprocessors are 14 waves for 13.5. NVIDIA's sweep has 2.87, 3.19 and 4.60 PFLOP/s in the median."""
    flag = {"fp4": low} if low == "nvfp4" else {"fp8": low}
    job = plan(
        model="llama-3-8b", framework="megatron", gpu="gb300", gpus=8, mbs=1, gbs=8, seq=4096, dtype="bf16", **flag
    )
    found = rates_of(job)
    assert dict(found.low)[size] == pytest.approx(rate)
    reached = 2 * 8192**3 / matmul(found, 8192, 8192, 8192, 1, size, 2)
    assert 0.93 * rate < reached < rate


def test_a_scan_as_nvidia_swept_it() -> None:
    """Nemotron 3 Super's, 8 sequences of 8,192 tokens on B200, forward, without its convolution: 5.00 ms
    (aiconfigurator, b200_sxm/linear_attention/trtllm/1.3.0rc15)."""
    flags = {"model": "nemotron-3-super-120b-a12b", "framework": "megatron", "gpu": "b200", "gpus": 8, "ep": 8}
    job = plan(**flags, layer_pattern="ME", mbs=8, gbs=64, seq=8192, dtype="bf16")
    mamba, _ = shape_of(job).entries.kinds[0]
    rates = rates_of(job)
    spent = sum(times * alone(one, rates) for one, times in mamba.forward if isinstance(one, Scan))
    assert spent == pytest.approx(5.00e-3, rel=0.1)
