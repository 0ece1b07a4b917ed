"""What nvidia-smi printed on machines with GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.plan.errors import LackingError
from memplan.report.names import MIB
from memplan.validate.devices import Device, Process, devices_by_nvidia_smi, parsed

H200 = "0, GPU-00000000-0000-0000-0000-000000000000, NVIDIA H200, 590.48.01, 143771, 12618, 130540"
APPS = """\
GPU-00000000-0000-0000-0000-000000000000, 10291, /root/tools/memhog, 2566
GPU-00000000-0000-0000-0000-000000000000, 10292, [Not Found], [N/A]
GPU-99999999-0000-0000-0000-000000000000, 7, python, 1
"""
"""Columns and names as in the captures of an H200 with driver 590.48.01, cut to what is asked for here:
https://github.com/utkuozdemir/nvidia_gpu_exporter/tree/main/internal/captures"""


def test_parsed() -> None:
    (device,) = parsed(H200, APPS)
    assert device == Device(
        index=0,
        uuid="GPU-00000000-0000-0000-0000-000000000000",
        name="NVIDIA H200",
        driver="590.48.01",
        total=143_771 * MIB,
        used=12_618 * MIB,
        free=130_540 * MIB,
        processes=(Process(10291, "/root/tools/memhog", 2566 * MIB), Process(10292, None, None)),
    )
    assert device.busy


def test_idle() -> None:
    (device,) = parsed(H200.replace("12618, 130540", "0, 143158"), "\n")
    assert not device.busy


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A program of the name that does ``body``."""
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both questions, in the words of ``nvidia-smi --help-query-gpu``."""
    gpu, apps = (
        "--query-gpu=index,uuid,name,driver_version,memory.total,memory.used,memory.free",
        "--query-compute-apps=",
    )
    body = f'case "$1" in {gpu}) echo "{H200}";; {apps}gpu_uuid,pid,process_name,used_gpu_memory) echo "{APPS}";; esac'
    stand_in(tmp_path, monkeypatch, body)
    (device,) = devices_by_nvidia_smi("no library")
    assert (device.name, len(device.processes)) == ("NVIDIA H200", 2)


def test_driver_that_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    stand_in(tmp_path, monkeypatch, f'echo "{said}"; echo "Make sure it runs."; exit 9')
    with pytest.raises(LackingError, match=f"^no CUDA device here: nvidia-smi says: {said}; --device fake"):
        devices_by_nvidia_smi("no library")


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LackingError, match=r"^no CUDA device here: no library, and nvidia-smi cannot be run; "):
        devices_by_nvidia_smi("no library")
