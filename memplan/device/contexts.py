"""What CUDA holds of a device for a process of PyTorch, besides the allocator's memory and NCCL's: causes, as ranges.

The bare context is what somebody read, or follows from the GPU's multiprocessors. Kernels come on top as they are first
used; before torch 1.13 (CUDA 11.7), or with ``CUDA_MODULE_LOADING=EAGER``, PyTorch's are all there from the start.
"""

from __future__ import annotations

from collections.abc import Mapping

from .facts import NO_ENVIRONMENT, Cause, Version, contexts_of, loads_all_kernels
from .gpus import GPUS, MULTIPROCESSORS, resident_threads

_MIB = 1 << 20
_STACK = 1 << 10
"""Bytes of stack and local memory that a context holds for each thread that a GPU can run at once (CUDA runtime API,
``cudaLimitStackSize``: 1 KiB unless somebody sets it)."""
_BESIDE_STACKS = (133 * _MIB, 316 * _MIB)
"""What bare contexts hold besides: least and most of those of which somebody published a reading, on an RTX 3090, L40S,
H100, A100, RTX PRO 6000 and B200 (the driver's own structures, heap and print buffer)."""
_FORWARD = 164 * _MIB
_FORWARD_SOURCE = (
    "what a forward pass of a model adds beside PyTorch's memory on an H100, 0.16 GiB (vllm-project/vllm pull request "
    "12126): its kernels, and the handles of cuBLAS"
)
_ALL_KERNELS = 461 * _MIB
_LAZY_BY_ITSELF = (2, 5)
"""From this PyTorch on wheels are of CUDA 12.4, which loads kernels when they are first used whoever initialises CUDA.
Before (up to CUDA 12.1) ``torch/cuda/__init__.py`` asks for that in ``_lazy_init``, which is too late where another
library, or ``torch.cuda.is_available()``, initialised the driver."""
_LIBRARIES = {(7, 0): 856, (7, 5): 936, (8, 0): 1240, (8, 6): 1269, (8, 9): 1300, (9, 0): 1613}
"""MiB of all kernels for a compute capability, uncompressed, in PyTorch 2.4.1 and the libraries that it links: the
cubins in ``libtorch_cuda.so`` and in what ``readelf -d`` says that it needs, ``libcublas.so.12`` and
``libcublasLt.so.12`` of 12.1.3.1, ``libcusparse.so.12`` of 12.1.0.106, ``libcufft.so.11`` of 11.0.2.54,
``libcurand.so.10`` of 10.3.2.106, its own ``libcusparseLt.so.0``, and ``libnccl.so.2`` of 2.20.5; of each module those
of the nearest lower capability of the same generation where it has none of its own. Of (8, 0): 567, 51, 398, 91, 19, 6,
14 and 94 MiB."""
_LIBRARIES_SOURCE = (
    "all kernels of libtorch_cuda and the libraries that it links (cuBLAS, cuBLASLt, cuSPARSE, cuSPARSELt, cuFFT, "
    "cuRAND, NCCL): sizes of the cubins in torch 2.4.1's wheels"
)
_PARTS = (9, 0), (2, 11)
"""The compute capability, and the PyTorch from which on wheels are of CUDA 13: what each first use adds to a context of
these was read on an H200 (``benchmarks/campaign/libraries.py``, ``docs/gpu.md``). To whole MiB:"""
_KERNELS, _HANDLE, _THREAD_HANDLE, _ATTENTION, _STREAM = (size * _MIB for size in (92, 66, 64, 18, 70))
_PARTS_SOURCE = "read on an H200 with torch 2.11.0+cu130, driver 580.159"
_PARTS_OF_A_STEP = (
    ("PyTorch's first kernels", _KERNELS, _KERNELS, "element-wise operators"),
    ("cuBLAS's handles", _HANDLE + _THREAD_HANDLE, _HANDLE + _THREAD_HANDLE, "66 MiB, and 64 of autograd's thread"),
    ("kernels of attention and cuDNN", 0, _ATTENTION, "nothing in 28 runs, 18 MiB where one process used them all"),
)
"""Name, least, most, and what it is of."""
SMALLEST_SEGMENT = 2 * _MIB
"""Of PyTorch's allocator (``kSmallBuffer``)."""
_OLD_KERNELS = (795 * _MIB, 1341 * _MIB)
"""Of PyTorch before 1.13: what the readings of a V100 and of A100s with all kernels are above their bare contexts."""
_ALL_SOURCE = (
    "all kernels of PyTorch, 0.92 less 0.47 GiB on an A100, torch 2.1 "
    "(https://github.com/stas00/ml-engineering/blob/master/training/performance/README.md)"
)


def context_causes(
    gpu: str, environment: Mapping[str, str] = NO_ENVIRONMENT, torch_version: Version = (2, 13)
) -> tuple[Cause, ...]:
    """Of a process on ``gpu``; empty where nothing at all is known."""
    eager = loads_all_kernels(environment, torch_version)
    bare = _read(gpu, environment, torch_version) or _by_multiprocessors(gpu, eager, torch_version)
    if bare is None:
        return ()
    if not eager and _has_parts(gpu, torch_version):
        return bare, *(
            Cause("cuda_context", name, least, most, f"{of}; {_PARTS_SOURCE}")
            for name, least, most, of in _PARTS_OF_A_STEP
        )
    linked = _linked(gpu, environment, torch_version)
    if eager:
        most, source = _FORWARD, _FORWARD_SOURCE
        if linked > bare.least:
            most, source = _FORWARD + linked - bare.least, f"at most {_FORWARD_SOURCE}, and {_LIBRARIES_SOURCE}"
        return bare, Cause("cuda_context", "libraries' kernels and handles", 0, most, source)
    most, source = _FORWARD + _ALL_KERNELS, f"at most {_FORWARD_SOURCE}, and {_ALL_SOURCE}, too"
    if linked and "CUDA_MODULE_LOADING" in environment:
        most, source = _FORWARD, f"at most {_FORWARD_SOURCE}"
    elif linked:
        most, source = _FORWARD + linked - bare.most, f"at most {_FORWARD_SOURCE}, and {_LIBRARIES_SOURCE}, too"
    return bare, Cause("cuda_context", "kernels and handles", 0, most, source)


def stream_causes(
    gpu: str, part: str, environment: Mapping[str, str] = NO_ENVIRONMENT, torch_version: Version = (2, 13)
) -> tuple[Cause, ...]:
    """What the first stream besides the current one adds as ``part``, and all others do not; empty where nobody has
    read it apart from the rest."""
    if loads_all_kernels(environment, torch_version) or not _has_parts(gpu, torch_version):
        return ()
    return (Cause(part, "a second stream", _STREAM, _STREAM, _PARTS_SOURCE),)


def _has_parts(gpu: str, torch_version: Version) -> bool:
    capability, since = _PARTS
    return GPUS[gpu].compute_capability == capability and torch_version >= since


def visiting_causes(
    gpu: str, processes: int, environment: Mapping[str, str] = NO_ENVIRONMENT, torch_version: Version = (2, 13)
) -> tuple[Cause, ...]:
    """Of so many other ``processes`` with a context on ``gpu``, where they copied a number and ran nothing: in each
    PyTorch's smallest segment, and all kernels where a context loads them."""
    bare = _read(gpu, environment, torch_version) or _by_multiprocessors(
        gpu, loads_all_kernels(environment, torch_version), torch_version
    )
    if bare is None or not processes:
        return ()
    told = environment.get("CUDA_MODULE_LOADING") == "LAZY"
    most = bare.most if told else max(bare.most, _linked(gpu, environment, torch_version))
    name = f"contexts of {processes} other process{'es' if processes > 1 else ''}"
    least, most = (processes * (size + SMALLEST_SEGMENT) for size in (bare.least, most))
    return (Cause("cuda_context", name, least, most, f"{bare.source}; {_LIBRARIES_SOURCE}"),)


def _linked(gpu: str, environment: Mapping[str, str], torch_version: Version) -> int:
    """Bytes of a context with all kernels of PyTorch and of the libraries that it links, before any handle; 0 where
    nobody has counted them, or no context loads them."""
    libraries = _LIBRARIES.get(GPUS[gpu].compute_capability or (0, 0), 0) * _MIB
    lazy = {name: value for name, value in environment.items() if name != "CUDA_MODULE_LOADING"}
    bare = _read(gpu, lazy, torch_version) or _by_multiprocessors(gpu, False, torch_version)
    counted = (1, 13) <= torch_version < _LAZY_BY_ITSELF
    return libraries + bare.most if libraries and bare is not None and counted else 0


def _read(gpu: str, environment: Mapping[str, str], torch_version: Version) -> Cause | None:
    """As somebody read it with the same kind of loading, to whole MiB."""
    read = contexts_of(gpu, environment, torch_version)
    if not read:
        return None
    sizes = [fact.bytes // _MIB * _MIB for fact in read]
    sources = "; ".join(f"{fact.note}: {fact.source}" for fact in read)
    return Cause("cuda_context", "CUDA context", min(sizes), max(sizes), sources)


def _by_multiprocessors(gpu: str, eager: bool, torch_version: Version) -> Cause | None:
    """Where nobody published a reading."""
    capability, processors = GPUS[gpu].compute_capability, MULTIPROCESSORS.get(gpu)
    if capability is None or processors is None:
        return None
    stacks = processors * resident_threads(capability) * _STACK // _MIB * _MIB
    least, most = (stacks + beside for beside in _BESIDE_STACKS)
    kernels = (0, 0) if not eager else _OLD_KERNELS if torch_version < (1, 13) else (_ALL_KERNELS, _ALL_KERNELS)
    source = f"{stacks // _MIB} MiB of stacks, 1 KiB for each thread, and the rest of published contexts" + (
        ", with all kernels" if eager else ""
    )
    return Cause("cuda_context", "CUDA context", least + kernels[0], most + kernels[1], source)
