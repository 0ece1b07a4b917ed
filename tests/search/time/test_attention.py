"""Fused attention beside the charts of those who wrote the kernels."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from memplan.layers.work import Attention, fused, windowed
from memplan.search.time import attention, rates_of
from memplan.search.time.attention import Fused
from memplan.search.time.efficiency import default

from .plans import plan

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS, HIDDEN = 16384, 2048
"""Of the charts: so many sequences as make these tokens, so many heads as make these features."""

FLASH_2 = {
    (False, 128): (309, 350, 362, 368, 370, 370),
    (True, 128): (191, 260, 298, 319, 333, 335),
    (False, 64): (282, 306, 318, 321, 322, 324),
    (True, 64): (180, 229, 262, 284, 295, 299),
}
CUDNN = {(False, 128): (497, 574, 617, 609, 600, 595), (True, 128): (315, 410, 484, 518, 529, 539)}
BACKWARD = {"flash": (214, 260, 291, 310, 318, 322), "cudnn": (305, 408, 465, 499, 518, 516)}
"""TFLOP/s on an H100, arXiv 2407.08608, figures 5 and 6; backward: 128 features, no mask."""


def kernels(s: int, causal: bool, d: int, heads: int, b: int) -> tuple[Attention, Attention]:
    return fused((b, s, heads, d), heads, s, "bf16", causal=causal)


def h100(fused_kernels: bool) -> tuple[Fused, Fused]:
    parts = default("h100-80gb", (9, 0), fused_kernels=fused_kernels)
    return parts.attention_forward.of(989.4e12), parts.attention_backward.of(989.4e12)


@pytest.mark.parametrize(("charts", "te"), [(FLASH_2, False), (CUDNN, True)], ids=["flash", "cudnn"])
def test_forward_as_in_the_charts(charts: dict[tuple[bool, int], tuple[int, ...]], te: bool) -> None:
    """One rate and one fixed part describe every length, with a causal mask and without."""
    for (causal, d), speeds in charts.items():
        for s, speed in zip(LENGTHS, speeds, strict=True):
            one, _ = kernels(s, causal, d, HIDDEN // d, TOKENS // s)
            found = one.part * one.flops / attention.seconds(one, h100(te)[0], 132)
            assert found / 1e12 == pytest.approx(speed, rel=0.14 if s == 512 else 0.09), (causal, d, s)


@pytest.mark.parametrize(("chart", "te"), [("flash", False), ("cudnn", True)])
def test_backward_as_in_the_charts(chart: str, te: bool) -> None:
    for s, speed in zip(LENGTHS, BACKWARD[chart], strict=True):
        _, one = kernels(s, False, 128, HIDDEN // 128, TOKENS // s)
        assert one.flops / attention.seconds(one, h100(te)[1], 132) / 1e12 == pytest.approx(speed, rel=0.08), s


SDPA = {
    ("h200", 64, 1024): {2048: (0.166, 0.488), 4096: (0.358, 1.042), 8192: (0.738, 2.149), 16384: (1.499, 4.392)},
    ("h200", 128, 0): {2048: (0.142, 0.464), 4096: (0.465, 1.450), 8192: (1.708, 5.083), 16384: (6.531, 19.002)},
    ("gb200", 64, 128): {2048: (0.109, 0.237), 4096: (0.210, 0.465), 8192: (0.414, 0.911), 16384: (0.822, 1.818)},
    ("gb300", 64, 128): {2048: (0.104, 0.227), 4096: (0.202, 0.442), 8192: (0.397, 0.862), 16384: (0.790, 1.712)},
}
"""Milliseconds of both directions, by GPU, features and window (0: none), of causal attention in bf16 by cuDNN 9.19
(H200) and 9.22, gradients not deterministic: NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results, of
April 2026 and of h200_919_only_cudnn. 64 heads, 128 on Blackwell; two sequences with 64 features, one with 128."""


@pytest.mark.parametrize("case", SDPA, ids=str)
def test_cudnns_own_benchmark(case: tuple[str, int, int]) -> None:
    """Another source than that of the rates. Hopper within 6 %, windows, too; Blackwell's windows within 30 %:
    forward too fast, backward too slow."""
    gpu, d, window = case
    job = {"model": "llama-3-8b", "framework": "megatron", "gpus": 1, "mbs": 1, "gbs": 1, "seq": 512, "dtype": "bf16"}
    rates = rates_of(plan(gpu=gpu, **job))
    both, heads = (rates.attention_forward, rates.attention_backward), 64 if gpu == "h200" else 128
    for s, times in SDPA[case].items():
        for whole, rate, spent in zip(kernels(s, True, d, heads, 128 // d), both, times, strict=True):
            one = whole._replace(part=windowed(s, window, alternating=False)) if window else whole
            found = attention.seconds(one, rate, rates.processors) + attention.beside(one) / rates.memory
            assert found * 1e3 == pytest.approx(spent, rel=0.06 if gpu == "h200" else 0.32), s


@pytest.mark.parametrize(("heads", "part"), [(64, 0.872), (32, 0.732), (16, 0.578), (8, 0.310), (4, 0.167)])
def test_few_heads_leave_multiprocessors_idle(heads: int, part: float) -> None:
    """Parts of a B200's peak, scores counted whole, on 4096 tokens: sdp_fwd of SimuMax's b200_bf16_ceperm.json."""
    one, _ = kernels(4096, True, 128, heads, 1)
    spent = attention.seconds(one, default("b200", (10, 0)).attention_forward.of(2250e12), 148)
    assert one.flops / spent / 2250e12 == pytest.approx(part, rel=0.3)


def test_a_causal_kernel_by_hand() -> None:
    """Two heads of 256 tokens are two rows of tiles each: 1 and 2 tiles, and the longest block has 2. On 2
    multiprocessors 6 tiles take 3, and 2 more."""
    one, _ = kernels(256, True, 128, 2, 1)
    tile = 4 * 128 * 128 * 128
    assert attention.seconds(one, Fused(2.0 * tile, 1.0), 2) == pytest.approx(3 + 2)


@given(s=st.integers(1, 64), b=st.integers(1, 64), d=st.sampled_from((64, 128)))
def test_more_sequences_are_never_slower_each(s: int, b: int, d: int) -> None:
    forward, backward = h100(False)
    for at, rates in ((0, forward), (1, backward)):
        few, many = (kernels(128 * s, True, d, 8, n)[at] for n in (b, b + 1))
        one, more = attention.seconds(few, rates, 132), attention.seconds(many, rates, 132)
        assert one < more <= one * (b + 1) / b * (1 + 1e-9)


def test_the_first_flash_attention_is_half_as_fast() -> None:
    """PyTorch before 2.2 (abstract of arXiv 2307.08691)."""
    new, old = (
        rates_of(plan(model="llama-3-8b", gpu="a100-80gb", dtype="bf16", torch=torch)) for torch in ("2.2", "2.1")
    )
    assert old.attention_forward.rate == new.attention_forward.rate / 2
    assert old.attention_backward.narrow == new.attention_backward.narrow / 2
