"""Environment variables: those that the estimate reads, those that change no memory, and those that it refuses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..frameworks import framework

if TYPE_CHECKING:
    from .plan import Plan

OF_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Which blocks requests get; the first goes before the second."""

READ = (
    *OF_ALLOCATOR,
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
    "CUDA_MODULE_LOADING",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_LL_BUFFSIZE",
    "NCCL_LL128_BUFFSIZE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_MIN_P2P_NCHANNELS",
    "NCCL_MAX_P2P_NCHANNELS",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_P2P_NVL_CHUNKSIZE",
    "NCCL_P2P_PCI_CHUNKSIZE",
    "NCCL_NVLS_ENABLE",
    "NCCL_NVLS_CHUNKSIZE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_RUNTIME_CONNECT",
    "NCCL_IB_DISABLE",
    "NCCL_NET",
    "NCCL_NET_GDR_LEVEL",
)
"""Variables that the estimate follows (``facts.py``, ``nccl.py``, the allocator,
``frameworks/megatron/from_plan.py``)."""

REFUSED = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "must be left out: it turns off the caching allocator, and memory without one is "
    "not modelled",
}
"""Why, by name."""

_IRRELEVANT = (
    r"CUDA_(?:DEVICE_MAX_CONNECTIONS|DEVICE_ORDER|VISIBLE_DEVICES|LAUNCH_BLOCKING|HOME|PATH|ROOT|VERSION"
    r"|CACHE_\w+|TOOLKIT_\w+|GRAPHS_USE_\w+)"
    r"|NCCL_(?:IB|NET|SOCKET|DEBUG|TIMEOUT|ASYNC|BLOCKING|TOPO|OOB|SHARP|UCX|COMM_ID|HOSTID|IGNORE|LAUNCH|CROSS"
    r"|ALGO\b|PROTO\b|CHECKS?|SET|GDR|GDRCOPY|P2P_LEVEL|SHM_DISABLE|DMABUF|RAS)\w*"
    r"|TORCH_(?:NCCL_|DIST|CPP_|CUDA_ARCH|EXTENSIONS|HOME|LOGS?\b|SHOW|TRACE|COMPILE_|FR_)\w*"
    r"|NVTE_(?:DEBUG\w*|NVTX_\w+|WARN\w*|PRINT\w*|(?:FWD|BWD|INF)_LAYERNORM_SM_MARGIN|EXT_MARGIN_SM"
    r"|BATCH_MHA_P2P_COMM|ALLOW_UNSAFE_PICKLE_EXTRA_STATE|TORCH_COMPILE|FRAMEWORK|BUILD_\w+|RELEASE_BUILD|FP8_DPA_BWD)"
)
"""How a machine is reached, what is logged, how many streams and multiprocessors are used: nothing allocates."""


def is_irrelevant(name: str) -> bool:
    """The variable ``name`` is known to change no memory."""
    return bool(re.fullmatch(_IRRELEVANT, name))


def is_followed(name: str, plan: Plan) -> bool:
    """The estimate of ``plan`` reads the variable ``name``, or a check has compared it with what it reads."""
    return name in READ or name in framework(plan.framework).supports.environment
