"""PyTorch's own CUDA allocator without a GPU: ``libc10_cuda.so`` on a CUDA runtime that only counts bytes.

``runtime.c`` is that runtime, and a driver and NVML as far as the allocator asks for them; ``driver.cpp`` reads
requests and prints what the allocator counts. Both are built where they are needed, with g++, the headers of the CUDA
toolkit, and a CUDA build of torch, of which ``lib/libc10*.so`` and ``include/c10`` are enough::

    pip download --no-deps torch==2.13.0 && unzip torch-2.13.0-*.whl 'torch/lib/libc10*' 'torch/include/*' -d FOLDER
    MEMPLAN_TORCH_CUDA=FOLDER/torch pytest tests/allocator/test_memory.py
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.memory import DeviceMemory, OutOfMemoryError
from tests.oracle.caching_allocator import CachingAllocator

HERE = Path(__file__).parent
TORCH = "MEMPLAN_TORCH_CUDA"
"""Variable with the folder of a CUDA build of torch."""
CUDA = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))


class Request(NamedTuple):
    """``allocate``, ``free``, ``free in use`` (by stream 2 as well, until somebody waits for that) or ``empty``."""

    what: str
    key: int = 0
    size: int = 0
    """Bytes."""
    stream: int = 0


class Counts(NamedTuple):
    """What the allocator counts after a request; bytes, and numbers since the beginning."""

    allocated: int
    reserved: int
    retries: int
    ooms: int


def requests(seed: int, length: int, bits: int) -> Iterator[Request]:
    """Allocations below 2^``bits`` bytes on two streams, half of them of a few sizes, and frees in no order."""
    state, live = seed, list[int]()

    def draw(below: int) -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % below

    def size() -> int:
        return draw(1 << 8 + draw(bits - 8)) + 1

    usual = [size() for _ in range(12)]
    for key in range(length):
        choice = draw(100)
        if choice == 0:
            yield Request("empty")
        elif live and choice < 49:
            at = draw(len(live)) if draw(2) else len(live) - 1
            yield Request("free in use" if draw(10) == 0 else "free", live.pop(at))
        else:
            live.append(key)
            yield Request("allocate", key, usual[draw(12)] if draw(2) else size(), draw(2))


def replayed(asked: Sequence[Request], conf: str, limit: int) -> list[Counts]:
    """The counts of the replay."""
    allocator, failed, found = CachingAllocator(AllocatorSettings.parse(conf), DeviceMemory(limit)), set[int](), []
    for what, key, size, stream in asked:
        if what == "allocate":
            try:
                allocator.allocate(key, size, stream)
            except OutOfMemoryError:
                failed.add(key)
        elif what == "empty":
            allocator.empty_cache()
        elif key not in failed:
            allocator.free(key, in_use=what == "free in use")
        found.append(Counts(allocator.allocated, allocator.reserved, allocator.retries, allocator.ooms))
    return found


def counted(build: Path, asked: Sequence[Request], conf: str, limit: int) -> tuple[list[Counts], list[str]]:
    """The counts of PyTorch, and its messages where requests fail. ``build``: what ``built`` returned."""
    words = {"allocate": "a {1} {2} {3}", "free": "f {1}", "free in use": "r {1}", "empty": "e"}
    text = "".join(words[one.what].format(*one) + "\n" for one in asked)
    environment = os.environ | {"PYTORCH_ALLOC_CONF": conf, "STUB_LIMIT": str(limit), "LD_LIBRARY_PATH": str(build)}
    run = [str(build / "driver")]
    done = subprocess.run(run, input=text, capture_output=True, text=True, check=True, env=environment)
    lines = done.stdout.splitlines()
    counts = [Counts(*map(int, line.split())) for line in lines if not line.startswith("# ")]
    return counts, [line[2:] for line in lines if line.startswith("# ")]


def built(torch: Path, place: Path) -> Path:
    """The folder ``place`` with runtime and driver in it."""
    (place / "version.map").write_text("libcudart.so.13 { *; };\n")
    include, lib = f"-I{CUDA}/include", torch / "lib"
    version = f"-Wl,-soname,libcudart.so.13,--version-script={place}/version.map"
    runtime = ["-shared", "-fPIC", include, f"{HERE}/runtime.c", "-o", f"{place}/libcudart.so.13", version]
    subprocess.run(["gcc", "-O1", "-w", *runtime], check=True)
    (place / "libnvidia-ml.so.1").symlink_to("libcudart.so.13")
    source = [f"-I{torch}/include", include, f"{HERE}/driver.cpp", "-o", f"{place}/driver"]
    libraries = [f"-L{lib}", "-lc10_cuda", "-lc10", f"{place}/libcudart.so.13", f"-Wl,-rpath,{place}:{lib}"]
    subprocess.run(["g++", "-std=c++20", "-O1", "-w", *source, *libraries], check=True)
    return place
