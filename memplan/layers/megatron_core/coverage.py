"""What the recipes of Megatron-Core's layers do not cover."""

from __future__ import annotations

from collections.abc import Iterator

from ..coverage import applying
from . import fused_mlp, gated_delta, grouped_chain, latent, moe, replaced, te_facts
from .shape import CoreShape


def uncovered(shape: CoreShape) -> Iterator[str]:
    """What these recipes do not cover of ``shape``: reasons, as sentences without a full stop."""
    spec = shape.spec
    yield from applying(
        (
            spec.attention_gate and (spec.kv_heads < shape.t or spec.latent_kv_rank or shape.keys),
            "a gate of attention's output with latent or cross attention, or fewer key/value heads than ranks",
        ),
        (
            shape.mlp_chunks > 1 and (shape.implementation == "local" or shape.experts is not None),
            "MLPs in chunks with experts, or in local layers",
        ),
        (
            shape.mlp_chunks > 1 and ("mlp" in shape.recompute_modules or shape.spec.layer_pattern),
            "MLPs in chunks with recompute of MLPs, or in hybrids",
        ),
        (
            shape.largest_logit and shape.te < te_facts.OLDEST_LARGEST_SCORE,
            "the largest score of each head before Transformer Engine 2.9",
        ),
        (
            shape.largest_logit and (shape.attention != "fused" or shape.cp > 1 or shape.low is not None),
            "the largest score of each head without cuDNN's attention, with context parallelism or low precision",
        ),
        (
            spec.kv_heads < shape.t and not spec.latent_kv_rank and (shape.implementation == "local" or spec.qk_norm),
            "fewer key/value heads than tensor-parallel ranks in local layers, or with norms of queries and keys",
        ),
        (
            spec.rotary_fraction < 1.0 and (spec.positions != "rotary" or spec.latent_kv_rank),
            "a rotary fraction without rotary positions of whole heads",
        ),
        (spec.norm_place == "post", "norms after each block"),
        (
            "mlp" in shape.recompute_modules and spec.mlp_bias and shape.experts is None,
            "recompute of an MLP with biases: Megatron-Core's own backward does not end",
        ),
        (
            shape.fp32_residual,
            "fp32 residual connections: linear layers refuse fp32 inputs beside 16-bit weights without autocast",
        ),
        (
            shape.implementation == "local" and spec.norm == "rmsnorm" and shape.sequence_parallel,
            "RMSNorm with sequence parallelism: PyTorch's norm, which the local implementation takes, refuses it",
        ),
        (shape.attention == "local" and shape.cp > 1, "context parallelism with Megatron-Core's own attention"),
        (
            spec.activation == "quick_geglu" and (shape.experts is None or spec.dense_layers or spec.shared_expert_ffn),
            "quick_geglu of an MLP; that of experts is covered",
        ),
        (
            spec.activation_clamp is not None and spec.activation != "quick_geglu",
            "a clamp of another activation than quick_geglu",
        ),
    )
    if spec.layer_pattern:
        yield from _uncovered_hybrid(shape)
    if spec.linear_interval or "G" in spec.layer_pattern + spec.mtp_pattern:
        yield from gated_delta.uncovered(shape)
    if shape.implementation == "local" and (spec.qk_norm_over != "head" or spec.nope_interval):
        yield "norms of queries and keys but of each head's, or layers without positions, in local layers"
    if spec.nope_interval and (spec.positions != "rotary" or spec.latent_kv_rank):
        yield "layers without positions where the others have no rotary ones of whole heads"
    yield from _uncovered_fusions(shape)
    yield from _uncovered_packing(shape)
    yield from replaced.uncovered(shape)
    yield from fused_mlp.uncovered(shape)
    yield from grouped_chain.uncovered(shape)
    yield from _uncovered_attention(shape)
    yield from latent.uncovered(shape)
    yield from moe.uncovered(shape)


def _uncovered_hybrid(shape: CoreShape) -> Iterator[str]:
    if shape.implementation == "local":
        yield "hybrids in local layers; those of Transformer Engine are covered"
    if shape.spec.latent_kv_rank:
        yield "latent attention in hybrids"


def _uncovered_packing(shape: CoreShape) -> Iterator[str]:
    if not shape.packed:
        return
    spec = shape.spec
    others = {
        "encoders, whose scripts know none": not spec.causal or shape.decoder > 0,
        "context parallelism": shape.cp > 1,
        "local layers": shape.implementation == "local",
        "unfused attention": shape.attention == "unfused",
        "hybrids": bool(spec.layer_pattern),
        "latent attention": spec.latent_kv_rank > 0,
        "multi-token prediction": spec.mtp_layers > 0,
        "CUDA graphs of layers": shape.graphs is not None,
        "experts and several sequences in a micro-batch": shape.experts is not None and shape.packed > 1,
        "attention sinks": spec.attention_sinks,
    }
    yield from (f"packed sequences with {name}" for name, applies in others.items() if applies)


def _uncovered_fusions(shape: CoreShape) -> Iterator[str]:
    spec = shape.spec
    yield from applying(
        (
            shape.te_activation and (shape.implementation == "local" or spec.layer_pattern),
            "Transformer Engine's activation functions in local layers or hybrids, which are given none",
        ),
        (
            shape.te_activation and shape.bias_activation_fusion,
            "Transformer Engine's activation functions beside a fused bias, which Megatron-Core refuses",
        ),
        (
            shape.te_activation and (spec.activation not in ("swiglu", "gelu") or spec.activation_clamp is not None),
            f"Transformer Engine's activation functions in place of {spec.activation}, which Megatron-Core refuses",
        ),
    )
    if not shape.norm_takes_residual:
        return
    if spec.norm != "rmsnorm":
        yield "residuals in a LayerNorm, which Megatron-Core refuses"
    if shape.te < te_facts.OLDEST_NORM_WITH_RESIDUAL:
        yield "residuals in an RMSNorm before Transformer Engine 2.8"
    away = {"attn_norm", "mlp_norm"} & {*shape.offload}
    if "layernorm" in shape.recompute_modules or away or shape.graphs is not None:
        yield "residuals in an RMSNorm that is recomputed, sent to the host or in a CUDA graph"


def _uncovered_attention(shape: CoreShape) -> Iterator[str]:
    spec, own = shape.spec, shape.attention == "local"
    yield from applying(
        (
            spec.qk_norm and spec.qk_norm_over == "heads" and shape.t > 1,
            "one norm over all heads with tensor parallelism: Megatron-Bridge has OLMoE's whole on every rank",
        ),
        (
            spec.attention_chunk is not None and shape.s * shape.cp > spec.attention_chunk,
            f"sequences above {spec.attention_chunk} tokens: Megatron-Core has no attention in chunks of so many",
        ),
        (spec.sliding_window is not None and own, "sliding windows in local layers"),
        (
            spec.attention_sinks and (shape.attention in ("local", "unfused") or spec.latent_kv_rank),
            "attention sinks in another back end than cuDNN's fused one, or with latent attention",
        ),
    )
