"""A published ``config.json`` of a model that is known from traces is that model, however many keys it has; models of
images and text are planned by their text part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import main
from memplan.plan.errors import PlanError
from memplan.plan.library import learned_models
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.plan.spec import ModelSpec
from memplan.plan.traced_spec import CHANGES_NOTHING, built_in_like

SMOLLM3: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None,
    "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
    "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4,
    "no_rope_layers": [int((at + 1) % 4 != 0) for at in range(36)], "num_attention_heads": 16,
    "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
    "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": False, "use_sliding_window": False,
    "vocab_size": 128256,
}  # fmt: skip
"""As https://huggingface.co/HuggingFaceTB/SmolLM3-3B has it, without ``tie_word_embeddings``."""
MISTRAL_SMALL: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "torch_dtype": "bfloat16",
    "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 32768, "max_position_embeddings": 131072, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True, "vocab_size": 131072,
    },
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral", "num_hidden_layers": 24},
}  # fmt: skip
"""Of https://huggingface.co/mistralai/Mistral-Small-3.1-24B-Instruct-2503."""


PHI_2: dict[str, Any] = {
    "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0,
    "eos_token_id": 50256, "hidden_act": "gelu_new", "hidden_size": 2560, "initializer_range": 0.02,
    "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "phi",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4,
    "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.37.0", "use_cache": True,
    "vocab_size": 51200,
}  # fmt: skip
"""Of https://huggingface.co/microsoft/phi-2."""


def test_a_published_configuration_is_the_built_in_model() -> None:
    assert built_in_like(PHI_2) == "phi-2"
    for name, value in (("hidden_size", 2304), ("qk_layernorm", True), ("embedding_dropout", 0.1)):
        assert built_in_like({**PHI_2, name: value}) == ""
    assert built_in_like({key: value for key, value in PHI_2.items() if key != "partial_rotary_factor"}) == ""


def test_smollm_3_is_read_from_its_published_configuration(tmp_path: Path) -> None:
    """As the built-in model; layers that have positions are those of one interval, and all see all tokens."""
    path = tmp_path / "config.json"

    def read(**changes: object) -> ModelSpec:
        path.write_text(json.dumps({**SMOLLM3, **changes}))
        return resolve(read_plan(None, {"model": str(path), "framework": "single"}).plan).model

    own = ("name", "source", "published_parameters")
    built_in = resolve(read_plan(None, {"model": "smollm3-3b", "framework": "single"}).plan).model
    assert read().model_dump(exclude={*own}) == built_in.model_dump(exclude={*own})
    with pytest.raises(PlanError, match="no_rope_layers: is not modelled; only every 4th layer without positions"):
        read(no_rope_layers=[1] * 36)
    with pytest.raises(PlanError, match="use_sliding_window = true: is not modelled; only false is"):
        read(use_sliding_window=True)


@pytest.mark.parametrize("name", learned_models())
def test_what_a_configuration_may_leave_out_is_what_transformers_fills_in(name: str) -> None:
    from transformers import AutoConfig

    config = learned_models()[name].configuration()
    whole = AutoConfig.for_model(**config).to_dict()
    left = {key: value for key, value in config.items() if key not in learned_models()[name].unsaid}
    filled = AutoConfig.for_model(**left).to_dict()
    compared = whole.keys() - CHANGES_NOTHING - {"sliding_window_pattern"}
    assert {key: filled.get(key) for key in compared} == {key: whole[key] for key in compared}
    assert built_in_like(left) == name


def estimated(folder: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code = main(["estimate", "--model", str(folder), "--gpu", "h200", "--seq", "2048", "--json"])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_text_part_of_a_model_that_reads_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = estimated(tmp_path / "both", MISTRAL_SMALL, capsys)
    alone, plain, _ = estimated(tmp_path / "text", {**MISTRAL_SMALL["text_config"]}, capsys)
    assert code == alone
    assert json.loads(out)["peak_bytes"] == json.loads(plain)["peak_bytes"]
    assert "text-part" in {one["code"] for one in json.loads(out)["warnings"]}


def test_a_tower_without_a_text_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "qwen2_5_vl", "hidden_size": 3584, "num_hidden_layers": 28, "vision_config": {"depth": 32}}
    code, _, told = estimated(tmp_path / "vl", {**config, "max_position_embeddings": 128000}, capsys)
    assert (code, told.count("\n")) == (2, 1)
    assert "with vision_config, which is not modelled, and has no text_config to plan alone" in told


def test_a_repository_whose_model_keeps_more_is_another_model() -> None:
    """OLMo 7B of April and July 2024 clip queries, keys and values (``clip_qkv: 8.0`` in configs/official of
    allenai/OLMo), of which autograd keeps a copy each: 3 b s h elements of every layer, 1.5 GiB of 2,048 tokens."""
    import torch
    from transformers import OlmoConfig, OlmoForCausalLM

    tokens, hidden, layers = 8, 16, 2

    def kept(clip: float | None) -> int:
        sizes = {"vocab_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "eos_token_id": 1}
        config = OlmoConfig(hidden_size=hidden, num_hidden_layers=layers, clip_qkv=clip, pad_token_id=0, **sizes)
        model, found = OlmoForCausalLM(config), {}

        def pack(one: torch.Tensor) -> torch.Tensor:
            found[one.untyped_storage().data_ptr()] = one
            return one

        ids = torch.zeros(1, tokens, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            held = model(input_ids=ids, labels=ids)  # noqa: F841 - its graph keeps what is counted
        return sum(one.untyped_storage().nbytes() for one in found.values())

    assert kept(8.0) - kept(None) == 3 * tokens * hidden * layers * 4
    for name in ("allenai/OLMo-7B-0424-hf", "allenai/OLMo-7B-0724-hf"):
        with pytest.raises(PlanError, match=r"its queries, keys and values, which are clipped \(clip_qkv\)"):
            read_plan(None, {"model": name}, traced=True)
    assert learned_models()["olmo-7b"].hub == ("allenai/OLMo-7B-hf",)
