"""One training step of a transformers model on fake tensors, written down event by event, with what transformers'
Trainer does around a model that it leaves as it is, by its own and Accelerate's functions.

transformers 5.23, ``trainer.py``: ``_run_epoch``, ``_clip_grad_norm``, ``create_optimizer``. The Trainer's loop itself
(logs, callbacks, the data loader, evaluation) is not run.

bitsandbytes' optimizers with 8-bit states, as transformers' Trainer makes them, on real tensors and on fake ones.

Maps of 8-bit values are read back when they are computed (``create_dynamic_map``), which fake tensors cannot be: there
they are any 256 numbers. An update is one operator, whose temporaries on a CPU are not followed: CUDA has none.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest.mock import patch
from warnings import catch_warnings, simplefilter

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..optimizers import algorithm
from ..tape.events import Category
from .autocast import Scaler, cuda_autocast, cuda_lists, scaler_of, scaler_states
from .distributed import Replica, answered, categories_of_fsdp, distributed, rank_of, reducing, shard
from .job import Job
from .models import config_of, example_inputs, made, outline_of, randomise
from .places import Places, UntraceableError, explained
from .recording import BACKWARD, EVALUATION, FORWARD, OPTIMIZER, Outline, Recording, Traced
from .storages import Follow, initialise, local, materialise, resizes_followed
from .surroundings import FAKE, Surroundings
from .tuning import dequantising, follow_frozen, tuned

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


def traced_step(
    job: Job, *, sums_in_place: bool = True, evaluates: bool = False, within: Surroundings = FAKE
) -> Traced:
    """The step after the first applied one: optimizer states exist, gradients do not. ``evaluates``: a forward
    pass without a graph follows it, and the order in which gradients are ready is noted.

    The model's output, and with it the logits' variable, is gone before backward begins; gradients end with
    ``zero_grad`` behind the step. On fake CUDA tensors, which PyTorch has to find a GPU for, nothing is put in
    CUDA's place, nor on real ones. ``UntraceableError`` where the model's code cannot run so.
    """
    imported(job)
    recording = Recording()
    lists = cuda_lists() if job.autocast is not None and within.fake else nullcontext()
    with environment(within), lists, rank_of(job, within) as mesh, within.tensors():
        model, outline = sharded_model(job, mesh, within)
        places = Places(model)
        follow = Follow(recording, places, sums_in_place=sums_in_place, device=within.device, fake=within.fake)
        follow.vocab = getattr(model.config, "vocab_size", None) or 0
        named = categories_of_fsdp(follow) if job.fsdp is not None else nullcontext()
        with (
            follow,
            dequantising(job),
            reducing(job, follow, within) as reducer,
            resizes_followed(follow),
            named,
            places.followed(),
        ):
            follow.calibrate()
            try:
                ready = _run(job, Replica(job, model, reducer), follow, places, evaluates, within)
            except Exception as error:
                if not within.fake:
                    raise
                raise UntraceableError(explained(error)) from error
    return Traced(recording.categorised(follow.vocab), outline, ready=ready)


def sharded_model(job: Job, mesh: DeviceMesh | None, within: Surroundings) -> tuple[Any, Outline]:
    """The job's model, with values if it is real, in its shards. Weights that are tied have to be made whole: memory
    that comes later would untie them."""
    on_meta = not within.fake and job.fsdp is not None and not config_of(job).tie_word_embeddings
    whole, seed = made(job, on_meta=on_meta), mesh.get_rank() if mesh is not None else 0
    is_quantised = job.tuned is not None and job.tuned.four_bit is not None
    if is_quantised and not within.fake:
        initialise(whole, seed)
    model = tuned(job, whole)
    outline = outline_of(model)
    shard(job, model, mesh)
    if not within.fake:
        is_offloaded = job.fsdp is not None and job.fsdp.offload
        materialise(model, within.device, host=is_offloaded)
        initialise(model, seed)
    if is_quantised and within.device == "cuda":
        torch.cuda.empty_cache()  # weights are read and quantised one after another, not all at once as here
    return model, outline


@contextmanager
def transformers_training_of(job: Job, within: Surroundings) -> Iterator[Training]:
    """The job's model on its rank, with its optimizer, before the first iteration; nothing looks on."""
    with environment(within), rank_of(job, within) as mesh, within.tensors(), answered(job, within):
        model, _ = sharded_model(job, mesh, within)
        yield Training(job, Replica(job, model), within)


def _run(
    job: Job, replica: Replica, follow: Follow, places: Places, evaluates: bool, within: Surroundings
) -> tuple[str, ...]:
    model: Any = replica.inner
    training = Training(job, replica, within, follow)
    _adopt(job, model, training.inputs, follow)
    held = variables(job, model, follow)
    if within.fake:
        _settle(job, training, follow)
    else:
        replica.settle(lambda: training.iterate(Watch()), within.warmup)
    mark_states(job, training.optimizer, follow)
    for tensor in scaler_states(training.scaler):
        follow.mark(tensor, Category.BUFFERS)
    gc.collect()
    ready: dict[str, None] = {}
    if evaluates:
        _note_ready(model, ready)
        follow.notes_work = True
    training.iterate(Marking(places, follow))
    gc.collect()
    follow.notes_work = False
    if evaluates:
        places.microbatch, places.phase = 0, EVALUATION
        with torch.no_grad():
            training.evaluate()
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


def mark_states(job: Job, optimizer: Any, follow: Follow) -> None:
    """What the first step has left, of ``ZeroRedundancyOptimizer`` in the optimizer that it wraps."""
    for state in getattr(optimizer, "optim", optimizer).state.values():
        for tensor in state.values():
            if isinstance(tensor, torch.Tensor) and is_followed(job, tensor):
                follow.mark(tensor, Category.OPTIMIZER_STATES)


def _settle(job: Job, training: Training, follow: Follow) -> None:
    """FSDP settles its streams and orders in the first pass, and keeps buffers from it; DDP its buckets; a scaler
    makes its numbers. Then a step of any gradients makes an optimizer's states."""

    def iteration() -> None:
        training.loss().backward()
        update(job, training.optimizer, follow, training.scaler)

    if job.fsdp is not None or job.ddp is not None or training.scaler is not None:
        training.replica.settle(iteration)
    for parameter in training.parameters:
        parameter.grad = torch.empty_like(parameter)
    update(job, training.optimizer, follow)


def mark_gradients(parameters: Sequence[torch.nn.Parameter], follow: Follow) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            follow.mark(parameter.grad, Category.GRADIENTS)


class Watch:
    """What looks on while an iteration runs; this one does not."""

    def begins(self, phase: str, microbatch: int) -> None:
        """Forward or backward of a micro-batch, or the optimizer's step."""

    def accumulated(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """A backward pass has ended, and left gradients."""


class Marking(Watch):
    """Tells a trace where the iteration is, and what gradients are."""

    def __init__(self, places: Places, follow: Follow) -> None:
        self.places, self.follow = places, follow

    def begins(self, phase: str, microbatch: int) -> None:
        self.places.microbatch, self.places.phase = microbatch, phase

    def accumulated(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        mark_gradients(parameters, self.follow)


class Training:
    """A model with its optimizer and the inputs of a micro-batch."""

    def __init__(self, job: Job, replica: Replica, within: Surroundings, follow: Follow | None = None) -> None:
        self.job, self.replica, self.within, self.follow = job, replica, within, follow
        model: Any = replica.inner
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        optimizer = eight_bit_optimizer if algorithm(job.optimizer).eight_bit else optimizer_of
        self.optimizer = optimizer(job, groups(job, model, self.parameters))
        if job.embeddings_32bit:
            keep_embeddings(model)
        self.scaler = scaler_of(job.autocast, within.device)
        self.inputs = example_inputs(job, model)
        if not within.fake:
            randomise(self.inputs, model.config.vocab_size)

    def iterate(self, watch: Watch) -> None:
        """Every micro-batch and the step."""
        with self.within.iteration():
            self._iterate(watch)

    def _iterate(self, watch: Watch) -> None:
        job, model = self.job, self.replica.inner
        last = job.microbatches - 1
        for microbatch in range(job.microbatches):
            watch.begins(FORWARD, microbatch)
            if job.fsdp is not None:
                model.set_requires_gradient_sync(job.fsdp.syncs_each or microbatch == last)
            with self.synced(microbatch):
                loss = self.loss()
                watch.begins(BACKWARD, microbatch)
                loss.backward()
                if self.within.lost is not None:
                    self.within.lost(local(loss.detach()))
                del loss
            watch.accumulated(self.parameters)
        watch.begins(OPTIMIZER, last)
        update(job, self.optimizer, self.follow, self.scaler)

    def synced(self, microbatch: int) -> AbstractContextManager[object]:
        """Around forward and backward of a micro-batch."""
        return self.replica.synced(microbatch)

    def loss(self) -> Any:
        """Of one micro-batch; nothing else of the model's output is kept."""
        loss = converting(self.job, self._forward)(**self.inputs).loss
        return loss if self.scaler is None else self.scaler.scale(loss)

    def evaluate(self) -> None:
        """A forward pass of the model alone, in evaluation mode from here on."""
        self.replica.inner.eval()
        with cuda_autocast(self.job.autocast, self.within.device):
            self.replica.inner(**self.inputs)

    def _forward(self, **inputs: torch.Tensor) -> Any:
        with cuda_autocast(self.job.autocast, self.within.device):
            return self.replica.model(**inputs)


def is_followed(job: Job, tensor: torch.Tensor) -> bool:
    return bool(tensor.dim()) or job.implementation == "fused"


def update(job: Job, optimizer: torch.optim.Optimizer, follow: Follow | None, scaler: Scaler | None = None) -> None:
    """``step()``, with what comes before it, and ``zero_grad()``; counters of steps are on the host unless fused."""
    if scaler is not None:
        scaler.unscale_(optimizer)
    clip(job, optimizer)
    with counting(job, follow):
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
    optimizer.zero_grad()


@contextmanager
def counting(job: Job, follow: Follow | None) -> Iterator[None]:
    """While an optimizer steps under ``follow``, if there is one."""
    if follow is not None:
        follow.host, follow.reads_ones = job.implementation != "fused", True
    yield
    if follow is not None:
        follow.host, follow.reads_ones = False, False


def optimizer_of(job: Job, parameters: list[Any]) -> torch.optim.Optimizer:
    """torch's optimizer of the job's name."""
    optimizer = algorithm(job.optimizer)
    how: dict[str, Any] = {"foreach": job.implementation == "foreach", "weight_decay": job.weight_decay}
    if "fused" in optimizer.implementations:
        how["fused"] = job.implementation == "fused"
    if optimizer.has_momentum:
        how |= {"lr": 1e-3, "momentum": job.momentum}
    return distributed(job.ddp, parameters, getattr(torch.optim, str(optimizer.torch)), how)


@contextmanager
def environment(within: Surroundings = FAKE) -> Iterator[None]:
    """transformers on fake tensors as it runs on a GPU: fewer key heads are handed to the kernel as they are, and rows
    are of one sequence each, which ``find_packed_sequence_indices`` cannot see on fake tensors."""
    from transformers import masking_utils
    from transformers.utils import logging

    find = masking_utils.find_packed_sequence_indices

    def found_none(position_ids: torch.Tensor) -> None:
        find(position_ids)

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if not within.fake:
        yield
        return
    with (
        patch.dict(os.environ, {"TRANSFORMERS_SDPA_FORCE_GQA": "1"}),
        patch.object(masking_utils, "find_packed_sequence_indices", found_none),
    ):
        yield
