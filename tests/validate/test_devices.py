"""GPUs that are free, and GPUs that are not."""

from __future__ import annotations

import ctypes.util
import shutil
from dataclasses import replace

import pytest

from memplan.plan.errors import LackingError, PlanError
from memplan.report.names import MIB
from memplan.validate.devices import IDLE, Device, Process, check_free, devices, gpus_for, visible

FREE = Device(0, "GPU-1111-2222", "NVIDIA H200", "590.48.01", 143_771 * MIB, 0, 143_158 * MIB)
HOG = Process(10291, "/root/tools/memhog", 2566 * MIB)


@pytest.mark.skipif(
    ctypes.util.find_library("nvidia-ml") is not None or shutil.which("nvidia-smi") is not None, reason="a GPU is here"
)
def test_no_gpu() -> None:
    for ask in (devices, lambda: gpus_for(8)):
        with pytest.raises(LackingError, match=r"^no CUDA device here: .* nvidia-smi .*--device fake") as caught:
            ask()
        assert "\n" not in str(caught.value)


def test_free() -> None:
    check_free([FREE, replace(FREE, index=1, used=26 * MIB)], share=False)


def test_in_use() -> None:
    busy = replace(FREE, used=12_618 * MIB, processes=(HOG, Process(10314, None, None)))
    with pytest.raises(LackingError) as caught:
        check_free([FREE, busy], share=False)
    assert str(caught.value) == (
        "GPU 0 (NVIDIA H200) is in use: 12.32 GiB by process 10291 (/root/tools/memhog, 2.51 GiB), process 10314; "
        "CUDA_VISIBLE_DEVICES chooses others; --share-gpu runs beside it, and measures both"
    )
    check_free([busy], share=True)


def test_in_use_by_what_cannot_be_seen() -> None:
    """A container's driver shows the memory of others, and not their processes."""
    with pytest.raises(LackingError, match="in use: 65 MiB, by processes that cannot be seen from here"):
        check_free([replace(FREE, used=IDLE + MIB)], share=False)


def test_a_process_without_memory_yet() -> None:
    with pytest.raises(LackingError, match=r"in use: 0 B by process 1 \(python\)"):
        check_free([replace(FREE, processes=(Process(1, "python", None),))], share=False)


ALL = tuple(replace(FREE, index=index, uuid=f"GPU-{index}{index}-rest") for index in range(4))


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("GPU-22,GPU-11-rest", [2, 1]),
        ("0,7,1", [0]),
        ("", []),
        ("-1", []),
        ("GPU-", []),
    ],
)
def test_visible(asked: str | None, shown: list[int]) -> None:
    environment = {} if asked is None else {"CUDA_VISIBLE_DEVICES": asked}
    assert [device.index for device in visible(ALL, environment)] == shown


def test_instances() -> None:
    with pytest.raises(PlanError, match="CUDA_VISIBLE_DEVICES = MIG-1: must name whole GPUs"):
        visible(ALL, {"CUDA_VISIBLE_DEVICES": "MIG-1"})
