"""Structures and calls of NVIDIA's library, against a library with the same declarations, compiled here; what a real
one says is for machines that have one."""

from __future__ import annotations

import ctypes.util
import shutil
import subprocess
from pathlib import Path

import pytest

from memplan.validate.devices import Process
from memplan.validate.nvidia_smi import devices_by_nvidia_smi
from memplan.validate.nvml import NvmlError, devices_by_nvml

SOURCE = r"""
#include <string.h>
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct {
    unsigned int pid; unsigned long long usedGpuMemory; unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
static int devices[2];
int nvmlInit_v2(void) { return INIT; }
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
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, nvmlProcessInfo_t *found) {
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


def compiled(folder: Path, *defined: str) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    source, library = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(SOURCE, encoding="utf-8")
    options = [f"-D{one}" for one in defined]
    subprocess.run([compiler, "-shared", "-fPIC", "-w", *options, "-o", library, source], check=True)
    return str(library)


def test_devices(tmp_path: Path) -> None:
    """What the driver keeps for itself is no use of it; more processes than there was room for are all listed."""
    idle, busy = devices_by_nvml(compiled(tmp_path, "INIT=0", "NEW"))
    assert (idle.index, idle.uuid, idle.name, idle.driver) == (0, "GPU-0", "NVIDIA H200", "590.48.01")
    assert (idle.total, idle.used, idle.free, idle.processes) == (100, 10, 70, ())
    assert (busy.uuid, len(busy.processes)) == ("GPU-1", 300)
    assert busy.processes[0] == Process(4_000_000, None, None)
    assert busy.processes[-1] == Process(4_000_299, None, 1299)


def test_older_driver(tmp_path: Path) -> None:
    """Without the second version of the question about memory."""
    assert [device.used for device in devices_by_nvml(compiled(tmp_path, "INIT=0"))] == [30, 30]


def test_driver_that_is_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(NvmlError, match=r"^nvmlInit_v2: Driver Not Loaded$"):
        devices_by_nvml(compiled(tmp_path, "INIT=9"))


def test_missing() -> None:
    with pytest.raises(NvmlError, match=r"^libnothing\.so, which comes with NVIDIA's driver, cannot be loaded$"):
        devices_by_nvml("libnothing.so")


@pytest.mark.gpu
@pytest.mark.skipif(ctypes.util.find_library("nvidia-ml") is None, reason="no NVIDIA driver here")
def test_real_ones() -> None:
    """Both ways of asking see the same GPUs."""
    by_library, by_program = devices_by_nvml(), devices_by_nvidia_smi("")
    assert [(one.uuid, one.name, one.driver) for one in by_library] == [
        (one.uuid, one.name, one.driver) for one in by_program
    ]
    assert all(abs(one.total - other.total) <= 1 << 20 for one, other in zip(by_library, by_program, strict=True))
