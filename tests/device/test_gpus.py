"""The table of GPUs (``memplan/device/gpus.py``)."""

from __future__ import annotations

import dataclasses

import pytest

from memplan.device.facts import cuda_context
from memplan.device.gpus import GPUS, Gpu
from memplan.device.instances import flags_of, gpu_of_folder, machines

MIB, GIB = 1 << 20, 1 << 30
BOX = {
    "v100-16gb": 16,
    "v100-32gb": 32,
    "a100-40gb": 40,
    "a100-80gb": 80,
    "h100-80gb": 80,
    "h100-94gb": 94,
    "h100-96gb": 96,
    "h200": 141,
    "b200": 180,
    "gb200": 186,
    "b300": 288,
    "gb300": 288,
    "l40s": 48,
    "rtx-5090": 32,
    "rtx-4090": 24,
    "rtx-3090": 24,
    "rtx-pro-6000": 96,
    "rtx-a6000": 48,
    "a10": 24,
    "a10g": 24,
    "l4": 24,
    "t4": 16,
    "mi300x": 192,
    "mi325x": 256,
    "mi355x": 288,
    "h800": 80,
    "h20": 96,
    "gh200-144gb": 144,
    "a30": 24,
    "rtx-3090-ti": 24,
    "rtx-3060": 12,
    "rtx-2080-ti": 11,
    "a800-80gb": 80,
    "rtx-6000-ada": 48,
    "h100-pcie": 80,
    "l40": 48,
    "l20": 48,
    "a40": 48,
    "rtx-4080": 16,
    "mi250x": 64,
}
"""Gigabytes on the box."""

every_gpu = pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)


def test_every_gpu_is_on_the_list_under_its_name() -> None:
    assert set(GPUS) == set(BOX)
    assert all(name == gpu.name for name, gpu in GPUS.items())
    assert len({(gpu.title, gpu.capacity_bytes) for gpu in GPUS.values()}) == len(GPUS)


@every_gpu
def test_capacity_is_at_most_what_the_box_says(gpu: Gpu) -> None:
    """A box's GB are never more than GiB, and drivers hide less than an eighth (46,068 of 49,152 MiB with ECC)."""
    assert BOX[gpu.name] * GIB * 7 / 8 < gpu.capacity_bytes <= BOX[gpu.name] * GIB


@every_gpu
def test_capacity_is_a_whole_number_of_mib_as_drivers_print_it(gpu: Gpu) -> None:
    assert gpu.capacity_bytes % MIB == 0


@every_gpu
def test_usable_is_a_little_less(gpu: Gpu) -> None:
    if gpu.usable_bytes is not None:
        assert 0.94 * gpu.capacity_bytes < gpu.usable_bytes <= gpu.capacity_bytes


@every_gpu
def test_sources_are_addresses(gpu: Gpu) -> None:
    assert gpu.sources
    assert len(set(gpu.sources)) == len(gpu.sources)
    assert all(source.startswith("https://") and " " not in source for source in gpu.sources)


@every_gpu
def test_context_is_the_measured_one_or_none(gpu: Gpu) -> None:
    fact = cuda_context(gpu.name)
    assert gpu.context_bytes == (fact.bytes if fact else None)
    assert gpu.context_bytes is None or 0 < gpu.context_bytes < gpu.capacity_bytes / 10


@every_gpu
def test_compute_capability_for_cuda_only(gpu: Gpu) -> None:
    assert (gpu.compute_capability is None) == gpu.title.startswith("AMD")
    if gpu.compute_capability is not None:
        assert (7, 0) <= gpu.compute_capability <= (12, 0)


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [("v100-32gb", 32_510), ("a100-80gb", 81_920), ("h100-80gb", 81_559), ("h200", 143_771), ("rtx-4090", 24_564)],
)
def test_capacities_that_nvidia_smi_prints(name: str, mebibytes: int) -> None:
    assert GPUS[name].capacity_bytes == mebibytes * MIB


@pytest.mark.parametrize(("name", "reserved"), [("h200", 614), ("l40s", 609)])
def test_usable_is_the_total_less_what_the_driver_reserves(name: str, reserved: int) -> None:
    """``nvidia-smi -q``: 143,771 MiB less 614 reserved are 139.80 GiB, as PyTorch prints it."""
    gpu = GPUS[name]
    assert gpu.usable_bytes is not None
    assert round((gpu.capacity_bytes - reserved * MIB) / GIB, 2) == round(gpu.usable_bytes / GIB, 2)


def test_more_memory_costs_no_more_context_on_one_chip() -> None:
    assert GPUS["v100-16gb"].context_bytes == GPUS["v100-32gb"].context_bytes
    assert GPUS["h100-80gb"].context_bytes == GPUS["h200"].context_bytes


def test_gpus_cannot_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPUS["h200"].capacity_bytes = 0  # type: ignore[misc]
    with pytest.raises(TypeError):
        GPUS["h200"] = GPUS["t4"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("machine", "gpus"),
    [
        ("p4d.24xlarge", "8 x a100-40gb: --gpu a100-40gb --gpus 8"),
        ("ml.p4de.24xlarge", "8 x a100-80gb: --gpu a100-80gb --gpus 8"),
        ("p5.48xlarge", "8 x h100-80gb: --gpu h100-80gb --gpus 8"),
        ("p5", "machines with h100-80gb: --gpu h100-80gb --gpus N"),
        ("g6.12xlarge", "4 x l4: --gpu l4 --gpus 4"),
        ("a2-ultragpu-4g", "4 x a100-80gb: --gpu a100-80gb --gpus 4"),
        ("a3-megagpu-8g", "8 x h100-80gb: --gpu h100-80gb --gpus 8"),
        ("Standard_ND96amsr_A100_v4", "8 x a100-80gb: --gpu a100-80gb --gpus 8"),
        ("ND96isr_H100_v5", "8 x h100-80gb: --gpu h100-80gb --gpus 8"),
        *((name, None) for name in ("", "p4", "h100", "nd96isr", "p4d.48xlarge")),
    ],
)
def test_machines_of_clouds_are_told_by_their_gpus(machine: str, gpus: str | None) -> None:
    assert flags_of(machine) == gpus


@pytest.mark.parametrize(
    ("folder", "gpu"),
    [("a3ultra", "h200"), ("A3Mega", "h100-80gb"), ("a2high", "a100-40gb"), ("p5", None), ("a4", None), ("", None)],
)
def test_folders_of_recipes_are_called_after_machines_of_google(folder: str, gpu: str | None) -> None:
    assert gpu_of_folder(folder) == gpu


def test_machines_of_clouds_have_gpus_that_are_known() -> None:
    assert {gpu for _, gpu, _ in machines()} <= GPUS.keys()
