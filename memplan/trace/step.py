"""One training step of a transformers model on fake tensors, written down event by event."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..tape import Category
from .job import Job
from .models import example_inputs, made
from .outline import outline_of
from .places import Places
from .ranks import rank_of, shard
from .recording import BACKWARD, EVALUATION, FORWARD, OPTIMIZER, Recording
from .storages import Follow, resizes_followed
from .substitutions import cuda_behaviour
from .traced import Traced


def traced_step(job: Job, *, sums_in_place: bool = True, evaluates: bool = False) -> Traced:
    """The step after the first applied one: optimizer states exist, gradients do not. ``evaluates``: a forward
    pass without a graph follows it, and the order in which gradients are ready is noted.

    The model's output, and with it the logits' variable, is gone before backward begins; gradients end with
    ``zero_grad`` behind the step.
    """
    recording = Recording()
    with environment(), rank_of(job) as mesh, FakeTensorMode(allow_non_fake_inputs=True), cuda_behaviour():
        model = made(job)
        outline = outline_of(model)
        shard(job, model, mesh)
        places = Places(model)
        follow = Follow(recording, places, sums_in_place=sums_in_place)
        with follow, resizes_followed(follow), places.followed():
            follow.calibrate()
            ready = _run(job, model, follow, places, evaluates)
    return Traced(recording.categorised(getattr(model.config, "vocab_size", None) or 0), outline, ready=ready)


def _run(job: Job, model: Any, follow: Follow, places: Places, evaluates: bool) -> tuple[str, ...]:
    parameters = [one for one in model.parameters() if one.requires_grad]
    for parameter in model.parameters():
        follow.adopt(parameter, "parameter", Category.PARAMETERS)
    for buffer in model.buffers():
        follow.adopt(buffer, "buffer", Category.BUFFERS)
    optimizer = optimizer_of(job, parameters)
    inputs = example_inputs(job, model)
    for name, tensor in inputs.items():
        follow.adopt(tensor, name, Category.INPUTS)
    if job.fsdp is not None:
        _first_iteration(job, model, optimizer, inputs, follow)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    _update(job, optimizer, follow)
    for state in optimizer.state.values():
        for tensor in state.values():
            if isinstance(tensor, torch.Tensor) and _is_followed(job, tensor):
                follow.mark(tensor, Category.OPTIMIZER_STATES)
    gc.collect()
    ready: dict[str, None] = {}
    if evaluates:
        _note_ready(model, ready)
    for microbatch in range(job.microbatches):
        places.microbatch, places.phase = microbatch, FORWARD
        if job.fsdp is not None:
            model.set_requires_gradient_sync(job.fsdp.syncs_each or microbatch == job.microbatches - 1)
        loss = model(**inputs).loss
        places.phase = BACKWARD
        loss.backward()
        del loss
        for parameter in parameters:
            if parameter.grad is not None:
                follow.mark(parameter.grad, Category.GRADIENTS)
    places.phase = OPTIMIZER
    _update(job, optimizer, follow)
    gc.collect()
    if evaluates:
        places.microbatch, places.phase = 0, EVALUATION
        model.eval()
        with torch.no_grad():
            model(**inputs)
    follow.close()
    return tuple(ready)


def _note_ready(model: torch.nn.Module, ready: dict[str, None]) -> None:
    """Paths of parameters, in the order in which their gradients arrive for the first time."""
    named: Any = model.named_parameters()
    for name, parameter in named:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.setdefault(name))


def _first_iteration(job: Job, model: Any, optimizer: Any, inputs: dict[str, torch.Tensor], follow: Follow) -> None:
    """FSDP settles its streams and orders in the first pass, and keeps buffers from it."""
    model(**inputs).loss.backward()
    _update(job, optimizer, follow)


def _is_followed(job: Job, tensor: torch.Tensor) -> bool:
    return bool(tensor.dim()) or job.implementation == "fused"


def _update(job: Job, optimizer: torch.optim.Optimizer, follow: Follow) -> None:
    """``step()`` and ``zero_grad()``; the counters of steps are on the host unless fused."""
    follow.host = job.implementation != "fused"
    optimizer.step()
    follow.host = False
    optimizer.zero_grad()


def optimizer_of(job: Job, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's optimizer of the job's name."""
    how: dict[str, Any] = {"foreach": job.implementation == "foreach", "weight_decay": job.weight_decay}
    if job.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=job.momentum, fused=job.implementation == "fused", **how)
    if job.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if job.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, fused=job.implementation == "fused", **how)
    return torch.optim.Adafactor(parameters, **how)


@contextmanager
def environment() -> Iterator[None]:
    """transformers as it runs on a GPU: fewer key heads are handed to the kernel as they are, and rows are of one
    sequence each, which ``find_packed_sequence_indices`` cannot see on fake tensors."""
    from transformers import masking_utils
    from transformers.utils import logging

    find = masking_utils.find_packed_sequence_indices

    def found_none(position_ids: torch.Tensor) -> None:
        find(position_ids)

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with (
        patch.dict(os.environ, {"TRANSFORMERS_SDPA_FORCE_GQA": "1"}),
        patch.object(masking_utils, "find_packed_sequence_indices", found_none),
    ):
        yield
