"""Which architectures a recipe covers: the values that each field of a spec may have.

A recipe reads some fields and is written for one value of the others; a spec that differs in those
would be computed wrongly, so it is refused. Fields that are not listed are read by the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..plan.errors import PlanError
from ..plan.spec import ModelSpec

Allowed = Mapping[str, tuple[object, ...]]

_GPT2: Allowed = MappingProxyType(
    {
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

_BERT: Allowed = MappingProxyType(
    {
        "norm": ("layernorm",),
        "norm_place": ("post",),
        "positions": ("learned",),
        "activation": ("gelu", "gelu_new"),
        "attention_output_bias": (True,),
        "mlp_bias": (True,),
        "qk_norm": (False,),
        "causal": (False,),
        "sliding_window": (None,),
        "embedding_norm": (True,),
        "final_norm": (False,),
        "mlm_head": (True,),
    }
)

_LLAMA: Allowed = MappingProxyType(
    {
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

_MEGATRON: Allowed = MappingProxyType(
    {
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

TRANSFORMERS: Mapping[str, Allowed] = MappingProxyType(
    {"gpt2": _GPT2, "gpt": _GPT2, "bert": _BERT, "llama": _LLAMA, "mistral": _LLAMA, "qwen3": _LLAMA}
)
"""Families that have a recipe in ``layers.huggingface``."""

MEGATRON: Mapping[str, Allowed] = MappingProxyType({"gpt": _MEGATRON, "gpt2": _MEGATRON, "bloom": _MEGATRON})
"""Families whose layers Megatron's GPT has (``layers.megatron``)."""

_CORE_GPT: Allowed = MappingProxyType(
    {
        "norm_place": ("pre",),
        "positions": ("learned", "rotary", "none"),
        "causal": (True,),
        "sliding_window": (None,),
        "embedding_norm": (False,),
        "final_norm": (True,),
        "token_types": (0,),
        "mlm_head": (False,),
    }
)

_CORE_BERT: Allowed = MappingProxyType(
    {
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

MEGATRON_CORE: Mapping[str, Allowed] = MappingProxyType(
    {**dict.fromkeys(("gpt", "gpt2", "llama", "mistral", "qwen3"), _CORE_GPT), "bert": _CORE_BERT}
)
"""Families whose layers Megatron-Core has (``layers.megatron_core``): its one GPT is made of options."""

MULTI_HEAD = frozenset({"gpt2", "gpt", "bert", "bloom"})
"""Families whose recipes have as many key heads as query heads, and heads that make up the hidden size."""


def check_covered(spec: ModelSpec, recipes: Mapping[str, Allowed], framework: str) -> None:
    """``PlanError`` that names the first field which no recipe of ``framework`` covers."""
    allowed = recipes.get(spec.family)
    if allowed is None:
        problem = f"has no recipe in framework {framework} yet; these have: {', '.join(recipes)}"
        raise PlanError("model.family", spec.family, problem)
    for field, values in allowed.items():
        value = getattr(spec, field)
        if value not in values:
            shown = " or ".join(_shown(known) for known in values)
            problem = f"must be {shown} for family {spec.family} in framework {framework}"
            raise PlanError(f"model.{field}", value, problem)
    if spec.family == "bert" and spec.token_types == 0:
        raise PlanError("model.token_types", 0, "must be at least 1 for family bert")
    if recipes is MEGATRON_CORE:
        return
    if spec.family in MULTI_HEAD and spec.kv_heads != spec.heads:
        problem = f"must equal the {spec.heads} attention heads for family {spec.family}"
        raise PlanError("model.kv_heads", spec.kv_heads, problem)
    if spec.family in MULTI_HEAD and spec.heads * spec.head_dim != spec.hidden:
        problem = f"must be hidden / heads = {spec.hidden} / {spec.heads} for family {spec.family}"
        raise PlanError("model.head_dim", spec.head_dim, problem)


def _shown(value: object) -> str:
    if value is None:
        return "left out"
    return str(value).lower() if isinstance(value, bool) else str(value)
