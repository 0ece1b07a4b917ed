"""torchao's MXFP8, NVFP4 and float8 linear layers, and its products of experts, in torchtitan's newest models under
``fully_shard``, followed on fake tensors. Needs torchao (its main branch of 21 August 2026, commit 36027d8), which
tests do not: what it gave is in ``tests/frameworks/titan_low_steps.json.gz``.

torchao's own functions run: ``mx_mm``, ``MXTensor``, ``to_blocked``, ``nvfp4_mm_triton``, ``Float8Linear``,
``_MXFP8GroupedMM``, ``_Float8GroupedMM``. Its kernels need a GPU; stand-ins allocate what each one's ``register_fake``,
or the body of a ``triton_op``, says.

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
from torch.nn import functional

from . import fsdp as oracle, titan_gpt_oss, titan_models, titan_muse, titan_newest
from .float8 import Case as Float8Case, Float8Follow, converted as float8_of, written

RECORDED = Path(__file__).parents[1] / "frameworks" / "titan_low_steps.json.gz"


@dataclass(frozen=True)
class Case:
    recipe: str
    recompute: str
    model: str
    fqns: tuple[str, ...] = ()
    """Parts of names of layers that are converted; none: all are. Of float8 of those that stay."""
    chunks: int = 0
    """Of the loss, if it has some."""
    shards: int = 4
    pad: int = 0
    """Rows of which an expert gets a multiple, if its products are in 8 bits, too."""
    ranks: int = 1
    """Which share experts."""

    @property
    def sizes(self) -> Any:
        found: dict[str, Any] = {"deepseek": LATENT, "qwen3-moe": MIXED}
        return found.get(self.model, WIDE if self.recipe == "nvfp4" else SMALL)

    @property
    def decoder(self) -> Any:
        dense = {"llama": titan_newest.Llama, "qwen3": titan_newest.Qwen3}
        mixed = {"qwen3-moe": titan_newest.Qwen3Moe, "deepseek": titan_newest.DeepSeek}
        return {**dense, **mixed}[self.model]


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
MIXED = titan_gpt_oss.Sizes(
    hidden=192, heads=6, kv_heads=2, head_dim=64, vocab=1003, layers=2, b=2, s=64, experts=16, top_k=3, expert_ffn=160
)
OF_DEEPSEEK = ("attention", "shared_experts", "feed_forward")
CASES = {
    "mxfp8": Case("mxfp8", "none", "llama", ("layers",)),
    "mxfp8-op-with-head": Case("mxfp8", "op", "llama"),
    "mxfp8-full-qwen3": Case("mxfp8", "full", "qwen3", ("layers",)),
    "mxfp8-chunked": Case("mxfp8", "none", "qwen3", chunks=2),
    "mxfp8-some-op": Case("mxfp8", "op", "qwen3", ("layers.0.", "feed_forward.w2"), chunks=4),
    "mxfp8-deepseek": Case("mxfp8", "none", "deepseek", OF_DEEPSEEK),
    "mxfp8-deepseek-op": Case("mxfp8", "op", "deepseek", OF_DEEPSEEK, chunks=2),
    "mxfp8-experts": Case("mxfp8", "none", "deepseek", OF_DEEPSEEK, pad=128),
    "mxfp8-experts-op": Case("mxfp8", "op", "deepseek", OF_DEEPSEEK, 2, pad=128),
    "mxfp8-experts-alone-full": Case("mxfp8", "full", "qwen3-moe", ("experts",), pad=256),
    "mxfp8-shared-experts": Case("mxfp8", "none", "deepseek", OF_DEEPSEEK, 2, pad=128, ranks=2),
    "mxfp8-shared-experts-op": Case("mxfp8", "op", "deepseek", OF_DEEPSEEK, pad=128, ranks=4),
    "rowwise": Case("rowwise", "none", "llama", ("lm_head",)),
    "rowwise-op-with-head": Case("rowwise", "op", "qwen3", chunks=2),
    "gw_hp-full": Case("rowwise_with_gw_hp", "full", "llama", ("lm_head", "attention.wo")),
    "rowwise-deepseek": Case("rowwise", "none", "deepseek", ("lm_head", "router.gate")),
    "rowwise-experts": Case("rowwise", "op", "deepseek", ("lm_head", "router.gate"), 2, pad=16),
    "rowwise-shared-experts": Case("rowwise", "none", "deepseek", ("lm_head", "router.gate"), pad=16, ranks=2),
    "gw_hp-experts-full": Case("rowwise_with_gw_hp", "full", "qwen3-moe", ("lm_head", "router.gate"), pad=16),
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


def _ordered_rows(x: torch.Tensor) -> Pair:
    rows, columns = x.shape
    return x.new_empty((rows, columns), dtype=FP8), x.new_empty((_up(rows, 128), _up(columns // 32, 4)), dtype=E8M0)


def _of_experts(x: torch.Tensor) -> Pair:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty((*x.shape[:-1], x.shape[-1] // 32), dtype=E8M0)


def _ordered(scales: torch.Tensor) -> torch.Tensor:
    e, rows, columns = scales.shape
    return scales.new_empty((e, _up(rows, 128) * _up(columns, 4)))


def _turned_experts(x: torch.Tensor) -> Pair:
    e, n, k = x.shape
    data = torch.empty_strided((e, n, k), (n * k, 1, n), dtype=FP8)
    return data, x.new_empty((e, _up(k, 128) * _up(n // 32, 4)), dtype=E8M0)


def _ordered_groups(scales: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    rows, columns = scales.shape
    return scales.new_empty((_up(rows, 128), columns + 4 * ends.shape[0]))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _by_rows(x: torch.Tensor) -> Pair:
    return x.new_empty(x.shape, dtype=FP8), x.new_empty((x.shape[0], 1), dtype=torch.float32)


def _weights_by_rows(x: torch.Tensor) -> Pair:
    e, k, n = x.shape
    data = torch.empty((e, k, n), dtype=FP8).as_strided((e, k, n), (k * n, 1, k))
    return data, torch.empty((e, 1, n), dtype=torch.float32)


def _weights_turned(x: torch.Tensor) -> Pair:
    e, k, n = x.shape
    data = torch.empty((e, n, k), dtype=FP8).as_strided((e, n, k), (n * k, 1, n))
    return data, torch.empty((e, k), dtype=torch.float32)


def _two_by_columns(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> Four:
    found: list[torch.Tensor] = []
    for one in (x, y):
        found.append(torch.empty_like(one, dtype=FP8).as_strided(one.size(), (1, one.shape[0])))
        found.append(torch.empty((one.shape[1] * ends.numel(),), dtype=torch.float32))
    return tuple(found)  # type: ignore[return-value]


TWO, FOUR = "(Tensor, Tensor)", "(Tensor, Tensor, Tensor, Tensor)"
rows_of = _operator("mxfp8_rows", _rows, f"(Tensor x) -> {TWO}")
columns_of = _operator("mxfp8_columns", _columns, f"(Tensor x) -> {FOUR}")
largest_two = _operator("nvfp4_largest_two", _largest_two, f"(Tensor x) -> {TWO}")
largest = _operator("nvfp4_largest", _largest, "(Tensor x) -> Tensor")
quantised = _operator("nvfp4_quantised", _turned_and_not, f"(Tensor x) -> {FOUR}")
weights = _operator("nvfp4_weights", _not_and_turned, f"(Tensor x) -> {FOUR}")
ordered_rows = _operator("mxfp8_ordered_rows", _ordered_rows, f"(Tensor x) -> {TWO}")
of_experts = _operator("mxfp8_of_experts", _of_experts, f"(Tensor x) -> {TWO}")
ordered = _operator("mxfp8_ordered", _ordered, "(Tensor x) -> Tensor")
turned_experts = _operator("mxfp8_turned_experts", _turned_experts, f"(Tensor x) -> {TWO}")
by_rows = _operator("float8_by_rows", _by_rows, f"(Tensor x) -> {TWO}")
weights_by_rows = _operator("float8_weights_by_rows", _weights_by_rows, f"(Tensor x) -> {TWO}")
weights_turned = _operator("float8_weights_turned", _weights_turned, f"(Tensor x) -> {TWO}")
two_by_columns = _operator("float8_two_by_columns", _two_by_columns, f"(Tensor x, Tensor y, Tensor ends) -> {FOUR}")
ordered_groups = _operator("mxfp8_ordered_groups", _ordered_groups, "(Tensor x, Tensor ends) -> Tensor")


@contextmanager
def kernels() -> Iterator[None]:
    """The stand-ins in the place of torchao's kernels."""
    mx: Any = import_module("torchao.prototype.mx_formats.kernels")
    tensor: Any = import_module("torchao.prototype.mx_formats.mx_tensor")
    four: Any = import_module("torchao.prototype.moe_training.nvfp4_training.nvfp4_linear")
    grouped: Any = import_module("torchao.prototype.moe_training.mxfp8_grouped_mm")
    rows: Any = import_module("torchao.prototype.moe_training.fp8_grouped_mm")
    found: list[tuple[Any, str, Any]] = [
        (rows, "triton_fp8_rowwise_2d_scale_and_cast", lambda x, **_: by_rows(x)),
        (rows, "triton_fp8_colwise_3d_scale_and_cast", lambda x, **_: weights_by_rows(x)),
        (rows, "triton_fp8_rowwise_3d_transpose_rhs", lambda x, **_: weights_turned(x)),
        (rows, "triton_fp8_per_group_colwise_scales_dual", lambda x, y, ends, *_, **__: two_by_columns(x, y, ends)),
        (grouped, "_SM100_KERNELS_AVAILABLE", True),
        (grouped, "mxfp8_quantize_2d_1x32_cutedsl", lambda x, **_: ordered_rows(x)),
        (grouped, "triton_to_mxfp8_dim0", lambda x, *_: of_experts(x)),
        (grouped, "triton_mx_block_rearrange_per_group_3d", lambda x: ordered(x)),
        (grouped, "mxfp8_quantize_cuda_3d", lambda x, *_, **__: turned_experts(x)),
        (grouped, "triton_mx_block_rearrange_2d_K_groups", lambda x, ends: ordered_groups(x, ends)),
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


class Padded(titan_gpt_oss.Dispatcher):
    """``TorchAOTokenDispatcher`` where no ranks share experts."""

    def dispatch(
        self, x: torch.Tensor, top: torch.Tensor, chosen: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, titan_gpt_oss.Dispatched]:
        rows, tokens, scores = self.reordered(x, top, chosen)
        shape, rows, places, here = titan_models.permuted(rows, counts, 1, counts.shape[0])
        return rows, here, titan_gpt_oss.Exchanged(tokens, scores, shape, places)

    def combine(self, rows: torch.Tensor, given: titan_gpt_oss.Dispatched, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(given, titan_gpt_oss.Exchanged)
        rows = titan_models.unpermuted(rows, given.shape, given.places)
        out = torch.zeros_like(x)
        rows = (rows.to(torch.float32) * given.scores.reshape(-1, 1)).to(rows.dtype)
        index = given.tokens.reshape(-1, 1).expand(-1, x.shape[-1])
        return titan_gpt_oss.scatter_add(out, index, rows)  # type: ignore[no-any-return]


class PaddedAllToAll(titan_gpt_oss.AllToAll):
    """The same where they do."""

    def permuted(
        self, rows: torch.Tensor, every: torch.Tensor
    ) -> tuple[torch.Size, torch.Tensor, torch.Tensor, torch.Tensor]:
        return titan_models.permuted(rows, every, self.ranks, every.shape[0] // self.ranks)

    def unpermuted(self, rows: torch.Tensor, given: titan_gpt_oss.Exchanged) -> torch.Tensor:
        return titan_models.unpermuted(rows, given.shape, given.places)


class LowExperts(titan_newest.GroupedExperts):
    """``Float8GroupedExperts``."""

    @staticmethod
    def config() -> Any:
        configs: Any = import_module("torchao.prototype.moe_training.config")
        return configs.Float8TrainingOpConfig()

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        module: Any = import_module("torchao.prototype.moe_training.utils")
        config = self.config()
        multiply = module._quantize_then_scaled_grouped_mm
        w1, w2, w3 = self.w1, self.w2, self.w3
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        h = functional.silu(multiply(x.bfloat16(), w1.bfloat16().transpose(-2, -1), config=config, offs=offsets))
        h = h * multiply(x.bfloat16(), w3.bfloat16().transpose(-2, -1), config=config, offs=offsets)
        return multiply(h, w2.bfloat16().transpose(-2, -1), config=config, offs=offsets).type_as(x)  # type: ignore[no-any-return]


class BlockExperts(LowExperts):
    """``MXFP8GroupedExperts``."""

    @staticmethod
    def config() -> Any:
        configs: Any = import_module("torchao.prototype.moe_training.config")
        return configs.MXFP8TrainingOpConfig.from_recipe(configs.MXFP8TrainingRecipe("mxfp8_rceil"))


class LowRouted(titan_newest.RoutedExperts):
    kind: type[LowExperts] = LowExperts

    def shared_among(self, sizes: Any, group: Any) -> None:
        super().shared_among(sizes, group)
        self.converted(sizes, PaddedAllToAll(sizes, group))

    def converted(self, sizes: Any, dispatcher: titan_gpt_oss.Dispatcher) -> None:
        """``Float8GroupedExpertsConverter.convert``, ``MXFP8GroupedExpertsConverter.convert``."""
        self.inner_experts.__class__ = self.kind
        self.dispatcher = dispatcher


class BlockRouted(LowRouted):
    kind = BlockExperts


def converted(case: Case) -> Any:
    """A decoder after ``MXFP8LinearConverter.convert`` or ``NVFP4LinearConverter.convert``."""
    eight: Any = import_module("torchao.prototype.moe_training.mxfp8_linear")

    def made(sizes: Any) -> Any:
        model = case.decoder(sizes)
        if case.recipe.startswith("rowwise"):
            float8_of(Float8Case(case.recipe, case.recompute, case.sizes, case.fqns))(model)
        for name, layer in list(model.named_modules()) if not case.recipe.startswith("rowwise") else ():
            if isinstance(layer, nn.Linear) and (not case.fqns or any(one in name for one in case.fqns)):
                parent, _, own = name.rpartition(".")
                k, n = layer.in_features, layer.out_features
                low = eight.MXFP8Linear(k, n, bias=False) if case.recipe == "mxfp8" else _four_bit(k, n)
                setattr(model.get_submodule(parent), own, low)
        for block in model.layers.values() if case.pad else ():
            if hasattr(block, "moe"):
                block.moe.routed_experts.__class__ = BlockRouted if case.recipe == "mxfp8" else LowRouted
                block.moe.routed_experts.converted(sizes, Padded(sizes))
        return model

    return made


def traced(case: Case) -> oracle.Steps:
    """The second iteration."""
    sharding, modes = oracle.Sharding(case.shards), [case.recompute] * case.sizes.layers
    of: Any = None
    if case.model in ("deepseek", "qwen3-moe"):
        build = titan_gpt_oss.builder(
            case.sizes, sharding, modes, case.chunks, ranks=case.ranks, decoder=converted(case)
        )
        of = (lambda _: titan_gpt_oss.expert_meshes(case.shards, case.ranks)) if case.ranks > 1 else None
    else:
        build = titan_muse.builder(case.sizes, sharding, modes, case.chunks, converted(case))
    tensor: Any = import_module("torchao.prototype.mx_formats.mx_tensor")
    parts: Any = import_module("torchao.float8.float8_training_tensor")
    with (
        patch.object(oracle, "ResizedFollow", Float8Follow),
        patch.object(Float8Follow, "own", (tensor.MXTensor, parts.Float8TrainingTensor)),
        patch.object(titan_models, "ALIGNED", case.pad),
        kernels(),
    ):
        return oracle.traced(build, sharding, of=of)


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
