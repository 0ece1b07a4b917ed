"""What NVIDIA's management library says about GPUs: ``libnvidia-ml.so.1``, which comes with the driver.

Structures and functions are those of ``nvml.h``: ``nvmlMemory_v2_t``, ``nvmlProcessInfo_t`` and its predecessor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .devices import Device, Process
from .processes import PROC

LIBRARY = "libnvidia-ml.so.1"
NAME_LENGTH = 96
_INSUFFICIENT_SIZE = 7
_NOT_AVAILABLE = ctypes.c_ulonglong(-1).value
_PAGE = 128
"""Processes for which there is room at first."""


class NvmlError(Exception):
    """The library is missing, or refuses; ``str()`` says which."""


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``: what the driver keeps counts as used."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _MemoryV2(ctypes.Structure):
    """``nvmlMemory_v2_t``, drivers from 510 on: what the driver keeps is ``reserved``."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _ProcessV1(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong))


class _ProcessV2(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


_PROCESSES: tuple[tuple[str, type[ctypes.Structure]], ...] = (
    ("nvmlDeviceGetComputeRunningProcesses_v3", _ProcessV2),
    ("nvmlDeviceGetComputeRunningProcesses_v2", _ProcessV2),
    ("nvmlDeviceGetComputeRunningProcesses", _ProcessV1),
)
"""Newest first."""
MEMORY_VERSION = ctypes.sizeof(_MemoryV2) | 2 << 24
"""``NVML_STRUCT_VERSION(Memory, 2)``."""


def devices_by_nvml(library: str = LIBRARY) -> tuple[Device, ...]:
    """All that it shows. ``NvmlError`` without it."""
    with _opened(library) as nvml:
        count = ctypes.c_uint()
        nvml.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return tuple(_device(nvml, index) for index in range(count.value))


@contextmanager
def _opened(library: str) -> Iterator[_Nvml]:
    try:
        nvml = _Nvml(ctypes.CDLL(library))
    except OSError:
        raise NvmlError(f"{library}, which comes with NVIDIA's driver, cannot be loaded") from None
    nvml.call("nvmlInit_v2")
    try:
        yield nvml
    finally:
        with suppress(NvmlError):
            nvml.call("nvmlShutdown")


class _Nvml:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def has(self, function: str) -> bool:
        return hasattr(self._library, function)

    def call(self, function: str, *arguments: Any, accepted: tuple[int, ...] = (0,)) -> int:
        """The function's code; ``NvmlError`` of one that is not ``accepted``."""
        if not self.has(function):
            raise NvmlError(f"{LIBRARY} has no {function}")
        code = int(getattr(self._library, function)(*arguments))
        if code not in accepted:
            raise NvmlError(f"{function}: {self._meaning(code)}")
        return code

    def text(self, function: str, *before: Any) -> str:
        buffer = ctypes.create_string_buffer(NAME_LENGTH)
        self.call(function, *before, buffer, ctypes.c_uint(NAME_LENGTH))
        return buffer.value.decode(errors="replace")

    def _meaning(self, code: int) -> str:
        describe = self._library.nvmlErrorString
        describe.restype = ctypes.c_char_p
        text: bytes | None = describe(code)
        return f"code {code}" if text is None else text.decode(errors="replace")


def _device(nvml: _Nvml, index: int) -> Device:
    handle = ctypes.c_void_p()
    nvml.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    memory = _memory(nvml, handle)
    return Device(
        index=index,
        uuid=nvml.text("nvmlDeviceGetUUID", handle),
        name=nvml.text("nvmlDeviceGetName", handle),
        driver=nvml.text("nvmlSystemGetDriverVersion"),
        total=memory.total,
        used=memory.used,
        free=memory.free,
        processes=_processes(nvml, handle),
    )


def _memory(nvml: _Nvml, handle: ctypes.c_void_p) -> Any:
    if nvml.has("nvmlDeviceGetMemoryInfo_v2"):
        newer = _MemoryV2(version=MEMORY_VERSION)
        with suppress(NvmlError):
            nvml.call("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(newer))
            return newer
    memory = _Memory()
    nvml.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    return memory


def _processes(nvml: _Nvml, handle: ctypes.c_void_p) -> tuple[Process, ...]:
    function, kind = next(one for one in _PROCESSES if nvml.has(one[0]))
    room = _PAGE
    while True:
        count, found = ctypes.c_uint(room), (kind * room)()
        code = nvml.call(function, handle, ctypes.byref(count), found, accepted=(0, _INSUFFICIENT_SIZE))
        if code == 0:
            return tuple(_process(one.pid, one.used) for one in found[: count.value])
        room = 2 * max(room, count.value)


def _process(pid: int, used: int) -> Process:
    try:
        name = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:  # of another container, or it has ended
        name = ""
    return Process(pid, Path(name).name or None, None if used == _NOT_AVAILABLE else used)
