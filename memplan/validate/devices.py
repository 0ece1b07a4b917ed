"""GPUs of this machine before anything is started on them: which there are, and whether somebody uses them.

Without torch, and without a CUDA context, which would itself be what the run is to measure.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..plan.errors import LackingError, PlanError, one_line
from ..report.units import MIB, size

IDLE = 64 * MIB
"""Bytes in use above which a GPU counts as busy. Idle ones without a display show 0 MiB (H100 and H200, driver 590) and
up to 26 MiB (with MIG enabled); the smallest CUDA context seen takes 185 MiB.
Sources: https://github.com/utkuozdemir/nvidia_gpu_exporter/tree/main/internal/captures,
https://github.com/NVIDIA/nvidia-docker/issues/1483"""
INSTEAD = "--device fake and --device cpu need none"


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
    from .nvidia_smi import devices_by_nvidia_smi
    from .nvml import NvmlError, devices_by_nvml

    try:
        found = devices_by_nvml()
    except NvmlError as error:
        found = devices_by_nvidia_smi(str(error))
    if not found:
        raise LackingError(f"no CUDA device here: the driver shows none; {INSTEAD}")
    return found


def gpus_for(
    count: int, needed: int | None, *, share: bool = False, environment: Mapping[str, str] = os.environ
) -> tuple[Device, ...]:
    """The first ``count`` of those that CUDA shows to processes with this environment, free for a run that takes
    ``needed`` bytes on each (``None``: not known). ``LackingError`` where they are too few or busy."""
    shown = visible(devices(), environment)
    if len(shown) < count:
        names = ", ".join(map(str, shown)) or "none"
        of = ", of those that CUDA_VISIBLE_DEVICES shows" if "CUDA_VISIBLE_DEVICES" in environment else ""
        advice = "--nnodes and srun run it on several machines, and --emulate one rank after the other"
        raise LackingError(
            f"the run needs {count} GPUs on this machine{of}, and there are {len(shown)}: {names}; {advice}"
        )
    check_free(shown[:count], needed, share=share)
    return shown[:count]


def check_free(gpus: Sequence[Device], needed: int | None, *, share: bool = False) -> None:
    """``LackingError`` if one of ``gpus`` is in use, unless ``share``, or has fewer than ``needed`` bytes left."""
    for gpu in gpus:
        if gpu.busy and not share:
            raise LackingError(one_line(f"{gpu} is in use: {_by(gpu)}; {_choices()}"))
        if needed is not None and needed > gpu.free:
            problem = f"{gpu} has {size(gpu.free)} free of {size(gpu.total)}, and the run takes about {size(needed)}"
            raise LackingError(one_line(f"{problem}: {_by(gpu)}" if gpu.busy else problem))


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
