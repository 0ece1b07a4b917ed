"""A plan run by Megatron-Core's own code: ``GPTModel``, its DistributedDataParallel, optimizer and schedule; and what
``pretrain_gpt.py`` of Megatron-LM brings to it, which has no training loop: batches and the loss.

Built and stepped as ``megatron/training/training.py`` does (``get_model``, ``setup_model_and_optimizer``,
``train_step``), which is no part of Megatron-Core.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what is not installed: apex, Transformer Engine
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        TorchFullyShardedDataParallel,
        TorchFullyShardedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.pipeline_parallel import p2p_communication, schedules
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import get_batch_on_this_cp_rank

from ...plan.plan import ResolvedPlan
from ...trace.recording import BACKWARD, BETWEEN, FORWARD, OPTIMIZER
from ...trace.step import Watch
from ...trace.storages import Follow
from ...trace.surroundings import Surroundings
from .core_settings import POSITIONS, ddp_config, layer_spec, on_cpu, optimizer_config, transformer_config
from .from_plan import padded_vocab

FIRST, LAST = ("position_ids", "tokens"), ("labels", "loss_mask")
MASK = "attention_mask"
Batch = dict[str, torch.Tensor]

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
"""Collectives begin before the products that they are to overlap with (``tensor_parallel/layers.py``)."""


def host_batch(plan: ResolvedPlan) -> Batch:
    """A micro-batch of random tokens as a data loader collates it on the host, the same on all ranks: of whole
    sequences. Nothing follows it, as nothing does on a GPU."""
    with _disable_current_modes():
        return _collated(plan)


def _collated(plan: ResolvedPlan) -> Batch:
    b, s = plan.batch.mbs, plan.batch.seq
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, plan.model.vocab, (b, s + 1), generator=generator)
    batch = {
        "tokens": rows[:, :-1].contiguous(),
        "labels": rows[:, 1:].contiguous(),
        "loss_mask": torch.ones(b, s),
        "position_ids": torch.arange(s).repeat(b, 1),
    }
    if plan.megatron.attention_mask_in_dataloader:
        batch[MASK] = torch.ones(s, s, dtype=torch.bool).triu(1).repeat(b, 1, 1, 1)
    return batch


class Batches:
    """``get_batch`` for one chunk of layers: the first rank of a tensor-parallel group has all of the batch on its
    device, then gives the others what a stage of theirs needs (``get_batch_on_this_tp_rank``)."""

    def __init__(
        self, host: Batch, device: str, arrived: Callable[[Batch], None] | None, *, first: bool, last: bool
    ) -> None:
        self.host, self.device, self.first, self.last = host, device, first, last
        self.arrived = arrived
        """Is shown what stays of a micro-batch."""
        self.group = parallel_state.get_tensor_model_parallel_group()
        self.source = parallel_state.get_tensor_model_parallel_src_rank()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """What the chunk's stage takes part in; nothing for one in the middle."""
        if not (self.first or self.last):
            return {}
        wanted = [name for name in self.host if self._is_wanted(name)]
        if self.group.rank() == 0:
            whole = {name: self._arrived(tensor) for name, tensor in self.host.items()}
        else:
            whole = {
                name: torch.empty(self.host[name].shape, dtype=self.host[name].dtype, device=self.device)
                for name in wanted
            }
        for name in wanted:
            if self.group.size() > 1:
                torch.distributed.broadcast(whole[name], self.source, group=self.group)
        cut = {name: whole[name] for name in wanted}
        del whole
        batch: Batch = get_batch_on_this_cp_rank(cut)
        if self.arrived is not None:
            self.arrived(batch)
        return batch

    def _arrived(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if self.device == "cpu" else tensor.to(self.device, non_blocking=True)

    def _is_wanted(self, name: str) -> bool:
        return name == MASK or (self.first and name in FIRST) or (self.last and name in LAST)


def forward_step(batches: Batches, model: Any) -> tuple[torch.Tensor, Any]:
    """``forward_step``: what a schedule calls for every micro-batch of a chunk, and the loss function behind it."""
    batch = next(batches)
    tokens, positions, mask = batch.get("tokens"), batch.get("position_ids"), batch.get(MASK)
    labels, loss_mask = batch.get("labels"), batch.get("loss_mask")
    del batch
    output = model(tokens, positions, mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss_of, loss_mask)


def loss_of(loss_mask: Any, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """``loss_func``: the loss summed over tokens, their number, and both for the log."""
    losses, mask = output.view(-1).float(), loss_mask.view(-1).float()
    loss = torch.sum(losses * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    report = torch.cat([loss.clone().detach().view(1), tokens.view(1)])
    return loss, tokens, {"lm loss": report}


@contextmanager
def training_of(
    plan: ResolvedPlan, rank: int, within: Surroundings, follow: Follow | None = None
) -> Iterator[MegatronTraining]:
    """The chunks of ``rank``, with buffers and optimizer, before the first iteration."""
    layout = plan.layout
    ranks = layout.tp * layout.cp * layout.dp * layout.pp
    on_host = on_cpu(follow) if within.device == "cpu" else nullcontext()
    zeros = received_zeros() if within.alone else nullcontext()
    with warnings.catch_warnings(), within.group(rank, ranks), on_host, zeros:
        warnings.simplefilter("ignore")
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            num_distributed_optimizer_instances=plan.megatron.distributed_optimizer_instances,
            distributed_timeout_minutes=max(1, round(within.seconds / 60)),
            create_gloo_process_groups=False,
        )
        try:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            tensor_parallel.model_parallel_cuda_manual_seed(1234 + 100 * stage)
            yield MegatronTraining(plan, within)
        finally:
            parallel_state.destroy_model_parallel()


@contextmanager
def received_zeros() -> Iterator[None]:
    """What stages that are not there would have sent is zeros, of which everything is finite."""

    def zeroed(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def exchanged(**tensors: Any) -> Any:
            for name in ("tensor_recv_prev", "tensor_recv_next"):
                if tensors[name] is not None:
                    tensors[name].detach().zero_()
            return exchange(**tensors)

        return exchanged

    with (
        patch.object(p2p_communication, "_p2p_ops", zeroed(p2p_communication._p2p_ops)),
        patch.object(p2p_communication, "_batched_p2p_ops", zeroed(p2p_communication._batched_p2p_ops)),
    ):
        yield


class Sharded(TorchFullyShardedDataParallel):  # type: ignore[misc]
    """FSDP2, whose gradients are reduced in backward: release 0.16 has no argument for what finalising asks of it."""

    def finish_grad_sync(self, *_: Any, **__: Any) -> None:
        """Nothing is left to do."""


class MegatronTraining:
    """A rank's chunks of layers, each in its DistributedDataParallel, their optimizer, and the schedule."""

    def __init__(self, plan: ResolvedPlan, within: Surroundings) -> None:
        layout = plan.layout
        self.plan, self.within = plan, within
        self.microbatches = plan.microbatches
        self.host = host_batch(plan)
        self.config = transformer_config(plan)
        self.models = [self._chunk(at) for at in range(layout.vpp)]
        self.chunks = [self._wrapped(model, at) for at, model in enumerate(self.models)]
        if layout.dp > 1 and plan.megatron.torch_fsdp == "none":
            for chunk in self.chunks:
                chunk.broadcast_params()
        self.optimizer = get_megatron_optimizer(optimizer_config(plan), self.chunks, use_gloo_process_groups=False)
        self._connect()
        self.schedule = schedules.get_forward_backward_func()

    def _chunk(self, at: int) -> GPTModel:
        """``model_provider`` and the move to the device."""
        plan, spec = self.plan, self.plan.model
        vpp = at if plan.layout.vpp > 1 else None
        model = GPTModel(
            self.config,
            layer_spec(plan),
            padded_vocab(plan),
            spec.positions_max,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vpp),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vpp),
            share_embeddings_and_output_weights=spec.tied_embeddings,
            position_embedding_type=POSITIONS[spec.positions],
            vp_stage=vpp,
        )
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        return model if self.within.device == "cpu" else model.cuda()

    def _wrapped(self, model: GPTModel, at: int) -> Any:
        """``get_model``: in 16 bits, and over gradient buffers or in shards; made on a stream of its own."""
        inner = Float16Module(self.config, model) if self.config.fp16 or self.config.bf16 else model
        if self.within.device == "cpu":
            return self._parallel(inner, at)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            made = self._parallel(inner, at)
        torch.cuda.current_stream().wait_stream(stream)
        return made

    def _parallel(self, inner: Any, at: int) -> Any:
        sharded = self.plan.megatron.torch_fsdp
        if sharded == "none":
            settings = ddp_config(self.plan, checks=not self.within.alone)
            return DistributedDataParallel(self.config, settings, inner, disable_bucketing=at > 0)
        settings = TorchFullyShardedDataParallelConfig(reshard_after_forward=sharded == "reshard")
        return Sharded(self.config, settings, inner)

    def _connect(self) -> None:
        """``train``: what schedules call."""
        config, megatron = self.config, self.plan.megatron
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if megatron.overlap_grad_reduce:
            config.no_sync_func = _one_or_all([chunk.no_sync for chunk in self.chunks])
            if self.plan.layout.pp > 1:
                config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in self.chunks])

    def iterate(self, watch: Watch) -> None:
        """``train_step``: every micro-batch and the step."""
        with self.within.iteration():
            self._train_step(watch)

    def _train_step(self, watch: Watch) -> None:
        watch.begins(BETWEEN, 0)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with told(watch, self.chunks):
            reports = self._run(watch, forward_only=False)
        watch.begins(OPTIMIZER, self.microbatches - 1)
        self.optimizer.step()
        self._tell(reports)

    def evaluate(self) -> None:
        """``evaluate``: the schedule of forward passes alone."""
        for chunk in self.chunks:
            chunk.eval()
        self._run(Watch(), forward_only=True)
        for chunk in self.chunks:
            chunk.train()

    def _run(self, watch: Watch, *, forward_only: bool) -> list[dict[str, torch.Tensor]]:
        plan = self.plan
        arrived = watch.batch if isinstance(watch, InChunks) else None

        def step(batches: Batches, model: Any) -> Any:
            result = forward_step(batches, model)
            if isinstance(watch, InChunks):
                watch.returned()
            return result

        found: list[dict[str, torch.Tensor]] = self.schedule(
            forward_step_func=step,
            data_iterator=[self._batches(model, arrived) for model in self.models],
            model=self.chunks,
            num_microbatches=self.microbatches,
            seq_length=plan.batch.seq,
            micro_batch_size=plan.batch.mbs,
            decoder_seq_length=plan.batch.seq,
            forward_only=forward_only,
        )
        return found

    def _batches(self, model: Any, arrived: Callable[[Batch], None] | None) -> Batches:
        ends = {"first": model.pre_process, "last": model.post_process}
        return Batches(self.host, self.within.device, arrived, **ends)

    @property
    def optimizers(self) -> list[Any]:
        """torch's, apex's or Transformer Engine's, within those of Megatron-Core."""
        return [one.optimizer for one in self.optimizer.chained_optimizers if one.optimizer is not None]

    def main_parameters(self) -> Iterator[torch.Tensor]:
        """What the optimizers step."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _tell(self, reports: Sequence[dict[str, torch.Tensor]]) -> None:
        """Of each micro-batch on the last stage: sum and number of tokens."""
        if self.within.lost is not None:
            for report in reports:
                total, tokens = report["lm loss"]
                self.within.lost((total / tokens).detach())


def _one_or_all(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


class InChunks(Watch):
    """Looks on, and knows which of a rank's chunks of layers a pass is of."""

    def __init__(self) -> None:
        self.chunk = 0

    def batch(self, batch: Batch) -> None:
        """A micro-batch has arrived."""

    def returned(self) -> None:
        """A chunk has run forward; its loss, if it is the last, comes now."""


@contextmanager
def told(watch: Watch, chunks: Sequence[Any]) -> Iterator[None]:
    """``watch`` is told of the passes of a schedule. Forward passes of a chunk come in the order of micro-batches;
    backward ones are of what the forward pass gave."""
    numbers = {id(chunk): number for number, chunk in enumerate(chunks)}
    counts = [0] * len(chunks)
    given: dict[int, tuple[int, int]] = {}

    def begins(phase: str, chunk: int, microbatch: int) -> None:
        if isinstance(watch, InChunks):
            watch.chunk = chunk
        watch.begins(phase, microbatch)

    def forward(function: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        chunk = numbers[id(model)]
        microbatch, counts[chunk] = counts[chunk], counts[chunk] + 1

        def called(*given: Any) -> Any:
            begins(FORWARD, chunk, microbatch)
            return function(*given)

        result = of_forward(called, data, model, *args, **kwargs)
        begins(BETWEEN, chunk, microbatch)
        given[id(_only(result[0]))] = chunk, microbatch
        return result

    def backward(received: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        chunk, microbatch = given.pop(id(_only(output)))
        begins(BACKWARD, chunk, microbatch)
        result = of_backward(received, output, *args, **kwargs)
        begins(BETWEEN, chunk, microbatch)
        return result

    of_forward, of_backward = schedules.forward_step, schedules.backward_step
    with patch.object(schedules, "forward_step", forward), patch.object(schedules, "backward_step", backward):
        yield


def _only(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, list) else tensors
