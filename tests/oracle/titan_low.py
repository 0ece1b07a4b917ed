"""torchao's MXFP8 and NVFP4 linear layers in torchtitan's newest models under ``fully_shard``, followed on fake
tensors. Needs torchao (its main branch of 21 August 2026, commit 36027d8), which tests do not: what it gave is in
``tests/frameworks/titan_low_steps.json.gz``.

torchao's own functions run: ``mx_mm``, ``MXTensor``, ``to_blocked``, ``nvfp4_mm_triton``. Its kernels need Blackwell;
stand-ins allocate what each one's ``register_fake``, or the body of a ``triton_op``, says.

python -m tests.oracle.titan_low
"""

from __future__ import annotations

import gzip
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from . import fsdp as oracle
from . import titan_gpt_oss, titan_models, titan_muse, titan_newest
from .float8 import Float8Follow, written

RECORDED = Path(__file__).parents[1] / "frameworks" / "titan_low_steps.json.gz"


@dataclass(frozen=True)
class Case:
    recipe: str
    recompute: str
    model: str
    fqns: tuple[str, ...] = ()
    """Parts of names of layers that are converted; none: all are."""
    chunks: int = 0
    """Of the loss, if it has some."""
    shards: int = 4

    @property
    def sizes(self) -> Any:
        return {"deepseek": LATENT}.get(self.model, WIDE if self.recipe == "nvfp4" else SMALL)

    @property
    def decoder(self) -> Any:
        return {"llama": titan_newest.Llama, "qwen3": titan_newest.Qwen3, "deepseek": titan_newest.DeepSeek}[self.model]


SMALL = titan_muse.Sizes(
    hidden=192, heads=6, kv_heads=2, head_dim=64, ffn=448, vocab=1024, layers=2, b=2, s=64, interval=2
)
WIDE = titan_muse.Sizes(
    hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=640, vocab=1024, layers=2, b=2, s=128, interval=2
)
LATENT = titan_models.Sizes(
    hidden=128, heads=4, kv_heads=4, head_dim=64, ffn=384, vocab=1008, layers=2, b=2, s=64, q_rank=64, kv_rank=96,
    plain=32, turned=32, width=32, experts=8, top_k=3, expert_ffn=96, shared=96, dense=1, score="sigmoid", groups=4,
    group_top_k=2,
)  # fmt: skip
OF_DEEPSEEK = ("attention", "shared_experts", "feed_forward")
CASES = {
    "mxfp8": Case("mxfp8", "none", "llama", ("layers",)),
    "mxfp8-op-with-head": Case("mxfp8", "op", "llama"),
    "mxfp8-full-qwen3": Case("mxfp8", "full", "qwen3", ("layers",)),
    "mxfp8-chunked": Case("mxfp8", "none", "qwen3", chunks=2),
    "mxfp8-some-op": Case("mxfp8", "op", "qwen3", ("layers.0.", "feed_forward.w2"), chunks=4),
    "mxfp8-deepseek": Case("mxfp8", "none", "deepseek", OF_DEEPSEEK),
    "mxfp8-deepseek-op": Case("mxfp8", "op", "deepseek", OF_DEEPSEEK, chunks=2),
    "nvfp4": Case("nvfp4", "none", "llama", ("layers",)),
    "nvfp4-op-qwen3": Case("nvfp4", "op", "qwen3", ("layers",), chunks=2),
    "nvfp4-full": Case("nvfp4", "full", "llama", ("layers",)),
    "nvfp4-first": Case("nvfp4", "none", "qwen3", ("layers.0.",), chunks=2),
    "nvfp4-with-head": Case("nvfp4", "op", "llama"),
    "nvfp4-with-chunked-head": Case("nvfp4", "none", "llama", chunks=2),
}

FP8, E8M0, FP4, UINT8 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.uint8
Pair = tuple[torch.Tensor, torch.Tensor]
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _operator(name: str, fake: Callable[..., Any], schema: str) -> Callable[..., Any]:
    def kernel(*_: Any) -> Any:
        raise NotImplementedError

    made: Any = torch.library.custom_op(f"memplan_tests::{name}", kernel, mutates_args=(), schema=schema)
    made.register_fake(fake)
    return made  # type: ignore[no-any-return]


def _rows(x: torch.Tensor) -> Pair:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty((x.shape[0], x.shape[1] // 32), dtype=E8M0)


def _columns(x: torch.Tensor) -> Four:
    rows, columns = x.shape
    data = torch.empty_strided((rows, columns), (1, rows), dtype=FP8)
    scales = torch.empty_strided((columns, rows // 32), (1, columns), dtype=E8M0)
    return x.new_empty(0, dtype=FP8), data, x.new_empty(0, dtype=E8M0), scales


def _largest_two(x: torch.Tensor) -> Pair:
    return x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.float32)


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0],), dtype=torch.float32)


def _scales(rows: int, columns: int) -> tuple[int, ...]:
    return rows // 128, columns // 64, 32, 16


def _turned_and_not(x: torch.Tensor) -> Four:
    rows, columns = x.shape
    turned = x.new_empty((columns, rows // 2), dtype=UINT8), x.new_empty(_scales(columns, rows), dtype=FP8)
    return *turned, x.new_empty((rows, columns // 2), dtype=UINT8), x.new_empty(_scales(rows, columns), dtype=FP8)


def _not_and_turned(x: torch.Tensor) -> Four:
    turned, turned_scales, plain, scales = _turned_and_not(x)
    return plain, scales, turned, turned_scales


TWO, FOUR = "(Tensor, Tensor)", "(Tensor, Tensor, Tensor, Tensor)"
rows_of = _operator("mxfp8_rows", _rows, f"(Tensor x) -> {TWO}")
columns_of = _operator("mxfp8_columns", _columns, f"(Tensor x) -> {FOUR}")
largest_two = _operator("nvfp4_largest_two", _largest_two, f"(Tensor x) -> {TWO}")
largest = _operator("nvfp4_largest", _largest, "(Tensor x) -> Tensor")
quantised = _operator("nvfp4_quantised", _turned_and_not, f"(Tensor x) -> {FOUR}")
weights = _operator("nvfp4_weights", _not_and_turned, f"(Tensor x) -> {FOUR}")


@contextmanager
def kernels() -> Iterator[None]:
    """The stand-ins in the place of torchao's kernels."""
    mx: Any = import_module("torchao.prototype.mx_formats.kernels")
    tensor: Any = import_module("torchao.prototype.mx_formats.mx_tensor")
    four: Any = import_module("torchao.prototype.moe_training.nvfp4_training.nvfp4_linear")
    found: list[tuple[Any, str, Callable[..., Any]]] = [
        (tensor, "triton_to_mxfp8_dim0", lambda x, **_: rows_of(x)),
        (mx, "mxfp8_quantize_cuda", lambda x, **_: columns_of(x)),
        (four, "triton_rht_amax", lambda x, **_: largest_two(x)),
        (four, "triton_rht_quantize_row_col", lambda x, **_: quantised(x)),
        (four, "triton_group_weight_amax", lambda x, _: largest(x)),
        (four, "triton_weight_quantize_2d", lambda x, _: weights(x)),
    ]
    with ExitStack() as stack:
        for module, name, stand_in in found:
            stack.enter_context(patch.object(module, name, stand_in))
        yield


def _four_bit(k: int, n: int) -> nn.Module:
    """torchtitan's ``NVFP4Linear``, which takes one vector of signs for all layers."""
    module: Any = import_module("torchao.prototype.moe_training.nvfp4_training.nvfp4_linear")

    class NVFP4Linear(nn.Linear):
        def __init__(self) -> None:
            super().__init__(k, n, bias=False)
            self.register_buffer("_sr_seed", torch.zeros(1, dtype=torch.int64), persistent=False)
            self.register_buffer("_rht_sign_vector", torch.ones(16, dtype=torch.int8), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = module.nvfp4_linear(x, self.weight, self.bias, sr_seed=self._sr_seed, sign_vector=(1,) * 16)
            return made  # type: ignore[no-any-return]  # noqa: RET504 (a call, as there)

    return NVFP4Linear()


def converted(case: Case) -> Any:
    """A decoder after ``MXFP8LinearConverter.convert`` or ``NVFP4LinearConverter.convert``."""
    eight: Any = import_module("torchao.prototype.moe_training.mxfp8_linear")

    def made(sizes: Any) -> Any:
        model = case.decoder(sizes)
        for name, layer in list(model.named_modules()):
            if isinstance(layer, nn.Linear) and (not case.fqns or any(one in name for one in case.fqns)):
                parent, _, own = name.rpartition(".")
                k, n = layer.in_features, layer.out_features
                low = eight.MXFP8Linear(k, n, bias=False) if case.recipe == "mxfp8" else _four_bit(k, n)
                setattr(model.get_submodule(parent), own, low)
        return model

    return made


def traced(case: Case) -> oracle.Steps:
    """The second iteration."""
    sharding, modes = oracle.Sharding(case.shards), [case.recompute] * case.sizes.layers
    if case.model == "deepseek":
        build = titan_gpt_oss.builder(case.sizes, sharding, modes, case.chunks, ranks=1, decoder=converted(case))
    else:
        build = titan_muse.builder(case.sizes, sharding, modes, case.chunks, converted(case))
    tensor: Any = import_module("torchao.prototype.mx_formats.mx_tensor")
    with (
        patch.object(oracle, "ResizedFollow", Float8Follow),
        patch.object(Float8Follow, "own", (tensor.MXTensor,)),
        kernels(),
    ):
        return oracle.traced(build, sharding)


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
