"""What the engine's tensors are for: those that it keeps by their names in it, others by who makes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from ...tape import Category
from ...trace.storages import Follow

BUFFERS, GATHERED, GRADIENTS = Category.COMMUNICATION_BUFFERS, Category.GATHERED_PARAMETERS, Category.GRADIENTS
MAIN, PARAMETERS = Category.MAIN_PARAMETERS, Category.PARAMETERS

KEPT: dict[str, Category] = {
    "bit16_groups_flat": PARAMETERS,
    "fp16_groups_flat": PARAMETERS,
    "bf16_groups_flat": PARAMETERS,
    "lp_param_buffer": PARAMETERS,
    "single_partition_of_fp32_groups": MAIN,
    "fp32_partitioned_groups_flat": MAIN,
    "fp32_groups_flat_partition": MAIN,
    "fp32_groups_flat": MAIN,
    "fp32_groups": MAIN,
    "fp32_groups_gradients_flat": GRADIENTS,
    "grad_partitions_flat_buffer": GRADIENTS,
}
"""Attributes of ``DeepSpeedZeroOptimizer``, ``DeepSpeedZeroOptimizer_Stage3``, ``BF16_Optimizer``, ``FP16_Optimizer``
and ``FP16_UnfusedOptimizer``."""

MAKERS: dict[str, Category] = {
    "_all_gather_dtype": GATHERED,
    "_all_gather_coalesced": GATHERED,
    "_all_gather_sequential": GATHERED,
    "all_gather_coalesced": GATHERED,
    "_allgather_param": GATHERED,
    "_allgather_params_coalesced": GATHERED,
    "setup_buckets": BUFFERS,
    "allreduce_bucket": BUFFERS,
    "allreduce_no_retain": BUFFERS,
    "buffered_allreduce_fallback": BUFFERS,
    "reduce_scatter_coalesced": BUFFERS,
    "copy_grads_in_partition": GRADIENTS,
    "flatten_dense_tensors_aligned": GRADIENTS,
    "get_flat_partition": GRADIENTS,
    "_prepare_sub_group": GRADIENTS,
}
"""Functions of DeepSpeed's, by the innermost of which a tensor is known."""


def mark_kept(training: Any, follow: Follow) -> None:
    """What lies between iterations."""
    optimizer, basic = training.engine.optimizer, training.engine.basic_optimizer
    for parameter in training.parameters:
        if hasattr(parameter, "ds_tensor"):
            follow.adopt(parameter.ds_tensor, "shard", PARAMETERS)
            if parameter.numel():
                follow.adopt(parameter.data, "persistent", GATHERED)
        else:
            follow.adopt(parameter.data, "parameter", PARAMETERS)
    for name, category in KEPT.items():
        for tensor in _tensors(getattr(optimizer, name, None)):
            follow.adopt(tensor, name, category)
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        for tensor in _tensors(bucket.buffer):
            follow.adopt(tensor, "ipg_bucket", BUFFERS)
    for state in getattr(basic, "state", {}).values():
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                follow.adopt(tensor, name, Category.OPTIMIZER_STATES)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All in nested lists."""
    if isinstance(value, torch.Tensor):
        if value.numel() and value.device.type != "meta":
            yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


@contextmanager
def categories_of_engine(follow: Follow) -> Iterator[None]:
    """Storages that ``follow`` sees first in one of ``MAKERS`` are what it makes."""
    adopt = follow._adopt

    def told(tensor: torch.Tensor, name: str) -> None:
        known = tensor.untyped_storage()._cdata in follow._followed
        adopt(tensor, name)
        category = None if known or name == "foreign" else _by_maker()
        if category is not None:
            follow.suppose(tensor, category)

    with patch.object(follow, "_adopt", told):
        yield


def _by_maker() -> Category | None:
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name in MAKERS and "deepspeed" in code.co_filename:
            return MAKERS[code.co_name]
        frame = frame.f_back
    return None
