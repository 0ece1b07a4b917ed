"""The recipe of a layer of Megatron-Core's own modules against the real one: every event of forward and backward.

The real layer is traced as the middle one of three (``tests/oracle/megatron.py``). Recipe and trace are equal event
by event, size by size; only tensors that end at once, with nothing held in between, may end in another order.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import pytest

from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.megatron_core import block, replaced
from memplan.layers.megatron_core.shape import CoreShape
from memplan.layers.module import Interface, Module, Options, Run, build
from memplan.layers.recompute import recomputed_reentrant
from memplan.plan.spec import ModelSpec, block_of
from memplan.tape.events import Drop, Hold, Tape

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed")


@pytest.fixture(autouse=True)
def _stand_ins() -> Iterator[None]:
    from ...oracle.megatron import megatron_with_stand_ins

    with megatron_with_stand_ins():
        yield


GPT = {
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
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
NO_BIAS = {"attention_bias": False, "attention_output_bias": False, "mlp_bias": False}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", **NO_BIAS, **NO_DROPOUT}
UNFUSED_SOFTMAX = {"masked_softmax_fusion": False}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt": ({}, {}),
    "one-sequence": ({}, {"b": 1}),
    "fp16-layer-scaling": ({}, {"dtype": "fp16", "query_key_layer_scaling": True}),
    "fp32": ({}, {"dtype": "fp32"}),
    "fp32-layer-scaling": ({}, {"dtype": "fp32", "query_key_layer_scaling": True}),
    "no-dropout": (NO_DROPOUT, {}),
    "softmax-unfused": ({}, UNFUSED_SOFTMAX),
    "softmax-unfused-own-mask": ({}, UNFUSED_SOFTMAX | {"attention_mask": False}),
    "softmax-unfused-layer-scaling": ({}, UNFUSED_SOFTMAX | {"query_key_layer_scaling": True}),
    "softmax-unfused-16-bit": ({}, UNFUSED_SOFTMAX | {"softmax_in_fp32": False}),
    "softmax-does-not-fit": ({}, {"s": 126}),
    "bert": ({"causal": False}, {}),
    "bert-softmax-unfused": ({"causal": False}, UNFUSED_SOFTMAX),
    "bias-dropout-unfused": ({}, {"bias_dropout_fusion": False}),
    "bias-dropout-unfused-no-dropout": (NO_DROPOUT, {"bias_dropout_fusion": False}),
    "gelu-unfused": ({}, {"bias_activation_fusion": False}),
    "no-bias-gelu": (NO_BIAS, {"bias_activation_fusion": False}),
    "swiglu": ({"activation": "swiglu"}, {}),
    "swiglu-unfused": ({"activation": "swiglu"}, {"bias_activation_fusion": False}),
    "swiglu-no-bias": ({"activation": "swiglu", **NO_BIAS}, {}),
    "swiglu-no-bias-unfused": ({"activation": "swiglu", **NO_BIAS}, {"bias_activation_fusion": False}),
    "qkv-bias-alone": ({"activation": "swiglu", **NO_BIAS, "attention_bias": True}, {}),
    "tensor-parallel": ({}, {"t": 2}),
    "sequence-parallel": ({}, {"t": 2, "sequence_parallel": True}),
    "gradient-fusion": ({}, {"gradient_fusion": True}),
    "sequence-parallel-gradient-fusion": ({}, {"t": 4, "sequence_parallel": True, "gradient_fusion": True}),
    "llama": (LLAMA, {}),
    "llama-groups": (LLAMA | {"kv_heads": 2}, {}),
    "rotary": ({"positions": "rotary"}, {}),
    "rotary-interleaved": ({"positions": "rotary"}, {"rotary_interleaved": True}),
    "rotary-in-part": ({"positions": "rotary", "rotary_fraction": 0.5}, {}),
    "groups": ({"kv_heads": 4}, {"t": 2}),
    "one-group": ({"kv_heads": 1}, {}),
    "one-group-one-sequence": ({"kv_heads": 1}, {"b": 1}),
    "qk-norm": ({"qk_norm": True}, {}),
    "qk-norm-groups": ({"qk_norm": True, "kv_heads": 2}, {}),
    "qk-norm-groups-rotary": ({"qk_norm": True, "kv_heads": 2, "positions": "rotary"}, {}),
    "gate": ({"attention_gate": True}, {}),
    "gate-groups": (LLAMA | {"attention_gate": True, "kv_heads": 2}, {}),
    "gate-qk-norm": ({"attention_gate": True, "qk_norm": True, "kv_heads": 2}, {"t": 2, "sequence_parallel": True}),
    "gate-one-group": ({"attention_gate": True, "kv_heads": 1}, {}),
    "recompute-core-attention": ({}, {"recompute_modules": ("core_attn",)}),
    "recompute-core-attention-groups": ({"kv_heads": 2}, {"recompute_modules": ("core_attn",)}),
    "recompute-core-attention-one-group": ({"kv_heads": 1}, {"recompute_modules": ("core_attn",)}),
    "recompute-core-attention-rotary": ({"positions": "rotary"}, {"recompute_modules": ("core_attn",)}),
    "recompute-core-attention-qk-norm": ({"qk_norm": True}, {"recompute_modules": ("core_attn",)}),
    "t5": ({}, {"keys": 256}),
    "t5-softmax-unfused": ({}, {"keys": 256, **UNFUSED_SOFTMAX}),
    "recompute-mlp": ({"activation": "swiglu", **NO_BIAS}, {"recompute_modules": ("mlp",)}),
    "recompute-norms": ({}, {"recompute_modules": ("layernorm",)}),
    "recompute-norms-and-mlp": (LLAMA, {"recompute_modules": ("layernorm", "mlp")}),
}
WHOLE = ("gpt", "no-dropout", "bias-dropout-unfused", "sequence-parallel-gradient-fusion", "llama")
"""Cases in which the whole layer is recomputed, too."""


def shape_of(spec: dict[str, Any], shape: dict[str, Any]) -> CoreShape:
    settings = {"b": 2, "s": 128, "t": 1, "dtype": "bf16", "gradient_fusion": False, "rope_fusion": False, **shape}
    spec_ = ModelSpec(**(GPT | spec))
    return CoreShape(spec_, vocab=1024, implementation="local", attention="local", **settings)


def module_of(shape: CoreShape, whole: bool) -> Module:
    def layer(r: Recorder, x: Tensor) -> Tensor:
        return block.layer(r, x, shape)

    def recipe(r: Recorder, x: Tensor | None) -> Run:
        assert x is not None
        if whole and replaced.is_empty(shape):
            return Run(replaced.recomputed_nothing(r, x))
        return Run(recomputed_reentrant(r, layer, (x,)) if whole else layer(r, x))

    options = Options(accumulates_in_place=False, consumes_gradients=True)
    return build("layer", recipe, Interface(shape.hidden, shape.dtype), options)


def config_of(shape: CoreShape) -> dict[str, Any]:
    """Arguments of ``TransformerConfig``."""
    from torch.nn import functional

    spec = shape.spec
    swiglu = spec.activation == "swiglu"
    selective: dict[str, Any] = {}
    if shape.recompute_modules:
        selective = {"recompute_granularity": "selective", "recompute_modules": list(shape.recompute_modules)}
    return selective | {
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_query_groups": spec.kv_heads,
        "kv_channels": spec.head_dim,
        "ffn_hidden_size": spec.ffn,
        "hidden_dropout": spec.hidden_dropout,
        "attention_dropout": spec.attention_dropout,
        "sequence_parallel": shape.sequence_parallel,
        "add_bias_linear": spec.mlp_bias,
        "add_qkv_bias": spec.attention_bias,
        "gated_linear_unit": swiglu,
        "activation_func": functional.silu if swiglu else functional.gelu,
        "bias_activation_fusion": shape.bias_activation_fusion,
        "bias_dropout_fusion": shape.bias_dropout_fusion,
        "masked_softmax_fusion": shape.masked_softmax_fusion,
        "attention_softmax_in_fp32": shape.softmax_in_fp32,
        "apply_query_key_layer_scaling": shape.query_key_layer_scaling,
        "gradient_accumulation_fusion": shape.gradient_fusion,
        "rotary_interleaved": shape.rotary_interleaved,
        "qk_layernorm": spec.qk_norm,
        "attention_output_gate": spec.attention_gate,
        "normalization": "LayerNorm" if spec.norm == "layernorm" else "RMSNorm",
    }


def sizes(tape: Tape) -> list[int]:
    return [e.bytes if isinstance(e, Hold) else -e.bytes for e in tape if isinstance(e, Hold | Drop)]


def drops_sorted(sizes: Iterable[int]) -> list[int]:
    """Signed sizes with those that end at once in order of size."""
    runs = groupby(sizes, lambda size: size < 0)
    return [size for ended, run in runs for size in (sorted(run) if ended else run)]


def compare(shape: CoreShape, whole: bool, block: str = "") -> None:
    """``block``: of layers that differ, the sizes of this one."""
    from ...oracle import megatron

    if "layernorm" in shape.recompute_modules and not megatron.discards_apart():
        pytest.skip("this version discards the norms' output in another way")
    spec = shape.spec
    setting = megatron.Setting(
        shape.b,
        shape.s,
        shape.t,
        shape.dtype,
        bert=not spec.causal,
        mask=shape.attention_mask,
        rotary=spec.rotary_features if spec.positions == "rotary" else 0,
        keys=shape.keys,
        recompute=whole,
        block=block,
        config=config_of(shape),
    )
    trace = megatron.traced_layer(setting)
    shape = shape.with_block(block_of(block)) if block else shape
    module = module_of(shape, whole)
    assert [(p.name, p.shape) for p in module.parameters] == trace.parameters
    for tape, changes in ((module.first.forward, trace.forward), (module.first.backward, trace.backward)):
        assert drops_sorted(sizes(tape)) == drops_sorted(change.sign * change.bytes for change in changes)


@pytest.mark.parametrize("name", CASES)
def test_real_layer(name: str) -> None:
    compare(shape_of(*CASES[name]), False)


@pytest.mark.parametrize("name", WHOLE)
def test_real_recomputed_layer(name: str) -> None:
    compare(shape_of(*CASES[name]), True)
