"""torchtitan's layers as ``torch.compile`` runs them, learnt: what each direction makes and lets go of, in sizes that
have names (``layers/compiled.json``).

``torchtitan/parallelisms/parallelize_llama.py``, ``apply_compile``: every ``TransformerBlock`` is compiled by itself,
wrapped for recompute already, and ``fully_shard`` comes around it. Structures depend on sizes where Inductor decides by
them; each ``Regime`` has a structure of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import nn
from torch._inductor import config as inductor
from torch._subclasses.fake_tensor import FakeTensorMode

from ..layers.compiled import FLOAT8_REGIMES, SKIPS, Sizes, parts, sizes_of
from ..layers.float8 import Float8
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


ROWS: Mapping[str, Mapping[str, Sizes]] = {
    "": {"mixed": Sizes(3, 7168, 40, 8, 64, 12160), "plain": Sizes(3, 1728, 56, 7, 64, 12160)},
    "narrow": {"mixed": Sizes(3, 7168, 40, 8, 64, 8384), "plain": Sizes(3, 1920, 56, 7, 64, 7872)},
    "widest": {"mixed": Sizes(3, 7168, 136, 4, 64, 19008), "plain": Sizes(3, 3008, 136, 4, 64, 19008)},
}
"""The same with scales by rows, whose numbers of parts (``layers.compiled.parts``) are not like sizes either; by what
``layers.compiled.width_of`` tells apart."""


def float8_layers() -> Iterator[tuple[Float8, Sizes]]:
    """Layers in float8 that are learnt, and of which sizes."""
    kinds = (("tensorwise", False), ("tensorwise", True), ("rowwise", False), ("rowwise_with_gw_hp", False))
    for (recipe, gathered), skips in product(kinds, (frozenset[str](), SKIPS)):
        if skips and recipe == "rowwise_with_gw_hp":
            continue
        widths = ROWS if recipe == "rowwise" and not skips else {"": GENERIC if recipe == "tensorwise" else ROWS[""]}
        for sizes in widths.values():
            yield from ((Float8(recipe, skips, gathered=gathered), sizes[regime]) for regime in FLOAT8_REGIMES)


MODES: tuple[Checkpointing, ...] = ("none", "op", "full")

_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "complex64": "fp32", "uint64": "int64"}
_DTYPES |= {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


def traced(mode: Checkpointing, sizes: Sizes, low: Float8 | None = None) -> tuple[Graphs, FakeTensorMode]:
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
        block = recomputed(in_float8(plain, low) if low is not None else plain, settings, 0)
        torch.set_default_dtype(before)
        x = torch.empty(sizes.b, sizes.s, sizes.hidden, dtype=DTYPES["bf16"], requires_grad=True)
        table = torch.empty(sizes.s, sizes.head_dim // 2, dtype=torch.complex64)
    return graphs_of(block, (x, table), fake), fake


def learnt(mode: Checkpointing, sizes: Sizes, low: Float8 | None = None, *, reuse: bool = False) -> dict[str, Any]:
    """What such a layer does: tensor 1 is its input, 2 the table of rotary positions, from 3 on are its parameters in
    the order of their use, and of backward 0 is the output's gradient."""
    rows = low is not None and low.by_rows
    with inductor.patch(emulate_precision_casts=low is not None and low.recipe == "rowwise"):  # as torchtitan sets it
        return _learnt(mode, sizes, low, {**(parts(sizes) if rows else {}), **sizes_of(sizes)}, reuse=reuse)


def _learnt(
    mode: Checkpointing, sizes: Sizes, low: Float8 | None, known: Mapping[str, int], *, reuse: bool
) -> dict[str, Any]:
    graphs, fake = traced(mode, sizes, low)
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
        "forward": [_written(one) for one in forward.events if isinstance(one, list) or one == 1 or one > len(inputs)],
        "output": forward.returned[0],
        "saved": [one for one in forward.returned[1:] if one == 1 or (one or 0) > len(inputs)],
        "backward": [_written(one) for one in backward.events if isinstance(one, list) or one < 2 or one > len(inputs)],
        "gradients": gradients,
        "work": [forward.work, backward.work],
    }


OWN = {"wk": "key", "wv": "value"}
"""Names here of layers that may stay in bf16."""


def in_float8(block: nn.Module, low: Float8) -> nn.Module:
    """``torchao.float8`` (``Float8Converter.convert``): linear layers, but for those that ``low`` skips, are each a
    ``Float8Linear``, whose weight has been gathered in bf16, or in 8 bits (``fsdp_post_all_gather``)."""
    float8: Any = import_module("torchao.float8")
    parts: Any = import_module("torchao.float8.float8_training_tensor")
    config = float8.Float8LinearConfig.from_recipe_name(low.recipe)

    def takes(_: nn.Module, name: str) -> bool:
        return OWN.get(name.rpartition(".")[2]) not in low.skips

    float8.convert_to_float8_training(block, config=config, module_filter_fn=takes)
    for module in block.modules():
        if low.gathered and hasattr(module, "linear_mm_config"):
            layer: Any = module
            data = torch.empty_like(layer.weight, dtype=torch.float8_e4m3fn)
            role, scale = parts.GemmInputRole.WEIGHT, torch.empty((), dtype=torch.float32)
            whole = parts.Float8TrainingTensor(data, scale, layer.weight.dtype, layer.linear_mm_config, role)
            layer.weight = nn.Parameter(whole)
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
