"""Qwen3-Next (``models/qwen3_next/modeling_qwen3_next.py``): gated delta nets, every fourth layer gated attention, and
experts. Megatron-Core has such layers, too (``--experimental-attention-variant gated_delta_net``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ..layers import experts, ops
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import LLAMA, MIXTURE, Allowed, reads
from ..layers.delta_net import Projecting, delta_net, projected_together
from ..layers.ends import Embedded, causal_mask, positions, rotary_tables, word_embeddings
from ..layers.huggingface import Heads, LayerShape, Shared, attention, linear
from ..plan.errors import Scalar
from ..plan.releases import LIBRARIES
from ..values import replace
from .base import ROUTER_LOSS, Config, key
from .gemma2 import gemma_norm
from .glm4_moe import rotary
from .llama import ATTENTION, CONSTANTS, KEYS, LLAMA_FAMILY, SILU, SUBMODULES, projection, seen_as_heads

DELTA = {
    **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
    "attention_output_bias": KEYS["attention_bias"],
    "head_dim": key("head_dim", default=256),
    "positions_max": key("max_position_embeddings", default=32_768),
    "rotary_fraction": key("partial_rotary_factor", "rope_parameters.partial_rotary_factor", default=0.25),
    "linear_interval": key("full_attention_interval", default=4),
    "linear_key_heads": key("linear_num_key_heads", default=16),
    "linear_value_heads": key("linear_num_value_heads", default=32),
    "linear_key_head_dim": key("linear_key_head_dim", default=128),
    "linear_value_head_dim": key("linear_value_head_dim", default=128),
    "linear_conv_kernel": key("linear_conv_kernel_dim", default=4),
}
Tables = Callable[[Recorder, LayerShape], tuple[Tensor, Tensor | None]]
"""What makes cosines and sines of positions."""
GATED: Mapping[str, Scalar] = {**CONSTANTS, "mlp_bias": False, "qk_norm": True, "attention_gate": True}


def mixed(
    r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape, *, projecting: Projecting
) -> tuple[Tensor, Tensor | None]:
    """What stands between tokens, and attention's weights."""
    if shape.linear:
        return delta_net(r, hidden, shape, projecting), None
    return gated_attention(r, hidden, shared, shape)


def gated_attention(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> tuple[Tensor, Tensor | None]:
    """``Qwen3NextAttention.forward``: a query's head and its gate are one after the other."""
    spec, (b, s) = shape.spec, (shape.b, shape.s)
    a, g, d = spec.heads, spec.kv_heads, spec.head_dim
    both = linear(r, hidden, "query", 2 * a * d, spec.attention_bias).view(b, s, a, 2 * d)
    q, gate = ops.split(r, both, [(b, s, a, d)] * 2, "query_gate")
    del both
    gate = ops.contiguous(r, gate, (b, s, a * d), "gate") if a > 1 else gate.view(b, s, d)
    q = gemma_norm(r, q, "query_norm").view(b, a, s, d)
    k = seen_as_heads(r, projection(r, hidden, "key", g, shape), "key", g, shape)
    k = gemma_norm(r, k, "key_norm").view(b, g, s, d)
    v = seen_as_heads(r, projection(r, hidden, "value", g, shape), "value", g, shape).view(b, g, s, d)
    q, k = rotary(r, q, k, shared)
    out, weights = attention(r, Heads(q, False), Heads(k, False), Heads(v, True), shared, shape)
    opened = ops.elementwise(r, "gate_sigmoid", (gate,), saves_output=True)
    out = ops.multiply(r, out, opened, "attention_gated")
    del opened
    out = linear(r, out, "attention_output", spec.hidden, spec.attention_output_bias)
    return out, weights


def embedding(r: Recorder, shape: LayerShape, tables: Tables = rotary_tables) -> Embedded:
    """``Qwen3NextModel.forward`` and ``Qwen3_5TextModel.forward`` up to the first layer: a mask for attention; delta
    nets have none for rows without padding (``create_recurrent_attention_mask``)."""
    inputs_embeds = r.embedded(word_embeddings(r, shape))
    position_ids = positions(r, shape.s)
    mask = causal_mask(r, shape)
    cos, sin = tables(r, shape)
    return Embedded(inputs_embeds, Shared(None, cos, sin, position_ids, mask))


READ = ("linear_interval", "rotary_fraction", "attention_gate")
OWN: Allowed = {
    "qk_norm": (True,),
    "attention_gate": (True,),
    "mlp_bias": (False,),
    "sliding_window": (None,),
    "linear_conv_kernel": (2, 3, 4),
}
"""``csrc/causal_conv1d.cpp`` takes these widths alone."""
COVERED: Allowed = {**reads(LLAMA, *READ), **OWN}
COVERED_MIXTURE: Allowed = {**reads(MIXTURE, *READ, "shared_expert_ffn"), **OWN, "shared_expert_gate": (True,)}
NET = "linear_attn"
"""What a layer calls its gated delta net."""
REGISTERED = (*ATTENTION, "convolution")
REST = ("numbers", "gate", "up", "down", "attention_norm", "mlp_norm")
"""``fully_shard`` takes a module's own parameters behind those of its submodules."""

OPENED = {
    **{f"shared_{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    "shared_opens": "mlp.shared_expert_gate",
}
MIXTURE_REST = (REST[0], "router", "experts", *OPENED, *REST[1:])


def mixture(r: Recorder, x: Tensor, shape: LayerShape) -> experts.Mixed:
    """``Qwen3NextSparseMoeBlock.forward``."""
    return experts.with_opened(r, x, shape, experts.cast_weights)


GATED_DELTA = replace(
    LLAMA_FAMILY,
    name="",
    covers=COVERED,
    needs=("linear_interval",),
    embedding=embedding,
    padded=False,
    norm=gemma_norm,
    rotary=rotary,
    kernels=(),
    lora_targets=None,
    since=LIBRARIES["transformers"].newest,
    no_zero3="a net reads its convolution's weight outside of that module, where ZeRO-3 gathers it",
    submodules={**SUBMODULES, "layer": replace(SUBMODULES["layer"], own=("numbers",))},
)
"""Of both families."""

QWEN3_NEXT = replace(
    GATED_DELTA,
    name="qwen3_next",
    covers=COVERED_MIXTURE,
    attention=partial(mixed, projecting=projected_together),
    mixture=mixture,
    config=Config(
        keys={
            **DELTA,
            "kv_heads": key("num_key_value_heads", default=2),
            "experts": key("num_experts", default=512),
            "expert_top_k": key("num_experts_per_tok", default=10),
            "expert_ffn": key("moe_intermediate_size", default=512),
            "shared_expert_ffn": key("shared_expert_intermediate_size", default=512),
            "router_normalises": key("norm_topk_prob", default=True),
            "router_aux_loss": key("router_aux_loss_coef", default=0.001),
            **ROUTER_LOSS,
        },
        constants={**GATED, "shared_expert_gate": True},
        activation=SILU,
        activations=("silu", "swish"),
    ),
    linear_layers={
        **LLAMA_FAMILY.linear_layers,
        **OPENED,
        "delta_qkvz": f"{NET}.in_proj_qkvz",
        "delta_ba": f"{NET}.in_proj_ba",
        "delta_output": f"{NET}.out_proj",
    },
    registered=(*REGISTERED, "delta_qkvz", "delta_ba", "delta_norm", "delta_output", *MIXTURE_REST),
)

FAMILIES = {"qwen3_next": QWEN3_NEXT}
