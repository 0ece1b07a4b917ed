"""Finds the layers of a model, and the norm behind them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from .traced import Buffer, Outline, Registered


def outline_of(model: torch.nn.Module) -> Outline:
    """Lists of equal modules that are in no other such list, and the norm that is registered behind the last."""
    modules = dict(model.named_modules())
    blocks: list[str] = []
    for name, module in modules.items():
        is_inside = any(name.startswith(f"{outer}.") for outer in blocks)
        if isinstance(module, torch.nn.ModuleList) and len(module) and not is_inside and _are_layers(module):
            blocks.append(name)
    parameters = sum(_elements(one) for one in model.parameters())
    norm = _norm_behind(model, blocks[-1]) if blocks else ""
    return Outline(tuple(blocks), norm, parameters, tuple(_parameters(model)), tuple(_buffers(model)))


def _parameters(model: torch.nn.Module) -> Iterator[Registered]:
    roles = _roles(model)
    for path, one in model.named_parameters():
        yield Registered(path, tuple(one.shape), _dtype(one), one.requires_grad, roles.get(id(one), ""))


def _buffers(model: torch.nn.Module) -> Iterator[Buffer]:
    """A storage that several share is there once."""
    seen = set()
    for path, one in model.named_buffers():
        key = one.untyped_storage()._cdata
        if key not in seen and one.numel():
            seen.add(key)
            yield Buffer(path, one.untyped_storage().nbytes(), _dtype(one))


def _roles(model: torch.nn.Module) -> dict[int, str]:
    """What optimizers treat apart: tables of embeddings, and the head, unless it is one of them."""
    module: Any = model
    result: dict[int, str] = {}
    for one in (module.get_output_embeddings(),) if hasattr(model, "get_output_embeddings") else ():
        result |= {id(one.weight): "head"} if hasattr(one, "weight") else {}
    words = module.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    for one in model.modules():
        if isinstance(one, torch.nn.Embedding):
            result[id(one.weight)] = "word" if one is words else "position"
    return result


def _dtype(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "bool": "uint8"}.get(name, name)


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
