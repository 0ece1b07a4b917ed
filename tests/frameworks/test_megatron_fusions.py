"""Fusions of Megatron-Core's layers, and Muon's clip, by hand."""

from __future__ import annotations

import pytest

from memplan.frameworks.megatron.from_plan import core_shape
from memplan.frameworks.megatron.modules import layer_shape_of, layers_module, module_shapes
from memplan.frameworks.megatron.programs import programs
from memplan.layers.module import Module, Options
from memplan.tape.events import Drop, Hold, Tape

from .test_megatron import plan, refusal
from .test_megatron_choices import MIXTURE, kept

S, H, F = 256, 256, 256
LATENT = {
    "model": "deepseek-v2", "dense_layers": "0", "experts": "4", "router_groups": "0", "expert_top_k": "2",
    "expert_ffn": "64", "ep": "2", "dp": "2", "head_dim": "192", "gpu": "h100-80gb",
}  # fmt: skip
Q, KV, P = 1536, 512, 64
"""Ranks of DeepSeek-V2's queries, and of its keys and values, and features of the key that turns."""


def of_layer(**flags: object) -> Module:
    return layers_module((layer_shape_of(module_shapes(core_shape(plan(**flags)))[0], 0),), Options())


def made(tape: Tape) -> dict[str, int]:
    return {one.name: one.bytes for one in tape if isinstance(one, Hold)}


def test_activation_of_transformer_engine_keeps_its_input() -> None:
    """Of SwiGLU 2 s 2f bytes, and a gradient as large; the output, 2 s f, is the next product's input. Without fusion
    PyTorch's operators keep two halves more, of which one is an activated copy."""
    flags = {"bias_swiglu_fusion": "false", "gpu": "h100-80gb"}
    module = of_layer(use_te_activation_func="true", **flags)
    stays = dict(kept(module.first.forward))
    assert stays["mlp.linear_fc1"] == 2 * S * 2 * F
    assert stays["mlp.linear_fc1_activation"] == 2 * S * F
    assert made(module.first.backward)["grad_mlp.linear_fc1_activation"] == 2 * S * 2 * F
    plain = sum(size for _, size in kept(of_layer(**flags).first.forward))
    assert plain - sum(size for _, size in kept(module.first.forward)) == 2 * 2 * S * F


def test_activation_of_transformer_engine_in_experts() -> None:
    """Of 512 rows of 64 features beside the row's probability in fp32; its product is cast back."""
    flags = {"bias_swiglu_fusion": "false", "gpu": "h100-80gb", "use_te_activation_func": "true", "dp": 2, "ep": 2}
    found = made(of_layer(**flags, **MIXTURE).first.forward)
    assert found["linear_fc1_activation"] == 2 * 2 * S * 64
    assert found["expert_weighted"] == 4 * 2 * S * 64
    assert found["expert_weighted_cast"] == 2 * 2 * S * 64


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"use_te_activation_func": "true"}, "beside a fused bias"),
        ({"use_te_activation_func": "true", "bias_swiglu_fusion": "false", "transformer_impl": "local"}, "local"),
        ({"fused_residual_rmsnorm": "true", "norm": "layernorm"}, "LayerNorm"),
        ({"fused_residual_rmsnorm": "true", "te_version": "2.7"}, "before Transformer Engine 2.8"),
        ({"fused_residual_rmsnorm": "true", "recompute": "selective", "recompute_modules": "layernorm"}, "recomputed"),
        ({"qk_clip": "true", "te_version": "2.8"}, "before Transformer Engine 2.9"),
        ({"qk_clip": "true", "attention_backend": "unfused"}, "without cuDNN"),
        ({"mla_down_proj_fusion": "true"}, "latent"),
        ({"mla_down_proj_fusion": "true", **LATENT, "latent_q_rank": "0"}, "no rank of their own"),
    ],
)
def test_what_megatron_refuses(flags: dict[str, object], said: str) -> None:
    assert said in refusal(**{"gpu": "h100-80gb", **flags})


def test_a_residual_out_of_the_norm_needs_no_sum() -> None:
    """The norm's gradient, 2 s h, has the residual's in it already, which ends with the kernel, in place of being the
    sum's; forward is the same, and so are layers whose norms are in projections."""
    flags = {"gpu": "h100-80gb", "dp": 2, "ep": 2, **MIXTURE}
    given, without = of_layer(**flags, fused_residual_rmsnorm="true"), of_layer(**flags)
    assert given.first.forward == without.first.forward
    assert made(given.first.backward) == made(without.first.backward)
    assert received_ends(given.first.backward) < received_ends(without.first.backward)
    ended = given.first.backward[received_ends(given.first.backward) - 2 :]
    assert isinstance(ended[0], Hold)
    assert (ended[0].name, ended[0].bytes) == ("grad_pre_mlp_layernorm_input", 2 * S * H)
    dense = {"gpu": "h100-80gb"}
    same = of_layer(**dense, fused_residual_rmsnorm="true"), of_layer(**dense)
    assert same[0].first.backward == same[1].first.backward


def received_ends(tape: Tape) -> int:
    """Where the gradient ends that another module gave; behind the end where it is handed on."""
    ends = (at for at, event in enumerate(tape) if isinstance(event, Drop) and event.tensor == -2)
    return next(ends, len(tape))


def test_one_projection_of_queries_keys_and_values() -> None:
    """(q + kv + p) x h on one rank, with the norm in it: its output is what queries are copied from."""
    module = of_layer(**LATENT, mla_down_proj_fusion="true")
    shapes = {one.name: one.shape for one in module.parameters}
    assert shapes["self_attention.linear_qkv_down_proj.weight"] == (Q + KV + P, H)
    assert shapes["self_attention.linear_qkv_down_proj.layer_norm.weight"] == (H,)
    assert not any("q_down_proj" in name and "qkv" not in name for name in shapes)
    assert "input_layernorm.weight" not in shapes
    found = made(module.first.forward)
    assert found["self_attention.linear_qkv_down_proj"] == 2 * S * (Q + KV + P)
    assert found["q_compressed_contiguous"] == 2 * S * Q
    assert found["kv_compressed_contiguous"] == 2 * S * KV


def test_parts_of_one_projection_are_put_together() -> None:
    """Of two ranks each has half of the features of all tokens, which both receive in two halves; a rank keeps a view
    of half of the tokens of queries, and a copy of those of keys and values."""
    flags = {**LATENT, "dp": 1, "tp": "2", "etp": "1", "sequence_parallel": "true", "mla_down_proj_fusion": "true"}
    module = of_layer(**flags)
    shapes = {one.name: one.shape for one in module.parameters}
    assert shapes["self_attention.linear_qkv_down_proj.weight"] == ((Q + KV + P) // 2, H)
    found, stays = made(module.first.forward), dict(kept(module.first.forward))
    assert found["q_compressed_together"] == found["q_compressed_received"] == 2 * S * Q
    assert found["kv_compressed_together"] == 2 * S * (KV + P)
    assert stays["q_compressed_together"] == 2 * S * Q
    assert stays["kv_compressed_own"] == 2 * S // 2 * KV
    assert "kv_compressed_together" not in stays


def test_a_clip_copies_the_largest_weight_and_keeps_factors() -> None:
    """Of 16 heads of 16 features: 16 + 256 fp32 factors a layer; a copy of 3 x 256 x 256 in fp32 behind the step, none
    where main parameters are shards in buffers, of which Megatron cannot clip any."""
    flags = {"gpu": "h100-80gb", "dp": 2}
    kept_of = [
        programs(plan(**flags, **more), Options())[0].kept
        for more in ({"qk_clip": "true"}, {"log_max_attention_logit": "true"}, {"qk_clip": "true", "zero": 1})
    ]
    clipped, logged, sharded = (one for one in kept_of if one is not None)
    assert made(clipped.step)["weight_clipped"] == 4 * 3 * 256 * 256
    assert "weight_clipped" not in made(logged.step) | made(sharded.step)
    net = clipped.workspaces.excursion.net - logged.workspaces.excursion.net
    assert net == 8 * (512 + 1024)
    holds = [one for one in clipped.workspaces if isinstance(one, Hold)]
    assert [one.bytes for one in holds if one.name == "clip_factors"] == [512, 1024] * 8


def test_an_mlp_in_one_chain_of_operations() -> None:
    """It saves what the layers' own modules save, and in backward the activation's output ends before the gradient of
    its input is there, so that at most input, gradient and both weights' gradients are held."""
    flags = {"gpu": "h100-80gb"}
    fused, usual = of_layer(use_transformer_engine_op_fuser="true", **flags), of_layer(**flags)
    assert [(one.name, one.shape) for one in fused.parameters] == [(one.name, one.shape) for one in usual.parameters]
    assert sorted(size for _, size in kept(fused.first.forward)) == sorted(
        size for _, size in kept(usual.first.forward)
    )
    events = [(type(one).__name__, one.bytes) for one in fused.first.backward][:6]
    f, wide, h = 2 * S * F, 2 * S * 2 * F, 2 * S * H
    assert events[0] == ("Hold", f)
    assert events[1] == ("Drop", f), "the activation's output"
    assert events[2] == ("Hold", wide)
    assert events[3:5] == [("Drop", wide), ("Drop", f)], "its input, and the gradient of its output"
    assert events[5] == ("Hold", h)


def test_a_chain_of_operations_gathers_and_scatters() -> None:
    """On two ranks (s, b, h) of the whole for the first product, and of the gradient for the second."""
    flags = {"gpu": "h100-80gb", "tp": 2, "sequence_parallel": "true", "dp": 1}
    module = of_layer(use_transformer_engine_op_fuser="true", **flags)
    forward, backward = made(module.first.forward), made(module.first.backward)
    assert forward["mlp.linear_fc1_input_gathered"] == 2 * S * H
    assert forward["mlp.linear_fc2_scattered"] == 2 * S // 2 * H
    assert backward["grad_mlp.linear_fc2_gathered"] == backward["mlp.linear_fc1_input_gathered"] == 2 * S * H
    assert dict(kept(module.first.forward))["mlp.linear_fc1.layer_norm"] == 2 * S // 2 * H


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"mlp_bias": "true", "activation": "gelu"}, "biases"),
        ({"fp8": "tensorwise"}, "8 or 4 bits"),
        ({"te_version": "2.7"}, "before 2.8"),
        ({**MIXTURE, "dp": 2, "ep": 2}, "experts"),
    ],
)
def test_chains_that_are_not_covered(flags: dict[str, object], said: str) -> None:
    assert said in refusal(use_transformer_engine_op_fuser="true", gpu="h100-80gb", **flags)


def test_learned_positions_beside_latent_attention() -> None:
    """The embedding has a table of places; layers turn parts of heads as before (``rope_type``)."""
    turned, learned = (programs(plan(positions=one, **LATENT), Options())[0] for one in ("rotary", "learned"))
    layers = [next(span for span in one.spans if span.names[0] == "layer.0").module for one in (turned, learned)]
    assert layers[0].steady.forward == layers[1].steady.forward
    table = next(one for span in learned.spans for one in span.module.parameters if one.name == "position.weight")
    assert learned.parameters() - turned.parameters() == table.elements
