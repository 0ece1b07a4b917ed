"""gpt-oss (``models/gpt_oss/modeling_gpt_oss.py``): experts with biases and a clamped gate, windows in every second
layer, and attention sinks. Its weights are published in MXFP4; training takes them in 16 bits."""

from __future__ import annotations

from ..layers import experts, ops, selecting
from ..layers.autograd import Recorder, Tensor
from ..layers.coverage import MIXTURE, reads
from ..layers.ends import Embedded, word_embeddings
from ..layers.huggingface import LayerShape, Shared, eager_rms_norm, rotary_of_halves
from ..plan.releases import SORTED_ONCE
from ..plan.spec import ModelSpec
from ..values import replace
from .base import ROUTER_LOSS, Config, key
from .gemma2 import of_both_kinds
from .llama import ATTENTION, CONSTANTS, KEYS, LLAMA_FAMILY, feed_forward, llama_attention
from .mixtral import MIXTRAL, NO_LEAF


def norm(r: Recorder, x: Tensor, name: str) -> Tensor:
    return eager_rms_norm(r, x, name, cast_last=True)


def rotary(r: Recorder, q: Tensor, k: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """``apply_rotary_pos_emb``: both halves of a head by the same angles."""

    def turned(x: Tensor, name: str) -> Tensor:
        half = (*x.shape[:-1], x.shape[-1] // 2)
        first, second = ops.split(r, x, [half, half], name)
        return rotary_of_halves(r, first, second, shared.tables, name)

    q_out = turned(q, "query")
    k_out = turned(k, "key")
    return q_out, k_out


def router(r: Recorder, hidden: Tensor, spec: ModelSpec) -> experts.Routed:
    """``GptOssTopKRouter.forward``: a softmax over the chosen logits."""
    logits = experts.logits_of(r, hidden, spec)
    chosen, indices = selecting.top_k(r, logits, spec.expert_top_k, "chosen")
    return logits, ops.softmax(r, chosen, "chosen_probabilities", chosen.dtype), indices


def gate(r: Recorder, x: Tensor, spec: ModelSpec) -> Tensor:
    """``GptOssExperts._apply_gate``: every second feature is the gate's; both are clamped."""
    f = spec.expert_ffn
    gate = ops.slice_last(r, x, f, "gate")
    up = ops.slice_last(r, x, f, "up")
    gate = selecting.clamped(r, gate, "gate_clamped", bounds=1)
    up = selecting.clamped(r, up, "up_clamped", bounds=2)
    inner = ops.elementwise(r, "gate_sigmoid", (ops.scale(r, gate, "gate_scaled"),), saves_output=True)
    inner = ops.multiply(r, gate, inner, "gated")
    return ops.multiply(r, ops.add_constant(r, up, "up_and_one"), inner, "gated_up")


def mixture(r: Recorder, x: Tensor, shape: LayerShape) -> experts.Mixed:
    """``GptOssMLP.forward``."""
    return experts.mixture(r, x, shape, router, gate=gate, returns=True)


def layer(r: Recorder, hidden: Tensor, shared: Shared, shape: LayerShape) -> Tensor:
    """``GptOssDecoderLayer.forward``: attention's weights end when the experts have given theirs."""
    residual = hidden
    hidden = norm(r, hidden, "attention_norm")
    hidden, given = llama_attention(r, hidden, shared, shape)
    hidden = ops.add(r, residual, hidden, "residual_attention")
    residual = hidden
    hidden = norm(r, hidden, "mlp_norm")
    hidden, given = feed_forward(r, hidden, shape)
    hidden = ops.add(r, residual, hidden, "residual_mlp")
    del residual, given
    return hidden


def embedding(r: Recorder, shape: LayerShape) -> Embedded:
    """``GptOssModel.forward`` up to the first layer: a mask of each kind, which know no positions."""
    return of_both_kinds(r, shape, r.embedded(word_embeddings(r, shape)), packed=False)


GPT_OSS = replace(
    LLAMA_FAMILY,
    name="gpt_oss",
    config=Config(
        keys={
            **{name: key for name, key in KEYS.items() if name != "mlp_bias"},
            "attention_bias": key("attention_bias", default=True),
            "attention_output_bias": key("attention_bias", default=True),
            "kv_heads": key("num_key_value_heads", default=8),
            "head_dim": key("head_dim", default=64),
            "positions_max": key("max_position_embeddings", default=131_072),
            "sliding_window": key("sliding_window", default=128),
            "experts": key("num_local_experts", default=128),
            "expert_top_k": key("num_experts_per_tok", default=4),
            "expert_ffn": key("intermediate_size"),
            "activation_clamp": key("swiglu_limit", default=7.0),
            "yarn_factor": key("rope_parameters.factor", "rope_scaling.factor", default=32.0),
            "router_aux_loss": key("router_aux_loss_coef", default=0.001),
            **ROUTER_LOSS,
        },
        constants={
            **CONSTANTS,
            "activation": "quick_geglu",
            "mlp_bias": True,
            "alternating_windows": True,
            "attention_sinks": True,
        },
        refused={"hidden_act": "silu"},
        published_in=("mxfp4",),
    ),
    covers={
        **reads(MIXTURE, "mlp_bias", "alternating_windows", "attention_sinks", "activation_clamp"),
        "activation": ("quick_geglu",),
        "qk_norm": (False,),
        "mlp_bias": (True,),
        "alternating_windows": (True,),
        "attention_sinks": (True,),
        "activation_clamp": (7.0,),
        "dense_layers": ((),),
    },
    layer=layer,
    embedding=embedding,
    norm=norm,
    rotary=rotary,
    tables="half",
    mixture=mixture,
    kernels=(),
    no_package="its attention sinks are an argument of kernels of their own, which are not modelled",
    no_flash="its attention sinks are not in PyTorch's flash kernel, and transformers refuses sdpa for the family",
    linear_layers=MIXTRAL.linear_layers,
    all_linear_of_attention=True,
    registered=(*ATTENTION, "sinks", "router", "experts", "attention_norm", "mlp_norm"),
    since=SORTED_ONCE,
    not_followed=None,
    submodules={
        **NO_LEAF,
        "layer": replace(
            NO_LEAF["layer"], parts=(experts.ROUTER, experts.EXPERTS), products_of_leaves=True, own=("sinks",)
        ),
    },
)

FAMILIES = {"gpt_oss": GPT_OSS}
