"""What ``pretrain_gpt.py`` of Megatron-LM brings to Megatron-Core, which has no training loop: batches and the loss."""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from torch.utils._python_dispatch import _disable_current_modes

from ...plan.plan import Plan

FIRST, LAST = ("position_ids", "tokens"), ("labels", "loss_mask")
MASK = "attention_mask"
Batch = dict[str, torch.Tensor]


def host_batch(plan: Plan) -> Batch:
    """A micro-batch of random tokens as a data loader collates it on the host, the same on all ranks: of whole
    sequences. Nothing follows it, as nothing does on a GPU."""
    with _disable_current_modes():
        return _collated(plan)


def _collated(plan: Plan) -> Batch:
    b, s = plan.batch.mbs, plan.batch.seq
    assert s is not None
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
