"""NVIDIA's bindings against a library with the driver's declarations, compiled here; what a real one says is for
machines that have one."""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from memplan.validate import devices as validate_devices
from memplan.validate.devices import NvmlError, Process, devices_by_nvidia_smi, devices_by_nvml

SOURCE = r"""
#include <string.h>
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct {
    unsigned int pid; unsigned long long usedGpuMemory; unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
static int devices[2];
int nvmlInitWithFlags(unsigned int flags) { return INIT; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "Unknown Error"; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = &devices[index]; return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length) {
    strncpy(uuid, device == &devices[1] ? "GPU-1" : "GPU-0", length); return 0;
}
int nvmlDeviceGetName(void *device, char *name, unsigned int length) { strncpy(name, "NVIDIA H200", length); return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned int length) { strncpy(version, "590.48.01", length); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, nvmlMemory_t *memory) {
    memory->total = 100; memory->free = 70; memory->used = 30; return 0;
}
#ifdef NEW
int nvmlDeviceGetMemoryInfo_v2(void *device, nvmlMemory_v2_t *memory) {
    if (memory->version != (sizeof(nvmlMemory_v2_t) | 2 << 24)) return 25;
    memory->total = 100; memory->reserved = 20; memory->free = 70; memory->used = 10; return 0;
}
#endif
#ifdef NEW
#define PROCESSES nvmlDeviceGetComputeRunningProcesses_v3
#else
#define PROCESSES nvmlDeviceGetComputeRunningProcesses_v2
#endif
int PROCESSES(void *device, unsigned int *count, nvmlProcessInfo_t *found) {
    unsigned int running = device == &devices[1] ? 300 : 0, room = *count;
    *count = running;
    if (room < running) return 7;
    for (unsigned int i = 0; i < running; i++) {
        found[i].pid = 4000000 + i; found[i].usedGpuMemory = i ? 1000 + i : ~0ull;
        found[i].gpuInstanceId = found[i].computeInstanceId = 0xffffffff;
    }
    return 0;
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the bindings load a library that was compiled with some names defined."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")

    def made(*defined: str) -> None:
        source, library = tmp_path / "nvml.c", tmp_path / "libnvidia-ml.so.1"
        source.write_text(SOURCE, encoding="utf-8")
        options = [f"-D{one}" for one in defined]
        subprocess.run([compiler, "-shared", "-fPIC", "-w", *options, "-o", library, source], check=True)
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(library)))

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return made


def test_devices(driver: Callable[..., None]) -> None:
    """What the driver keeps for itself is no use of it; however many processes there are, all are listed."""
    driver("INIT=0", "NEW")
    idle, busy = devices_by_nvml()
    assert (idle.index, idle.uuid, idle.name, idle.driver) == (0, "GPU-0", "NVIDIA H200", "590.48.01")
    assert (idle.total, idle.used, idle.free, idle.processes) == (100, 10, 70, ())
    assert (busy.uuid, len(busy.processes)) == ("GPU-1", 300)
    assert busy.processes[0] == Process(4_000_000, None, None)
    assert busy.processes[-1] == Process(4_000_299, None, 1299)


def test_older_driver(driver: Callable[..., None]) -> None:
    """Without the second version of the question about memory, nor the third of that about processes."""
    driver("INIT=0")
    found = devices_by_nvml()
    assert [(device.used, len(device.processes)) for device in found] == [(30, 0), (30, 300)]


def test_driver_that_is_not_loaded(driver: Callable[..., None]) -> None:
    driver("INIT=9")
    with pytest.raises(NvmlError, match=r"^NVIDIA's driver: Driver Not Loaded$"):
        devices_by_nvml()


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate_devices, "NVML", "no_such_bindings")
    with pytest.raises(NvmlError, match=r"^nvidia-ml-py, which asks NVIDIA's driver, is not installed$"):
        devices_by_nvml()


@pytest.mark.skipif(ctypes.util.find_library("nvidia-ml") is not None, reason="a driver is here")
def test_no_driver() -> None:
    with pytest.raises(NvmlError, match=r"^NVIDIA's driver: .+$"):
        devices_by_nvml()


@pytest.mark.gpu
@pytest.mark.skipif(ctypes.util.find_library("nvidia-ml") is None, reason="no NVIDIA driver here")
def test_real_ones() -> None:
    """Both ways of asking see the same GPUs."""
    by_library, by_program = devices_by_nvml(), devices_by_nvidia_smi("")
    assert [(one.uuid, one.name, one.driver) for one in by_library] == [
        (one.uuid, one.name, one.driver) for one in by_program
    ]
    assert all(abs(one.total - other.total) <= 1 << 20 for one, other in zip(by_library, by_program, strict=True))
