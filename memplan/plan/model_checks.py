"""Rules between the sizes of a model. Each says what is allowed."""

from __future__ import annotations

from .errors import ABSENT, PlanError
from .spec import ModelSpec, block_of, kinds_of

LATENT = ("nope_head_dim", "rope_head_dim", "value_head_dim")
"""Sizes that latent attention needs."""

DELTA = (
    "linear_key_heads", "linear_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel"
)  # fmt: skip
"""Sizes that gated delta nets need."""

MAMBA = ("mamba_heads", "mamba_head_dim", "mamba_groups", "mamba_state_dim")
"""Sizes that Mamba-2 layers need."""


def check_model(model: ModelSpec) -> None:
    """Sizes of the architecture that must fit one another."""
    if model.heads % model.kv_heads:
        raise model.wrong("kv_heads", f"must divide the {model.heads} attention heads ({divisors(model.heads)})")
    if model.full_kv_heads and model.heads % model.full_kv_heads:
        raise model.wrong("full_kv_heads", f"must divide the {model.heads} attention heads ({divisors(model.heads)})")
    model.refuse(
        ("full_head_dim", model.full_head_dim % 2, "must be even: rotary positions turn features in pairs"),
        (
            "layers",
            model.full_head_dim and model.full_interval and model.layers % model.full_interval,
            f"must be a multiple of full_interval = {model.full_interval}: transformers makes the last layer see all "
            "tokens in any case",
        ),
        *(
            (name, getattr(model, name) and not model.full_head_dim, "needs model.full_head_dim")
            for name in ("full_kv_heads", "keys_as_values")
        ),
    )
    for field in ("latent_q_rank", "index_head_dim", "index_top_k") if model.index_heads else ():
        if not getattr(model, field):
            raise model.wrong(field, "must be given with an indexer (index_heads)")
    if model.index_heads and model.index_head_dim < model.rope_head_dim:
        raise model.wrong("index_head_dim", f"must be at least rope_head_dim, {model.rope_head_dim}, which turn")
    for field in LATENT if model.latent_kv_rank else ():
        if not getattr(model, field):
            raise model.wrong(field, "must be given with latent attention (latent_kv_rank)")
    if model.latent_kv_rank and model.head_dim != model.nope_head_dim + model.rope_head_dim:
        raise model.wrong(
            "head_dim", f"must be nope_head_dim + rope_head_dim = {model.nope_head_dim} + {model.rope_head_dim}"
        )
    missing = [f"--{field.replace('_', '-')}" for field in ("expert_top_k", "expert_ffn") if not getattr(model, field)]
    model.refuse(
        ("experts", model.experts and missing, f"needs {' and '.join(missing)}, which the model does not say"),
        ("expert_latent", model.expert_latent and not model.experts, "must be left out: the model has no experts"),
        ("expert_top_k", model.expert_top_k > model.experts, f"must be at most the {model.experts} experts"),
        (
            "router_groups",
            model.router_groups and model.experts % model.router_groups,
            f"must divide the {model.experts} experts",
        ),
        (
            "router_groups",
            model.router_groups and not model.router_group_top_k,
            "needs model.router_group_top_k, the groups that a token's experts are of",
        ),
        (
            "router_group_top_k",
            0 < model.router_groups < model.router_group_top_k,
            f"must be at most the {model.router_groups} groups (router_groups)",
        ),
    )
    _check_pattern(model)
    _check_blocks(model)
    _check_delta(model)
    if model.positions == "rotary" and model.head_dim % 2:
        raise model.wrong("head_dim", "must be even: rotary positions turn features in pairs")


def _check_pattern(model: ModelSpec) -> None:
    """Layers of a hybrid, and the sizes that they need."""
    pattern = model.layer_pattern
    if not pattern:
        if model.mtp_pattern:
            raise model.wrong("mtp_pattern", "must be left out without model.layer_pattern")
        return
    for field in ("layer_pattern", "mtp_pattern"):
        if other := set(getattr(model, field)) - set("M*-EG"):
            raise model.wrong(
                field,
                f"has {min(other)!r}: kinds of layers are M Mamba-2, * attention, - MLP, E experts and "
                "G gated delta nets",
            )
    if len(pattern) != model.layers:
        raise model.wrong(
            "layers", f"must be {len(pattern)}, as many as model.layer_pattern has ({pattern}); cut or grow that"
        )
    if bool(model.mtp_layers) is not bool(model.mtp_pattern):
        problem = "is needed with model.mtp_layers: kinds of the layers that predict one token further, such as *E"
        if model.mtp_pattern:
            problem = "needs model.mtp_layers: how many further tokens are predicted"
        raise PlanError("model.mtp_pattern", model.mtp_pattern or ABSENT, problem)
    for field in MAMBA if "M" in pattern else ():
        if not getattr(model, field):
            raise model.wrong(field, "must be given with Mamba-2 layers (M of model.layer_pattern)")
    if "M" in pattern and model.mamba_heads % model.mamba_groups:
        raise model.wrong("mamba_groups", f"must divide the {model.mamba_heads} Mamba heads")
    if ("E" in pattern) is not bool(model.experts):
        problem = "must be given with layers E" if not model.experts else "must be 0 without a layer E"
        raise model.wrong("experts", f"{problem} in model.layer_pattern ({pattern})")
    if model.dense_layers:
        raise model.wrong("dense_layers", "must be left out with model.layer_pattern")


def _check_delta(model: ModelSpec) -> None:
    """Gated delta nets, in a hybrid's pattern or between layers with attention, and the sizes that they need."""
    interval = model.linear_interval
    if interval and model.layer_pattern:
        raise model.wrong("linear_interval", "must be left out with model.layer_pattern, which has G")
    if interval == 1:
        raise PlanError("model.linear_interval", 1, "must be 2 or more, or left out: with 1 all layers have attention")
    if not interval and "G" not in model.layer_pattern + model.mtp_pattern:
        return
    for field in DELTA:
        if not getattr(model, field):
            raise model.wrong(field, "must be given with gated delta nets")
    keys, values = model.linear_key_heads, model.linear_value_heads
    model.refuse(
        ("linear_value_heads", values % keys, f"must be a multiple of the {keys} heads of keys"),
        ("linear_interval", model.layer_blocks, "must be left out with model.layer_blocks"),
    )
    if model.mtp_layers and model.is_linear(model.layers - 1):
        problem = f"must divide the {model.layers} layers: predicting further tokens takes a layer like the last one, "
        raise model.wrong("linear_interval", f"{problem}and one with a gated delta net is not modelled")


def _check_blocks(model: ModelSpec) -> None:
    """Layers that differ: as many as there are, each of which divides the heads."""
    blocks = model.layer_blocks
    if not blocks:
        return
    if len(blocks) != model.layers:
        raise model.wrong("layers", f"must be {len(blocks)}, as many as model.layer_blocks has; cut or grow that")
    for text in kinds_of(blocks):
        if (groups := block_of(text).kv_heads) and model.heads % groups:
            problem = f"has {groups} key/value heads, which must divide the {model.heads} attention heads"
            raise PlanError("model.layer_blocks", text, problem)
    for field in ("experts", "latent_kv_rank", "mtp_layers", "layer_pattern"):
        if getattr(model, field):
            raise model.wrong(field, "must be left out with model.layer_blocks")


def divisors(number: int) -> str:
    """Divisors of ``number`` in words, the first ten."""
    found = [divisor for divisor in range(1, min(number, 4096) + 1) if number % divisor == 0]
    return ", ".join(str(divisor) for divisor in found[:10]) + (", …" if len(found) > 10 else "")
