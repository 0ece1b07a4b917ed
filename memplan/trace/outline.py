"""Finds the layers of a model, and the norm behind them."""

from __future__ import annotations

import math

import torch

from .traced import Outline


def outline_of(model: torch.nn.Module) -> Outline:
    """Lists of equal modules that are in no other such list, and the norm that is registered behind the last."""
    modules = dict(model.named_modules())
    blocks: list[str] = []
    for name, module in modules.items():
        is_inside = any(name.startswith(f"{outer}.") for outer in blocks)
        if isinstance(module, torch.nn.ModuleList) and len(module) and not is_inside and _are_layers(module):
            blocks.append(name)
    parameters = sum(_elements(one) for one in model.parameters())
    return Outline(tuple(blocks), _norm_behind(model, blocks[-1]) if blocks else "", parameters)


def _elements(parameter: torch.Tensor) -> int:
    state = getattr(parameter, "quant_state", None)  # bitsandbytes packs two numbers in a byte
    return parameter.numel() if state is None else math.prod(state.shape)


def _are_layers(modules: torch.nn.ModuleList) -> bool:
    return len({type(one) for one in modules}) == 1 and any(True for _ in modules[0].parameters())


def _norm_behind(model: torch.nn.Module, blocks: str) -> str:
    path, _, name = blocks.rpartition(".")
    siblings = [child for child, _ in model.get_submodule(path).named_children()]
    for child in siblings[siblings.index(name) + 1 :]:
        if "Norm" in type(model.get_submodule(f"{path}.{child}".lstrip("."))).__name__:
            return f"{path}.{child}".lstrip(".")
    return ""
