"""What an out-of-memory message says, in bytes.

PyTorch's message is made in ``c10/cuda/CUDACachingAllocator.cpp``: up to 1.4 ``(GPU 0; 5.93 GiB total capacity; 4.64
GiB already allocated; 54.94 MiB free; 233.05 MiB cached)``, where the cache is what is not allocated; from 1.5 to 2.0
``reserved in total by PyTorch``; from 2.1 on sentences (``reportProcessMemoryInfo``), with the memory of every process
on the GPU, what private pools of CUDA graphs hold, and what is reserved but unallocated. What it tried to allocate is
the segment that it asked the driver for (``get_allocation_size``), not the tensor. ``backend:cudaMallocAsync`` has a
message of its own (``CUDAMallocAsyncAllocator.cpp``): ``Allocation on device 0 would exceed allowed``
``memory``, then a line for each size.
"""

from __future__ import annotations

import re
from math import ceil, floor

from ..values import dataclass

_UNITS = {"bytes": 1, "b": 1}
_UNITS |= {f"{letter}{i}b": 1 << 10 * power for power, letter in enumerate("kmgtp", 1) for i in ("", "i")}
_SIZE = r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s?(bytes|[KMGTP]i?B|B)\b"


@dataclass(frozen=True, slots=True)
class Size:
    """A size as printed: the bytes that it can stand for."""

    text: str
    least: int
    middle: int
    most: int

    def is_printed_of(self, size: int) -> bool:
        """Whether PyTorch prints ``size`` bytes so; of a size that somebody shortened, whether it may have been."""
        return self.least <= size <= self.most


def size_of(number: str, unit: str) -> Size:
    """``3.82`` and ``GiB``. PyTorch prints two decimals; of fewer the last may be cut off instead of rounded."""
    scale, decimals = _UNITS[unit.lower()], len(number.partition(".")[2])
    value = float(number) * scale
    if scale == 1:
        return Size(f"{number} {unit}", int(value), int(value), int(value))
    last = scale / 10**decimals
    above = last / 2 if decimals >= 2 else last
    return Size(f"{number} {unit}", floor(value - last / 2), round(value), ceil(value + above))


@dataclass(frozen=True, slots=True)
class Process:
    """Another process on the GPU, as the message lists them."""

    pid: int
    size: int


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """One message. Sizes in bytes, ``None`` where it does not say; those of PyTorch are rounded to two decimals."""

    text: str
    who: str
    """Who asked: ``pytorch``, ``driver``, ``nccl``, ``cublas`` (any of CUDA's libraries), ``handle`` where such a
    library said only that it has no handle, ``host``, ``shared`` for /dev/shm; ``killed`` where a process got signal
    9, and nothing says that it was for the host's memory."""
    tried: Size | None = None
    gpu: int | None = None
    capacity: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    """By PyTorch, with what is unallocated."""
    in_process: int | None = None
    """By this process, with what is not PyTorch's."""
    allowed: int | None = None
    """What ``set_per_process_memory_fraction`` leaves it."""
    private: int | None = None
    """Of ``allocated``, what private pools hold."""
    others: tuple[Process, ...] = ()
    resident: int | None = None
    """Of a process that Linux has killed: what it had of the host's memory, files and shared memory apart."""

    @property
    def of_host(self) -> bool:
        """The host's memory, not the GPU's, ran out, as far as one knows."""
        return self.who in ("host", "shared", "killed")

    @property
    def unallocated(self) -> int | None:
        """Reserved by PyTorch, and not in use."""
        return None if self.reserved is None or self.allocated is None else max(self.reserved - self.allocated, 0)

    @property
    def request(self) -> int | None:
        """What it asked for, as far as it is printed."""
        return self.tried.middle if self.tried is not None else None


def _field(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.IGNORECASE)


_FIELDS = {
    "tried": _field(
        *(rf"tried to allocate {_SIZE}", rf"Unable to allocate {_SIZE} for an array"),
        *(r"Allocation failed for size::([0-9]{1,15})(\b)", rf"\bRequested ?: {_SIZE}"),
    ),
    "capacity": _field(rf"{_SIZE} total capacity", rf"total capaci?ty of {_SIZE}", rf"\bDevice limit ?: {_SIZE}"),
    "free": _field(
        rf"{_SIZE} free;", rf"of which {_SIZE} is free", rf"{_SIZE} free\)", rf"Free \(according to CUDA\) ?: {_SIZE}"
    ),
    "allocated": _field(
        rf"{_SIZE} already allocated", rf"{_SIZE} is allocated by PyTorch", rf"(?:Currently|MPS) allocated ?: {_SIZE}"
    ),
    "reserved": _field(rf"{_SIZE} reserved in total"),
    "unallocated": _field(rf"{_SIZE} is reserved by PyTorch but unallocated", rf"{_SIZE} cached"),
    "in_process": _field(rf"this process has {_SIZE} memory in use"),
    "allowed": _field(rf"{_SIZE} allowed", rf"max allowed: {_SIZE}"),
    "private": _field(rf"with {_SIZE} allocated in private pools"),
}
_GPU = re.compile(r"\b(?:(?:GPU|XPU|NPU) ?(?=[0-9]{1,4}(?:;| has a total))|Allocation on device )([0-9]{1,4})")
_OTHER = re.compile(rf"\bProcess ([0-9]{{1,10}}) has {_SIZE} memory in use")

LONGEST = 4096
"""Characters of a message that are read. One with a hundred processes is that long."""


def parse(text: str, line: str = "") -> OutOfMemory:
    """The message that ``text`` begins with, whose blanks are single ones; ``line`` is what it stands in."""
    text = text[:LONGEST]
    found = {name: _found(pattern, text) for name, pattern in _FIELDS.items()}
    bytes_of = {name: size.middle for name, size in found.items() if size is not None}
    reserved = bytes_of.get("reserved")
    if reserved is None and "unallocated" in bytes_of and "allocated" in bytes_of:
        reserved = bytes_of["allocated"] + bytes_of["unallocated"]
    gpu = _GPU.search(text)
    others = [Process(int(one[1]), size_of(one[2], one[3]).middle) for one in _OTHER.finditer(text)]
    others = [one for one in others if one.size < IMPOSSIBLE]
    own = bytes_of.get("in_process")
    own = own if own is None or own < IMPOSSIBLE else None
    if own is None:
        own = _own(others, reserved) if reserved is not None else _alone(others, bytes_of)
        others = [one for one in others if one.size != own]
    return OutOfMemory(
        text=text,
        who=_who(line or text),
        tried=found["tried"],
        gpu=int(gpu[1]) if gpu else None,
        capacity=bytes_of.get("capacity"),
        free=bytes_of.get("free"),
        allocated=bytes_of.get("allocated"),
        reserved=reserved,
        in_process=own,
        allowed=bytes_of.get("allowed"),
        private=bytes_of.get("private"),
        others=tuple(others),
        resident=int(resident[1]) << 10 if (resident := _RESIDENT.search(text)) else None,
    )


def _found(pattern: re.Pattern[str], text: str) -> Size | None:
    match = pattern.search(text)
    if match is None:
        return None
    number, unit = [group for group in match.groups() if group is not None][:2]
    return size_of(number, unit or "bytes")


IMPOSSIBLE = 1 << 50
"""Bytes that no process has: NVML's "not available" under WSL, which PyTorch prints as 17179869184.00 GiB."""
MOST_BESIDE = 4 << 30
"""Bytes that a process holds beside what PyTorch reserves: contexts, NCCL, libraries. More is somebody else's."""


def _own(processes: list[Process], reserved: int) -> int | None:
    """In a container PyTorch does not know its own number, and lists itself among the others."""
    rounding = 1 << 25
    likely = [one.size for one in processes if reserved - rounding <= one.size <= reserved + MOST_BESIDE]
    return min(likely, default=None)


def _alone(processes: list[Process], bytes_of: dict[str, int]) -> int | None:
    """The one process of a message whose end is lost, if nothing else is on the GPU: then it is this one."""
    if len(processes) != 1 or "capacity" not in bytes_of or "free" not in bytes_of:
        return None
    rest = bytes_of["capacity"] - bytes_of["free"] - processes[0].size
    return processes[0].size if rest < LEAST_OF_A_PROCESS else None


LEAST_OF_A_PROCESS = 100 << 20
"""Bytes of a GPU that a process with a CUDA context has at least."""

_KILLED = (
    r"SIGKILL|\bKilled\b|\bsignal 9\b"
    r"|(?i:exit(?:ed with|s with)?[ _]?(?:return[ _])?(?:code|status)|return code)\W{1,9}(?:-9|137)\b"
)
"""How shells, launchers and containers say that a process got signal 9: torchrun's ``exitcode: -9``, DeepSpeed's
``return code = -9``, Docker's ``exit code 137`` (128 + 9)."""
_RESIDENT = re.compile(r"anon-rss:([0-9]{1,15})kB")

_LIBRARY = r"\b(?:CU|HIP|ROC)[A-Z]{2,8}_(?:STATUS_)?"
"""Of cuBLAS, cuDNN, cuFFT, cuSOLVER and AMD's."""
_SHARED = r"(?:insufficient|out of) shared memory"
"""What PyTorch says where workers of a data loader die of a full /dev/shm."""
_OF_PYTHON = r"Unable to allocate [0-9]|WinError 1455"
"""What NumPy, and Python on Windows, say where the host gives no memory."""

_WHO = (
    ("nccl", re.compile(r"nccl|Failed to CUDA calloc", re.IGNORECASE)),
    ("cublas", re.compile(rf"{_LIBRARY}ALLOC_FAILED", re.IGNORECASE)),
    ("handle", re.compile(rf"{_LIBRARY}NOT_INITIALIZED", re.IGNORECASE)),
    ("shared", re.compile(rf"{_SHARED}", re.IGNORECASE)),
    (
        "host",
        re.compile(
            r"DefaultCPUAllocator|Cannot allocate memory|oom[-_ ]?kill|not enough memory: you tried"
            rf"|Out of memory: Kill|out-of-memory handler|Memory cgroup out of memory|{_OF_PYTHON}",
            re.IGNORECASE,
        ),
    ),
    ("killed", re.compile(_KILLED)),
)


def _who(text: str) -> str:
    if "would exceed allowed memory" in text:
        return "pytorch"
    if "ried to allocate" in text and "DefaultCPU" not in text and "not enough memory: you" not in text:
        return "pytorch"
    return next((who for who, pattern in _WHO if pattern.search(text)), "driver")


BEGINS = re.compile(
    r"(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory|error:? out of memory|cudaErrorMemoryAllocation"
    r"|Failed to CUDA calloc|Cuda failure[^\n]{0,40}out of memory"
    rf"|{_LIBRARY}(?:ALLOC_FAILED|NOT_INITIALIZED)|{_SHARED}"
    rf"|DefaultCPUAllocator|tried to allocate [0-9]|OutOfMemoryError|Allocation failed for size::|{_OF_PYTHON}"
    r"|out of memory: Kill(?:ed)? process|oom[-_ ]?kill|out-of-memory handler"
    rf"|(?-i:{_KILLED})",
    re.IGNORECASE,
)
"""Where a message begins."""
