"""One training step of a transformers model on fake tensors, written down event by event."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..tape import Category
from .autocast import Scaler, cuda_autocast, cuda_lists, scaler_of, scaler_states
from .ddp import Replica, distributed, reducing
from .failures import UntraceableError, explained
from .fsdp_categories import categories_of_fsdp
from .job import Job
from .models import example_inputs, made
from .outline import outline_of
from .places import Places
from .ranks import rank_of, shard
from .recording import BACKWARD, EVALUATION, FORWARD, OPTIMIZER, Recording
from .storages import Follow, resizes_followed
from .substitutions import cuda_behaviour
from .traced import Traced
from .trainer import clip, converting, groups, imported, variables
from .tuning import dequantising, follow_frozen, tuned


def traced_step(job: Job, *, sums_in_place: bool = True, device: str = "cpu", evaluates: bool = False) -> Traced:
    """The step after the first applied one: optimizer states exist, gradients do not. ``evaluates``: a forward
    pass without a graph follows it, and the order in which gradients are ready is noted.

    The model's output, and with it the logits' variable, is gone before backward begins; gradients end with
    ``zero_grad`` behind the step. On fake tensors of ``device``: with ``cuda``, which PyTorch has to find, nothing is
    put in CUDA's place. ``UntraceableError`` where the model's code cannot run so.
    """
    imported(job)
    recording = Recording()
    lists = cuda_lists() if job.autocast is not None else nullcontext()
    with environment(), lists, rank_of(job) as mesh, FakeTensorMode(allow_non_fake_inputs=True), _on(device):
        model = tuned(job, made(job))
        outline = outline_of(model)
        shard(job, model, mesh)
        places = Places(model)
        follow = Follow(recording, places, sums_in_place=sums_in_place, device=device)
        named = categories_of_fsdp(follow) if job.fsdp is not None else nullcontext()
        with (
            follow,
            dequantising(job),
            reducing(job, follow) as reducer,
            resizes_followed(follow),
            named,
            places.followed(),
        ):
            follow.calibrate()
            try:
                ready = _run(job, Replica(job, model, reducer), follow, places, evaluates)
            except Exception as error:
                raise UntraceableError(explained(error)) from error
    return Traced(recording.categorised(getattr(model.config, "vocab_size", None) or 0), outline, ready=ready)


@contextmanager
def _on(device: str) -> Iterator[None]:
    """What is made is made on ``device``, and behaves as on a GPU."""
    with torch.device(device) if device == "cuda" else cuda_behaviour():
        yield


def _run(job: Job, replica: Replica, follow: Follow, places: Places, evaluates: bool) -> tuple[str, ...]:
    model: Any = replica.inner
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer, scaler = optimizer_of(job, groups(job, model, parameters)), scaler_of(job.autocast)
    inputs = example_inputs(job, model)
    _adopt(job, model, inputs, follow)
    held = variables(job, model, follow)
    if job.fsdp is not None or job.ddp is not None or scaler is not None:
        replica.settle(lambda: _first_iteration(job, replica.model, optimizer, inputs, follow, scaler))
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    update(job, optimizer, follow)
    _mark_states(job, optimizer, scaler, follow)
    gc.collect()
    ready: dict[str, None] = {}
    if evaluates:
        _note_ready(model, ready)
    for microbatch in range(job.microbatches):
        places.microbatch, places.phase = microbatch, FORWARD
        if job.fsdp is not None:
            model.set_requires_gradient_sync(job.fsdp.syncs_each or microbatch == job.microbatches - 1)
        with replica.synced(microbatch):
            loss = _loss(job, replica.model, inputs, scaler)
            places.phase = BACKWARD
            loss.backward()
            del loss
        for parameter in parameters:
            if parameter.grad is not None:
                follow.mark(parameter.grad, Category.GRADIENTS)
    places.phase = OPTIMIZER
    update(job, optimizer, follow, scaler)
    gc.collect()
    if evaluates:
        places.microbatch, places.phase = 0, EVALUATION
        model.eval()
        with torch.no_grad():
            _evaluated(job, model, inputs)
    follow.close()
    del held
    return tuple(ready)


def _note_ready(model: torch.nn.Module, ready: dict[str, None]) -> None:
    """Paths of parameters, in the order in which their gradients arrive for the first time."""
    named: Any = model.named_parameters()
    for name, parameter in named:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.setdefault(name))


def _adopt(job: Job, model: Any, inputs: dict[str, torch.Tensor], follow: Follow) -> None:
    """What is there before a step."""
    for parameter in model.parameters():
        follow.adopt(parameter, "parameter", Category.PARAMETERS)
    follow_frozen(job, model, follow)
    for buffer in model.buffers():
        follow.adopt(buffer, "buffer", Category.BUFFERS)
    for name, tensor in inputs.items():
        follow.adopt(tensor, name, Category.INPUTS)


def _mark_states(job: Job, optimizer: Any, scaler: Scaler | None, follow: Follow) -> None:
    """What the first step has left, of ``ZeroRedundancyOptimizer`` in the optimizer that it wraps."""
    for tensor in scaler_states(scaler):
        follow.mark(tensor, Category.BUFFERS)
    for state in getattr(optimizer, "optim", optimizer).state.values():
        for tensor in state.values():
            if isinstance(tensor, torch.Tensor) and is_followed(job, tensor):
                follow.mark(tensor, Category.OPTIMIZER_STATES)


def _first_iteration(
    job: Job,
    model: Any,
    optimizer: torch.optim.Optimizer,
    inputs: dict[str, torch.Tensor],
    follow: Follow,
    scaler: Scaler | None,
) -> None:
    """FSDP settles its streams and orders in the first pass, and keeps buffers from it; DDP its buckets; a scaler
    makes its numbers."""
    _loss(job, model, inputs, scaler).backward()
    update(job, optimizer, follow, scaler)


def _evaluated(job: Job, model: Any, inputs: dict[str, torch.Tensor]) -> None:
    with cuda_autocast(job.autocast):
        model(**inputs)


def _loss(job: Job, model: Any, inputs: dict[str, torch.Tensor], scaler: Scaler | None) -> Any:
    """Of one micro-batch; nothing else of the model's output is kept."""

    def run(**inputs: torch.Tensor) -> Any:
        with cuda_autocast(job.autocast):
            return model(**inputs)

    loss = converting(job, run)(**inputs).loss
    return loss if scaler is None else scaler.scale(loss)


def is_followed(job: Job, tensor: torch.Tensor) -> bool:
    return bool(tensor.dim()) or job.implementation == "fused"


def update(job: Job, optimizer: torch.optim.Optimizer, follow: Follow, scaler: Scaler | None = None) -> None:
    """``step()``, with what comes before it, and ``zero_grad()``; counters of steps are on the host unless fused."""
    if scaler is not None:
        scaler.unscale_(optimizer)
    clip(job, optimizer)
    follow.host, follow.reads_ones = job.implementation != "fused", True
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
    follow.host, follow.reads_ones = False, False
    if scaler is not None:
        scaler.update()
    optimizer.zero_grad()


def optimizer_of(job: Job, parameters: list[Any]) -> torch.optim.Optimizer:
    """torch's optimizer of the job's name."""
    how: dict[str, Any] = {"foreach": job.implementation == "foreach", "weight_decay": job.weight_decay}
    if job.optimizer != "adafactor":
        how["fused"] = job.implementation == "fused"
    if job.optimizer == "sgd":
        how |= {"lr": 1e-3, "momentum": job.momentum}
    return distributed(job.ddp, parameters, KINDS[job.optimizer], how)


KINDS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


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
