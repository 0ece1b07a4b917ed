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

_PLAIN: Allowed = MappingProxyType(
    {
        "blocks": ("sequential",),
        "position_offset": (0,),
        "rotary_fraction": (1.0,),
        "alternating_windows": (False,),
        "attention_softcap": (None,),
        "embedding_scale": (False,),
        "head_bias": (False,),
        "logit_softcap": (None,),
    }
)
"""What only single families have."""

_GPT2: Allowed = MappingProxyType(
    {
        **_PLAIN,
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
        **_PLAIN,
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
        **_PLAIN,
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


def _reads(base: Allowed, *fields: str) -> Allowed:
    """``base`` of a recipe that reads ``fields``, too."""
    return MappingProxyType({name: values for name, values in base.items() if name not in fields})


_PHI3: Allowed = MappingProxyType({**_reads(_LLAMA, "rotary_fraction", "hidden_dropout"), "qk_norm": (False,)})

_GEMMA2: Allowed = MappingProxyType(
    {
        **_reads(_LLAMA, "attention_softcap", "logit_softcap"),
        "norm_place": ("both",),
        "activation": ("geglu",),
        "qk_norm": (False,),
        "mlp_bias": (False,),
        "alternating_windows": (True,),
        "embedding_scale": (True,),
    }
)

_OPT: Allowed = MappingProxyType(
    {**_reads(_GPT2, "position_offset"), "activation": ("gelu", "gelu_new", "relu"), "embedding_dropout": (0.0,)}
)

_NEOX: Allowed = MappingProxyType(
    {
        **_reads(_GPT2, "rotary_fraction"),
        "positions": ("rotary",),
        "activation": ("gelu", "gelu_new", "gelu_fast", "relu"),
        "blocks": ("sequential", "parallel"),
        "mlp_bias": (True,),
    }
)

_GPTJ: Allowed = MappingProxyType(
    {
        **_reads(_GPT2, "rotary_fraction", "head_bias"),
        "positions": ("rotary",),
        "blocks": ("parallel_one_norm",),
    }
)

_FALCON: Allowed = MappingProxyType(
    {
        **_GPT2,
        "positions": ("rotary",),
        "blocks": ("parallel_one_norm",),
        "activation": ("gelu",),
        "kv_heads": (1,),
        "attention_bias": (False,),
        "attention_output_bias": (False,),
        "mlp_bias": (False,),
        "embedding_dropout": (0.0,),
        "attention_dropout": (0.0,),
    }
)

_MEGATRON: Allowed = MappingProxyType(
    {
        **_PLAIN,
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
    {
        "gpt2": _GPT2,
        "gpt": _GPT2,
        "bert": _BERT,
        "llama": _LLAMA,
        "mistral": _LLAMA,
        "qwen3": _LLAMA,
        "qwen2": _LLAMA,
        "phi3": _PHI3,
        "gemma2": _GEMMA2,
        "opt": _OPT,
        "gpt_neox": _NEOX,
        "gptj": _GPTJ,
        "falcon": _FALCON,
    }
)
"""Families that have a recipe in ``layers.huggingface``."""

MEGATRON: Mapping[str, Allowed] = MappingProxyType({"gpt": _MEGATRON, "gpt2": _MEGATRON, "bloom": _MEGATRON})
"""Families whose layers Megatron's GPT has (``layers.megatron``)."""

_CORE_GPT: Allowed = MappingProxyType(
    {
        **_PLAIN,
        "norm_place": ("pre",),
        "positions": ("learned", "rotary", "none"),
        "activation": ("gelu", "gelu_new", "swiglu"),
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
        **_PLAIN,
        **_PLAIN,
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

MULTI_HEAD = frozenset({"gpt2", "gpt", "bert", "bloom", "opt", "gpt_neox", "gptj"})
"""Families whose recipes have as many key heads as query heads, and heads that make up the hidden size."""


WITHOUT_KERNEL: Mapping[str, str] = MappingProxyType(
    {
        "gemma2": "soft-capped scores are not in PyTorch's flash kernel, and transformers refuses sdpa for the family",
        "gptj": "transformers has no sdpa for the family",
        "falcon": "transformers hands a mask to sdpa, and PyTorch leaves its flash kernel",
    }
)
"""Families whose attention does not run in PyTorch's flash kernel."""


def check_kernel(spec: ModelSpec) -> None:
    """``PlanError`` where transformers does not reach the flash kernel through ``sdpa``."""
    if spec.family in WITHOUT_KERNEL:
        problem = f"must be eager for family {spec.family}: {WITHOUT_KERNEL[spec.family]}"
        raise PlanError("attention", "flash", problem)


KEEPS_WEIGHTS = frozenset({"gptj", "falcon"})
"""Families whose layers return their attention weights, which the model holds while the next layer runs: a
recomputed layer leaves more than its output behind, which is not modelled."""


def check_recompute(spec: ModelSpec) -> None:
    """``PlanError`` where a recomputed layer is more than its input and its output."""
    if spec.family in KEEPS_WEIGHTS:
        problem = f"must be none for family {spec.family}: its layers also return their attention weights"
        raise PlanError("recompute.mode", "full", problem)


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
    if spec.positions == "rotary" and (spec.rotary_features % 2 or not spec.rotary_features):
        problem = f"must make an even number of a head's {spec.head_dim} features turn, not {spec.rotary_features}"
        raise PlanError("model.rotary_fraction", spec.rotary_fraction, problem)
    if recipes is MEGATRON_CORE:
        return
    if spec.family in MULTI_HEAD and spec.kv_heads != spec.heads:
        problem = f"must equal the {spec.heads} attention heads for family {spec.family}"
        raise PlanError("model.kv_heads", spec.kv_heads, problem)
    if spec.family in {*MULTI_HEAD, "falcon"} and spec.heads * spec.head_dim != spec.hidden:
        problem = f"must be hidden / heads = {spec.hidden} / {spec.heads} for family {spec.family}"
        raise PlanError("model.head_dim", spec.head_dim, problem)


def _shown(value: object) -> str:
    if value is None:
        return "left out"
    return str(value).lower() if isinstance(value, bool) else str(value)
