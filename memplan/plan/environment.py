"""Environment variables that the estimate reads (``facts.py``, the allocator), and those that it cannot follow."""

from __future__ import annotations

READ = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
    "CUDA_MODULE_LOADING",
)

REFUSED = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "must be left out: it turns off the caching allocator, and memory without one is "
    "not modelled",
}
"""Why, by name."""
