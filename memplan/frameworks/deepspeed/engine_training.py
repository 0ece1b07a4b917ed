"""DeepSpeed's own engine around a model of transformers: built as a training script builds it, and iterated. What its
tensors are for is known by their names in the engine, or else by which function makes them."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ...plan.plan import ResolvedPlan
from ...tape.events import Category
from ...tape.program import Program
from ...trace.models import example_inputs, made, outline_of, randomise
from ...trace.places import Places
from ...trace.recording import BACKWARD, FORWARD, OPTIMIZER, SETUP, Place, Recording, Traced
from ...trace.step import Marking, Watch, environment
from ...trace.storages import DEVIATION, Follow, initialise, resizes_followed
from ...trace.substitutions import cuda_behaviour_of_real
from ...trace.surroundings import Surroundings
from ...values import replace
from .validating import EngineJob, WithDeepspeed

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


GLOO = 0.02
"""Seconds in which threads of gloo's let go of what they have sent: they need Python's lock for that."""
SHARED_MEMORY = "deepspeed_shm_comm"
"""An operator for inference, which is compiled and takes shared memory where the device is a CPU."""


@contextmanager
def engine_of(job: EngineJob, within: Surroundings) -> Iterator[EngineTraining]:
    """The engine on its rank, before the first iteration."""
    os.environ["DS_ACCELERATOR"] = within.device
    with ExitStack() as stack:
        stack.enter_context(environment(within))
        stack.enter_context(within.group(job.rank, job.ranks))
        if within.alone:
            ours = {"RANK": str(job.rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(job.ranks)}
            stack.enter_context(patch.dict(os.environ, ours))
        deepspeed: Any = import_module("deepspeed")
        stack.enter_context(_own_globals())
        deepspeed.init_distributed(verbose=False)
        stack.enter_context(cuda_behaviour_of_real() if within.device == "cpu" else nullcontext())
        training = EngineTraining(job, deepspeed, within)
        try:
            yield training
        finally:
            training.engine.destroy()


@contextmanager
def _own_globals() -> Iterator[None]:
    """DeepSpeed keeps process groups and the linear function that it replaced in variables of its modules, which the
    next engine of this process would find."""
    operators: Any = import_module("deepspeed.ops").__compatible_ops__
    init: Any = import_module("deepspeed.runtime.zero.partition_parameters").InsertPostInitMethodToModuleSubClasses
    with (
        patch.dict(operators, {SHARED_MEMORY: False}),
        patch.dict(vars(import_module("deepspeed.utils.groups"))),
        patch.dict(vars(import_module("deepspeed.comm.comm"))),
        patch.object(torch.nn.functional, "linear", torch.nn.functional.linear),
    ):
        try:
            yield
        finally:
            if hasattr(init, "linear_bk"):
                del init.linear_bk


class EngineTraining:
    """The engine with the inputs of a micro-batch."""

    def __init__(self, job: EngineJob, deepspeed: Any, within: Surroundings) -> None:
        self.job, self.within = job, within
        self.model = _model(job, deepspeed, within)
        with torch.device(within.device):
            self.inputs = example_inputs(job, self.model)
            randomise(self.inputs, self.model.config.vocab_size)
        self.parameters: list[Any] = list(self.model.parameters())
        self.engine, *_ = deepspeed.initialize(
            model=self.model, model_parameters=_groups(job, self.parameters), config=job.ds_config
        )

    def iterate(self, watch: Watch) -> None:
        """Every micro-batch and the step."""
        with self.within.iteration():
            self._iterate(watch)

    def _iterate(self, watch: Watch) -> None:
        last = self.job.microbatches - 1
        for microbatch in range(self.job.microbatches):
            watch.begins(FORWARD, microbatch)
            loss = self.engine(**self.inputs).loss
            watch.begins(BACKWARD, microbatch)
            with self._reduction(watch, microbatch):
                self.engine.backward(loss)
            if self.within.lost is not None:
                self.within.lost(loss.detach())
            del loss
            watch.accumulated(self.parameters)
            if microbatch == last:
                watch.begins(OPTIMIZER, last)
            self.engine.step()

    def evaluate(self) -> None:
        """A forward pass alone."""
        self.engine(**self.inputs)

    @contextmanager
    def _reduction(self, watch: Watch, microbatch: int) -> Iterator[None]:
        """At stages 0 and 1 gradients are cast and reduced behind a backward pass, in ``engine.backward``; here, as in
        the estimate, that is of the step."""
        if self.job.stage > 1:
            yield
            return
        epilogue = self.engine._backward_epilogue

        def reduced() -> None:
            watch.accumulated(self.parameters)
            watch.begins(OPTIMIZER, microbatch)
            epilogue()

        with patch.object(self.engine, "_backward_epilogue", reduced):
            yield


def _model(job: EngineJob, deepspeed: Any, within: Surroundings) -> Any:
    """With values, and in its shards from the start where it is ZeRO-3."""
    if job.stage < 3:
        with torch.device(within.device):
            model = made(job)
            initialise(model, seed=0)
        torch.manual_seed(job.rank)
        return model
    with deepspeed.zero.Init(config_dict_or_path=job.ds_config):
        sharded: Any = made(job)
    torch.manual_seed(job.rank)
    for name, parameter in sharded.named_parameters():
        if len(parameter.ds_shape) > 1:
            parameter.ds_tensor.normal_(0.0, DEVIATION)
        else:
            parameter.ds_tensor.fill_(0.0 if name.endswith("bias") else 1.0)
    return sharded


def _groups(job: EngineJob, parameters: list[Any]) -> list[Any]:
    """As transformers' Trainer makes them, where it makes the optimizer; a matrix is one before it is sharded, too."""
    if job.groups == "one":
        return parameters
    decay = [one for one in parameters if len(getattr(one, "ds_shape", one.shape)) > 1]
    rest = [one for one in parameters if len(getattr(one, "ds_shape", one.shape)) <= 1]
    return [{"params": decay}, {"params": rest, "weight_decay": 0.0}]


class _Place:
    """Where the engine is, from when there is a model."""

    def __init__(self) -> None:
        self.places: Places | None = None

    def __call__(self) -> Place:
        return SETUP if self.places is None else self.places()


def followed_engine(job: EngineJob, within: Surroundings) -> Traced:
    """An iteration of the engine, storage by storage: from the making of the model on, since the engine's own tensors
    are views of others."""
    recording, place = Recording(), _Place()
    follow = Follow(recording, place, device=within.device, fake=False)
    with follow, resizes_followed(follow), categories_of_engine(follow):
        with torch.device(within.device):
            follow.calibrate()
        follow.host = True
        with engine_of(job, within) as training:
            follow.host = False
            outline = replace(outline_of(training.model), parameters=sum(map(_elements, training.parameters)))
            for buffer in training.model.buffers():
                follow.adopt(buffer, "buffer", Category.BUFFERS)
            for name, tensor in training.inputs.items():
                follow.adopt(tensor, name, Category.INPUTS)
            for _ in range(within.warmup):
                training.iterate(Watch())
            gc.collect()
            place.places = places = Places(training.model)
            mark_kept(training, follow)
            with places.followed():
                training.iterate(_EngineMarking(places, follow))
            gc.collect()
            follow.close()
            vocab = training.model.config.vocab_size
    return Traced(recording.categorised(vocab), outline)


class _EngineMarking(Marking):
    """Scalars of the engine's own step are numbers of Python's on a GPU, or stay on the host. What only cycles of
    references hold, gradients at times, ends with a phase at the latest."""

    def begins(self, phase: str, microbatch: int) -> None:
        gc.collect()
        time.sleep(GLOO)
        super().begins(phase, microbatch)
        self.follow.host = phase == OPTIMIZER

    def accumulated(self, parameters: Any) -> None:
        super().accumulated([one for one in parameters if one.grad is not None and one.grad.numel()])


def _elements(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def training_of(plan: ResolvedPlan, rank: int, within: Surroundings) -> AbstractContextManager[EngineTraining]:
    """The plan's model on ``rank`` in its engine, before the first iteration."""
    return engine_of(WithDeepspeed(plan, plan).job(rank), within)


def followed(plan: ResolvedPlan, rank: int, program: Program, within: Surroundings) -> Traced:
    """An iteration event by event, behind those that warm up."""
    return followed_engine(WithDeepspeed(plan, plan).job(rank), within)
