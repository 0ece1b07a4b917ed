"""A CUDA build of torch on a GPU that computes nothing: its allocator, its operators and its autograd are real, so what
a training allocates is what it would allocate on a GPU, as far as no size depends on a value.

``environment`` builds what stands in for the driver, CUDA's runtime, cuBLAS and ``nvidia-smi``, with gcc and the
headers of the CUDA toolkit. ``MEMPLAN_CUDA_PYTHON`` names a Python that has a CUDA build of torch (2.11 was tried),
transformers and what memplan needs::

    MEMPLAN_CUDA_PYTHON=/path/to/python pytest tests/validate/test_on_no_gpu.py
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from ..cuda_allocator import CUDA, HERE as ALLOCATOR

HERE = Path(__file__).parent
PYTHON = "MEMPLAN_CUDA_PYTHON"
USERS = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so", "libcaffe2_nvrtc.so")
MEMORY = 143_156 << 20
"""Bytes that a process of an H200 gets."""
SMI = """#!/bin/sh
case "$*" in *query-gpu*) echo "0, GPU-0, NVIDIA H200, 580.159.03, 143771, 0, 143156";; esac
"""
CONTEXT = "int cuDevicePrimaryCtxGetState(int d, unsigned* f, int* a) { *f = 0; *a = 1; return 0; }\n"


def environment(torch: Path, place: Path) -> dict[str, str]:
    """Of a process whose ``torch``, a package's folder, is to find such a GPU. Libraries are made in ``place``."""
    runtime = _library(place, "runtime", (ALLOCATOR / "runtime.c").read_text())
    device = _library(place, "device", (HERE / "device.c").read_text())
    wanted = _symbols([torch / "lib" / name for name in USERS], "--undefined-only")
    rest = wanted - _symbols([runtime, device], "--defined-only")
    called = sorted(name for name in rest if name.startswith(("cuda", "__cuda", "cublas")))
    nothing = _library(place, "nothing", _nothing(called))
    drivers = sorted(
        name for name in rest if name[:2] == "cu" and name[2:3].isupper() and not name.startswith("cuFile")
    )
    driver = _library(place, "cuda", _nothing(name for name in drivers if name not in CONTEXT) + CONTEXT)
    for name, made in (("libcuda.so.1", driver), ("libnvidia-ml.so.1", runtime)):
        (place / name).symlink_to(made)
    smi = place / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    return {
        **os.environ,
        "STUB_LIMIT": str(MEMORY),
        "LD_LIBRARY_PATH": str(place),
        "LD_PRELOAD": ":".join(map(str, (device, runtime, nothing))),
        "PATH": f"{place}:{os.environ['PATH']}",
    }


def _library(place: Path, name: str, source: str) -> Path:
    code, made = place / f"{name}.c", place / f"libstand_in_{name}.so"
    code.write_text(source)
    plain = os.environ | {"LD_PRELOAD": ""}
    command = ["gcc", "-O1", "-w", "-fPIC", "-shared", f"-I{CUDA}/include", str(code), "-o", str(made)]
    subprocess.run(command, check=True, env=plain)
    return made


def _nothing(names: Iterable[str]) -> str:
    return "".join(f"int {name}() {{ return 0; }}\n" for name in names)


def _symbols(libraries: Iterable[Path], which: str) -> set[str]:
    """Names, without their versions."""
    there = [str(library) for library in libraries if library.exists()]
    done = subprocess.run(["nm", "-D", which, *there], capture_output=True, text=True, check=True)
    return {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines() if line and not line.endswith(":")}
