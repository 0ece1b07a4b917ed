from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from memplan.layers.work import Product, Scan, linear
from memplan.search.time import Efficiency, rates_of, step_time
from memplan.search.time.attention import Fused
from memplan.search.time.kernels import GAP, LAUNCH, alone, in_parts, matmul, streamed
from memplan.search.time.power import at
from memplan.search.time.shape import shape_of

from .plans import plan

WHOLE = Efficiency(1.0, 1.0, Fused(1.0, 1.0), Fused(1.0, 1.0), 1.0, 1.0, 1.0)
A100 = rates_of(plan(model="gpt2", gpu="a100-80gb", dtype="bf16"), WHOLE)
H100 = rates_of(plan(model="gpt2", gpu="h100-80gb", dtype="bf16"), WHOLE)
sizes = st.integers(1, 4000).map(lambda n: 8 * n)


def test_waves_by_hand() -> None:
    """2048 x 5376 in tiles of 256 x 128: 8 x 42 = 336 tiles on 108 multiprocessors are four waves, the last a ninth
    full; each wave computes 2 * 256 * 128 * 1024 FLOP on every one, and the result is written behind the product. The
    next kernel starts a gap later."""
    wave = 2 * 256 * 128 * 1024 / (312e12 / 108)
    assert matmul(A100, 2048, 5376, 1024) == pytest.approx(4 * wave + 2 * 2048 * 5376 / 2039e9 + GAP)
    # 108 columns of tiles fill the waves.
    assert matmul(A100, 2048, 108 * 128, 14336) == pytest.approx(8 * 14 * wave + 2 * 2048 * 108 * 128 / 2039e9 + GAP)


def test_long_sums_are_split_by_hand() -> None:
    """The gradient of a weight of 1,024 x 4,096 from 32,768 tokens: 4 x 32 = 128 tiles of 256 x 128 would be two waves
    of 108, the second a fifth full. In five parts they are 640 tiles, 5.93 waves of a fifth of the sum, so six; five
    results in fp32 are written and read, and the gradient is written."""
    fifth = 2 * 256 * 128 * 32768 / 5 / (312e12 / 108)
    moved = (5 * 2 * 4 + 2) * 1024 * 4096 / 2039e9
    assert matmul(A100, 1024, 4096, 32768) == pytest.approx(6 * fifth + moved + GAP)


@pytest.mark.parametrize(
    ("m", "n", "k", "written", "milliseconds"),
    [(4096, 512, 32768, 2, 0.616), (5120, 1536, 24640, 8, 1.714)],
)
def test_long_sums_as_an_a100_took_them(m: int, n: int, k: int, written: int, milliseconds: float) -> None:
    """SimuMax's sweep of the PCIe card (configs/system/a100_pcie.json): without parts of the sum they would take 51 and
    24 % longer."""
    rates = rates_of(plan(model="gpt2", gpu="a100-80gb", dtype="bf16"))
    assert matmul(rates, m, n, k, 1, 2, written) == pytest.approx(milliseconds * 1e-3, rel=0.05)


def test_fp32_as_tf32_by_hand() -> None:
    """4,096 x 7,168 in tiles of 256 x 128: 16 x 56 = 896 tiles on 108 multiprocessors are nine waves at half the rate
    of 16 bits (156 TFLOP/s), at half the clock eighteen; ordinary cores (19.5) have an eighth of that rate. Rows want 4
    elements of 4 bytes."""
    wave, result = 2 * 256 * 128 * 2048 / (156e12 / 108), 4 * 4096 * 7168 / 2039e9
    assert matmul(A100, 4096, 7168, 2048, element=4, tf32=True) == pytest.approx(9 * wave + result + GAP)
    assert matmul(at(A100, 0.5), 4096, 7168, 2048, element=4, tf32=True) == pytest.approx(18 * wave + result + GAP)
    ordinary = 2 * 4096 * 7168 * 2048 / 19.5e12
    assert matmul(A100, 4096, 7168, 2048, element=4) > ordinary < matmul(A100, 4096, 7166, 2048, element=4, tf32=True)


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


def test_rows_of_no_whole_16_bytes_left_the_tensor_cores_before_hopper() -> None:
    """Heads of 150 features, as BigScience's first trials had them, beside heads of 152."""
    odd, even = (matmul(A100, 2048, 2048, d, 12) for d in (150, 152))
    assert odd > 4 * even


@pytest.mark.parametrize(
    ("gpu", "rate"),
    [
        ("h200", 121e12),
        ("h100-80gb", 121e12 * 66.9 / 67),
        ("b200", 121e12 * 75 / 67),
        ("a100-80gb", 121e12 * 2 * 19.5 / 67),  # of 64 lanes in each multiprocessor, where Hopper has 128
    ],
)
def test_rows_of_no_whole_16_bytes_by_multiprocessors_and_clock(gpu: str, rate: float) -> None:
    """The kernel that an H200 takes (121 TFLOP/s) is as fast on each later GPU as their multiprocessors and clocks,
    which fp32 rates say, are to an H200's (67 TFLOP/s); no GPU is faster with odd rows than with others."""
    rates = rates_of(plan(model="gpt2", gpu=gpu, dtype="bf16"))
    assert rates.odd == pytest.approx(min(rate, rates.matrix), rel=1e-3)


def test_rows_of_no_whole_16_bytes_take_the_tensor_cores_of_an_a100_from_cuda_12_on() -> None:
    """Mistral 7B with a vocabulary of 32,001, four sequences of 4,096 tokens: 5.35 s measured with PyTorch 2.4.1
    (foundation-model-stack's runs). On ordinary cores the head alone, 12.9 TFLOP, would take 0.9 s of it."""
    job = {"model": "mistral-7b", "vocab": 32_001, "gpu": "a100-80gb", "framework": "single", "dtype": "bf16"}
    sizes = {"seq": 4096, "mbs": 4, "recompute": "full", "use_reentrant": "true", "attention": "flash_attention_2"}
    newer, older = (step_time(plan(**job, **sizes, torch=torch)).total for torch in ("2.4.1", "2.0"))
    assert newer == pytest.approx(5.35, rel=0.04)
    assert older - newer > 0.6


@pytest.mark.parametrize(("sizes", "rows"), [((682, 4096, 7168), "m"), ((4096, 7168, 682), "k")])
def test_experts_with_any_number_of_tokens_keep_the_tensor_cores(sizes: tuple[int, int, int], rows: str) -> None:
    """Kimi K2's 8 x 8,192 tokens of 384 experts are 170 for each, or 682 with four times as many: lines of memory have
    4,096 and 7,168 elements all the same, forward and in the gradient of a weight. 682 and 688 tokens take as long."""
    odd = alone(Product(*sizes, 24, rows=rows), A100)  # type: ignore[arg-type]
    even = alone(Product(*(688 if one == 682 else one for one in sizes), 24, rows=rows), A100)  # type: ignore[arg-type]
    assert odd == pytest.approx(even, rel=0.02)
    assert alone(Product(682, 4096, 7165, 24, rows="m"), H100) > 3 * alone(Product(682, 4096, 7168, 24, rows="m"), H100)


def test_any_number_of_tokens_keeps_the_tensor_cores() -> None:
    """1,500 tokens of a sequence, which 8 does not divide, take as long as 1,504: lines of memory are hidden sizes. A
    vocabulary of 50,257 is a line of its logits."""

    def seconds(tokens: int, n: int, k: int = 4096) -> list[float]:
        done = linear(tokens, n, k, "bf16")
        return [alone(one, H100) for one in (*done.forward, *done.backward) if isinstance(one, Product)]

    assert seconds(1500, 14336) == pytest.approx(seconds(1504, 14336), rel=0.01)
    assert all(odd > 3 * even for odd, even in zip(seconds(1504, 50257), seconds(1504, 50264), strict=True))


def test_few_tiles_split_the_sum() -> None:
    """512 columns are 64 tiles of 128 x 128 on 108 multiprocessors... and a short, long product is cut in parts."""
    short = matmul(A100, 256, 128, 1 << 17)
    assert short < 2 * 256 * 128 * (1 << 17) / (312e12 / 108) / 4


def test_a_kernel_begins_a_gap_behind_the_one_before() -> None:
    """0.9 microseconds (3.8 from start to start of kernels of 2.9), which short ones have in their 3.8: three that move
    as much as the memory does in 30 microseconds, and three that move nothing to speak of."""
    assert pytest.approx(0.9e-6) == GAP
    assert streamed(A100, 2039e9 * 30e-6, 3) == pytest.approx(30e-6 + 3 * GAP)
    assert streamed(A100, 2039.0, 3) == 3 * LAUNCH


def test_fp32_accumulation_moves_more() -> None:
    slow = replace(A100, memory=1e9)
    assert matmul(slow, 1024, 1024, 8, 1, 2, 8) > 2 * matmul(slow, 1024, 1024, 8)


@pytest.mark.parametrize(
    ("low", "size", "rate"),
    [("tensorwise", 1.0, 0.6555 * 5e15), ("mxfp8", 1.0, 0.6102 * 5e15), ("nvfp4", 0.5, 0.4193 * 15e15)],
)
def test_what_low_precision_reaches_on_gb300(low: str, size: float, rate: float) -> None:
    """A product of 8,192^3 takes no longer than its rate says, but for the last wave: 2,048 tiles of 152
    multiprocessors are 14 waves for 13.5. NVIDIA's sweep has 2.87, 3.19 and 4.60 PFLOP/s in the median; Transformer
    Engine's guide 1.04, 0.83 and 1.29 times as much on B300."""
    flag = {"fp4": low} if low == "nvfp4" else {"fp8": low}
    job = plan(
        model="llama-3-8b", framework="megatron", gpu="gb300", gpus=8, mbs=1, gbs=8, seq=4096, dtype="bf16", **flag
    )
    found = rates_of(job)
    assert dict(found.low)[size] == pytest.approx(rate, rel=1e-3)
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


GUIDE = {"bf16": ("", 12.93), "fp8": ("tensorwise", 6.81), "mxfp8": ("mxfp8", 7.16), "nvfp4": ("nvfp4", 3.76)}
"""Milliseconds of a layer's products on B300, operands quantised before (Transformer Engine's docs, gemm_profiling.rst;
bf16: the mean of two runs)."""


@pytest.mark.parametrize("name", GUIDE)
def test_transformer_engines_guide_by_layer(name: str) -> None:
    recipe, measured = GUIDE[name]
    low = {"fp4": recipe} if recipe == "nvfp4" else {"fp8": recipe} if recipe else {}
    rates = rates_of(plan(model="llama-3-8b", framework="megatron", gpu="b300", dtype="bf16", **low))
    element = {"fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5}.get(name, 2.0)
    tokens, total = 15_872, 0.0
    for k, n in ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)):
        for sizes in ((tokens, n, k), (tokens, k, n), (n, k, tokens)):
            total += matmul(rates, *sizes, 1, element, 2)
    assert total * 1e3 == pytest.approx(measured, rel=0.02)


def test_grouped_products_of_gb200() -> None:
    """2,672 TFLOP/s in MXFP8 of K = 7,168 and N = 2,048 (NVIDIA/Megatron-LM, deepseek-v3-gb200-optimization.md)."""
    rates = rates_of(plan(model="llama-3-8b", framework="megatron", gpu="gb200", dtype="bf16", fp8="mxfp8"))
    rows = 32_768
    seconds = matmul(rates, rows, 2048, 7168, 1, 1.0, 2)
    assert 2 * rows * 2048 * 7168 / seconds == pytest.approx(2672e12, rel=0.06)


def test_a_product_whose_operand_goes_round() -> None:
    """Of two ranks each computes its half, then the other's, which came meanwhile, or waits for it."""
    product = Product(8192, 8192, 8192)
    whole, half = (alone(product._replace(m=m), A100) for m in (8192, 4096))
    assert in_parts(0.5 * half, product, 2, A100) == pytest.approx(2 * half - whole)
    assert in_parts(3 * half, product, 2, A100) == pytest.approx(4 * half - whole)


def test_products_of_one_byte_beside_a_computation_in_16_bits() -> None:
    """LLM.int8's, of which a plan names no rate: at least that of 16 bits, and half the bytes move."""
    rates = rates_of(plan(model="gpt2", gpu="a100-80gb", dtype="bf16"))
    assert not rates.low
    assert matmul(rates, 4096, 4096, 4096, element=1) <= matmul(rates, 4096, 4096, 4096)
    assert matmul(rates, 64, 4096, 4096, element=1) < matmul(rates, 64, 4096, 4096)
