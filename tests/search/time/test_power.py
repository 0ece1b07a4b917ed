from __future__ import annotations

import pytest

from benchmarks import kernel_times
from memplan.layers.work import Attention, Product, Scan, Stream, fused
from memplan.search.time import entry_times, power
from memplan.search.time.efficiency import POWER
from memplan.search.time.kernels import Ranks, alone, drawn, seconds
from memplan.search.time.power import Drawn
from memplan.values import replace

from .plans import plan

RATES = kernel_times.rates()
MEASURED = {name: (late, watts) for name, _, late, _, watts in kernel_times.measured()["sustained"]}


@pytest.mark.parametrize(
    ("sizes", "scale"),
    [((8192, 8192, 8192), 1.0), ((8192, 28672, 4096), 0.02), ((16384, 4096, 14336), 0.02), ((4096, 4096, 4096), 0.02)],
)
def test_products_for_seconds_on_end(sizes: tuple[int, int, int], scale: float) -> None:
    """What an H200 sustains of random numbers, at its limit."""
    m, n, k = sizes
    late, watts = MEASURED[f"{m}x{n}x{k} x{scale} bfloat16"]
    one = Product(m, n, k)
    part = power.clock(RATES, drawn([(one, 1)], RATES))
    found = one.flops / alone(one, power.at(RATES, part))
    assert found / 1e12 == pytest.approx(late, rel=0.025)
    assert watts == pytest.approx(POWER.limit, rel=0.005)


def test_what_stays_below_the_limit_keeps_its_clock() -> None:
    """A copy took 563 W; products take a quarter of the time."""
    stream, product = Stream(4.2e12 * 3), Product(8192, 8192, 8192)
    copied = drawn([(stream, 1)], RATES)
    taken = POWER.always + POWER.byte * stream.bytes / copied.other
    assert taken == pytest.approx(MEASURED["stream copy (bytes/1000 as flops)"][1], rel=0.02)
    assert power.clock(RATES, copied) == 1.0
    mixed = drawn([(stream, 1), (product, round(copied.other / 3 / alone(product, RATES)))], RATES)
    assert power.clock(RATES, mixed) == 1.0
    assert power.clock(replace(RATES, power=POWER._replace(limit=493)), mixed) < 1


def test_what_kernels_draw() -> None:
    """Causal attention computes half of its scores, products in 8 bits take half of the energy, and what instructions
    bind is longer at a lower clock."""
    attention, _ = fused((1, 4096, 32, 128), 32, 4096, "bf16", causal=True)
    assert isinstance(attention, Attention)
    product, eight = Product(4096, 4096, 4096), Product(4096, 4096, 4096, element=1)
    rates = replace(RATES, low=((1, 2 * RATES.matrix),))
    work = [(attention, 1), (product, 2), (eight, 1), (Scan(product), 1), (Stream(1e6, issue=10**9), 1)]
    found = drawn(work, rates)
    assert found.flops == attention.flops / 2 + 3.5 * product.flops
    assert (found.bytes, found.other) == (attention.bytes + 1e6, 0.0)
    assert found.bound == pytest.approx(seconds(work, rates, Ranks(1)).device)
    lower = power.at(rates, 0.8)
    assert seconds([(one, 1) for one, _ in work[1:]], lower, Ranks(1)).device == pytest.approx(
        seconds([(one, 1) for one, _ in work[1:]], rates, Ranks(1)).device / 0.8, rel=0.1
    )


def test_no_limit_no_lower_clock() -> None:
    assert power.clock(replace(RATES, power=None), Drawn(1e18, 0.0, 1.0)) == 1.0
    assert power.at(RATES, 1.0) is RATES


def test_a_layer_that_is_mostly_products_is_slower_than_its_kernels_alone() -> None:
    """Llama 3 405B on an H200, beside one whose limit is twice as high."""
    job = plan(model="llama-3-405b", gpu="h200", framework="megatron", tp=8, mbs=1, seq=8192, sequence_parallel="true")
    usual = entry_times(job, rates=replace(RATES, power=POWER))
    free = entry_times(job, rates=replace(RATES, power=POWER._replace(limit=1380)))
    assert 1.0 < usual.layer.forward / free.layer.forward < 1.15
