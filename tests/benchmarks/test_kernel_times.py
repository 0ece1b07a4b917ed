"""Kernels alone on an H200 and an H100 beside the model, and the steps that ran on the first."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks import kernel_times, timing
from memplan.search.time.rates import ADAPTERS, ERRORS_OF_ONE, PUBLISHED_ERRORS

LIMITS = {
    "attention, cudnn": 0.08,
    "attention, flash": 0.09,
    "element-wise": 0.04,
    "products, bf16": 0.02,
    "products, bf16, odd": 0.18,
    "products, fp32": 0.09,
    "rows": 0.06,
    "AdamW": 0.14,
}
"""Median errors. Rows of 50,257 elements: forward alone, where gradients are faster. ``foreach`` AdamW: of gradients of
zeros, where a step's take three quarters of the time."""


def test_kernels_alone() -> None:
    found = kernel_times.groups(kernel_times.kernels())
    assert set(found) == set(LIMITS)
    assert sum(map(len, found.values())) > 300
    for group, errors in found.items():
        assert abs(median(errors)) < LIMITS[group], group


def test_attention_by_the_size_of_heads() -> None:
    """On an H100: heads of 64 to 256 features. cuDNN's rates up to 128 are an H200's."""
    found = kernel_times.groups(kernel_times.kernels("h100-80gb"))
    cudnn, flash = found["attention, cudnn"], found["attention, flash"]
    assert abs(median(cudnn)) < 0.03
    assert -0.22 < cudnn[0] < cudnn[-1] < 0.14
    assert abs(median(flash)) < 0.1
    efficient = found["attention, memory-efficient"]
    assert -0.06 < efficient[0] < efficient[-1] < 0.15


def test_steps_on_an_h200() -> None:
    """Of adapters QLoRA's is 17 % too fast: bitsandbytes' Python is slower than its kernels."""
    whole, adapters = timing.own()
    assert (len(whole.rows), len(adapters.rows)) == (21, 2)
    assert whole.median_error == pytest.approx(ERRORS_OF_ONE["h200"], abs=0.002)
    assert whole.rank_correlation > 0.98
    assert whole.worst_error < 0.105
    assert adapters.median_error == pytest.approx(PUBLISHED_ERRORS[ADAPTERS]["h200"], abs=0.002)
    assert adapters.worst_error < 0.17
