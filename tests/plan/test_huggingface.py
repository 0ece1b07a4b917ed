"""``config.json``: every family counted as transformers counts it, and nothing guessed or run."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, given, settings, strategies as st

import memplan
from memplan.families import families
from memplan.layers.coverage import MEGATRON_CORE, TRANSFORMERS, check_covered
from memplan.plan.count import parameters
from memplan.plan.errors import PlanError
from memplan.plan.library import model_specs
from memplan.plan.models import load_spec, read_spec
from memplan.plan.read import read_plan
from memplan.plan.spec import ModelSpec
from memplan.plan.validation import validated_spec
from memplan.trace.job import config_of_spec

from .outcomes import error_of

GPT2 = {"model_type": "gpt2", "vocab_size": 101, "n_embd": 12, "n_layer": 2, "n_head": 3}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
}
OPT = {
    "model_type": "opt",
    "vocab_size": 101,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "ffn_dim": 20,
}


FAMILIES = {one.config.model_type or one.name: one.config for one in families() if one.config is not None}
"""How the configurations of each family are read."""


def spec_of(config: dict[str, Any], folder: Path) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return load_spec(str(folder))


def refusal(config: object, folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    with pytest.raises(PlanError) as caught:
        load_spec(str(folder / "config.json"))
    return str(caught.value).removeprefix(str(folder))


def transformers_count(config: dict[str, Any]) -> int:
    """Parameters of the model that transformers makes of ``config``, on the meta device."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    kind = transformers.AutoModelForMaskedLM if config["model_type"] == "bert" else transformers.AutoModelForCausalLM
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = kind.from_config(made)
    return sum(parameter.numel() for parameter in model.parameters())


UNKNOWN = {"kimi_k2", "llama4", "nemotron-nas"}
"""Families whose configuration is in no release of transformers (their own code is that of another family), or has
another's inside."""
OF_HYBRIDS = {"nemotron_h", "mamba2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Families with sizes of their own: ``test_hybrids_count_as_transformers_does``, ``test_linear_…``."""
AS = {"kimi_k2": "deepseek_v3"}

sizes = st.integers(1, 9)

GROUPED = {
    *("mistral", "qwen3", "qwen2", "phi3", "gemma2", "mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "llama4_text"),
    *("minimax_m2", "ministral3", "gemma3_text", "exaone4", "starcoder2", "smollm3", "seed_oss"),
    *("qwen2_moe", "dots1", "ernie4_5", "gemma4_text", "gemma4_unified_text"),
}
"""Families with fewer key heads than query heads by default."""

LATENT = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"}


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """A small configuration of a family that is known, some keys left to their defaults."""
    family = draw(st.sampled_from(sorted(FAMILIES.keys() - UNKNOWN - OF_HYBRIDS)))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3), (6, 6)]))
    head = 2 * draw(sizes)
    required = {
        **{
            family: {"n_layer": draw(st.integers(1, 3)), "n_embd": heads * head, "n_head": heads}
            for family in ("gpt2", "gpt_bigcode")
        },
        "bloom": {"n_layer": draw(st.integers(1, 3)), "hidden_size": heads * head, "n_head": heads},
        "gptj": {"n_layer": draw(st.integers(1, 3)), "n_embd": heads * head, "n_head": heads, "rotary_dim": 2},
        "falcon": {
            "num_hidden_layers": draw(st.integers(1, 3)),
            "hidden_size": heads * head,
            "num_attention_heads": heads,
        },
        "granitemoehybrid": {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention"] * 2,
            "hidden_size": heads * head,
            "num_attention_heads": heads,
            "shared_intermediate_size": draw(st.integers(1, 40)),
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_heads": 1,
        },
        "opt": {
            "num_hidden_layers": draw(st.integers(1, 3)),
            "hidden_size": heads * head,
            "num_attention_heads": heads,
            "ffn_dim": draw(st.integers(1, 40)),
        },
    }.get(
        family,
        {
            "num_hidden_layers": draw(st.integers(1, 3)),
            "hidden_size": heads * head,
            "num_attention_heads": heads,
            "intermediate_size": draw(st.integers(1, 40)),
        },
    )
    optional: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        **{
            family: {"n_inner": st.none() | sizes, "n_positions": sizes, "tie_word_embeddings": st.booleans()}
            for family in ("gpt2", "gpt_bigcode")
        },
        "bert": {"max_position_embeddings": sizes, "type_vocab_size": sizes},
        "bloom": {"tie_word_embeddings": st.booleans()},
        "llama": {
            "num_key_value_heads": st.just(kv_heads),
            "head_dim": st.none() | st.just(4),
            "attention_bias": st.booleans(),
            "mlp_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
        },
        "mistral": {"head_dim": st.none() | st.just(4), "sliding_window": st.none() | sizes},
        "qwen3": {"head_dim": st.just(6), "attention_bias": st.booleans(), "tie_word_embeddings": st.booleans()},
        "qwen2": {"tie_word_embeddings": st.booleans()},
        "mixtral": {"num_local_experts": sizes, "tie_word_embeddings": st.booleans()},
        **{
            f"deepseek_v{version}": {
                "q_lora_rank": st.none() | sizes,
                "n_shared_experts": st.integers(1, 2),
                "first_k_dense_replace": st.integers(0, 2),
                "tie_word_embeddings": st.booleans(),
            }
            for version in (2, 3)
        },
        **{
            indexed: {
                "q_lora_rank": sizes,
                **dict.fromkeys(("index_n_heads", "index_topk"), sizes),
                "n_shared_experts": st.integers(1, 2),
                "first_k_dense_replace": st.integers(0, 2),
                "tie_word_embeddings": st.booleans(),
            }
            for indexed in ("deepseek_v32", "glm_moe_dsa")
        },
        "glm4_moe_lite": {
            "q_lora_rank": st.none() | sizes,
            "n_shared_experts": st.integers(1, 2),
            "tie_word_embeddings": st.booleans(),
        },
        "minimax_m2": {"num_local_experts": sizes, "tie_word_embeddings": st.booleans()},
        "ministral3": {"head_dim": st.just(4), "tie_word_embeddings": st.booleans()},
        "qwen3_moe": {
            "num_experts": sizes,
            "moe_intermediate_size": sizes,
            "mlp_only_layers": st.just([1]) | st.just([]),
            "decoder_sparse_step": st.integers(1, 2),
            "attention_bias": st.booleans(),
        },
        "qwen2_moe": {
            "num_experts": sizes,
            **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), sizes),
            "mlp_only_layers": st.just([1]) | st.just([]),
            "decoder_sparse_step": st.integers(1, 2),
            "qkv_bias": st.booleans(),
        },
        "gpt_oss": {"num_local_experts": sizes, "attention_bias": st.booleans()},
        **{
            glm: {"attention_bias": st.booleans(), "tie_word_embeddings": st.booleans(), "head_dim": st.just(4)}
            for glm in ("glm", "glm4")
        },
        "ernie4_5": {"head_dim": st.just(4), "use_bias": st.booleans(), "tie_word_embeddings": st.booleans()},
        "dots1": {
            "n_shared_experts": st.integers(1, 2),
            "first_k_dense_replace": st.integers(0, 2),
            "attention_bias": st.booleans(),
        },
        "glm4_moe": {
            "n_routed_experts": sizes,
            "moe_intermediate_size": sizes,
            "n_shared_experts": st.integers(1, 2),
            "first_k_dense_replace": st.integers(0, 2),
            "attention_bias": st.booleans(),
            "use_qk_norm": st.booleans(),
        },
        "llama4_text": {
            "num_local_experts": sizes,
            "intermediate_size_mlp": sizes,
            "interleave_moe_layer_step": st.integers(1, 2),
            "moe_layers": st.just([0]) | st.just([]),
            "no_rope_layer_interval": st.integers(1, 3),
            "use_qk_norm": st.booleans(),
        },
        "olmoe": {"num_experts": sizes, "norm_topk_prob": st.booleans(), "tie_word_embeddings": st.booleans()},
        "granite": {
            "attention_bias": st.booleans(),
            "mlp_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
        },
        "granitemoehybrid": {"attention_bias": st.booleans(), "tie_word_embeddings": st.booleans()},
        "granitemoe": {"num_local_experts": sizes, "tie_word_embeddings": st.booleans()},
        "phi3": {"tie_word_embeddings": st.booleans()},
        **{
            gemma: {"attention_bias": st.booleans(), "tie_word_embeddings": st.booleans()}
            for gemma in ("gemma", "gemma2")
        },
        "exaone4": {"tie_word_embeddings": st.booleans(), "sliding_window_pattern": st.integers(1, 4)},
        **{
            olmo: {"attention_bias": st.booleans(), "tie_word_embeddings": st.booleans()} for olmo in ("olmo2", "olmo3")
        },
        "smollm3": {
            "attention_bias": st.booleans(),
            "mlp_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
            "no_rope_layer_interval": st.integers(1, 4),
        },
        "seed_oss": {
            **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), st.booleans()),
            "tie_word_embeddings": st.booleans(),
        },
        "cohere": {
            "attention_bias": st.booleans(),
            "use_qk_norm": st.booleans(),
            "tie_word_embeddings": st.booleans(),
        },
        "cohere2": {
            "attention_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
            "sliding_window_pattern": st.integers(1, 4),
        },
        "starcoder2": {
            "use_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
            "sliding_window": st.none() | sizes,
        },
        "gemma3_text": {
            "attention_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
            "sliding_window_pattern": st.integers(2, 4),
        },
        **{
            gemma: {
                "attention_bias": st.booleans(),
                "tie_word_embeddings": st.booleans(),
                "attention_k_eq_v": st.booleans(),
                "num_global_key_value_heads": st.just(1),
                "global_head_dim": sizes.map(lambda half: 2 * half),
                "layer_types": st.just(["sliding_attention", "full_attention"]),
            }
            for gemma in ("gemma4_text", "gemma4_unified_text")
        },
        "opt": {"enable_bias": st.booleans(), "tie_word_embeddings": st.booleans(), "max_position_embeddings": sizes},
        "gpt_neox": {
            "attention_bias": st.booleans(),
            "tie_word_embeddings": st.booleans(),
            "use_parallel_residual": st.booleans(),
        },
        "gptj": {"n_inner": st.none() | sizes, "tie_word_embeddings": st.booleans()},
        "falcon": {"ffn_hidden_size": st.none() | sizes, "tie_word_embeddings": st.booleans()},
    }
    chosen = {name: draw(value) for name, value in optional[family].items() if draw(st.booleans())}
    if family.startswith("gemma4"):
        required |= {"num_hidden_layers": 2 if "layer_types" in chosen else 6, "hidden_size_per_layer_input": 0}
    if family in LATENT:
        required |= {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 6,
            "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6, "head_dim": 2,
            "routed_scaling_factor": 2.0,
        }  # fmt: skip
        chosen["num_key_value_heads"] = heads
    if family == "dots1":
        required |= {"n_routed_experts": 4, "n_shared_experts": 1, "norm_topk_prob": True}
    if "experts" in FAMILIES[family].keys and family not in LATENT:
        chosen["num_experts_per_tok"] = 1
    if family in GROUPED:
        chosen["num_key_value_heads"] = kv_heads
    return {"model_type": family, "vocab_size": draw(st.integers(8, 99)), **required, **chosen}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=configurations())
def test_counts_as_transformers_does(config: dict[str, Any], tmp_path: Path) -> None:
    config = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **config}
    assert parameters(spec_of(config, tmp_path)) == transformers_count(config)


def test_deepseek_v2_chooses_from_groups_only_where_it_says_so(tmp_path: Path) -> None:
    """``DeepseekV2TopkRouter.forward`` looks at ``topk_method``, not at the number of groups."""
    config = config_of_spec(load_spec("deepseek-v2")) | {"model_type": "deepseek_v2"}
    assert config["topk_method"] == "group_limited_greedy"
    assert spec_of(config, tmp_path).router_groups == 8
    assert spec_of(config | {"topk_method": "greedy"}, tmp_path).router_groups == 0
    with pytest.raises(PlanError, match=r"topk_method = group_limited_greedy: needs groups of experts"):
        spec_of(config | {"n_group": 1}, tmp_path)
    with pytest.raises(PlanError, match=r"topk_method = noaux_tc: must be greedy or group_limited_greedy"):
        spec_of(config | {"topk_method": "noaux_tc"}, tmp_path)


def test_minimax_says_what_turns_as_a_part_or_as_features(tmp_path: Path) -> None:
    """``MiniMaxM2Config.convert_rope_params_to_dict``: ``rotary_dim / head_dim``, unless a factor is there."""
    config: dict[str, Any] = {"model_type": "minimax_m2", "vocab_size": 99, "num_hidden_layers": 2, "hidden_size": 64}
    config |= {"num_attention_heads": 2, "intermediate_size": 8, "head_dim": 128}
    assert spec_of(config, tmp_path).rotary_features == 128
    assert spec_of(config | {"rotary_dim": 64}, tmp_path).rotary_features == 64
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    assert spec_of(config | {"rotary_dim": 64, "rope_parameters": rope}, tmp_path).rotary_features == 32
    with pytest.raises(PlanError, match="rotary_dim = 130: must be even and at most 128"):
        spec_of(config | {"rotary_dim": 130}, tmp_path)


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_phi_4_mini_is_read_from_its_configuration(where: str, tmp_path: Path) -> None:
    """It stretches its positions (LongRoPE), which takes no more memory; by its name it is the same model."""
    built_in = load_spec("phi-4-mini")
    rope = {"rope_type": "longrope", "type": "longrope", "partial_rotary_factor": 0.75, "rope_theta": 1e4}
    rope |= {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48}
    config = config_of_spec(built_in) | {"model_type": "phi3", "original_max_position_embeddings": 4096}
    config.pop("rope_parameters", None)
    found = spec_of({**config, where: rope, "partial_rotary_factor": 0.75}, tmp_path)
    same = {name: getattr(built_in, name) for name in ("name", "source", "published_parameters")}
    assert found.model_copy(update=same) == built_in


def test_glm_4_7_flash_names_its_layers_with_experts(tmp_path: Path) -> None:
    """``Glm4MoeLiteConfig``: the first is dense unless ``mlp_layer_types`` says; no ``first_k_dense_replace`` does."""
    config = config_of_spec(load_spec("glm-4.7-flash")) | {"model_type": "glm4_moe_lite", "num_hidden_layers": 3}
    types = {"mlp_layer_types": ["sparse", "dense", "sparse"]}
    assert spec_of(config | {"mlp_layer_types": None}, tmp_path).dense_layers == (0,)
    assert spec_of(config | types, tmp_path).dense_layers == (1,)
    with pytest.raises(PlanError, match="must name all 4 layers, not 3"):
        spec_of(config | types | {"num_hidden_layers": 4}, tmp_path)
    with pytest.raises(PlanError, match="first_k_dense_replace = 3: is not modelled; only 1 is"):
        spec_of(config | types | {"first_k_dense_replace": 3}, tmp_path)


NO_MODEL = {"deepseek_v2", "dots1", "glm4_moe"}
"""Families whose class has defaults that make no model: experts of a token are None, heads do not divide hidden."""


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - UNKNOWN - NO_MODEL))
def test_defaults_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    defaults = transformers.AutoConfig.for_model(family).to_dict()
    required = {
        name: defaults[name]
        for key in FAMILIES[family].keys.values()
        for name in key.names
        if not isinstance(key.default, (int, float, type(None))) and name in defaults
    }
    wanted = {name: modelled[0] for name, modelled in FAMILIES[family].wanted.items()}
    from_little = spec_of({"model_type": family, **required, **wanted}, tmp_path)
    from_all = spec_of(defaults | wanted, tmp_path)
    assert from_little == from_all


HYBRIDS = [name for name in model_specs() if load_spec(name).layer_pattern]
DIFFERING = [name for name in model_specs() if load_spec(name).layer_blocks]


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_count_as_transformers_does(name: str) -> None:
    """Of their first layers, as far as those of every kind, as Nemotron-H; Mamba-2 alone as itself."""
    spec = load_spec(name)
    pattern = spec.layer_pattern[:12]
    cut = spec.model_copy(update={"layers": len(pattern), "layer_pattern": pattern})
    sizes = {"hidden_size": cut.hidden, "vocab_size": cut.vocab, "tie_word_embeddings": cut.tied_embeddings}
    sizes |= {"n_groups": cut.mamba_groups, "num_hidden_layers": cut.layers}
    if cut.family == "mamba2":
        sizes |= {"num_heads": cut.mamba_heads, "head_dim": cut.mamba_head_dim, "state_size": cut.mamba_state_dim}
    else:
        sizes |= {
            "hybrid_override_pattern": pattern, "intermediate_size": cut.ffn, "num_attention_heads": cut.heads,
            "num_key_value_heads": cut.kv_heads, "head_dim": cut.head_dim, "mamba_num_heads": cut.mamba_heads,
            "mamba_head_dim": cut.mamba_head_dim, "ssm_state_size": cut.mamba_state_dim,
            "n_routed_experts": cut.experts, "moe_intermediate_size": cut.expert_ffn,
            "moe_shared_expert_intermediate_size": cut.shared_expert_ffn, "num_experts_per_tok": cut.expert_top_k,
            "moe_latent_size": cut.expert_latent or None,
        }  # fmt: skip
    family = "mamba2" if cut.family == "mamba2" else "nemotron_h"
    assert parameters(cut) == transformers_count({"model_type": family, **sizes})


def test_linear_attention_counts_as_transformers_does(tmp_path: Path) -> None:
    """Of every n-th layer attention, by interval or by names; other orders are refused."""
    sizes: dict[str, Any] = {
        "model_type": "qwen3_next", "num_hidden_layers": 6, "hidden_size": 64, "vocab_size": 128, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    }  # fmt: skip
    names = [("linear_attention", "full_attention")[(layer + 1) % 3 == 0] for layer in range(6)]
    spec = spec_of({**sizes, "layer_types": names}, tmp_path)
    assert spec.linear_interval == 3
    assert parameters(spec) == transformers_count({**sizes, "layer_types": names})
    assert spec_of({**sizes, "full_attention_interval": 2}, tmp_path).linear_interval == 2
    assert "only full_attention in every n-th layer" in refusal({**sizes, "layer_types": names[::-1]}, tmp_path)


def test_exaone_4_says_which_layers_have_neither_window_nor_positions(tmp_path: Path) -> None:
    """``Exaone4Attention.forward``: without a window all layers turn, else those that see a window."""
    config = config_of_spec(load_spec("exaone-4.0-32b"))
    assert config["layer_types"][:5] == ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]
    spec = spec_of(config | {"sliding_window_pattern": "LLLG"}, tmp_path)
    assert (spec.nope_interval, spec.sliding_window) == (4, 4096)
    assert config_of_spec(load_spec("exaone-4.0-1.2b"))["layer_types"] == ["full_attention"] * 30
    del config["layer_types"]
    assert spec_of(config, tmp_path).nope_interval == 4
    assert spec_of(config | {"sliding_window_pattern": 2}, tmp_path).nope_interval == 2
    assert spec_of(config | {"sliding_window": None, "sliding_window_pattern": None}, tmp_path).nope_interval == 0
    assert "sliding_window_pattern = LLLG: must be a whole number from 1 to 1,024 where layer_types is" in refusal(
        config | {"sliding_window_pattern": "LLLG"}, tmp_path
    )
    kinds = {"layer_types": ["sliding_attention"], "sliding_window": None}
    assert "must be only full_attention where sliding_window is null" in refusal(config | kinds, tmp_path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layer_types": ["attention", "mamba"]}, "layer_types = mamba: is not modelled; only full_attention or atten"),
        ({"num_local_experts": 62}, "num_local_experts = 62: is not modelled; only 0 is"),
        ({"position_embedding_type": "nope"}, "position_embedding_type = nope: is not modelled; only rope is"),
        ({"position_embedding_type": None}, "position_embedding_type = null: is not modelled; only rope is"),
    ],
)
def test_granite_4_is_read_where_every_layer_has_attention(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    """``GraniteMoeHybridConfig``, whose defaults are layers of Mamba-2 with experts and without positions."""
    config = config_of_spec(load_spec("granite-4.0-micro")) | {"layer_types": ["attention"] * 40}
    assert spec_of(config, tmp_path).ffn == 8192
    assert problem in refusal(config | changes, tmp_path)
    without = {name: value for name, value in config.items() if name not in changes}
    assert ": is missing; only " in refusal(without, tmp_path)


def test_olmo_3_says_which_layers_see_all_tokens(tmp_path: Path) -> None:
    """``Olmo3Config``: every fourth, unless ``layer_types`` says otherwise; 16 of allenai/Olmo-3-1125-32B's 64."""
    config = config_of_spec(load_spec("olmo-3-32b"))
    assert config["layer_types"] == [*["sliding_attention"] * 3, "full_attention"] * 16
    del config["layer_types"]
    assert spec_of(config, tmp_path).full_interval == 4
    kinds = ["full_attention", "sliding_attention"]
    assert "only full_attention in every n-th layer" in refusal(config | {"layer_types": kinds}, tmp_path)
    with pytest.raises(PlanError, match=r"sliding_window .*must be set where every 4th layer sees all tokens"):
        check_covered(spec_of(config | {"sliding_window": None}, tmp_path), TRANSFORMERS, "single")


SIX = [*["sliding_attention"] * 5, "full_attention"]


def gemma_4(**changes: object) -> dict[str, Any]:
    """The text part of google/gemma-4-31B, as transformers' ``convert_gemma4_weights.py`` makes it."""
    layers = SIX * 10
    sizes = {"hidden_size": 5376, "intermediate_size": 21_504, "num_hidden_layers": 60, "num_attention_heads": 32}
    heads = {"num_key_value_heads": 16, "num_global_key_value_heads": 4, "global_head_dim": 512, "layer_types": layers}
    others = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "use_bidirectional_attention": "vision"}
    others |= {"sliding_window": 1024, "final_logit_softcapping": 30.0, "max_position_embeddings": 262_144}
    return {"model_type": "gemma4_text", **sizes, **heads, **others, **changes}


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_gemma_4_is_read_as_published_and_as_saved(kind: str, tmp_path: Path) -> None:
    """Of heads that layers with full attention have, a published ``text_config`` says ``global_head_dim`` and
    ``num_global_key_value_heads``, and one that transformers saved ``per_layer_config``."""
    transformers = pytest.importorskip("transformers")
    built_in = load_spec("gemma-4-31b")
    same = {name: getattr(built_in, name) for name in ("name", "family", "source", "published_parameters")}
    published = gemma_4(model_type=f"{kind}_text")
    saved = transformers.AutoConfig.for_model(**published).to_dict()
    assert "global_head_dim" not in saved
    for text in (published, saved):
        found = spec_of({"model_type": kind, "text_config": text, "vision_config": {}}, tmp_path)
        assert found.family == f"{kind}_text"
        assert found.model_copy(update=same) == built_in
    assert spec_of(published | {"attention_k_eq_v": False}, tmp_path).full_kv_heads == 16
    assert transformers_count(published | {"num_hidden_layers": 12, "layer_types": published["layer_types"][:12]}) == (
        parameters(built_in.model_copy(update={"layers": 12}))
    )


def test_experts_of_gemma_4_are_there_where_it_says_so(tmp_path: Path) -> None:
    """``enable_moe_block``, without which sizes of experts say nothing (google/gemma-4-26B-A4B)."""
    experts = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    assert spec_of(gemma_4(**experts), tmp_path).experts == 0
    sizes = {"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16}
    heads = {"num_key_value_heads": 8, "num_global_key_value_heads": 2, "layer_types": SIX * 5}
    found = spec_of(gemma_4(**experts, **sizes, **heads, enable_moe_block=True), tmp_path)
    built_in = load_spec("gemma-4-26b-a4b")
    same = {name: getattr(built_in, name) for name in ("name", "source", "published_parameters")}
    assert found.model_copy(update=same) == built_in


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input = 256: is not modelled; only 0 is"),
        ({"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}, "moe_intermediate_size: is missing"),
        ({"enable_moe_block": 1}, "enable_moe_block = 1: must be true or false"),
        ({"num_kv_shared_layers": 20}, "num_kv_shared_layers = 20: is not modelled; only 0 is"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = all: is not modelled; only vision is"),
        (
            {
                "layer_types": [*(["sliding_attention"] * 5 + ["full_attention"]) * 2, "sliding_attention"],
                "num_hidden_layers": 13,
            },
            "layer_types: must end with full_attention",
        ),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config: is not modelled; only one head_dim and"),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v = 1: must be true or false"),
        ({"num_global_key_value_heads": 0}, "num_global_key_value_heads = 0: must be a whole number from 1"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters.full_attention.rope_type = yarn: is not modelled; only proportional is",
        ),
    ],
)
def test_what_is_not_modelled_of_gemma_4_is_refused(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    assert problem in refusal(gemma_4(**changes), tmp_path)


def test_gemma_4_without_a_word_of_embeddings_of_each_layer_has_them(tmp_path: Path) -> None:
    config = gemma_4()
    del config["hidden_size_per_layer_input"]
    assert "hidden_size_per_layer_input: is missing; only 0 is modelled" in refusal(config, tmp_path)
    assert "sliding_window" in spec_of(config | {"model_type": "gemma4_unified_text"}, tmp_path).model_fields_set


def test_gemma_3_says_which_layers_see_all_tokens(tmp_path: Path) -> None:
    """``Gemma3TextConfig``: every sixth, or as ``sliding_window_pattern`` or, before it, ``layer_types`` says; what its
    multimodal model's ``text_config`` leaves out are the class's defaults (google/gemma-3-4b-pt)."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    whole = {"model_type": "gemma3", "text_config": text | {"sliding_window": 1024}, "vision_config": {}}
    spec = spec_of(whole, tmp_path)
    assert parameters(spec) == load_spec("gemma-3-4b").published_parameters
    assert spec.full_interval == 6
    assert spec_of(text | {"sliding_window_pattern": 2}, tmp_path).full_interval == 2
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    named = text | {"num_hidden_layers": 4, "layer_types": kinds}
    assert spec_of(named | {"sliding_window_pattern": 2}, tmp_path).full_interval == 3
    assert "only full_attention in every n-th layer, and sliding_attention in" in refusal(
        named | {"layer_types": kinds[::-1]}, tmp_path
    )
    assert "sliding_window_pattern = 1: must be a whole number from 2" in refusal(
        text | {"sliding_window_pattern": 1}, tmp_path
    )
    with pytest.raises(PlanError, match=r"attn_logit_softcapping = 50\.0: is not modelled; only null is"):
        spec_of(text | {"attn_logit_softcapping": 50.0}, tmp_path)


def test_qwen_3_5_is_read_alone_and_within_a_model_of_images(tmp_path: Path) -> None:
    """The text part of Qwen/Qwen3.5-9B is the built-in model; ``lm_head`` is tied where that part says so, whatever
    stands above it (``Qwen3_5ForCausalLM``); layers that predict further tokens are left out."""
    built_in = load_spec("qwen3.5-9b")
    types = [("linear_attention", "full_attention")[layer % 4 == 3] for layer in range(32)]
    text = config_of_spec(built_in) | {"layer_types": types, "mtp_num_hidden_layers": 1, "attn_output_gate": True}
    assert text["model_type"] == "qwen3_5_text"
    del text["tie_word_embeddings"]
    both = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 27}, "tie_word_embeddings": True}
    for config in (text, both):
        spec = spec_of(config, tmp_path)
        assert spec.model_copy(update={"name": built_in.name, "source": built_in.source}) == built_in
    text["tie_word_embeddings"] = True
    assert spec_of(both, tmp_path).tied_embeddings
    with pytest.raises(PlanError, match="attn_output_gate = false: is not modelled; only true is"):
        spec_of(text | {"attn_output_gate": False}, tmp_path)


def test_a_configuration_is_a_spec_in_whatever_code_runs_it(tmp_path: Path) -> None:
    """Of Qwen 3.5, of which transformers, torchtitan and Megatron-Core have layers."""
    text = config_of_spec(load_spec("qwen3.5-9b"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    for flags in (
        {"framework": "megatron"},
        {"framework": "fsdp", "fsdp-code": "torchtitan"},
        {"framework": "fsdp"},
        {"framework": "single", "gpus": "1"},
    ):
        read = read_plan(None, {"model": str(tmp_path), "gpus": "8", **flags}, traced=True)
        assert read.plan.model.has_sizes


@pytest.mark.parametrize(
    ("kind", "further"),
    [("qwen3_5_text", {"mtp_num_hidden_layers": 2}), ("glm4_moe", {"num_nextn_predict_layers": 2})],
)
def test_layers_that_predict_further_tokens_are_told(kind: str, further: dict[str, int], tmp_path: Path) -> None:
    """No class of these families in transformers has them (``_keys_to_ignore_on_load_unexpected``)."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96}
    for said, told in ((further, 1), (dict.fromkeys(further, 0), 0)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": 512, **sizes, **said}))
        notes = read_spec(tmp_path).notes
        assert [note.code for note in notes] == ["further-layers"] * told
        assert not told or "--mtp-layers 2" in notes[0].message


def test_layers_that_predict_further_tokens_are_read(tmp_path: Path) -> None:
    """As Nemotron 3 Super's ``config.json`` has them, and as transformers writes them."""
    sizes = {
        "model_type": "nemotron_h", "hybrid_override_pattern": "ME*E", "hidden_size": 256, "vocab_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 128,
        "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128, "moe_shared_expert_intermediate_size": 128,
    }  # fmt: skip
    for further in ({"mtp_hybrid_override_pattern": "*E"}, {"mtp_layers_block_type": ["full_attention", "moe"]}):
        spec = spec_of({**sizes, "moe_latent_size": 64, "num_nextn_predict_layers": 1, **further}, tmp_path)
        assert (spec.expert_latent, spec.mtp_layers, spec.mtp_pattern, spec.mtp_shared) == (64, 1, "*E", True)
    without = {"moe_latent_size": None, "num_nextn_predict_layers": 0, "mtp_hybrid_override_pattern": "*E"}
    spec = spec_of({**sizes, **without}, tmp_path)
    assert (spec.expert_latent, spec.mtp_layers, spec.mtp_pattern) == (0, 0, "")


UNREAD = ("gpt", "muse_glimmer")
"""Families whose configurations are not read."""


@pytest.mark.parametrize(
    "name",
    [one for one in model_specs() if one not in HYBRIDS + DIFFERING and load_spec(one).family not in UNREAD],
)
def test_built_in_specs_count_as_transformers_does(name: str) -> None:
    spec = load_spec(name)
    if spec.experts or spec.linear_interval or FAMILIES[spec.family].wanted:
        few = spec.full_interval or 4
        cut = spec.model_copy(update={"layers": few, "dense_layers": tuple(i for i in spec.dense_layers if i < few)})
        config = config_of_spec(cut)
        assert parameters(cut) == transformers_count(
            {**config, "model_type": AS.get(spec.family, config["model_type"])}
        )
        return
    common = {"model_type": spec.family, "vocab_size": spec.vocab, "tie_word_embeddings": spec.tied_embeddings}
    sizes = {
        **{
            family: {
                "n_layer": spec.layers,
                "n_embd": spec.hidden,
                "n_head": spec.heads,
                "n_positions": spec.positions_max,
            }
            for family in ("gpt2", "gpt_bigcode")
        },
        "bloom": {"n_layer": spec.layers, "hidden_size": spec.hidden, "n_head": spec.heads},
        "gptj": {"n_layer": spec.layers, "n_embd": spec.hidden, "n_head": spec.heads},
        "opt": {
            "num_hidden_layers": spec.layers,
            "hidden_size": spec.hidden,
            "num_attention_heads": spec.heads,
            "ffn_dim": spec.ffn,
            "max_position_embeddings": spec.positions_max,
        },
    }.get(
        spec.family,
        {
            "num_hidden_layers": spec.layers,
            "hidden_size": spec.hidden,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads,
            **({"head_dim": spec.head_dim} if "head_dim" in FAMILIES[spec.family].keys else {}),
            **({"use_qk_norm": spec.qk_norm} if "qk_norm" in FAMILIES[spec.family].keys else {}),
            **({"attention_bias": spec.attention_bias} if spec.family in ("glm", "glm4") else {}),
            "intermediate_size": spec.ffn,
            "max_position_embeddings": spec.positions_max,
        },
    )
    assert parameters(spec) == transformers_count({**common, **sizes})


def test_an_unknown_model_type_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    line = refusal({"model_type": "mamba", "hidden_size": 8}, tmp_path)
    assert line == (
        "/config.json:2: model_type = mamba: is not an architecture that is modelled; "
        "known are gpt2, "
        "gpt_bigcode, bert, bloom, llama, mistral, ministral3, qwen3, qwen2, phi3, gemma, gemma2, gemma3_text, "
        "gemma4_text, gemma4_unified_text, "
        "exaone4, olmo2, olmo3, cohere, cohere2, smollm3, seed_oss, starcoder2, opt, gpt_neox, gptj, falcon, mixtral, "
        "qwen2_moe, qwen3_moe, qwen3_next, qwen3_5_text, qwen3_5_moe_text, deepseek_v2, deepseek_v3, kimi_k2, "
        "deepseek_v32, glm_moe_dsa, gpt_oss, glm, glm4, glm4_moe, dots1, ernie4_5, glm4_moe_lite, minimax_m2, "
        "llama4_text, llama4, olmoe, granite, granitemoe, granitemoehybrid, nemotron-nas, nemotron_h, mamba2"
    )
    assert "model_type: is missing" in refusal({"hidden_size": 8}, tmp_path)
    assert "model_type = 7" in refusal({"model_type": 7}, tmp_path)


def test_code_that_a_configuration_names_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "configuration_evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    auto_map = {"AutoConfig": "configuration_evil.EvilConfig"}
    assert "(code named in auto_map is never run)" in refusal({"model_type": "evil", "auto_map": auto_map}, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "auto_map": auto_map}))
    found = read_spec(tmp_path)
    assert "which was not run: it is read as a plain llama" in found.notes[0].message
    assert validated_spec(found.spec).family == "llama"
    assert not ran.exists()


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({**GPT2, "n_embd": "768"}, "n_embd = 768: must be a whole number from 1 to 2,147,483,648"),
        ({**GPT2, "n_embd": -1}, "n_embd = -1: must be a whole number from 1 to"),
        ({**GPT2, "n_embd": 12.0}, "n_embd = 12.0: must be a whole number"),
        ({**GPT2, "n_embd": True}, "n_embd = true: must be a whole number"),
        ({**GPT2, "n_embd": 10**40}, "must be a whole number from 1 to 2,147,483,648"),
        ({**GPT2, "n_embd": 13}, "n_embd = 13: must be divided by the number of attention heads (3)"),
        ({**GPT2, "n_layer": 10**9}, "n_layer = 1000000000: must be a whole number from 1 to 1,024"),
        ({**GPT2, "attn_pdrop": 1.5}, "attn_pdrop = 1.5: must be a probability"),
        ({**GPT2, "activation_function": "relu"}, "activation_function = relu: is not an activation"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention = true: is not modelled; only false is"),
        ({key: value for key, value in GPT2.items() if key != "n_layer"}, "n_layer: is missing (the model's layers)"),
        ({**LLAMA, "tie_word_embeddings": "no"}, "tie_word_embeddings = no: must be true or false"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config: is set"),
        (
            {**LLAMA, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types: mixes full_attention, sliding",
        ),
        ({**GPT2, "reorder_and_upcast_attn": True}, "reorder_and_upcast_attn = true: is not modelled; only false is"),
        ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights = false: is not modelled; only true is"),
        ({**LLAMA, "model_type": "bert", "chunk_size_feed_forward": 64}, "= 64: is not modelled; only 0 is"),
        ({**LLAMA, "model_type": "bert", "architectures": ["BertForPreTraining"]}, "it adds a next-sentence head"),
        ({**LLAMA, "num_local_experts": 8}, "num_local_experts = 8: must be 1 or left out: a mixture of experts"),
        ({**GPT2, "num_experts": 2}, "num_experts = 2: must be 1 or left out"),
        ({**OPT, "word_embed_proj_dim": 6}, "word_embed_proj_dim = 6: is not modelled; only the hidden size (12) is"),
        ({**OPT, "do_layer_norm_before": False}, "do_layer_norm_before = false: is not modelled; only true is"),
        ({**OPT, "layerdrop": 0.1}, "layerdrop = 0.1: is not modelled; only 0 is"),
        (
            {**LLAMA, "model_type": "gemma2", "rope_scaling": {"type": "longrope"}},
            "rope_scaling: is not modelled; only null",
        ),
        (
            {**LLAMA, "model_type": "gemma2", "rope_parameters": {"rope_type": "longrope"}},
            "rope_parameters.rope_type = longrope: is not modelled; only default is",
        ),
        ({**LLAMA, "model_type": "phi3", "partial_rotary_factor": 2}, "= 2: must be a number above 0 and up to 1"),
        ({**LLAMA, "model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window = true: is not modelled"),
        (
            {**LLAMA, "model_type": "gemma2", "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types: is not modelled; only sliding_attention and full_attention in turn are",
        ),
        ({**LLAMA, "model_type": "gemma2", "attn_logit_softcapping": 0}, "= 0: must be a number above 0"),
        ({**LLAMA, "model_type": "falcon", "alibi": True}, "alibi = true: is not modelled; only false is"),
        ({**LLAMA, "model_type": "falcon", "attention_dropout": 0.1}, "= 0.1: is not modelled; only 0.0 is"),
        ({**LLAMA, "model_type": "falcon", "num_ln_in_parallel_attn": 2}, "= 2: is not modelled; only null is"),
        ({**LLAMA, "model_type": "mixtral", "num_experts_per_tok": 0}, "= 0: must be a whole number from 1 to"),
        (
            {**LLAMA, "model_type": "mixtral", "num_local_experts": "8"},
            "a whole number from 0 to 2,147,483,648, not text",
        ),
        ({**LLAMA, "model_type": "mixtral", "router_jitter_noise": 0.1}, "= 0.1: is not modelled; only 0.0 is"),
        ({**LLAMA, "model_type": "mixtral", "output_router_logits": "yes"}, "= yes: must be true or false"),
        ({**LLAMA, "layer_types": ["full_attention"] * 3}, "layer_types: must name all 2 layers, not 3"),
        ({**LLAMA, "model_type": "falcon", "new_decoder_architecture": True}, "is not modelled; only false is"),
        ({**GPT2, "model_type": "gptj", "rotary_dim": 6}, "rotary_dim = 6: must be even and at most 4"),
        ([1, 2], "model = [1, 2]: a model spec is a mapping of fields"),
        ("text", "model = text: a model spec is a mapping of fields"),
    ],
)
def test_a_wrong_value_is_named(config: object, line: str, tmp_path: Path) -> None:
    found = refusal(config, tmp_path)
    assert line in found
    assert found.startswith("/config.json:")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({**LLAMA, "architectures": ["LlamaForCausalLM"], "num_experts": 1}, False),
        ({**LLAMA, "architectures": ["LlamaModel"]}, False),
        ({**LLAMA, "architectures": None}, False),
        ({**LLAMA, "architectures": [7]}, False),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, False),
        ({**LLAMA, "architectures": ["LlamaForTokenClassification"]}, True),
        ({**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForRewardModel"]}, True),
        ({**GPT2, "architectures": ["GPT2LMHeadModel"], "scale_attn_by_inverse_layer_idx": True}, False),
        ({**GPT2, "architectures": ["GPT2DoubleHeadsModel"]}, True),
        ({**LLAMA, "model_type": "bert", "architectures": ["BertForMaskedLM"]}, False),
    ],
)
def test_a_head_that_is_not_the_one_estimated_is_told(config: dict[str, Any], told: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    notes = read_spec(tmp_path).notes
    assert [note.code for note in notes] == (["head-assumed"] if told else [])
    assert all(config["architectures"][0] in note.message for note in notes)


@pytest.mark.parametrize(
    ("said", "labels"),
    [
        ({}, 2),
        ({"id2label": {"0": "A", "1": "B", "2": "C"}, "label2id": {"A": 0, "B": 1, "C": 2}}, 3),
        ({"num_labels": 1}, 1),
        ({"id2label": {"0": "LABEL_0"}, "problem_type": "regression"}, 1),
    ],
)
def test_labels_of_a_classifier(said: dict[str, Any], labels: int, tmp_path: Path) -> None:
    """As transformers counts them; a language model that has the same keys has none."""
    classifier = {**LLAMA, **said, "architectures": ["LlamaForSequenceClassification"]}
    assert spec_of(classifier, tmp_path).labels == labels
    assert transformers.AutoConfig.for_model(**classifier).num_labels == labels
    assert spec_of({**classifier, "architectures": ["LlamaForCausalLM"]}, tmp_path).labels == 0
    several = refusal({**classifier, "problem_type": "multi_label_classification"}, tmp_path)
    assert "problem_type = multi_label_classification: is not modelled" in several


@pytest.mark.parametrize(
    ("head", "told"),
    [("ForMaskedLM", False), ("Model", False), ("ForTokenClassification", True), ("ForQuestionAnswering", True)],
)
def test_a_head_that_is_not_the_one_traced_is_told(head: str, told: bool, tmp_path: Path) -> None:
    """Of an architecture that traces alone know, the language model with masked words is what was learnt."""
    config = {"model_type": "roberta", "architectures": [f"Roberta{head}"], "max_position_embeddings": 514}
    (tmp_path / "config.json").write_text(json.dumps(config))
    notes = read_plan(None, {"model": str(tmp_path), "seq": "128"}, traced=True).warnings
    found = [note.message for note in notes if note.code == "head-assumed"]
    assert bool(found) == told
    assert all(f"is a Roberta{head}: " in message and "its own take less" in message for message in found)


EXPERTS = {**LLAMA, "intermediate_size_mlp": 40, "num_local_experts": 4, "head_dim": 4, "moe_layers": [1]}


def test_the_part_of_llama_4_that_reads_text(tmp_path: Path) -> None:
    whole = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "vision_config": {}}
    text = {**EXPERTS, "model_type": "llama4_text", "no_rope_layers": [1, 1]}
    spec = spec_of({**whole, "text_config": text}, tmp_path)
    assert spec == spec_of(text, tmp_path).model_copy(update={"source": spec.source})
    assert (spec.ffn, spec.shared_expert_ffn, spec.dense_layers) == (40, 20, (0,))
    (tmp_path / "config.json").write_text(json.dumps({**whole, "text_config": text}))
    assert [note.code for note in read_spec(tmp_path).notes] == ["text-part"]
    assert "text_config: must be a mapping" in refusal(whole, tmp_path)
    wrong = {**text, "no_rope_layers": [0, 1]}
    assert "only every 4th layer without positions" in refusal({**whole, "text_config": wrong}, tmp_path)
    assert "moe_layers = 7: must be a list of layers" in refusal({**text, "moe_layers": 7}, tmp_path)


@pytest.mark.parametrize(
    ("whole", "alone", "told"), [(True, None, 1), (True, True, 0), (False, True, 1), (None, True, 0)]
)
def test_a_head_that_the_whole_model_ties_and_its_text_part_does_not(
    whole: bool | None, alone: bool | None, told: int, tmp_path: Path
) -> None:
    """``LlavaForConditionalGeneration`` looks at its own configuration, ``LlamaForCausalLM`` at the part's."""
    text = LLAMA if alone is None else {**LLAMA, "tie_word_embeddings": alone}
    both = {"model_type": "llava", "text_config": text} | ({} if whole is None else {"tie_word_embeddings": whole})
    assert spec_of(both, tmp_path).tied_embeddings is bool(alone)
    assert [note.code for note in read_spec(tmp_path).notes].count("text-part-tied") == told


def test_a_text_part_says_what_else_the_model_reads(tmp_path: Path) -> None:
    """Of Voxtral it is sound; an encoder beside an image's, as in Grounding DINO, writes nothing: it is no model."""
    for tower, reads in (("vision_config", "images"), ("audio_config", "sound")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "both", tower: {}, "text_config": LLAMA}))
        (note,) = read_spec(tmp_path).notes
        assert f"reads {reads}, too: only its text part is planned" in note.message
    encoder = {"model_type": "grounding-dino", "text_config": {**LLAMA, "model_type": "bert"}}
    assert "model_type = grounding-dino: is not an architecture that is modelled" in refusal(encoder, tmp_path)


MIXTURES = {name: read for name, read in FAMILIES.items() if "experts" in read.keys and name not in UNKNOWN}


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_loss_of_routers_is_refused_where_a_class_has_it(kind: str) -> None:
    """``load_balancing_loss_func``; other classes hand out routers' logits, if at all, and leave the loss as it is."""
    kind, read = kind.removesuffix("_text"), MIXTURES[kind]
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    assert hasattr(module, "load_balancing_loss_func") is ("router_loss" in read.keys)


def test_the_loss_of_routers_matters_where_transformers_model_runs(tmp_path: Path) -> None:
    """Megatron-LM and torchtitan make the model by themselves, from its sizes."""
    config = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "output_router_logits": True}))
    plan = {"model": str(tmp_path), "batch": {"seq": 32}, "hardware": {"gpus": 2}}
    check_covered(read_plan(None, {"model": str(tmp_path)}).plan.model, MEGATRON_CORE, "megatron")
    assert memplan.estimate({**plan, "framework": "fsdp", "fsdp": {"code": "torchtitan"}}).stages
    for name in ("fsdp", "ddp", "deepspeed"):
        with pytest.raises(PlanError, match=r"model\.router_loss = true: must be false \(output_router_logits\)"):
            memplan.estimate({**plan, "framework": name})


def test_weights_that_are_published_in_a_low_precision(tmp_path: Path) -> None:
    published = {**EXPERTS, "model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    assert spec_of(published, tmp_path).attention_sinks
    (note,) = read_spec(tmp_path).notes
    assert "published in mxfp4: training in 16 bits casts them back" in note.message
    other = {**published, "quantization_config": {"quant_method": "gptq"}}
    assert "training on a quantised checkpoint is not modelled" in refusal(other, tmp_path)


def test_weights_of_a_model_of_images_that_are_quantised(tmp_path: Path) -> None:
    """What its makers packed stands beside ``text_config``, and is of both parts: Ministral 3's in fp8, which training
    casts back, and an AWQ of LLaVA's."""
    whole = {"model_type": "mistral3", "text_config": {**LLAMA, "model_type": "ministral3"}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "quantization_config": {"quant_method": "fp8"}}))
    assert [note.code for note in read_spec(tmp_path).notes] == ["text-part", "published-quantised"]
    awq = {**whole, "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert "quantization_config: is set: training on a quantised checkpoint" in refusal(awq, tmp_path)


@given(st.dictionaries(st.sampled_from([*GPT2, *LLAMA]), st.none() | st.integers() | st.text() | st.booleans()))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_configuration_gives_a_spec_or_one_line(tmp_path: Path, config: dict[str, Any]) -> None:
    assert len(error_of(lambda: spec_of({"model_type": "llama", **config}, tmp_path)).splitlines()) <= 1


def test_layers_that_differ(tmp_path: Path) -> None:
    """Llama-Nemotron's: two thirds of ``ffn_mult`` hidden sizes, up to a multiple of 256."""
    kinds = {"no_op": False, "replace_with_linear": False}
    blocks = [
        {"attention": {"n_heads_in_group": 8, **kinds}, "ffn": {"ffn_mult": 2.625, **kinds}},
        {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 0.5, **kinds}},
        {
            "attention": {"n_heads_in_group": None, "replace_with_linear": True},
            "ffn": {"ffn_mult": None, "no_op": True},
        },
    ]
    config = {
        "model_type": "nemotron-nas", "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 3,
        "vocab_size": 128256, "max_position_embeddings": 131072, "hidden_act": "silu", "num_key_value_heads": None,
        "intermediate_size": None, "tie_word_embeddings": False, "block_configs": blocks,
    }  # fmt: skip
    model = spec_of(config, tmp_path)
    assert model.layer_blocks == ("8:14336", "none:2816", "linear:none")
    assert (model.kv_heads, model.ffn, model.head_dim) == (8, 14336, 128)


@pytest.mark.parametrize("name", DIFFERING)
def test_layers_that_differ_count_as_their_modules_do(name: str) -> None:
    """Attention, MLP and norm of transformers' Llama in the sizes of each layer, and both ends."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    from transformers.models.llama import modeling_llama as llama

    spec = load_spec(name)

    def count(make: Any, **sizes: int) -> int:
        config = transformers.LlamaConfig(
            hidden_size=spec.hidden, num_attention_heads=spec.heads, head_dim=spec.head_dim, **sizes
        )
        with torch.device("meta"):
            return sum(one.numel() for one in make(config).parameters())

    norm, total = spec.hidden, (2 * spec.vocab + 1) * spec.hidden
    for text in spec.layer_blocks:
        kv_heads, ffn = text.split(":")
        if kv_heads != "none":
            total += norm + count(lambda config: llama.LlamaAttention(config, 0), num_key_value_heads=int(kv_heads))
        if ffn != "none":
            total += norm + count(llama.LlamaMLP, intermediate_size=int(ffn))
    assert parameters(spec) == total
