from __future__ import annotations

import pytest

from memplan.device.gpus import GPUS, MULTIPROCESSORS
from memplan.layers import ops, selecting
from memplan.layers.autograd import Recorder
from memplan.layers.work import Exchange, Product
from memplan.plan.errors import PlanError
from memplan.plan.releases import DEPRIORITIZED
from memplan.search.time import power, rates_of
from memplan.search.time.efficiency import POWER, default
from memplan.search.time.hardware import GIGA, SPEEDS, Figure
from memplan.search.time.kernels import alone, drawn, matmul

from .plans import plan


def figures(name: str) -> list[Figure]:
    speed = SPEEDS[name]
    found = [speed.matrix, speed.tf32, speed.fp32, speed.memory, speed.link, speed.host, speed.network]
    return [figure for figure in found if figure is not None]


@pytest.mark.parametrize("name", SPEEDS)
def test_every_figure_has_an_address(name: str) -> None:
    assert name in GPUS
    assert all(figure.value > 0 and figure.source.startswith("https://") for figure in figures(name))
    assert (SPEEDS[name].network is None) == (SPEEDS[name].system is None)


PER_CLOCK = {
    "v100-32gb": 1024,
    "rtx-2080-ti": 512,
    "a100-80gb": 2048,
    "a800-80gb": 2048,
    "rtx-3090": 512,
    "rtx-3090-ti": 512,
    "rtx-4080": 512,
    "rtx-6000-ada": 1024,
    "h100-80gb": 4096,
    "rtx-pro-6000": 1024,
    "mi300x": 2048,
    "mi325x": 2048,
    "mi355x": 4096,
}


CLOCKS = {
    "v100-32gb": 1.53,
    "a100-80gb": 1.41,
    "h100-80gb": 1.83,
    "rtx-4090": 2.52,
    "rtx-3090": 1.695,
    "rtx-4080": 2.505,
    "rtx-3090-ti": 1.86,
    "rtx-2080-ti": 1.635,
    "rtx-6000-ada": 2.505,
    "rtx-pro-6000": 2.617,
    "a800-80gb": 1.41,
    "mi300x": 2.1,
    "mi325x": 2.1,
    "mi355x": 2.4,
}
"""Boost clocks in GHz, at which the peaks are reckoned, of the same white papers as the peaks; of the V100
https://images.nvidia.com/content/volta-architecture/pdf/volta-architecture-whitepaper.pdf."""


@pytest.mark.parametrize(("name", "per_clock"), PER_CLOCK.items())
def test_peaks_are_processors_times_clock_times_what_a_processor_does(name: str, per_clock: int) -> None:
    """FLOP a clock of a multiprocessor's tensor cores, as the white papers state it: peak and table agree."""
    matrix = SPEEDS[name].matrix
    assert matrix is not None
    assert MULTIPROCESSORS[name] * CLOCKS[name] * GIGA * per_clock == pytest.approx(matrix.value, rel=0.01)


def test_parts_of_peaks_are_parts() -> None:
    for name in SPEEDS:
        parts = default(name, GPUS[name].compute_capability)
        fused = (parts.attention_forward, parts.attention_backward)
        rates = [rate for one in fused for rate in (one.rate, one.narrow)]
        for part in (parts.matrix, parts.memory, parts.link, parts.network, parts.host, *rates):
            assert 0 < part <= 1
        assert len(parts.sources) >= 5


def test_products_of_cublas_12_1_beside_those_that_were_timed() -> None:
    """The median of those that end at once, and for fractions of a second on end, at the clock that the power leaves,
    float8_experimental's (pull request 100): columns and inner size behind 16,384 rows, seconds."""
    job = {"model": "gpt2", "gpu": "h100-80gb", "dtype": "bf16"}
    first, last, later = (rates_of(plan(**job, torch=torch)) for torch in ("2.1", "2.4", "2.5"))
    assert first.matrix == last.matrix < later.matrix
    assert (first.power, later.power) == (POWER, None)
    assert 2 * 2048 * 4096**2 / matmul(first, 2048, 4096, 4096) == pytest.approx(613.7e12, rel=0.01)
    timed = {(1280, 8192): 0.622e-3, (8192, 1024): 0.499e-3, (7168, 8192): 3.445e-3, (8192, 3584): 1.628e-3}
    for sizes, spent in timed.items():
        clocked = power.at(first, power.clock(first, drawn(((Product(16384, *sizes), 1),), first)))
        assert matmul(clocked, 16384, *sizes) == pytest.approx(spent, rel=0.065)


def test_kernels_are_those_of_the_release() -> None:
    """On Hopper PyTorch's kernels load 8 bytes at a time before 2.7, and its own attention is FlashAttention 1 before
    2.2, the package's is not. From 2.11 on sdpa takes cuDNN's there, from 2.8 on cuBLAS has other kernels, and
    FlashAttention-2 0.92 of its authors' rate forward."""
    job = {"model": "gpt2", "gpu": "h100-80gb", "dtype": "bf16"}
    releases = ({"torch": "2.1"}, {"torch": "2.1", "attention": "fa2"}, {"torch": "2.10"}, {"torch": "2.11"})
    old, named, new, newest = (rates_of(plan(**job, **flags)) for flags in releases)
    off = plan(**job, torch="2.11").model_copy(update={"environment": {DEPRIORITIZED: "1"}})
    assert newest.attention_forward.rate > 1.5 * new.attention_forward.rate
    assert rates_of(off).attention_forward == new.attention_forward
    assert newest.matrix == new.matrix > 1.1 * rates_of(plan(**job, torch="2.7")).matrix > 1.15 * old.matrix
    assert old.power == newest.power == POWER
    rates = {once: sum(4 * 2**29 / spent for spent in of) / 2 for once, of in WRITTEN.items()}
    assert old.memory == named.memory == pytest.approx(rates["before"], rel=0.002)
    assert new.memory == pytest.approx(rates["after"], rel=0.002)
    assert new.attention_forward.rate == pytest.approx(0.92 * named.attention_forward.rate, rel=0.001)
    assert new.attention_backward == named.attention_backward
    assert old.attention_forward.rate == pytest.approx(named.attention_forward.rate / 2)
    older, newer = (rates_of(plan(**{**job, "gpu": "a100-80gb"}, torch=torch)) for torch in ("2.1", "2.9"))
    assert older.memory == newer.memory


WRITTEN = {"before": (736.8e-6, 842.6e-6), "after": (708.1e-6, 743.7e-6)}
"""Seconds of relu and gelu of 2^29 elements of bf16 (https://github.com/pytorch/pytorch/pull/145746)."""


def test_a_gpu_without_published_speed_is_refused() -> None:
    with pytest.raises(PlanError, match="has no published speed"):
        rates_of(plan(model="gpt2", gpu="rtx-3060"))


def test_a_plan_without_gpu_is_refused() -> None:
    with pytest.raises(PlanError, match=r"hardware\.gpu: is missing"):
        rates_of(plan(model="gpt2"))


def test_volta_has_no_bf16() -> None:
    with pytest.raises(PlanError, match="must be fp16 or fp32 on v100-32gb"):
        rates_of(plan(model="gpt2", gpu="v100-32gb", dtype="bf16"))


def test_a_plan_overrides_the_network() -> None:
    usual, other = (rates_of(plan(model="gpt2", gpu="a100-80gb", **flags)) for flags in ({}, {"network": 6.25}))
    assert usual.network == pytest.approx(25e9 * 0.96)
    assert other.network == pytest.approx(6.25e9 * 0.96)


@pytest.mark.parametrize(
    ("experts", "chosen", "measured"),
    [(256, 6, 250.7), (128, 8, 136.9), (256, 8, 254.0), (288, 8, 292.9), (512, 10, 457.5)],
)
def test_a_router_that_pytorch_runs_by_operators(experts: int, chosen: int, measured: float) -> None:
    """Microseconds of an H100 for 16,384 tokens in bf16: cast, softmax, ``torch.topk`` and the norm of what is chosen
    (https://github.com/FlashML-org/FreeToken/pull/319, the column of torch)."""
    r = Recorder(counts=True, closed=True, grad_enabled=False)
    logits = ops.cast(r, r.outside((16384, experts), "bf16"), "fp32", "wide")
    weights, _ = selecting.top_k(r, ops.softmax(r, logits, "scores"), chosen, "chosen")
    selecting.divided_in_place(r, weights, selecting.sum_last(r, weights, "sum"), "normed")
    rates = rates_of(plan(model="gpt2", gpu="h100-80gb", dtype="bf16"))
    spent = sum(alone(kernel, rates) for kernel in r.work if not isinstance(kernel, Exchange))
    assert spent * 1e6 == pytest.approx(measured, rel=0.1)
