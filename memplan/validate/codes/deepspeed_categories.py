"""What the engine's tensors are for: those that it keeps by their names in it, others by who makes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
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

MAKERS: dict[tuple[str, str], Category] = {
    ("partition_parameters.py", "_all_gather_dtype"): GATHERED,
    ("partition_parameters.py", "_all_gather_coalesced"): GATHERED,
    ("partition_parameters.py", "_all_gather_sequential"): GATHERED,
    ("partition_parameters.py", "all_gather_coalesced"): GATHERED,
    ("partition_parameters.py", "wait"): GATHERED,
    ("coalesced_collectives.py", "reduce_scatter_coalesced"): BUFFERS,
    ("stage_1_and_2.py", "setup_buckets"): BUFFERS,
    ("stage_1_and_2.py", "allreduce_bucket"): BUFFERS,
    ("stage_1_and_2.py", "copy_grads_in_partition"): GRADIENTS,
    ("stage_1_and_2.py", "step"): GRADIENTS,
    ("stage3.py", "_prepare_fp32_grad_for_sub_group"): GRADIENTS,
    ("bf16_optimizer.py", "_update_hp_grad"): GRADIENTS,
    ("engine.py", "allreduce_bucket"): BUFFERS,
    ("fused_optimizer.py", "step"): GRADIENTS,
    ("fused_optimizer.py", "<listcomp>"): GRADIENTS,
    ("unfused_optimizer.py", "step"): GRADIENTS,
}
"""Of functions of DeepSpeed's by file and name: the innermost that is running when a storage appears is its maker."""

WRAPPER = "nvtx.py"
"""Calls for others: ``instrument_w_nvtx(torch.cat)``."""
OPTIMIZERS = "/torch/optim/"
"""What these make is temporary, whoever calls them."""


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
    adopt, package = follow._adopt, _package()

    def told(tensor: torch.Tensor, name: str) -> None:
        known = tensor.untyped_storage()._cdata in follow._followed
        adopt(tensor, name)
        category = None if known or name == "foreign" else _by_maker(package)
        if category is not None:
            follow.suppose(tensor, category)

    with patch.object(follow, "_adopt", told):
        yield


def _package() -> str:
    """The folder of DeepSpeed's code, with a slash."""
    found = find_spec("deepspeed")
    assert found is not None
    assert found.origin is not None
    return f"{Path(found.origin).parent}/"


def _by_maker(package: str) -> Category | None:
    frame: Any = sys._getframe(2)
    while frame is not None:
        path, function = frame.f_code.co_filename, frame.f_code.co_name
        file = path.rpartition("/")[2]
        if path.startswith(package) and file != WRAPPER:
            return MAKERS.get((file, function))
        if OPTIMIZERS in path:
            return None
        frame = frame.f_back
    return None
