"""What Megatron-Core's own modules choose, and what the recipes do not cover."""

from __future__ import annotations

from typing import Any

import pytest

from memplan.layers.megatron_core import block, coverage, local
from memplan.layers.megatron_core.shape import CoreShape
from memplan.layers.module import Interface, Options, Run, build
from memplan.plan.spec import ModelSpec
from memplan.tape.events import Hold


def shape_of(spec: dict[str, Any] | None = None, **shape: Any) -> CoreShape:
    values: dict[str, Any] = {
        "name": "gpt",
        "family": "gpt",
        "layers": 1,
        "hidden": 256,
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 32,
        "ffn": 640,
        "vocab": 1000,
        "positions_max": 1024,
        "norm": "layernorm",
        "positions": "learned",
        "activation": "gelu",
        "embedding_dropout": 0.1,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
    }
    settings = {"b": 2, "s": 128, "t": 1, "dtype": "bf16", "implementation": "local", "attention": "local", **shape}
    return CoreShape(ModelSpec(**(values | (spec or {}))), vocab=1024, **settings)


@pytest.mark.parametrize(
    ("b", "s", "heads", "causal", "dtype", "fused"),
    [
        (2, 128, 8, True, "bf16", True),
        (1, 128, 4, True, "bf16", False),  # 8 rows a block up to 128 keys
        (1, 256, 4, True, "fp16", True),
        (1, 256, 3, True, "bf16", False),
        (1, 4096, 4, False, "bf16", True),
        (1, 4100, 4, True, "bf16", False),
        (2, 16, 8, True, "bf16", False),
        (2, 130, 8, True, "bf16", False),
        (2, 128, 8, True, "fp32", False),
    ],
)
def test_softmax_is_fused(b: int, s: int, heads: int, causal: bool, dtype: str, fused: bool) -> None:
    assert local.softmax_is_fused(b, s, heads, causal, dtype) is fused


def test_memory_buffer_is_the_larger_of_its_users() -> None:
    scores = (2 * 4, 128, 128)
    assert local.memory_buffer(shape_of(t=2)) == scores
    assert local.memory_buffer(shape_of(t=2, sequence_parallel=True)) == scores
    assert local.memory_buffer(shape_of(t=8, s=16, sequence_parallel=True)) == (16, 2, 256)
    assert local.memory_buffer(shape_of(implementation="transformer_engine", attention="flash")) == (0,)


def test_one_dummy_gradient_a_shape() -> None:
    square = {"head_dim": 32, "ffn": 768}  # fc1 has the shape of the projection to queries, keys and values
    assert local.dummy_gradients(shape_of(square)) == {(768, 256), (256, 256), (256, 768)}
    assert local.dummy_gradients(shape_of(gradient_fusion=False)) == frozenset()


@pytest.mark.parametrize(
    ("spec", "shape", "reasons"),
    [
        ({}, {}, 0),
        ({"kv_heads": 2}, {"t": 4}, 1),
        ({"norm_place": "post"}, {}, 1),
        ({}, {"recompute_modules": ("mlp",)}, 1),
        ({"mlp_bias": False}, {"recompute_modules": ("mlp",)}, 0),
        ({}, {"fp32_residual": True}, 1),
        ({"norm": "rmsnorm"}, {"t": 2, "sequence_parallel": True}, 1),
        ({}, {"cp": 2}, 1),
    ],
)
def test_uncovered(spec: dict[str, Any], shape: dict[str, Any], reasons: int) -> None:
    assert len(list(coverage.uncovered(shape_of(spec, **shape)))) == reasons


def test_fused_accumulation_leaves_no_weight_gradient() -> None:
    def held(fusion: bool) -> set[str]:
        shape = shape_of(gradient_fusion=fusion)
        interface, options = Interface(shape.hidden, shape.dtype), Options(consumes_gradients=True)
        module = build("layer", lambda r, x: Run(block.layer(r, x, shape) if x else None), interface, options)
        return {event.name for event in module.first.backward if isinstance(event, Hold)}

    linear = {f"grad_{name}_weight" for name in ("self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")}
    assert linear <= held(False)
    assert not linear & held(True)
