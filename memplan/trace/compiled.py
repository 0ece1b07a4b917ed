"""torchtitan's layers as ``torch.compile`` runs them, learnt: what each direction makes and lets go of, in sizes that
have names (``layers/compiled.json``).

``torchtitan/parallelisms/parallelize_llama.py``, ``apply_compile``: every ``TransformerBlock`` is compiled by itself,
wrapped for recompute already, and ``fully_shard`` comes around it. Structures depend on sizes where Inductor decides by
them; each ``Regime`` has a structure of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..layers.compiled import Sizes, sizes_of
from .inductor import Event, Graphs, code_of, graphs_of, happened
from .job import Checkpointing, Torchtitan
from .models import DTYPES
from .torchtitan import TransformerBlock, recomputed

GENERIC: Mapping[str, Sizes] = {
    "mixed": Sizes(b=3, s=7168, heads=20, kv_heads=4, head_dim=128, ffn=6080),
    "plain": Sizes(b=3, s=1664, heads=28, kv_heads=4, head_dim=128, ffn=12160),
    "few": Sizes(b=3, s=448, heads=40, kv_heads=8, head_dim=128, ffn=18240),
}
"""Sizes of which no two are alike, in each regime (``layers.compiled.regime_of``)."""


MODES: tuple[Checkpointing, ...] = ("none", "op", "full")

_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "complex64": "fp32", "uint64": "int64"}
_DTYPES |= {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


def traced(mode: Checkpointing, sizes: Sizes, fp8: str = "") -> tuple[Graphs, FakeTensorMode]:
    """A layer of ``sizes`` in bf16, recomputed as ``mode`` says, of a micro-batch and the table of rotary positions."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    settings = Torchtitan(
        sizes.hidden,
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        sizes.ffn,
        vocab=1,
        layers=1,
        recompute=mode,
        every=1,
        tensor=1,
        parallel_loss=False,
        ends_apart=False,
    )
    fake, before = FakeTensorMode(allow_non_fake_inputs=True), torch.get_default_dtype()
    with fake:
        torch.set_default_dtype(DTYPES["bf16"])
        plain = TransformerBlock(settings)
        block = recomputed(in_float8(plain, fp8) if fp8 else plain, settings, 0)
        torch.set_default_dtype(before)
        x = torch.empty(sizes.b, sizes.s, sizes.hidden, dtype=DTYPES["bf16"], requires_grad=True)
        table = torch.empty(sizes.s, sizes.head_dim // 2, dtype=torch.complex64)
    return graphs_of(block, (x, table), fake), fake


def learnt(mode: Checkpointing, sizes: Sizes, fp8: str = "", *, reuse: bool = False) -> dict[str, Any]:
    """What such a layer does: tensor 1 is its input, 2 the table of rotary positions, from 3 on are its parameters in
    the order of their use, and of backward 0 is the output's gradient."""
    (graphs, fake), known = traced(mode, sizes, fp8), sizes_of(sizes)
    (out,) = [node for node in graphs.forward.graph.nodes if node.op == "output"]
    saved = [node.name for node in out.args[0][1:]]
    inputs = [node for node in graphs.forward.graph.nodes if node.op == "placeholder"]
    numbers = _numbers(inputs)
    with fake:
        given = [_fake(node) for node in inputs]
        forward = happened(code_of(graphs.forward, is_backward=False, reuse=reuse), given, numbers, known)
        kept = dict(zip(saved, forward.returned[1:], strict=True))
        inputs_of_backward = [node for node in graphs.backward.graph.nodes if node.op == "placeholder"]
        numbers = [kept.get(node.name, 0) or 0 for node in inputs_of_backward]
        largest = max(one[0] for one in forward.events if isinstance(one, list))
        given = [_fake(node) for node in inputs_of_backward]
        code = code_of(graphs.backward, is_backward=True, reuse=reuse)
        backward = happened(code, given, numbers, known, above=largest)
    gradients = [number for number in backward.returned if number is not None]
    return {
        "forward": [_written(one) for one in forward.events],
        "output": forward.returned[0],
        "saved": [one for one in forward.returned[1:] if one == 1 or (one or 0) > len(inputs)],
        "backward": [_written(one) for one in backward.events if isinstance(one, list) or one < 2 or one > len(inputs)],
        "gradients": gradients,
    }


def in_float8(block: nn.Module, recipe: str) -> nn.Module:
    """``torchao.float8`` (``Float8Converter.convert``): every linear layer a ``Float8Linear``, which gathers bf16."""
    float8: Any = import_module("torchao.float8")
    float8.convert_to_float8_training(block, config=float8.Float8LinearConfig.from_recipe_name(recipe))
    return block


def _written(event: Event) -> str:
    """As ``layers.compiled`` reads it: a complex number is two."""
    if isinstance(event, int):
        return str(event)
    number, sizes, dtype, name = event
    sizes = [*sizes, "2"] if dtype == "complex64" else sizes
    return f"{number} {_DTYPES[dtype]} {'*'.join(sizes) or '1'} {name}"


def _numbers(inputs: list[Any]) -> list[int]:
    """The layer's input, the table, and parameters, whatever their order."""
    numbers, parameter = [], 3
    for node in inputs:
        value = node.meta["val"]
        if value.dtype is torch.complex64:
            numbers.append(2)
        elif value.dim() == 3:
            numbers.append(1)
        else:
            numbers.append(parameter)
            parameter += 1
    return numbers


def _fake(node: Any) -> torch.Tensor:
    """Like the input that ``node`` stands for."""
    value = node.meta["val"]
    return torch.empty_strided(tuple(map(int, value.shape)), value.stride(), dtype=value.dtype)
