"""DeepSeek V2 and V3 (``models/deepseek_v2/modeling_deepseek_v2.py``, ``deepseek_v3``), and Kimi K2, which is a V3:
latent attention, experts, and shared experts beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..layers import experts, ops, selecting
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import CORE_GPT, SHARED, reads
from ..layers.fused_attention import efficient_attention
from ..layers.gradients import by_way_of
from ..layers.huggingface import (
    Heads,
    LayerShape,
    Shared,
    attention,
    linear,
    rms_norm,
    rotary_of_halves,
)
from ..plan.errors import Scalar
from ..plan.releases import SORTED_ONCE
from ..plan.spec import ModelSpec
from ..values import replace
from .base import NO_BIASES, Config, Family, key
from .llama import CONSTANTS, KEYS, LLAMA_FAMILY, SILU
from .mixtral import NO_LEAF_SHARED, SHARED_LAYERS, SHARED_REGISTERED


def queries(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Tensor:
    """By a rank of their own, or at once."""
    features = spec.heads * spec.head_dim
    if not spec.latent_q_rank:
        return linear(r, hidden, "query", features, False)
    return linear(r, rank_of_queries(r, hidden, spec), "query_up", features, False)


def rank_of_queries(r: Recorder, hidden: Tensor, spec: ModelSpec) -> Tensor:
    return rms_norm(r, linear(r, hidden, "query_down", spec.latent_q_rank, False), "query_down_norm")


Picking = Callable[[Recorder, Tensor, Tensor, Shared, LayerShape], tuple[Tensor, ...]]
"""From hidden states and the rank of queries to a mask of attention, and what stays in variables beside it."""


def latent_attention(
    r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape, *, picking: Picking | None = None
) -> tuple[Tensor, Tensor | None]:
    """``DeepseekV3Attention.forward``: keys and values by a rank, one turned key for all heads. ``picking``: which keys
    each query sees, whose rank stays in a variable then."""
    spec, b, s = shape.spec, shape.b, shape.s
    a, rank, plain, turned = spec.heads, spec.latent_kv_rank, spec.nope_head_dim, spec.rope_head_dim
    small: Tensor | None = None
    if picking is None:
        q = queries(r, hidden, spec)
    else:
        small = rank_of_queries(r, hidden, spec)
        q = linear(r, small, "query_up", a * spec.head_dim, False)
    q = ops.copied_gradient(r, q, "query")
    q = q.view(b, a, s, spec.head_dim)
    q_pass, q_rot = ops.split(r, q, [(b, a, s, plain), (b, a, s, turned)], "query_parts")
    compressed = linear(r, hidden, "key_value_down", rank + turned, False)
    low, k_rot = ops.split(r, compressed, [(b, s, rank), (b, s, turned)], "key_value_parts")
    k_rot = k_rot.view(b, 1, s, turned)
    last: Tensor | None = None
    if shared.sin is None or picking is not None:  # V2 and V3.2 have it in a variable of its own
        last = rms_norm(r, low, "key_value_norm")
    else:
        low = rms_norm(r, low, "key_value_norm")
    if shared.sin is None:
        q_rot, k_rot = complex_rotary(r, q_rot, k_rot, shared, copied=shape.fused or q_rot.dtype == "fp32")
    else:
        q_rot, k_rot = interleaved_rotary(r, q_rot, k_rot, shared)
    query = ops.cat_last(r, q_pass, q_rot, "query_states")
    key, value = expanded(r, last or low, k_rot, shape)
    if picking is not None and small is not None:
        mask, *_variables = picking(r, hidden, small, shared, shape)
        shared = replace(shared, mask=mask)
        del mask
    if shape.flash and spec.value_head_dim != spec.head_dim:  # which flash attention cannot
        out, weights = efficient_attention(r, query, key, value, mask=shared.mask if shape.masked else None), None
    else:
        out, weights = attention(r, Heads(query, False), Heads(key, False), Heads(value, True), shared, shape)
    out = out.view(b, s, a * spec.value_head_dim)
    out = linear(r, out, "attention_output", spec.hidden, False)
    return out, weights


def expanded(r: Recorder, low: Tensor, k_rot: Tensor, shape: LayerShape) -> tuple[Tensor, Tensor]:
    """``expand_kv``: keys are written into a tensor part by part; values are a view."""
    spec, b, s, a = shape.spec, shape.b, shape.s, shape.spec.heads
    plain, width = spec.nope_head_dim, spec.value_head_dim
    both = ops.copied_gradient(r, linear(r, low, "key_value_up", a * (plain + width), False), "key_value_up")
    k_pass, value = ops.split(r, both.view(b, a, s, plain + width), [(b, a, s, plain), (b, a, s, width)], "key_value")
    k_rot = ops.expanded(r, k_rot, (b, a, s, spec.rope_head_dim), "key_turned", copies=False)
    key = r.empty((b, a, s, spec.head_dim), both.dtype, "key_states")
    return selecting.written(r, key, (k_pass, k_rot), "key"), value


def interleaved_rotary(r: Recorder, q: Tensor, k: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb_interleave``: pairs of neighbours by the first half of the tables."""
    half = q.shape[-1] // 2
    cos, sin = (table.view(1, table.shape[1], half) for table in shared.tables)
    q_even, q_odd = (ops.slice_last(r, q, half, f"query_{part}") for part in ("even", "odd"))
    k_even, k_odd = (ops.slice_last(r, k, half, f"key_{part}") for part in ("even", "odd"))
    q_out = rotary_of_halves(r, q_even, q_odd, (cos, sin), "query")
    return q_out, rotary_of_halves(r, k_even, k_odd, (cos, sin), "key")


def complex_rotary(r: Recorder, q: Tensor, k: Tensor, shared: Shared, *, copied: bool) -> tuple[Tensor, Tensor]:
    """``apply_rotary_emb``: pairs of neighbours are complex numbers in fp32. ``copied``: the gradient of queries comes
    in a layout that cannot be seen so."""
    table = shared.cos
    assert table is not None

    def turned(x: Tensor, name: str, dtype: str) -> Tensor:
        whole = complex_product(r, x, table, name)
        whole = ops.copied_gradient(r, whole, f"{name}_turned") if copied and name == "query" else whole
        return ops.cast(r, whole, dtype, f"{name}_rotary")

    q_wide = ops.cast(r, q, "fp32", "query_fp32")
    k_wide = ops.cast(r, k, "fp32", "key_fp32")
    q_out = turned(q_wide, "query", q.dtype)
    k_out = turned(k_wide, "key", k.dtype)
    return q_out, k_out


def complex_product(r: Recorder, x: Tensor, table: Tensor, name: str) -> Tensor:
    """fp32 ``x``, pairs of neighbours seen as complex numbers, times the numbers of ``table``, as fp32."""
    backward = by_way_of((table.shape, "fp32", "rotary_conjugate"), (x.shape, "fp32", f"grad_{name}_turned"))
    return r.output((x,), (table,), backward, x.shape, "fp32", f"{name}_turned")


def v2_mixture(r: Recorder, x: Tensor, shape: LayerShape) -> experts.Mixed:
    """``DeepseekV2Moe.forward``."""
    return experts.with_shared(r, x, shape, experts.grouped_softmax)


def v3_mixture(r: Recorder, x: Tensor, shape: LayerShape) -> experts.Mixed:
    """``DeepseekV3MoE.forward``."""
    return experts.with_shared(r, x, shape, experts.grouped_sigmoid)


DEEPSEEK = {
    **{name: KEYS[name] for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied_embeddings")},
    "attention_dropout": KEYS["attention_dropout"],
    "experts": key("n_routed_experts"),
    "expert_ffn": key("moe_intermediate_size"),
    "router_scaling": key("routed_scaling_factor"),
    "latent_kv_rank": key("kv_lora_rank"),
    "nope_head_dim": key("qk_nope_head_dim"),
    "rope_head_dim": key("qk_rope_head_dim"),
    "value_head_dim": key("v_head_dim"),
    "router_aux_loss": key("aux_loss_alpha", default=None),
}
LATENT: Mapping[str, Scalar] = {**CONSTANTS, **NO_BIASES, "qk_norm": True, "router_balancing": "seq_aux_loss"}

COVERS = {
    **reads(SHARED, "latent_kv_rank", "router_groups", "router_scaling"),
    "qk_norm": (True,),
    "attention_bias": (False,),
    "attention_output_bias": (False,),
}
LATENT_LAYERS = {
    "query": "self_attn.q_proj",
    "query_down": "self_attn.q_a_proj",
    "query_up": "self_attn.q_b_proj",
    "key_value_down": "self_attn.kv_a_proj_with_mqa",
    "key_value_up": "self_attn.kv_b_proj",
    "attention_output": "self_attn.o_proj",
}
IN_ORDER = ("query", "query_down", "query_down_norm", "query_up", "key_value_down", "key_value_norm", "key_value_up")

V2 = replace(
    LLAMA_FAMILY,
    name="deepseek_v2",
    padded=False,
    config=Config(
        keys={
            **DEEPSEEK,
            "positions_max": key("max_position_embeddings", default=2048),
            "expert_top_k": key("num_experts_per_tok"),
            "router_method": key("topk_method", default="greedy"),
            "router_groups": key("n_group", default=None),
            "router_group_top_k": key("topk_group", default=None),
            "first_dense": key("first_k_dense_replace", default=0),
            "shared_experts": key("n_shared_experts", default=2),
            "latent_q_rank": key("q_lora_rank", default=1536),
        },
        constants={**LATENT, "router_score_first": True},
        activation=SILU,
        activations=("silu", "swish"),
        refused={"attention_bias": False, "mlp_bias": False},
    ),
    covers=COVERS | {"router_score": ("softmax",), "router_expert_bias": (False,)},
    attention=latent_attention,
    multi_head=True,
    mixture=v2_mixture,
    tables="complex",
    kernels=(),
    linear_layers={**LATENT_LAYERS, **SHARED_LAYERS},
    lora_targets=None,
    registered=(*IN_ORDER, "attention_output", *SHARED_REGISTERED),
    since=SORTED_ONCE,
    submodules=NO_LEAF_SHARED,
)

V3 = replace(
    V2,
    name="deepseek_v3",
    config=Config(
        keys={
            **DEEPSEEK,
            "positions_max": key("max_position_embeddings", default=4096),
            "expert_top_k": key("num_experts_per_tok", default=8),
            "router_groups": key("n_group", default=8),
            "router_group_top_k": key("topk_group", default=4),
            "first_dense": key("first_k_dense_replace", default=3),
            "shared_experts": key("n_shared_experts", default=1),
            "latent_q_rank": key("q_lora_rank", default=1536),
        },
        constants={**LATENT, "router_score": "sigmoid", "router_expert_bias": True},
        activation=SILU,
        activations=("silu", "swish"),
        refused={"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True},
        published_in=("fp8",),
    ),
    covers=COVERS | {"router_score": ("sigmoid",), "router_expert_bias": (True,)},
    mixture=v3_mixture,
    tables="whole",
)

KIMI_K2 = Family(
    "kimi_k2",
    config=V3.config,
    no_transformers="transformers has no class of it, and its repository's own code asserts that it is not training "
    "(MoEGate.forward); it is a DeepSeek V3 in all but name, which can: --family deepseek_v3",
    megatron_core=CORE_GPT,
)

FAMILIES = {"deepseek_v2": V2, "deepseek_v3": V3, "kimi_k2": KIMI_K2}
