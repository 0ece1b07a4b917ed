"""No field of an architecture is ignored: another value is refused, or it changes the estimate."""

from __future__ import annotations

import pytest

from memplan.estimate import fold
from memplan.families import families
from memplan.layers.coverage import MEGATRON, MEGATRON_CORE, TRANSFORMERS, covered
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

BASE = {
    "gpt_bigcode": "santacoder",
    "gpt2": "gpt2", "gpt": "bigscience-104b", "bert": "bert-large", "llama": "llama-3-8b", "mistral": "mistral-7b",
    "qwen3": "qwen3-8b", "bloom": "bloom-176b", "qwen2": "qwen2.5-7b", "phi3": "phi-3-mini", "gemma2": "gemma-2-9b",
    "gemma": "gemma-7b", "glm": "glm-4-9b-chat", "glm4": "glm-4-9b-0414",
    "opt": "opt-6.7b", "gpt_neox": "gpt-neox-20b", "gptj": "gpt-j-6b", "falcon": "falcon-7b",
    "mixtral": "mixtral-8x7b", "qwen3_moe": "qwen3-30b-a3b", "qwen2_moe": "qwen1.5-moe-a2.7b",
    "deepseek_v2": "deepseek-v2-lite", "deepseek_v3": "moonlight-16b", "kimi_k2": "kimi-k2",
    "deepseek_v32": "deepseek-v3.2",
    "dots1": "dots.llm1", "ernie4_5": "ernie-4.5-0.3b",
    "glm4_moe": "glm-4.5-air", "gpt_oss": "gpt-oss-20b", "olmoe": "olmoe-1b-7b", "granite": "granite-3.1-2b",
    "granitemoehybrid": "granite-4.0-micro",
    "granitemoe": "granite-3.0-1b-a400m",
    "llama4_text": "llama-4-scout", "hybrid": "mamba2-hybrid-8b", "nemotron_h": "nemotron-h-8b",
    "mamba2": "mamba2-1.3b", "nemotron-nas": "llama-3-8b", "qwen3_next": "qwen3-next-80b-a3b",
    "glm4_moe_lite": "glm-4.7-flash", "minimax_m2": "minimax-m2", "ministral3": "ministral-3-8b",
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), "gemma-4-31b"),
    "gemma3_text": "gemma-3-4b", "exaone4": "exaone-4.0-32b", "olmo3": "olmo-3-7b",
    "starcoder2": "starcoder2-3b", "olmo2": "olmo-2-7b", "smollm3": "smollm3-3b", "seed_oss": "seed-oss-36b",
    "cohere": "command-r-plus", "cohere2": "command-r7b",
    "qwen3_5": "qwen3.5-9b", "qwen3_5_moe": "qwen3.5-35b-a3b",
}  # fmt: skip
"""A built-in spec of each family, or of one with layers that are all alike."""

OTHER = {
    "norm": ["layernorm", "layernorm_without_bias", "rmsnorm"],
    "norm_place": ["pre", "post", "both"],
    "blocks": ["sequential", "parallel", "parallel_one_norm"],
    "positions": ["learned", "rotary", "alibi", "none"],
    "position_offset": [0, 2],
    "rotary_fraction": [1.0, 0.5],
    "activation": ["gelu", "gelu_new", "gelu_fast", "relu", "swiglu", "geglu", "quick_geglu"],
    "attention_bias": [True, False],
    "attention_output_bias": [True, False],
    "mlp_bias": [True, False],
    "qk_norm": [True, False],
    "causal": [True, False],
    "alternating_windows": [True, False],
    "full_interval": [0, 2],
    "full_head_dim": [0, 24, 64],
    "full_kv_heads": [0, 1, 2],
    "keys_as_values": [True, False],
    "attention_softcap": ["null", 50.0],
    "tied_embeddings": [True, False],
    "embedding_norm": [True, False],
    "embedding_scale": [True, False],
    "final_norm": [True, False],
    "head_bias": [True, False],
    "logit_softcap": ["null", 30.0],
    "mlm_head": [True, False],
    "token_types": [0, 2],
    "kv_heads": [4, 2, 1],
    "head_dim": [16, 32],
    "ffn": [256, 320],
    "embedding_dropout": [0.0, 0.1],
    "attention_dropout": [0.0, 0.1],
    "hidden_dropout": [0.0, 0.1],
}

SAME_BYTES = {("megatron-deepspeed", "activation")} | {
    ("megatron", name) for name in ("activation", "alternating_windows", "positions")
}
"""Megatron's fused bias-GELU is the tanh form: both names are one kernel. A window changes what its kernels compute,
not what they hold. Megatron-Core's latent attention rotates its part of queries and keys, whatever positions say."""

ALL_EXPERTS = {"experts": 4, "expert_top_k": 2, "expert_ffn": 64}
EXPERTS = {**ALL_EXPERTS, "dense_layers": 0}
"""Of a second layer."""

LATENT = {**EXPERTS, "nope_head_dim": 8, "rope_head_dim": 8, "value_head_dim": 16, "latent_kv_rank": 8, "head_dim": 16,
          "shared_expert_ffn": 64, "router_groups": 0, "router_group_top_k": 0}  # fmt: skip

MIXER = {"mamba_heads": 8, "mamba_head_dim": 16, "mamba_groups": 2, "mamba_state_dim": 16}

LINEAR = {"linear_interval": 2, "linear_key_heads": 2, "linear_value_heads": 4, "linear_key_head_dim": 16,
          "linear_value_head_dim": 16}  # fmt: skip

OF_FAMILY = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), LATENT),
    "deepseek_v32": LATENT | {"latent_q_rank": 8, "index_heads": 2, "index_head_dim": 16, "index_top_k": 8},
    "falcon": {"kv_heads": 1},
    "gpt_bigcode": {"kv_heads": 1},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    **dict.fromkeys(("gpt_oss", "olmoe", "granitemoe", "minimax_m2"), ALL_EXPERTS),
    **{family: EXPERTS | {"shared_expert_ffn": 64} for family in ("glm4_moe", "dots1", "qwen2_moe")},
    "llama4_text": {**EXPERTS, "expert_top_k": 1, "shared_expert_ffn": 64},
    **dict.fromkeys(("hybrid", "nemotron_h"), MIXER | {"layers": 3, "layer_pattern": "M*-"}),
    "mamba2": MIXER | {"layer_pattern": "MM"},
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe"), EXPERTS | LINEAR | {"shared_expert_ffn": 64}),
    "qwen3_5": LINEAR,
    **{family: {"full_interval": 2} for family in ("gemma3_text", "olmo3")},
    **{
        family: {"family": family, "full_interval": 2, "full_head_dim": 64, "full_kv_heads": 2, "keys_as_values": True}
        for family in ("gemma4_text", "gemma4_unified_text")
    },
    **{family: {"nope_interval": 2} for family in ("exaone4", "smollm3", "cohere2")},
    "nemotron-nas": {"family": "nemotron-nas"},
}  # fmt: skip
"""Sizes that a family needs."""

LATENT_FAMILIES = [family for family, sizes in OF_FAMILY.items() if "latent_kv_rank" in sizes]

OF_MEGATRON_CORE = {"bert": {"norm_place": "pre", "embedding_norm": False, "final_norm": True}}
"""Where Megatron-Core's own model of a family differs from the built-in spec."""


def folded(family: str, framework: str, **fields: object) -> object:
    """Requested bytes of two layers of ``family``, or the refusal."""
    flags = {
        "model": BASE[family], "framework": framework, "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4,
        "head_dim": 16, "ffn": 256, "vocab": 512, "positions_max": 128, "seq": 128, "mbs": 2, "dtype": "bf16",
        "attention": "eager", **OF_FAMILY.get(family, {}),
        **(OF_MEGATRON_CORE.get(family, {}) if framework == "megatron" else {}), **fields,
    }  # fmt: skip
    try:
        plan = read_plan(
            None,
            {
                name.replace("_", "-"): value if isinstance(value, str) else str(value).lower()
                for name, value in flags.items()
            },
        ).plan
        return [(once.static, once.peak, once.peak_by, once.after_forward) for once in fold(resolve(plan))]
    except PlanError as error:
        return str(error)


CASES = [
    *((family, "single") for family in covered(TRANSFORMERS)),
    *((family, "megatron-deepspeed") for family in covered(MEGATRON)),
    *((family, "megatron") for family in covered(MEGATRON_CORE) if family not in ("mistral", "gpt_oss", "t5")),
]


@pytest.mark.parametrize(("family", "framework"), CASES)
@pytest.mark.parametrize("field", OTHER)
def test_a_field_that_changes_nothing_is_refused(family: str, framework: str, field: str) -> None:
    results = [folded(family, framework, **{field: value}) for value in OTHER[field]]
    estimated = [result for result in results if not isinstance(result, str)]
    assert estimated, results
    if family == "mamba2":
        return  # it has neither attention nor an MLP
    if field in ("kv_heads", "head_dim") and family in LATENT_FAMILIES:
        return  # sizes of latent attention are others
    if field == "ffn" and OF_FAMILY.get(family) is ALL_EXPERTS:
        return  # no layer has an MLP
    distinct = {str(result) for result in estimated}
    assert len(distinct) == len(estimated) or (framework, field) in SAME_BYTES


@pytest.mark.parametrize("activation", ["relu", "gelu_fast", "geglu"])
def test_activations_that_megatron_has_not(activation: str) -> None:
    for framework, family in (("megatron", "gpt"), ("megatron", "llama"), ("megatron-deepspeed", "gpt")):
        assert f"model.activation = {activation}: must be" in str(folded(family, framework, activation=activation))


def test_an_odd_number_of_features_cannot_turn() -> None:
    refusal = folded("gpt_neox", "single", rotary_fraction=0.2)
    assert "model.rotary_fraction = 0.2: must make an even number of a head's 16 features turn, not 3" in str(refusal)


@pytest.mark.parametrize("family", [one.name for one in families() if one.no_flash])
def test_families_without_the_flash_kernel(family: str) -> None:
    assert f"eager for family {family}: " in str(folded(family, "single", attention="flash"))


@pytest.mark.parametrize("family", [one.name for one in families() if one.returns_weights])
def test_families_whose_layers_return_their_weights(family: str) -> None:
    assert f"must be none for family {family}" in str(folded(family, "single", recompute="full"))


def test_kimi_k2_is_a_deepseek_v3_to_transformers() -> None:
    assert "its repository's own code asserts that it is not training" in str(folded("kimi_k2", "single"))
    flags = {"model": "kimi-k2", "layers": "2", "framework": "single", "attention": "eager"}
    assert len(fold(resolve(read_plan(None, {**flags, "family": "deepseek_v3"}).plan))) == 1
    refusal = folded("deepseek_v3", "single", kv_heads=2)
    assert "model.kv_heads = 2: must equal the 4 attention heads for family deepseek_v3" in str(refusal)


def test_a_refusal_names_the_field_and_what_is_allowed() -> None:
    refusal = folded("llama", "single", activation="gelu")
    assert isinstance(refusal, str)
    assert "model.activation = gelu: must be swiglu for family llama in framework single" in refusal


def test_a_refusal_names_frameworks_that_have_the_model() -> None:
    bert = str(folded("bert", "megatron", norm_place="post"))
    assert bert.endswith(
        "must be pre for family bert in framework megatron; post is in single, ddp, deepspeed, device-map (--framework)"
    )
    granite = str(folded("granite", "megatron"))
    assert granite.endswith("; it has a recipe in single, ddp, fsdp, deepspeed, device-map (--framework)")
    assert str(folded("llama", "single", activation="gelu")).endswith("; gelu is in megatron (--framework)")
