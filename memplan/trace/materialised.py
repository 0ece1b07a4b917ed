"""Models of real tensors: made on ``meta`` where they can be, so that no rank ever holds more than its part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from .storages import local

DEVIATION = 0.02
"""Of weights' first values: GPT-2's and Llama's."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made now have parameters without memory; buffers are as ever."""
    register: Any = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    with patch.object(nn.Module, "register_parameter", registered):
        yield


def materialise(model: nn.Module, device: str) -> None:
    """Gives parameters and buffers on ``meta`` memory on ``device``."""
    whole: Any = model
    whole._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """First values: normally distributed matrices, biases of nothing, norms of ones."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        part = local(parameter)
        if part.dim() > 1:
            part.normal_(0.0, DEVIATION)
        else:
            part.fill_(0.0 if name.endswith("bias") else 1.0)
