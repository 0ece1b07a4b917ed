"""bitsandbytes' optimizers with 8-bit states, as transformers' Trainer makes them, on real tensors and on fake ones.

Maps of 8-bit values are read back when they are computed (``create_dynamic_map``), which fake tensors cannot be: there
they are any 256 numbers. An update is one operator, whose temporaries on a CPU are not followed: CUDA has none.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..optimizers import algorithm
from .job import Job

MAPS = ("dynamic", "udynamic")
"""Of signed and of unsigned values (``Optimizer8bit.fill_qmap``)."""


def eight_bit_optimizer(job: Job, parameters: list[Any]) -> torch.optim.Optimizer:
    """bitsandbytes' optimizer of the job's name. What overrides of another one named is forgotten."""
    library: Any = import_module("bitsandbytes.optim")
    library.GlobalOptimManager.get_instance().initialize()
    made = getattr(library, str(algorithm(job.optimizer).bitsandbytes))
    if not any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()):
        return _made(made, parameters, job)
    base: Any = library.optimizer.Optimizer8bit
    computed, base.fill_qmap = base.fill_qmap, _fill_with_any
    try:
        return _made(made, parameters, job)
    finally:
        base.fill_qmap = computed


def _made(kind: Any, parameters: list[Any], job: Job) -> torch.optim.Optimizer:
    return kind(parameters, lr=1e-3, weight_decay=job.weight_decay)  # type: ignore[no-any-return]


def _fill_with_any(optimizer: Any) -> None:
    for name in MAPS:
        optimizer.name2qmap[name] = torch.zeros(256)


def keep_embeddings(model: torch.nn.Module) -> None:
    """States of embeddings have 32 bits (``Trainer.get_optimizer_cls_and_kwargs``, ``create_optimizer``)."""
    library: Any = import_module("bitsandbytes.optim")
    manager = library.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
