"""Frozen parameters and adapters against the code that they describe: a training step of peft's and transformers'."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from memplan.plan.errors import PlanError
from memplan.plan.lora import adapted, adapter_parameters, linear_layers
from memplan.plan.read import read_plan
from memplan.tape.events import rounded

from ..oracle.tuned_step import frozen, lora, traced_tuned_step
from .test_against_transformers import drops_sorted, named, sizes, without_scalars
from .tuned_comparison import assert_equal, config_of, program_of, traced_backward, witness_of, word_shape

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft", reason="peft is not installed (the extra dev has it)")

RANK = 8
DOWN = "mlp.experts.down_proj"
BOTH = "experts.gate_up_proj,experts.down_proj"
SHAPES = ((2, 64), (1, 128), (3, 37))
"""Sequences and tokens, which cases take in turn."""
Shape = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """One model in one setting."""

    model: str
    dtype: str
    attention: str
    recompute: str

    def flags(self, shape: Shape, **more: str) -> dict[str, str]:
        (b, s) = shape
        own = {"dtype": self.dtype, "attention": self.attention, "recompute": self.recompute}
        return {"mbs": str(b), "seq": str(s), **own, **{name.replace("_", "-"): value for name, value in more.items()}}


@dataclass(frozen=True)
class Adapted(Case):
    """LoRA."""

    targets: str
    dropout: float = 0.1
    adapters: str = "fp32"
    dora: bool = False
    saved: str = ""
    parameters: str = ""
    alpha: float = 8

    def __str__(self) -> str:
        adapters = f"{self.targets}-{self.adapters}{'-dora' * self.dora}{self.saved}{self.parameters}"
        return f"{self.model}-{self.dtype}-{self.attention}-recompute-{self.recompute}-{adapters}"


@dataclass(frozen=True)
class Partly(Case):
    """Frozen parts of a model that is trained."""

    embedding: bool
    layers: int

    def __str__(self) -> str:
        parts = f"{'embedding-and-' if self.embedding else ''}{self.layers}-layers"
        return f"{self.model}-{self.dtype}-{self.attention}-recompute-{self.recompute}-{parts}-frozen"


ADAPTED = (
    Adapted("llama", "bf16", "eager", "none", "v_proj"),
    Adapted("llama", "bf16", "flash", "full", "q_proj,v_proj"),
    Adapted("llama-tied-dropout", "fp32", "eager", "none", "all-linear", 0.0),
    Adapted("gpt2", "bf16", "eager", "none", "c_attn"),
    Adapted("gpt2", "bf16", "flash", "full", "c_proj"),
    Adapted("bert", "bf16", "eager", "full", "all-linear"),
    Adapted("phi3", "bf16", "flash", "none", "all-linear"),
    Adapted("opt-dropout", "bf16", "eager", "full", "all-linear"),
    Adapted("opt", "bf16", "flash", "none", "q_proj,fc1", 0.0),
    Adapted("gpt_neox-dropout", "bf16", "eager", "full", "query_key_value"),
    Adapted("falcon", "bf16", "eager", "none", "all-linear"),
    Adapted("qwen3", "bf16", "flash", "none", "all-linear", 0.1, "bf16"),
    Adapted("llama", "bf16", "flash", "full", "q_proj,down_proj", 0.0, "fp32", dora=True),
    Adapted("opt", "bf16", "flash", "none", "all-linear", 0.1, "fp32", dora=True),
    Adapted("gpt2", "bf16", "eager", "none", "c_attn,c_proj", 0.0, "bf16", dora=True),
    Adapted("llama", "bf16", "flash", "full", "q_proj,v_proj", 0.0, saved="embed_tokens,lm_head"),
    Adapted("phi3", "bf16", "eager", "none", "qkv_proj", 0.1, saved="lm_head"),
    Adapted("llama", "bf16", "flash", "none", "embed_tokens,lm_head,q_proj"),
    Adapted("llama", "bf16", "eager", "full", "embed_tokens,v_proj", 0.0, "bf16"),
    Adapted("qwen2", "bf16", "flash", "full", "all-linear", 0.1, saved="embed_tokens"),
    Adapted("qwen3", "bf16", "flash", "full", "lm_head", 0.0),
    Adapted("llama-tied-dropout", "fp32", "eager", "none", "embed_tokens", 0.0),
    Adapted("llama", "bf16", "flash", "full", "embed_tokens", 0.1),
    Adapted("gpt2", "bf16", "flash", "none", "wte,c_attn", 0.1),
    Adapted("gpt_neox", "bf16", "eager", "full", "embed_in", 0.0, "bf16"),
    Adapted("phi3", "fp32", "eager", "none", "embed_tokens,lm_head", 0.1),
    Adapted("mixtral", "bf16", "flash", "none", "q_proj", 0.0, parameters=BOTH),
    Adapted("mixtral", "bf16", "flash", "full", "q_proj,v_proj", 0.0, parameters="experts.gate_up_proj", alpha=16),
    Adapted("qwen3_moe", "bf16", "eager", "none", "q_proj,o_proj", 0.0, "bf16", parameters=BOTH),
    Adapted(
        "qwen3_moe-unnormed-tied-dense", "fp32", "eager", "full", "v_proj", 0.0, parameters="mlp.experts.down_proj"
    ),
    Adapted("deepseek_v3", "bf16", "flash", "none", "q_b_proj,o_proj", 0.0, parameters=BOTH, alpha=32),
    Adapted("llama4_text", "bf16", "flash", "none", "q_proj", 0.0, parameters=BOTH),
    Adapted("qwen3_5", "bf16", "flash", "none", "all-linear"),
    Adapted("qwen2_moe", "bf16", "flash", "none", "q_proj,o_proj", 0.0, parameters=BOTH),
    Adapted("qwen2_moe-one-key", "bf16", "eager", "full", "q_proj,v_proj", 0.0),
    Adapted("ernie4_5", "bf16", "flash", "none", "all-linear"),
    Adapted("ernie4_5-one-key", "bf16", "eager", "full", "q_proj,v_proj", 0.0),
    Adapted("dots1", "bf16", "flash", "none", "q_proj,o_proj", 0.0, parameters=BOTH),
    Adapted("qwen3_next", "bf16", "eager", "full", "in_proj_ba,q_proj", 0.0, parameters=BOTH),
    Adapted("llama4_text-dense-unnormed-dropout", "bf16", "eager", "full", "q_proj,o_proj", 0.1),
    Adapted("olmo3", "bf16", "flash", "none", "all-linear"),
    Adapted("gemma", "bf16", "flash", "none", "all-linear"),
    Adapted("gemma-one-key", "bf16", "eager", "full", "q_proj,v_proj", 0.0),
    Adapted("glm", "bf16", "eager", "full", "q_proj,v_proj", 0.0),
    Adapted("glm4", "bf16", "flash", "none", "all-linear"),
    Adapted("olmo2", "bf16", "flash", "full", "all-linear"),
    Adapted("smollm3", "bf16", "flash", "none", "all-linear"),
    Adapted("seed_oss", "bf16", "eager", "none", "q_proj,v_proj", 0.0),
    Adapted("cohere", "bf16", "flash", "none", "all-linear"),
    Adapted("cohere2", "bf16", "eager", "full", "q_proj,v_proj", 0.0),
    Adapted("cohere2", "bf16", "flash", "none", "all-linear"),
    Adapted("olmo3", "bf16", "eager", "full", "q_proj,v_proj", 0.0),
    Adapted("starcoder2-dropout-untied-unbiased", "bf16", "flash", "none", "all-linear"),
    Adapted("starcoder2", "bf16", "eager", "full", "q_proj,c_fc", 0.0),
    Adapted("granitemoehybrid", "bf16", "flash", "full", "all-linear", 0.1, "bf16"),
    Adapted("granitemoehybrid", "bf16", "eager", "none", "q_proj,output_linear", 0.0),
    Adapted("qwen3_5", "bf16", "flash", "none", "q_proj,v_proj"),
    Adapted("qwen3_5_moe", "bf16", "eager", "none", "o_proj", 0.0),
    Adapted("gemma4_text", "bf16", "flash", "none", "all-linear"),
    Adapted("gemma4_text-keys-as-values", "bf16", "flash", "full", "all-linear"),
    Adapted("gemma4_text-keys-as-values", "bf16", "eager", "none", "q_proj,v_proj", 0.0),
    Adapted("gemma4_text-experts", "bf16", "flash", "none", "q_proj,o_proj"),
    Adapted("gemma4_text-experts", "bf16", "eager", "full", "q_proj,v_proj", 0.0, parameters=BOTH),
)
PARTLY = (
    Partly("llama", "bf16", "flash", "none", True, 2),
    Partly("llama-tied-dropout", "bf16", "eager", "full", True, 1),
    Partly("llama", "bf16", "eager", "none", False, 2),
    Partly("gpt2", "bf16", "eager", "full", True, 1),
    Partly("bert", "bf16", "flash", "none", True, 3),
)


@pytest.mark.parametrize(("case", "shape"), list(zip(ADAPTED, cycle(SHAPES), strict=False)), ids=str)
def test_step_with_adapters(case: Adapted, shape: Shape, tmp_path: Path) -> None:
    flags = case.flags(
        shape,
        lora_rank=str(RANK),
        lora_targets=case.targets,
        lora_dropout=str(case.dropout),
        lora_dtype=case.adapters,
        use_dora=str(case.dora).lower(),
        lora_alpha=str(case.alpha),
        **({"modules_to_save": case.saved} if case.saved else {}),
        **({"lora_target_parameters": case.parameters} if case.parameters else {}),
    )
    more: dict[str, Any] = {"use_dora": case.dora, "modules_to_save": case.saved.split(",") if case.saved else None}
    more |= {"lora_alpha": case.alpha, "target_parameters": case.parameters.split(",") if case.parameters else None}
    tune = lora(RANK, tuple(case.targets.split(",")), case.dropout, case.adapters, **more)
    compare(case, shape, flags, tune, tmp_path)


CLASSIFIERS = (
    Adapted("bert", "bf16", "flash", "none", "query,value", saved="classifier"),
    Adapted("bert", "fp32", "eager", "full", "all-linear", 0.0, saved="classifier"),
    Adapted("llama", "bf16", "flash", "none", "q_proj,v_proj", saved="score"),
)


@pytest.mark.parametrize(("case", "shape"), list(zip(CLASSIFIERS, cycle(SHAPES), strict=False)), ids=str)
def test_step_of_a_classifier_with_adapters(case: Adapted, shape: Shape, tmp_path: Path) -> None:
    """peft trains a copy of the head (``PeftModelForSequenceClassification``), BERT's with its bias; the pooler before
    it is a linear layer like others."""
    b, s = shape
    flags = case.flags(
        shape,
        lora_rank=str(RANK),
        lora_targets=case.targets,
        lora_dropout=str(case.dropout),
        modules_to_save=case.saved,
        labels="3",
    )
    program = program_of(case.model, tmp_path, flags)
    tune = lora(RANK, tuple(case.targets.split(",")), case.dropout, case.adapters, task_type="SEQ_CLS")
    step = traced_tuned_step(
        config_of(case.model),
        b,
        s,
        case.dtype,
        tune,
        flash=case.attention == "flash",
        recompute=case.recompute == "full",
        labels=3,
    )
    pooled = case.model == "bert"
    assert_equal(program, witness_of(step, program), (1 + pooled) * rounded(8 * b * s), pooled=pooled)


@pytest.mark.parametrize(("case", "shape"), list(zip(PARTLY, cycle(SHAPES), strict=False)), ids=str)
def test_step_with_frozen_parts(case: Partly, shape: Shape, tmp_path: Path) -> None:
    flags = case.flags(shape, freeze_embedding=str(case.embedding).lower(), freeze_layers=str(case.layers))
    compare(case, shape, flags, frozen(case.embedding, case.layers), tmp_path)


def test_later_microbatch_adds_to_gradients(tmp_path: Path) -> None:
    case = Adapted("llama", "bf16", "flash", "full", "q_proj,v_proj")
    program = program_of("llama", tmp_path, case.flags(SHAPES[0], lora_rank=str(RANK), lora_targets=case.targets))
    tune = lora(RANK, ("q_proj", "v_proj"), 0.0, "fp32")
    step = traced_tuned_step(config_of("llama"), *SHAPES[0], "bf16", tune, flash=True, recompute=True, accumulates=True)
    modules = [span.module for span in reversed(program.spans) for _ in span.names]
    backward = [event for module in modules for event in named(module, module.steady.backward)]
    traced = traced_backward(step.backward, word_shape(program))
    assert drops_sorted(sizes(without_scalars(backward))) == drops_sorted(traced)


def compare(case: Case, shape: Shape, flags: dict[str, str], tune: object, folder: Path) -> None:
    b, s = shape
    program = program_of(case.model, folder, flags)
    step = traced_tuned_step(
        config_of(case.model),
        b,
        s,
        case.dtype,
        tune,  # type: ignore[arg-type]
        flash=case.attention == "flash",
        recompute=case.recompute == "full",
    )
    assert_equal(program, witness_of(step, program), rounded(8 * b * s))


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj"])
@pytest.mark.parametrize("model", ["llama", "gemma4_text", "gemma4_text-keys-as-values"])
def test_parameters_of_adapters(model: str, targets: str, tmp_path: Path) -> None:
    """Where layers have heads of their own, or no projection of values, so have their adapters."""
    config = config_of(model)
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    plan = read_plan(None, {"model": str(tmp_path), "lora-rank": "8", "lora-targets": targets}).plan
    given = targets if targets == "all-linear" else targets.split(",")
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_config(config)
        tuned = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=given))
    assert adapter_parameters(plan) == sum(one.numel() for one in tuned.parameters() if one.requires_grad)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "granite-3.0-3b-a800m", "mixtral-8x7b"])
def test_all_linear_layers_of_a_model_with_experts(name: str) -> None:
    """Those of attention, unless peft wraps experts and routers, too."""
    plan = read_plan(None, {"model": name, "lora-rank": "8", "lora-targets": "all-linear"}).plan
    spec = plan.model
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(spec.family, **sizes, vocab_size=128, num_local_experts=4, num_experts_per_tok=2)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft names a pattern of ranks for stacks that are not adapted
        base, settings = AutoModelForCausalLM.from_config(config), peft.LoraConfig(target_modules="all-linear")
        model = peft.get_peft_model(base, settings)
    modules = {one.split(".lora_A")[0].rpartition(".")[2] for one, _ in model.named_parameters() if ".lora_A" in one}
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if modules == attention:
        assert {linear_layers(spec)[one].rpartition(".")[2] for one in adapted(plan)} == attention
    else:
        assert "experts" in modules
        with pytest.raises(PlanError, match=r"lora\.targets = all-linear: must be among q_proj"):
            adapted(plan)
