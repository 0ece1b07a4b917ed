"""Bytes that no tensor of a model accounts for, each with where it comes from.

Three owners: cuBLAS and Transformer Engine take workspaces from PyTorch's caching allocator, so they
count as allocated; the CUDA context and NCCL's buffers lie beside it and show up in ``nvidia-smi``
only. What nobody has published is ``None``, never a guess. All sizes in bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from ..values import NamedTuple, dataclass

_KIB = 1 << 10
_MIB = 1 << 20
_GIB = 1 << 30

Version = tuple[int, int]
"""Major and minor."""

NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})
"""No variable is set."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A size that a library or driver decides."""

    name: str
    bytes: int
    source: str
    note: str = ""
    held: bool = True
    """Stays once it is taken; otherwise it comes and goes with each call."""


class Cause(NamedTuple):
    """Something that takes memory of a device outside PyTorch's allocator: the least and the most bytes."""

    part: str
    """``cuda_context``, ``nccl`` or ``other``."""
    name: str
    least: int
    most: int
    source: str


# ---- cuBLAS ----

_CUBLAS_SOURCE = "pytorch/pytorch aten/src/ATen/cuda/CublasHandlePool.cpp (pull requests 83461, 91564, 175344, 194311)"
_CUBLASLT_SOURCE = (
    "pytorch/pytorch aten/src/ATen/cuda/CublasHandlePool.cpp, CUDABlas.cpp (pull requests 73439, 151163, 156495, "
    "168175, 183923, 194311)"
)
_CUBLAS_DEFAULT = 2 * 4096 * _KIB + 8 * 16 * _KIB
"""``:4096:2:16:8``: 8,519,680 B."""
_CUBLAS_LARGE = 32 * _MIB
_CUBLASLT_DEFAULT = _MIB
_LARGEST, _MOST_DIGITS = 1 << 40, 12


def cublas_workspaces(
    compute_capability: tuple[int, int],
    environment: Mapping[str, str] = NO_ENVIRONMENT,
    torch_version: Version = (2, 13),
) -> tuple[Fact, ...]:
    """Workspaces that PyTorch hands to cuBLAS and cuBLASLt, once per handle and stream.

    They come from the caching allocator on the first product. Empty before torch 2.0, when cuBLAS took
    its own with ``cudaMalloc``. ``CUBLAS_WORKSPACE_CONFIG``, ``CUBLASLT_WORKSPACE_SIZE``,
    ``TORCH_CUBLASLT_UNIFIED_WORKSPACE`` and ``TORCH_CUBLAS_WORKSPACE_CACHE`` count as PyTorch reads
    them, but what it would warn of and ignore is a ``ValueError`` here.
    """
    if torch_version < (2, 0):
        return ()
    held = torch_version < (2, 15) or _switch(environment, "TORCH_CUBLAS_WORKSPACE_CACHE", False)
    size = _cublas_size(compute_capability, environment, torch_version)
    cublas = Fact("cublas_workspace", size, _CUBLAS_SOURCE, "per cuBLAS handle and stream", held)
    if _unified(environment, torch_version, held):
        return (cublas,)
    return cublas, _cublaslt(size, environment, torch_version, held)


def _cublas_size(capability: tuple[int, int], environment: Mapping[str, str], torch_version: Version) -> int:
    """``parseCUDABlasWorkspaceSize``: every ``:size:count`` in the text, in KiB, adds up."""
    key = "CUBLAS_WORKSPACE_CONFIG"
    value = environment.get(key, "")
    if not value:
        return _CUBLAS_LARGE if _has_large_workspace(capability, torch_version) else _CUBLAS_DEFAULT
    pairs = re.findall(r":([0-9]+):([0-9]+)", value)
    if not pairs:
        raise ValueError(f"{key}={value} is not read by PyTorch; allowed are pairs of KiB and count, such as :4096:8")
    is_long = any(len(number) > _MOST_DIGITS for pair in pairs for number in pair)
    total = 0 if is_long else sum(int(size) * _KIB * int(count) for size, count in pairs)
    if is_long or total > _LARGEST:
        raise ValueError(f"{key} asks for workspaces of more than {_LARGEST >> 40} TiB, which no GPU has")
    return total


def _has_large_workspace(capability: tuple[int, int], torch_version: Version) -> bool:
    """Hopper, from 2.12 on also Blackwell (10 and 12), from 2.14 on also 11."""
    major, _ = capability
    if torch_version < (2, 12):
        return capability == (9, 0)
    return major in (9, 10, 12) or (major == 11 and torch_version >= (2, 14))


def _unified(environment: Mapping[str, str], torch_version: Version, cached: bool) -> bool:
    """Does cuBLASLt work in the workspace of cuBLAS? Possible since 2.8, the rule since 2.12."""
    if torch_version < (2, 8) or not cached:
        return False
    return _switch(environment, "TORCH_CUBLASLT_UNIFIED_WORKSPACE", torch_version >= (2, 12))


def _cublaslt(cublas: int, environment: Mapping[str, str], torch_version: Version, held: bool) -> Fact:
    """A workspace of its own: for ``addmm`` with a fused bias, and scaled products. Held since 2.9."""
    size = _cublaslt_size(environment)
    capped = (2, 9) <= torch_version < (2, 12) and environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") != "0"
    note = "only once addmm fuses a bias, or a scaled product runs"
    held = held and torch_version >= (2, 9)
    return Fact("cublaslt_workspace", min(size, cublas) if capped else size, _CUBLASLT_SOURCE, note, held)


def _cublaslt_size(environment: Mapping[str, str]) -> int:
    """``CUBLASLT_WORKSPACE_SIZE`` in KiB, read by ``std::stoi``: what follows the digits is ignored."""
    key = "CUBLASLT_WORKSPACE_SIZE"
    value = environment.get(key, "")
    if not value:
        return _CUBLASLT_DEFAULT
    number = re.match(r"\s*\+?([0-9]+)", value)
    if number is None or int(number[1]) >= 1 << 31:
        raise ValueError(f"{key}={value} is not read by PyTorch; allowed is a number of KiB below 2^31, such as 1024")
    return int(number[1]) * _KIB


def _switch(environment: Mapping[str, str], key: str, default: bool) -> bool:
    """``c10::utils::check_env``: 1 or 0, and nothing else."""
    value = environment.get(key, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{key}={value} is not read by PyTorch; allowed are 0 and 1")
    return value == "1" if value else default


# ---- CUDA context ----


class _Context(NamedTuple):
    gpus: tuple[str, ...]
    fact: Fact
    eager: bool
    """Were all kernels loaded at the start?"""
    torch_version: Version | None
    """``None``: not said, or measured without PyTorch."""


def _context(
    gpus: tuple[str, ...], size: int, source: str, note: str, eager: bool = False, torch_version: Version | None = None
) -> _Context:
    return _Context(gpus, Fact("cuda_context", size, source, note), eager, torch_version)


_BIGSCIENCE = "https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles-prequel.md"
_BEKMAN = "https://github.com/stas00/ml-engineering/blob/master/training/performance/README.md"
_CAPTURES = "https://github.com/utkuozdemir/nvidia_gpu_exporter/tree/main/internal/captures"
_BARE = "the bare context; kernels come on top as they are first used"
_ONES = "torch.ones(1).cuda(), then mem_get_info, to 0.01 GiB, on the 80 GB version"
_A100 = ("a100-40gb", "a100-80gb")
_GH100 = ("h100-80gb", "h100-94gb", "h100-96gb", "gh200-144gb", "h200")

_CONTEXTS = (
    _context(("v100-16gb", "v100-32gb"), 1271 * _MIB, _BIGSCIENCE, "nvidia-smi, PyTorch of 2021, 32 GB", eager=True),
    _context(_A100, 1573 * _MIB, _BIGSCIENCE, "nvidia-smi, PyTorch of 2021, 40 GB", eager=True, torch_version=(1, 10)),
    _context(("a100-80gb",), 178 * _GIB // 100, _BEKMAN, f"{_ONES}; torch 1.10.2", eager=True, torch_version=(1, 10)),
    _context(_A100, 90 * _GIB // 100, _BEKMAN, f"{_ONES}; torch 1.13.1", eager=True, torch_version=(1, 13)),
    _context(_A100, 92 * _GIB // 100, _BEKMAN, f"{_ONES}; torch 2.1.1+cu121", eager=True, torch_version=(2, 1)),
    _context(
        _A100,
        47 * _GIB // 100,
        _BEKMAN,
        f"{_ONES}; torch 2.1.1+cu121; with all kernels loaded 0.92 GiB",
        torch_version=(2, 1),
    ),
    _context(
        _GH100,
        518 * _MIB,
        _CAPTURES,
        f"{_BARE}; driver 590.48, alike on the 80 GB H100 and the H200: two processes with 2566 and 1542 MiB in "
        "nvidia-smi, read as 2 and 1 GiB of their own beside the context",
    ),
    _context(
        _GH100,
        526 * _MIB,
        "benchmarks/campaign/libraries.py on an H200",
        f"{_BARE}; NVML before and after, driver 580.159, torch 2.11",
    ),
    _context(
        ("b200",),
        612 * _MIB,
        "https://github.com/unslothai/unsloth/pull/8669",
        f"{_BARE}; mem_get_info, then nvidia-smi",
    ),
    _context(
        ("rtx-pro-6000",),
        555 * _MIB,
        "https://github.com/ggml-org/llama.cpp/pull/23604",
        f"{_BARE}; cudaMemGetInfo, then NVML",
    ),
    _context(
        ("l40s",),
        426 * _MIB,
        "https://github.com/unslothai/unsloth-zoo/pull/1053",
        f"{_BARE}; mem_get_info, then nvidia-smi, torch 2.10; RTX 6000 Ada: the same chip, as many multiprocessors",
        torch_version=(2, 10),
    ),
    _context(
        ("rtx-3090",),
        1687 * _MIB,
        "https://github.com/pytorch/pytorch/issues/55277",
        "torch.Tensor(1).cuda(), with the allocator's first 2 MiB; torch 1.8.2+cu111",
        eager=True,
        torch_version=(1, 8),
    ),
    _context(
        ("rtx-3090",),
        256 * _MIB,
        "https://github.com/invoke-ai/InvokeAI/issues/9413",
        f"{_BARE}; nvidia-smi, torch 2.7, driver 610",
        torch_version=(2, 7),
    ),
)


def loads_all_kernels(environment: Mapping[str, str], torch_version: Version) -> bool:
    """From torch 1.13 on (CUDA 11.7; pytorch/pytorch pull request 86509) kernels load when first used, unless
    ``CUDA_MODULE_LOADING=EAGER``."""
    return torch_version < (1, 13) or environment.get("CUDA_MODULE_LOADING") == "EAGER"


def contexts_of(
    gpu: str, environment: Mapping[str, str] = NO_ENVIRONMENT, torch_version: Version = (2, 13)
) -> tuple[Fact, ...]:
    """What a process holds on ``gpu`` for CUDA itself, and for all of PyTorch's kernels where they are loaded at the
    start, as somebody has measured it: readings of the release that is next below ``torch_version``, and those that
    do not say theirs."""
    eager = loads_all_kernels(environment, torch_version)
    alike = [context for context in _CONTEXTS if gpu in context.gpus and context.eager == eager]
    known = sorted({context.torch_version for context in alike if context.torch_version is not None})
    release = max((one for one in known if one <= torch_version), default=min(known, default=None))
    return tuple(context.fact for context in alike if context.torch_version in (None, release))


def cuda_context(
    gpu: str, environment: Mapping[str, str] = NO_ENVIRONMENT, torch_version: Version = (2, 13)
) -> Fact | None:
    """The smallest of ``contexts_of``; ``None`` without a measurement."""
    return min(contexts_of(gpu, environment, torch_version), key=lambda fact: fact.bytes, default=None)
