"""Which architectures a recipe covers: the values that each field of a spec may have.

A recipe reads some fields and is written for one value of the others; a spec that differs in those
would be computed wrongly, so it is refused. Fields that are not listed are read by the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType

from ..families import Family, families, family
from ..plan.errors import PlanError
from ..plan.spec import ModelSpec

Allowed = Mapping[str, tuple[object, ...]]

PLAIN: Allowed = MappingProxyType(
    {
        "blocks": ("sequential",),
        "position_offset": (0,),
        "rotary_fraction": (1.0,),
        "alternating_windows": (False,),
        "full_interval": (0,),
        "full_head_dim": (0,),
        "full_kv_heads": (0,),
        "keys_as_values": (False,),
        "attention_softcap": (None,),
        "embedding_scale": (False,),
        "head_bias": (False,),
        "logit_softcap": (None,),
        "qk_norm_over": ("head",),
        "attention_sinks": (False,),
        "attention_gate": (False,),
        "attention_chunk": (None,),
        "nope_interval": (0,),
        "linear_interval": (0,),
        "activation_clamp": (None,),
        "residual_scale": (False,),
        "logit_scale": (False,),
        "router_weighs_inputs": (False,),
        "experts": (0,),
        "expert_latent": (0,),
        "latent_kv_rank": (0,),
        "index_heads": (0,),
        "mtp_layers": (0,),
        "layer_pattern": ("",),
        "layer_blocks": ((),),
    }
)
"""What only single families have."""

GPT2: Allowed = MappingProxyType(
    {
        **PLAIN,
        "norm": ("layernorm",),
        "norm_place": ("pre",),
        "positions": ("learned",),
        "activation": ("gelu", "gelu_new"),
        "qk_norm": (False,),
        "causal": (True,),
        "sliding_window": (None,),
        "embedding_norm": (False,),
        "token_types": (0,),
        "mlm_head": (False,),
    }
)

LLAMA: Allowed = MappingProxyType(
    {
        **PLAIN,
        "norm": ("rmsnorm",),
        "norm_place": ("pre",),
        "positions": ("rotary",),
        "activation": ("swiglu",),
        "causal": (True,),
        "embedding_norm": (False,),
        "token_types": (0,),
        "mlm_head": (False,),
        "embedding_dropout": (0.0,),
        "hidden_dropout": (0.0,),
    }
)


def applying(*reasons: tuple[object, str]) -> Iterator[str]:
    """Those of ``reasons`` whose condition, which stands before each, holds."""
    return (reason for applies, reason in reasons if applies)


def reads(base: Allowed, *fields: str) -> Allowed:
    """``base`` of a recipe that reads ``fields``, too."""
    return MappingProxyType({name: values for name, values in base.items() if name not in fields})


MIXTURE: Allowed = MappingProxyType(
    {
        **reads(LLAMA, "experts"),
        "router_score": ("softmax",),
        "router_expert_bias": (False,),
        "router_groups": (0,),
        "router_scaling": (None,),
        "router_dtype": (None,),
        "router_z_loss": (0.0,),
        "shared_expert_ffn": (0,),
        "shared_expert_gate": (False,),
        "mlp_bias": (False,),
    }
)
"""Experts between a softmax over all of them and their sum, and no others."""

SHARED: Allowed = MappingProxyType(
    reads(MIXTURE, "router_score", "router_expert_bias", "router_groups", "router_scaling", "shared_expert_ffn")
)
"""And experts that take every token, by routers that know groups of experts."""

MEGATRON_GPT: Allowed = MappingProxyType(
    {
        **PLAIN,
        "norm": ("layernorm",),
        "norm_place": ("pre",),
        "positions": ("learned", "alibi"),
        "activation": ("gelu", "gelu_new"),
        "attention_bias": (True,),
        "attention_output_bias": (True,),
        "mlp_bias": (True,),
        "qk_norm": (False,),
        "causal": (True,),
        "sliding_window": (None,),
        "tied_embeddings": (True,),
        "final_norm": (True,),
        "token_types": (0,),
        "mlm_head": (False,),
    }
)

CORE_GPT: Allowed = MappingProxyType(
    {
        **reads(
            PLAIN,
            "rotary_fraction",
            "experts",
            "expert_latent",
            "latent_kv_rank",
            "mtp_layers",
            "alternating_windows",
            "attention_sinks",
            "attention_gate",
            "activation_clamp",
            "attention_chunk",
            "nope_interval",
            "linear_interval",
            "router_weighs_inputs",
            "layer_blocks",
        ),
        "norm": ("layernorm", "rmsnorm"),
        "norm_place": ("pre",),
        "qk_norm_over": ("head", "heads", "head_without_weight"),
        "positions": ("learned", "rotary", "none"),
        "activation": ("gelu", "gelu_new", "relu2", "swiglu", "quick_geglu"),
        "causal": (True,),
        "embedding_norm": (False,),
        "final_norm": (True,),
        "token_types": (0,),
        "mlm_head": (False,),
    }
)

CORE_HYBRID: Allowed = MappingProxyType(
    {
        **reads(CORE_GPT, "layer_pattern"),
        "layer_blocks": ((),),
        "linear_interval": (0,),
        "latent_kv_rank": (0,),
        "alternating_windows": (False,),
        "attention_sinks": (False,),
    }
)

CORE_BERT: Allowed = MappingProxyType(
    {
        **PLAIN,
        "norm": ("layernorm",),
        "norm_place": ("pre",),
        "positions": ("learned",),
        "activation": ("gelu", "gelu_new"),
        "attention_bias": (True,),
        "attention_output_bias": (True,),
        "mlp_bias": (True,),
        "qk_norm": (False,),
        "causal": (False,),
        "sliding_window": (None,),
        "embedding_norm": (False,),
        "final_norm": (True,),
        "mlm_head": (True,),
    }
)

CORE_T5: Allowed = MappingProxyType(
    {
        **reads(CORE_BERT, "mlm_head"),
        "token_types": (0,),
        "mlm_head": (False,),
    }
)


def check_kernel(spec: ModelSpec) -> None:
    """``PlanError`` where transformers does not reach the flash kernel through ``sdpa``."""
    known = family(spec.family)
    if why := known.no_flash:
        instead = "eager" if known.no_package else "flash_attention_2 or eager"
        raise PlanError("attention", "flash", f"must be {instead} for family {spec.family}: {why}")


def check_recompute(spec: ModelSpec) -> None:
    """``PlanError`` where a recomputed layer is more than its input and its output."""
    if family(spec.family).returns_weights:
        raise PlanError(
            "recompute.mode",
            "full",
            f"must be none for family {spec.family}: its layers also return their attention weights",
        )


Recipes = Callable[[Family], Allowed | None]
"""Whose layers: what they cover of a family, if they have it."""

TRANSFORMERS: Recipes = attrgetter("covers")
MEGATRON: Recipes = attrgetter("megatron")
MEGATRON_CORE: Recipes = attrgetter("megatron_core")
SHARDED: Recipes = attrgetter("sharded")
RUN_BY: tuple[tuple[Recipes, str], ...] = (
    (TRANSFORMERS, "single, ddp"),
    (SHARDED, "fsdp"),
    (TRANSFORMERS, "deepspeed, device-map"),
    (MEGATRON, "megatron-deepspeed"),
    (MEGATRON_CORE, "megatron"),
)
"""The frameworks that run each kind of recipe, for people."""


def elsewhere(known: Family) -> str:
    """What has a recipe of the family, for people; empty where nothing has."""
    return f"it has one in {others} (--framework)" if (others := run_by(known)) else ""


def run_by(known: Family, **fields: object) -> str:
    """Frameworks that have a recipe of the family, of models with ``fields``, for people."""

    def covers(allowed: Allowed | None) -> bool:
        return allowed is not None and all(value in allowed.get(name, (value,)) for name, value in fields.items())

    return ", ".join(names for recipes, names in RUN_BY if covers(recipes(known)))


def covered(recipes: Recipes) -> tuple[str, ...]:
    """Families that have a recipe."""
    return tuple(one.name for one in families() if recipes(one) is not None)


def check_covered(spec: ModelSpec, recipes: Recipes, framework: str) -> None:
    """``PlanError`` that names the first field which no recipe of ``framework`` covers."""
    known = family(spec.family)
    allowed = recipes(known)
    others = run_by(known)
    spec.refuse(
        (
            "family",
            allowed is None and recipes is MEGATRON_CORE and known.no_megatron_core,
            f"cannot be trained in {framework}: {known.no_megatron_core}"
            + (others and f"; it has a recipe in {others} (--framework)"),
        ),
        (
            "family",
            allowed is None and recipes is TRANSFORMERS and known.no_transformers,
            f"cannot be trained in {framework}: {known.no_transformers}",
        ),
    )
    if allowed is None:
        also = elsewhere(known)
        also = f"{also}{known.other_code}" if also else f"these have: {', '.join(covered(recipes))}"
        raise spec.wrong("family", f"has no recipe in framework {framework} yet; {also}")
    for field, values in allowed.items():
        value = getattr(spec, field)
        if value not in values:
            shown = " or ".join(_shown(known) for known in values)
            problem = f"must be {shown} for family {spec.family} in framework {framework}"
            others = run_by(known, **{field: value})
            raise spec.wrong(field, f"{problem}; {_shown(value)} is in {others} (--framework)" if others else problem)
    spec.refuse(
        (
            "router_loss",
            recipes is TRANSFORMERS and spec.router_loss,
            f"must be false (output_router_logits) in framework {framework}: transformers' model adds the routers' "
            "loss to its own, which keeps scores of all layers and is not modelled; Megatron-Core does not read it",
        )
    )
    for field in known.needs if recipes is TRANSFORMERS else ():
        if not getattr(spec, field):
            raise spec.wrong(field, f"must be set for family {spec.family}")
    spec.refuse(
        ("token_types", spec.family == "bert" and spec.token_types == 0, "must be at least 1 for family bert"),
        (
            "rotary_fraction",
            spec.positions == "rotary" and (spec.rotary_features % 2 or not spec.rotary_features),
            f"must make an even number of a head's {spec.head_dim} features turn, not {spec.rotary_features}",
        ),
        ("full_interval", spec.full_interval == 1, "must be 0, or at least 2: every layer would see all tokens"),
        (
            "sliding_window",
            spec.full_interval and spec.sliding_window is None,
            f"must be set where every {spec.full_interval}th layer sees all tokens",
        ),
    )
    if recipes is MEGATRON_CORE:
        return
    spec.refuse(
        (
            "kv_heads",
            known.multi_head and spec.kv_heads != spec.heads,
            f"must equal the {spec.heads} attention heads for family {spec.family}",
        ),
        (
            "head_dim",
            known.heads_fill_hidden and spec.heads * spec.head_dim != spec.hidden,
            f"must be hidden / heads = {spec.hidden} / {spec.heads} for family {spec.family}",
        ),
    )


def _shown(value: object) -> str:
    if value is None:
        return "left out"
    return str(value).lower() if isinstance(value, bool) else str(value)
