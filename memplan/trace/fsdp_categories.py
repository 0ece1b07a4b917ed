"""What ``fully_shard`` allocates, said at the place where it does: gathered parameters, buffers of collectives, and
gradients before they are reduced (``_fully_shard/_fsdp_param.py`` and ``_fsdp_collectives.py`` of torch 2.13)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group

from ..tape import Category
from .storages import Follow

BUFFERS, GATHERED, GRADIENTS = Category.COMMUNICATION_BUFFERS, Category.GATHERED_PARAMETERS, Category.GRADIENTS


@contextmanager
def categories_of_fsdp(follow: Follow) -> Iterator[None]:
    """While ``follow`` is told of them. A gradient's buffer is a gradient once its parameter has it."""
    parameter, collectives = _fsdp_param.FSDPParam, _fsdp_collectives.DefaultAllocMixin
    allocate, gathered = collectives.allocate, parameter.init_all_gather_outputs
    accumulated, inputs = parameter.to_accumulated_grad_if_needed, _fsdp_collectives._get_param_all_gather_inputs
    reduce = _fsdp_collectives.foreach_reduce

    def told(tensors: Any, category: Category) -> None:
        for tensor in tensors:  # a variable that ends here, before any of them may
            follow.suppose(tensor, category)

    def told_allocate(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = allocate(self, *args, **kwargs)
        follow.suppose(result, BUFFERS)
        return result

    def told_gathered(self: Any, *args: Any, **kwargs: Any) -> None:
        gathered(self, *args, **kwargs)
        told(self.all_gather_outputs, GATHERED)

    def told_inputs(*args: Any) -> Any:
        result = inputs(*args)
        for tensors in result:
            told(tensors, BUFFERS)
        return result

    def told_accumulated(self: Any) -> None:
        accumulated(self)
        if self.unsharded_accumulated_grad is not None:
            follow.suppose(self.unsharded_accumulated_grad, GRADIENTS)

    def told_reduce(parameters: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        told(gradients, GRADIENTS)
        return reduce(parameters, gradients, *args, **kwargs)

    with (
        patch.object(collectives, "allocate", told_allocate),
        patch.object(parameter, "init_all_gather_outputs", told_gathered),
        patch.object(parameter, "to_accumulated_grad_if_needed", told_accumulated),
        patch.object(_fsdp_collectives, "_get_param_all_gather_inputs", told_inputs),
        patch.object(_fsdp_param_group, "foreach_reduce", told_reduce),
    ):
        yield
