"""GPUs of this machine before anything is started on them: which there are, which of memplan's table they are, and
whether somebody uses them; and whether the host has memory for ranks on its CPU.

Without torch, and without a CUDA context, which would itself be what the run is to measure.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ..device.gpus import GPUS
from ..plan.errors import LackingError, PlanError, one_line, wrong_at
from ..report.names import MIB, size
from ..result import Estimate
from ..values import dataclass
from .guards import PROC

IDLE = 64 * MIB
"""Bytes in use above which a GPU counts as busy. Idle ones without a display show 0 MiB (H100 and H200, driver 590) and
up to 26 MiB (with MIG enabled); the smallest CUDA context seen takes 185 MiB.
Sources: https://github.com/utkuozdemir/nvidia_gpu_exporter/tree/main/internal/captures,
https://github.com/NVIDIA/nvidia-docker/issues/1483"""
INSTEAD = "--device fake and --device cpu need none"
NVML = "pynvml"
"""NVIDIA's bindings of ``libnvidia-ml.so.1``, which comes with the driver (package ``nvidia-ml-py``)."""
SMI_GPUS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used", "memory.free")
SMI_PROCESSES = ("gpu_uuid", "pid", "process_name", "used_gpu_memory")
SMI_SECONDS = 30
"""That ``nvidia-smi`` may take: a driver that nothing keeps loaded needs several for eight GPUs."""
NEAR = 0.06
"""Part by which a device's memory may differ from the table's: of names like H100 there are several sizes."""
_MEMORY = re.compile(r"-\d+gb$")
HOST_MEMORY = Path("/proc/meminfo")
_AVAILABLE = re.compile(r"^MemAvailable: +(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Process:
    """Something that computes on a GPU."""

    pid: int
    """As the driver knows it: in a container, that of the machine."""
    name: str | None
    used: int | None
    """Bytes; ``None`` where the driver does not tell."""

    def __str__(self) -> str:
        known = ", ".join(filter(None, (self.name, None if self.used is None else size(self.used))))
        return f"process {self.pid}{f' ({known})' if known else ''}"


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as its driver shows it now. Sizes in bytes."""

    index: int
    """In the order of PCI buses, as in ``nvidia-smi``."""
    uuid: str
    name: str
    driver: str
    total: int
    used: int
    """By processes; what the driver keeps for itself is not in it, where the driver tells them apart (510 on)."""
    free: int
    processes: tuple[Process, ...] = ()

    @property
    def busy(self) -> bool:
        return bool(self.processes) or self.used > IDLE

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name})"


def devices() -> tuple[Device, ...]:
    """All of this machine. ``LackingError`` where there are none."""
    try:
        found = devices_by_nvml()
    except NvmlError as error:
        found = devices_by_nvidia_smi(str(error))
    if not found:
        raise LackingError(f"no CUDA device here: the driver shows none; {INSTEAD}")
    return found


class NvmlError(Exception):
    """The driver's library or its bindings are missing, or it refuses; ``str()`` says which."""


def devices_by_nvml() -> tuple[Device, ...]:
    """All that the driver's library shows. ``NvmlError`` without it."""
    with _nvml() as nvml:
        return tuple(_device_by_nvml(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))


@contextmanager
def _nvml() -> Iterator[Any]:
    try:
        nvml: Any = import_module(NVML)
    except ImportError:
        raise NvmlError("nvidia-ml-py, which asks NVIDIA's driver, is not installed") from None
    try:
        nvml.nvmlInit()
        try:
            yield nvml
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise NvmlError(f"NVIDIA's driver: {error}") from None


def _device_by_nvml(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:  # drivers before 510, which count what they keep for themselves as used
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    except nvml.NVMLError:  # likewise
        processes = nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)
    return Device(
        index=index,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        driver=nvml.nvmlSystemGetDriverVersion(),
        total=memory.total,
        used=memory.used,
        free=memory.free,
        processes=tuple(Process(one.pid, _command(one.pid), one.usedGpuMemory) for one in processes),
    )


def _command(pid: int) -> str | None:
    """Its program; ``None`` of a process that has ended, or is of another container."""
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return None
    return Path(command).name or None


def devices_by_nvidia_smi(why: str) -> tuple[Device, ...]:
    """All that ``nvidia-smi`` shows. ``LackingError`` where it cannot; ``why`` the library could not be asked."""
    gpus = _asked(["--query-gpu=" + ",".join(SMI_GPUS)], why)
    return parsed(gpus, _asked(["--query-compute-apps=" + ",".join(SMI_PROCESSES)], why))


def _asked(question: list[str], why: str) -> str:
    command = ["nvidia-smi", *question, "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        said = (
            f"does not answer in {SMI_SECONDS} s" if isinstance(error, subprocess.TimeoutExpired) else "cannot be run"
        )
        raise _missing(f"{why}, and nvidia-smi {said}") from None
    if answer.returncode:
        said = (answer.stdout + answer.stderr).decode(errors="replace").strip().partition("\n")[0]
        raise _missing(f"nvidia-smi says: {said}")
    return answer.stdout.decode(errors="replace")


def _missing(why: str) -> LackingError:
    return LackingError(one_line(f"no CUDA device here: {why}; {INSTEAD}"))


def parsed(gpus: str, processes: str) -> tuple[Device, ...]:
    """From the tables of both questions, without header and units: MiB."""
    return tuple(
        Device(
            index=int(index),
            uuid=uuid,
            name=name,
            driver=driver,
            total=int(total) * MIB,
            used=int(used) * MIB,
            free=int(free) * MIB,
            processes=tuple(_process_by_nvidia_smi(row) for row in _rows(processes) if row[0] == uuid),
        )
        for index, uuid, name, driver, total, used, free in _rows(gpus)
    )


def _process_by_nvidia_smi(row: list[str]) -> Process:
    """Names of other containers' processes are ``[Not Found]``, and sizes that the driver does not tell ``[N/A]``."""
    _, pid, name, used = row
    return Process(int(pid), None if name.startswith("[") else name, int(used) * MIB if used.isdecimal() else None)


def _rows(table: str) -> list[list[str]]:
    return [row for row in csv.reader(table.splitlines(), skipinitialspace=True) if row]


def gpus_for(count: int, *, share: bool = False, environment: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """The first ``count`` of those that CUDA shows to processes with this environment. ``LackingError`` where they are
    too few or busy."""
    shown = visible(devices(), environment)
    if len(shown) < count:
        names = ", ".join(map(str, shown)) or "none"
        of = ", of those that CUDA_VISIBLE_DEVICES shows" if "CUDA_VISIBLE_DEVICES" in environment else ""
        raise LackingError(
            f"the run needs {count} GPUs on this machine{of}, and there are {len(shown)}: {names}; "
            "--nnodes and srun run it on several machines, and --emulate one rank after the other"
        )
    check_free(shown[:count], share=share)
    return shown[:count]


def check_free(gpus: Sequence[Device], *, share: bool) -> None:
    """``LackingError`` if one of ``gpus`` is in use, unless ``share``."""
    for gpu in gpus:
        if gpu.busy and not share:
            raise LackingError(one_line(f"{gpu} is in use: {_by(gpu)}; {_choices()}"))


def _by(gpu: Device) -> str:
    if not gpu.processes:
        return f"{size(gpu.used)}, by processes that cannot be seen from here (another container, say)"
    return f"{size(gpu.used)} by {', '.join(map(str, gpu.processes))}"


def _choices() -> str:
    return "CUDA_VISIBLE_DEVICES chooses others; --share-gpu runs beside it, and measures both"


def visible(all_devices: Sequence[Device], environment: Mapping[str, str]) -> tuple[Device, ...]:
    """Those that ``CUDA_VISIBLE_DEVICES`` leaves, in its order: indices, or the beginnings of UUIDs, up to the first
    that does not exist ("Environment Variables" of the CUDA C++ Programming Guide). ``PlanError`` of instances (MIG),
    whose memory is not that of their GPU."""
    asked = environment.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return tuple(all_devices)
    found: list[Device] = []
    for name in (part.strip() for part in asked.split(",")):
        if name.startswith("MIG-"):
            raise PlanError("CUDA_VISIBLE_DEVICES", asked, "must name whole GPUs: instances (MIG) are not measured yet")
        match = [one for one in all_devices if _is_named(one, name)]
        if len(match) != 1:
            break
        found.append(match[0])
    return tuple(found)


def _is_named(device: Device, name: str) -> bool:
    return name == str(device.index) or (name.startswith("GPU-") and device.uuid.startswith(name))


def gpu_of(name: str, total: int) -> str | None:
    """The table's name of ``NVIDIA A100-SXM4-80GB`` with ``total`` bytes; ``None`` where no row is like it."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    fitting = [gpu for gpu, row in GPUS.items() if row.title == name or set(_model(gpu)) <= set(words)]
    near = [gpu for gpu in fitting if _distance(gpu, total) <= NEAR]
    return min(near, key=lambda gpu: (-len(_model(gpu)), _distance(gpu, total)), default=None)


def _model(gpu: str) -> list[str]:
    return _MEMORY.sub("", gpu).split("-")


def _distance(gpu: str, total: int) -> float:
    return abs(GPUS[gpu].capacity_bytes / total - 1)


def check_host(estimated: Estimate, ranks: int, memory: Path = HOST_MEMORY) -> None:
    """``PlanError`` where ``ranks`` of the largest stage at once need more than is available; what PyTorch itself takes
    comes on top. Nothing is checked where that is not known."""
    available = _available(memory)
    needed = ranks * max(stage.requested for stage in estimated.stages)
    if available is not None and needed > available:
        who = "a rank is" if ranks == 1 else f"{ranks} ranks are"
        raise wrong_at(
            "--device",
            f"cpu has {size(available)} available, and {who} estimated to need {size(needed)}; --force runs it anyway",
        )


def _available(memory: Path) -> int | None:
    """Bytes."""
    try:
        found = _AVAILABLE.search(memory.read_text())
    except OSError:
        return None
    return int(found[1]) << 10 if found else None
