"""torchao's float8 in torchtitan's Llama and Qwen 3 under ``fully_shard``, followed on fake tensors. Needs torchao
(0.18.0), which tests do not: what it gave is in ``tests/frameworks/float8_steps.json.gz``.

python -m tests.oracle.float8
"""

from __future__ import annotations

import gzip
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from . import fsdp as oracle, titan_models, torchtitan
from .tracer import Change

RECORDED = Path(__file__).parents[1] / "frameworks" / "float8_steps.json.gz"
HEAD = ("output",)


@dataclass(frozen=True)
class Case:
    recipe: str
    recompute: str
    sizes: torchtitan.Sizes | titan_models.Sizes
    filters: tuple[str, ...] = HEAD
    gathered: bool = False
    """By ``enable_fsdp_float8_all_gather``."""
    shards: int = 4
    chunks: int = 0
    """Of the loss, if it has some."""


SMALL = torchtitan.Sizes(hidden=96, heads=6, kv_heads=2, ffn=224, vocab=1008, layers=2, b=2, s=24)
ODD = torchtitan.Sizes(hidden=128, heads=4, kv_heads=4, ffn=328, vocab=515, layers=2, b=1, s=96)
QWEN_3 = titan_models.Sizes(hidden=96, heads=6, kv_heads=2, head_dim=32, ffn=224, vocab=1008, layers=2, b=2, s=24)
CASES = {
    "tensorwise": Case("tensorwise", "none", SMALL),
    "tensorwise-op": Case("tensorwise", "op", SMALL),
    "tensorwise-full": Case("tensorwise", "full", SMALL),
    "tensorwise-with-head": Case("tensorwise", "op", SMALL, ()),
    "tensorwise-odd": Case("tensorwise", "op", ODD, (), shards=3),
    "tensorwise-qwen3": Case("tensorwise", "op", QWEN_3),
    "tensorwise-gathered": Case("tensorwise", "none", SMALL, gathered=True),
    "tensorwise-gathered-op": Case("tensorwise", "op", SMALL, (), gathered=True),
    "tensorwise-gathered-full": Case("tensorwise", "full", SMALL, gathered=True),
    "tensorwise-chunked": Case("tensorwise", "none", QWEN_3, (), chunks=3),
    "rowwise-chunked": Case("rowwise", "op", QWEN_3, (), chunks=3),
    "gw_hp-chunked": Case("rowwise_with_gw_hp", "none", QWEN_3, (), chunks=4),
    "rowwise": Case("rowwise", "none", SMALL, ("attention.wk", "layers.1.")),
    "rowwise-op": Case("rowwise", "op", SMALL),
    "rowwise-full-qwen3": Case("rowwise", "full", QWEN_3, ()),
    "gw_hp": Case("rowwise_with_gw_hp", "none", SMALL),
    "gw_hp-op": Case("rowwise_with_gw_hp", "op", SMALL, ("feed_forward.w2", "output")),
    "gw_hp-full": Case("rowwise_with_gw_hp", "full", SMALL),
}


class Float8Follow(oracle.ResizedFollow):  # type: ignore[no-untyped-call]
    """Operators of a tensor with a scale come back as those of its parts, which are followed."""

    own: tuple[type, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, self.own) for one in types):
            return NotImplemented
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as on a GPU; fake tensors give another
        return super().__torch_dispatch__(func, types, args, kwargs)

    def adopt(self, tensor: torch.Tensor, op: str) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        for part in ("_tensor", "_data"):
            tensor = getattr(tensor, part, tensor)
        super().adopt(tensor, op)


def converted(case: Case) -> Callable[[nn.Module], Any]:
    """``Float8Converter.convert``."""
    float8: Any = import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(case.recipe)
    if case.gathered:
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)

    def takes(module: nn.Module, name: str) -> bool:
        sizes: Any = module.weight.shape
        return not any(one in name for one in case.filters) and not any(size % 16 for size in sizes)

    return lambda model: float8.convert_to_float8_training(model, config=config, module_filter_fn=takes)


def traced(case: Case) -> oracle.Steps:
    """The second iteration."""
    sharding, modes, convert = oracle.Sharding(case.shards), [case.recompute] * case.sizes.layers, converted(case)
    if isinstance(case.sizes, titan_models.Sizes):
        build = titan_models.builder(case.sizes, sharding, modes, case.chunks, convert=convert)
    else:
        build = torchtitan.builder(case.sizes, sharding, modes, ends_apart=True, convert=convert)
    parts: Any = import_module("torchao.float8.float8_training_tensor")
    wrapped: Any = import_module("torchao.float8.fsdp_utils")
    own = (parts.Float8TrainingTensor, wrapped.WeightWithDynamicFloat8CastTensor)
    with patch.object(oracle, "ResizedFollow", Float8Follow), patch.object(Float8Follow, "own", own):
        return oracle.traced(build, sharding)


def written(changes: list[Change], *, but: str = "") -> list[int]:
    """Bytes that begin, and below zero those that end, ``but`` for tensors of one operator."""
    return [one.sign * one.bytes for one in changes if one.sign > 0 or one.op != but]


def main() -> None:
    found = {}
    for name, case in CASES.items():
        steps = traced(case)
        forward, backward, _ = steps.stretches
        found[name] = {
            "before": steps.before,
            "levels": steps.levels(),
            "peaks": steps.peaks(),
            "forward": written(forward),
            "backward": written(backward, but="aten.ones_like.default"),  # the gradient of the loss
        }
        print(name, len(forward), len(backward))
    text = json.dumps(found, separators=(",", ":"))
    RECORDED.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
