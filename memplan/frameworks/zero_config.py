"""What DeepSpeed's ``zero_optimization`` section decides, with its defaults (``runtime/zero/config.py``, 0.19.8).

Sizes are in elements unless a name says bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..plan.errors import PlanError

OffloadDevice = Literal["none", "cpu", "nvme"]

UNLIMITED = 2**63 - 1
"""``sys.maxsize``."""


@dataclass(frozen=True, slots=True)
class Zero:
    """One ``zero_optimization`` section, and what else of ``ds_config.json`` changes memory."""

    stage: int = 0
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    """Read by nothing where ``all_gather_into_tensor`` exists (``runtime/utils.py``, ``all_gather_dp_groups``)."""
    contiguous_gradients: bool = True
    overlap_comm: bool | None = None
    """``None``: true in stage 3 only (``overlap_comm_valid``)."""
    reduce_scatter: bool = True
    round_robin_gradients: bool = False
    sub_group_size: int = 1_000_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_model_persistence_threshold: int = UNLIMITED
    memory_efficient_linear: bool = True
    offload_optimizer: OffloadDevice = "none"
    offload_optimizer_pin: bool = True
    """PyTorch rounds pinned blocks up to a power of two (``ATen/core/CachingHostAllocator.h``); it is not counted."""
    offload_optimizer_ratio: float = 1.0
    offload_optimizer_buffer_count: int = 4
    offload_param: OffloadDevice = "none"
    offload_param_pin: bool = True
    offload_param_max_in_cpu: int = 1_000_000_000
    """nvme: elements of shards that stay on the host, per rank."""
    offload_param_buffer_count: int = 5
    offload_param_buffer_size: int = 100_000_000
    gradient_accumulation_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    """``data_types.grad_accum_dtype``; ``None``: that of the parameters (``engine.get_data_types``)."""
    gradient_clipping: float = 0.0
    groups: Literal["one", "decay"] = "one"
    """Parameter groups: one, or matrices and the rest (the Trainer's, where it makes the optimizer)."""

    @property
    def overlaps(self) -> bool:
        return self.stage == 3 if self.overlap_comm is None else self.overlap_comm


def check_zero(zero: Zero) -> None:
    """Refuses what contradicts itself, or is not modelled. Field paths are those of ``ds_config.json``."""
    section = "zero_optimization"
    if zero.offload_param != "none" and zero.stage < 3:
        raise PlanError(f"{section}.offload_param", zero.offload_param, f"needs stage 3, not {zero.stage}")
    if zero.offload_optimizer != "none" and zero.stage < 1:
        raise PlanError(f"{section}.offload_optimizer", zero.offload_optimizer, "needs stage 1, 2 or 3, not 0")
    if zero.offload_optimizer == "nvme" and zero.stage < 3:
        raise PlanError(f"{section}.offload_optimizer", "nvme", f"needs stage 3, not {zero.stage}; cpu is possible")
    if zero.offload_optimizer_ratio != 1.0:
        problem = "must be 1: states that stay on the device are not modelled"
        raise PlanError(f"{section}.offload_optimizer.ratio", zero.offload_optimizer_ratio, problem)
    if not zero.reduce_scatter and zero.stage == 3:
        raise PlanError(f"{section}.reduce_scatter", False, "is not modelled in stage 3; leave it true")
    if not zero.memory_efficient_linear and zero.stage == 3:
        problem = "is not modelled: PyTorch's linear keeps every gathered weight until its backward; leave it true"
        raise PlanError(f"{section}.memory_efficient_linear", False, problem)
    if zero.reduce_bucket_size < 1:
        raise PlanError(f"{section}.reduce_bucket_size", zero.reduce_bucket_size, "must be at least 1")
    if zero.allgather_bucket_size % 2:
        raise PlanError(f"{section}.allgather_bucket_size", zero.allgather_bucket_size, "must be even")
