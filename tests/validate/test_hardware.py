"""Devices as drivers name them, and the table's rows."""

from __future__ import annotations

import pytest

from memplan.device.gpus import GPUS
from memplan.validate.devices import gpu_of

MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "mebibytes", "gpu"),
    [
        ("NVIDIA H200", 143_771, "h200"),
        ("Tesla V100-SXM2-32GB", 32_510, "v100-32gb"),
        ("Tesla V100-SXM2-16GB", 16_160, "v100-16gb"),
        ("NVIDIA A100-SXM4-80GB", 81_920, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 40_960, "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", 81_559, "h100-80gb"),
        ("NVIDIA H100 NVL", 95_830, "h100-94gb"),
        ("NVIDIA GeForce RTX 4090", 24_564, "rtx-4090"),
        ("NVIDIA L40S", 46_068, "l40s"),
        ("NVIDIA A10G", 23_028, "a10g"),
        ("Tesla T4", 15_360, "t4"),
        ("NVIDIA GeForce GTX 1080 Ti", 11_264, None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 19_968, None),
    ],
)
def test_names(name: str, mebibytes: int, gpu: str | None) -> None:
    assert gpu_of(name, mebibytes * MIB) == gpu


@pytest.mark.parametrize("gpu", GPUS)
def test_every_row_is_found_by_its_own_title(gpu: str) -> None:
    assert gpu_of(GPUS[gpu].title, GPUS[gpu].capacity_bytes) == gpu
