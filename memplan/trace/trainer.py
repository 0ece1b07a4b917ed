"""What transformers' Trainer does around a model that it leaves as it is, with its own and Accelerate's functions.

transformers 5.23, ``trainer.py``: ``_run_epoch``, ``_clip_grad_norm``, ``create_optimizer``. The loop itself (logs,
callbacks, the data loader, evaluation) is not run.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any
from warnings import catch_warnings, simplefilter

import torch

from ..tape import Category
from .job import Job
from .models import example_inputs
from .storages import Follow


def imported(job: Job) -> None:
    """Before operators are followed: these modules make tensors when they are imported."""
    if job.trainer is not None:
        with catch_warnings():
            simplefilter("ignore")
            import_module("accelerate.utils.operations")
            import_module("transformers.trainer")


def groups(job: Job, model: Any, parameters: list[torch.nn.Parameter]) -> list[Any]:
    """``parameters`` as the optimizer takes them: those whose weights decay and the rest (``create_optimizer``)."""
    if job.trainer is None:
        return parameters
    from transformers import Trainer

    decay = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    return [
        {"params": [one for name, one in named if name in decay], "weight_decay": job.weight_decay},
        {"params": [one for name, one in named if name not in decay], "weight_decay": 0.0},
    ]


def variables(job: Job, model: Any, follow: Follow) -> list[torch.Tensor]:
    """What variables of ``_run_epoch`` hold: the loss so far, the last norm, a count of tokens, and inputs of the
    iteration's other micro-batches (``get_batch_samples``)."""
    if job.trainer is None:
        return []
    numbers = [torch.zeros(()), torch.zeros(()), torch.zeros((), dtype=torch.int64)]
    for number in numbers:
        follow.adopt(number, "trainer", Category.BUFFERS)
    batches = [one for _ in range(job.trainer - 1) for one in example_inputs(job, model).values()]
    for tensor in batches:
        follow.adopt(tensor, "inputs", Category.INPUTS)
    return numbers + batches


def converting(job: Job, model: Any) -> Any:
    """What calls ``model``: its outputs are cast to fp32 behind autocast (``Accelerator.prepare_model``)."""
    if job.trainer is None or job.autocast is None:
        return model
    operations: Any = import_module("accelerate.utils.operations")
    return operations.convert_outputs_to_fp32(model)


def clip(job: Job, optimizer: torch.optim.Optimizer) -> None:
    """``clip_grad_norm_`` over all gradients, with the foreach kernels that CUDA tensors have."""
    if job.trainer is not None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
