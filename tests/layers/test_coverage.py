"""No field of an architecture is ignored: another value is refused, or it changes the estimate."""

from __future__ import annotations

import pytest

from memplan.estimate import fold
from memplan.layers.coverage import MEGATRON, MEGATRON_CORE, TRANSFORMERS
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

BASE = {
    "gpt2": "gpt2", "gpt": "bigscience-104b", "bert": "bert-large", "llama": "llama-3-8b", "mistral": "mistral-7b",
    "qwen3": "qwen3-8b", "bloom": "bloom-176b",
}  # fmt: skip
"""A built-in spec of each family."""

OTHER = {
    "norm": ["layernorm", "rmsnorm"],
    "norm_place": ["pre", "post"],
    "positions": ["learned", "rotary", "alibi", "none"],
    "activation": ["gelu", "gelu_new", "swiglu"],
    "attention_bias": [True, False],
    "attention_output_bias": [True, False],
    "mlp_bias": [True, False],
    "qk_norm": [True, False],
    "causal": [True, False],
    "tied_embeddings": [True, False],
    "embedding_norm": [True, False],
    "final_norm": [True, False],
    "mlm_head": [True, False],
    "token_types": [0, 2],
    "kv_heads": [4, 2],
    "head_dim": [16, 32],
    "ffn": [256, 320],
    "embedding_dropout": [0.0, 0.1],
    "attention_dropout": [0.0, 0.1],
    "hidden_dropout": [0.0, 0.1],
}

SAME_BYTES = {("megatron-deepspeed", "activation"), ("megatron", "activation")}
"""Megatron's fused bias-GELU is the tanh form: both names are one kernel."""

OF_MEGATRON_CORE = {"bert": {"norm_place": "pre", "embedding_norm": False, "final_norm": True}}
"""Where Megatron-Core's own model of a family differs from the built-in spec."""


def folded(family: str, framework: str, **fields: object) -> object:
    """Requested bytes of two layers of ``family``, or the refusal."""
    flags = {
        "model": BASE[family], "framework": framework, "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4,
        "head_dim": 16, "ffn": 256, "vocab": 512, "positions_max": 128, "seq": 128, "mbs": 2, "dtype": "bf16",
        "attention": "eager", **(OF_MEGATRON_CORE.get(family, {}) if framework == "megatron" else {}), **fields,
    }  # fmt: skip
    try:
        plan = read_plan(None, {name.replace("_", "-"): str(value).lower() for name, value in flags.items()}).plan
        return [(once.static, once.peak, once.peak_by, once.after_forward) for once in fold(resolve(plan))]
    except PlanError as error:
        return str(error)


CASES = [
    *((family, "single") for family in TRANSFORMERS),
    *((family, "megatron-deepspeed") for family in MEGATRON),
    *((family, "megatron") for family in MEGATRON_CORE if family != "mistral"),  # whose spec has a sliding window
]


@pytest.mark.parametrize(("family", "framework"), CASES)
@pytest.mark.parametrize("field", OTHER)
def test_a_field_that_changes_nothing_is_refused(family: str, framework: str, field: str) -> None:
    results = [folded(family, framework, **{field: value}) for value in OTHER[field]]
    estimated = [result for result in results if not isinstance(result, str)]
    assert estimated, results
    distinct = {str(result) for result in estimated}
    assert len(distinct) == len(estimated) or (framework, field) in SAME_BYTES


def test_a_refusal_names_the_field_and_what_is_allowed() -> None:
    refusal = folded("llama", "single", activation="gelu")
    assert isinstance(refusal, str)
    assert "model.activation = gelu: must be swiglu for family llama in framework single" in refusal
