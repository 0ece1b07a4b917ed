"""Megatron-Core on a CPU: what it asks of CUDA, answered by the host.

Nothing is left out of an iteration for it; ``megatron_plan.ON_CPU`` names every place, for reports.
"""
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import random
from torch.overrides import TorchFunctionMode

from ...trace.storages import Follow
from ...trace.substitutions import cuda_behaviour_of_real

NUMBERS = {"torch.FloatTensor", "torch.HalfTensor", "torch.BFloat16Tensor"}
FACTORIES = frozenset((torch.tensor, torch.zeros, torch.ones, torch.empty, torch.full))


class _Device(TorchFunctionMode):
    """Tensors that are asked of a GPU are on the CPU. Single numbers that are asked of none are on a GPU's host, and do
    not count."""

    def __init__(self, follow: Follow | None) -> None:
        super().__init__()
        self.follow = follow

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
            if function is torch.tensor:  # copied to a GPU from the host
                return function(*args, **kwargs).clone()
        if self.follow is None or device is not None or function not in FACTORIES:
            return function(*args, **kwargs)
        before, self.follow.host = self.follow.host, True
        try:
            return function(*args, **kwargs)
        finally:
            self.follow.host = before


@contextmanager
def on_cpu(follow: Follow | None) -> Iterator[None]:
    """While Megatron-Core is built and runs on the host. What it compiles runs operator by operator."""
    type_of = torch.Tensor.type

    def typed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As a tensor on a GPU names its type, which optimizers tell parameters by."""
        name = type_of(tensor, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.") if name in NUMBERS else name

    def state_set(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    logger = logging.getLogger(random.__name__)
    level = logger.level
    changes: tuple[tuple[Any, str, Any], ...] = (
        (torch.cuda, "current_device", lambda: "cpu"),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state()),
        (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        (torch.Tensor, "type", typed),
        (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", state_set),
    )
    with ExitStack() as stack:
        logger.setLevel(logging.ERROR)  # of every state it says that it is the host's, too
        stack.callback(logger.setLevel, level)
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(cuda_behaviour_of_real())
        stack.enter_context(_Device(follow))
        yield
