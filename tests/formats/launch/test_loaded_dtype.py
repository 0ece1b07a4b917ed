"""Which dtype parameters have where a job names none: what loads the model decides, against transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from memplan.commands.launched import flags_of_launch, read_given
from memplan.plan.errors import PlanError
from memplan.plan.library import model_specs, published_dtype
from memplan.plan.read import ReadPlan, read_plan
from memplan.plan.resolve import resolve

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
}
SCRIPT = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
model = {model}
Trainer(model=model, args=TrainingArguments("out", per_device_train_batch_size=1, bf16=True))
"""
BY_NAME = """
from trl import SFTConfig, SFTTrainer
SFTTrainer(model="FOLDER", args=SFTConfig("out", max_length=64))
"""


def read_text(folder: Path, text: str, name: str = "train.py", **flags: str) -> ReadPlan:
    place = folder / name
    place.write_text(text, encoding="utf-8")
    return read_given(str(place), flags_of_launch(str(place), None), {"seq": "64", **flags})


def arguments_of(**more: object) -> str:
    return json.dumps({"output_dir": "out", "per_device_train_batch_size": 1, **more})


def stored(read: ReadPlan) -> str:
    return resolve(read.plan).precision.stored


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model saved in each of two dtypes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    places = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        places[name] = folder / name
        made = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=dtype)  # type: ignore[no-untyped-call]
        made.save_pretrained(places[name])
    return places


@pytest.mark.parametrize("saved", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "model",
    [
        "AutoModelForCausalLM.from_pretrained(FOLDER)",
        "AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto')",
        "AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)",
        "AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16)",
        "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER))",
        "AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))",
        "LlamaForCausalLM(LlamaConfig(**SIZES))",
    ],
)
def test_parameters_have_the_dtype_that_transformers_gives_them(
    model: str, saved: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    place = str(checkpoints[saved])
    known = {"AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM, "LlamaConfig": LlamaConfig}
    made = eval(model, {**known, "LlamaForCausalLM": LlamaForCausalLM, "SIZES": SIZES, "FOLDER": place, "torch": torch})
    text = SCRIPT.format(model=model.replace("FOLDER", repr(place)))
    assert stored(read_text(tmp_path, text, model=place)) == NAMES[made.dtype]


def test_before_transformers_5_the_checkpoint_did_not_decide(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """``from_pretrained`` of 4.57: ``dtype = kwargs.pop("dtype", None)``, then torch's default."""
    text = SCRIPT.format(model=f"AutoModelForCausalLM.from_pretrained({str(checkpoints['bf16'])!r})")
    assert stored(read_text(tmp_path, text, versions="transformers=4.57")) == "fp32"
    assert stored(read_text(tmp_path, text, versions="transformers=5.0")) == "bf16"


def test_trl_loads_what_it_is_given_by_name_in_fp32(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """``create_model_from_path`` since trl 0.27; before, and with a model that the script loaded, as transformers."""
    text = BY_NAME.replace("FOLDER", str(checkpoints["bf16"]))
    assert stored(read_text(tmp_path, text, dtype="bf16", autocast="true")) == "fp32"
    older = read_text(tmp_path, text, dtype="bf16", autocast="true", versions="trl=0.26,transformers=5.0")
    assert stored(older) == "bf16"
    loaded = f'model = AutoModelForCausalLM.from_pretrained("{checkpoints["bf16"]}")\n{text}'
    given = loaded.replace(f'model="{checkpoints["bf16"]}", args', "model=model, args")
    assert stored(read_text(tmp_path, given, dtype="bf16", autocast="true")) == "bf16"


@pytest.mark.parametrize(
    ("arguments", "flags", "dtypes"),
    [
        ({}, {}, ("bf16", False, None)),
        ({"bf16": True}, {}, ("bf16", True, "bf16")),
        ({"bf16": True}, {"autocast-parameters": "fp32"}, ("bf16", True, "fp32")),
        ({"bf16": True}, {"autocast": "false"}, ("bf16", False, None)),
        ({"bf16": True, "dtype": "float32"}, {}, ("bf16", True, "fp32")),
        ({"fp16": True}, {}, ("fp16", True, "fp32")),
        ({"bf16": True, "load_in_4bit": True, "use_peft": True}, {}, ("bf16", True, "bf16")),
    ],
)
def test_autocast_runs_over_what_was_loaded(
    arguments: dict[str, object], flags: dict[str, str], dtypes: tuple[str, bool, str | None], tmp_path: Path
) -> None:
    """GradScaler takes fp32 gradients alone (``_unscale_grads_``), so fp16 stays over fp32."""
    read = read_text(tmp_path, arguments_of(**arguments), "arguments.json", model="llama-3.1-8b", **flags)
    found = resolve(read.plan).precision
    assert (found.dtype, found.autocast, found.parameters) == dtypes


def test_shards_are_of_what_was_loaded(tmp_path: Path) -> None:
    whole = arguments_of(fsdp="full_shard")
    read = read_text(tmp_path, whole, "arguments.json", model="llama-3.1-8b", gpus="8")
    assert (read.plan.precision.dtype, read.plan.fsdp.parameters, read.plan.fsdp.reduce) == ("bf16", "bf16", "bf16")


def test_adapters_in_fp16_run_over_a_checkpoint_in_fp16(tmp_path: Path) -> None:
    job = arguments_of(fp16=True, use_peft=True)
    assert stored(read_text(tmp_path, job, "arguments.json", model="llama-2-7b")) == "fp16"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("llama-3.1-8b", "bf16, as the checkpoint was saved (model spec llama-3.1-8b)"),
        ("meta-llama/Llama-3.1-8B-Instruct", "bf16, as the checkpoint was saved (model spec llama-3.1-8b)"),
        ("gpt2", "assumed to be fp32; transformers 5 loads a checkpoint in the dtype that it was saved in"),
    ],
)
def test_the_source_of_the_dtype_is_said(model: str, said: str, tmp_path: Path) -> None:
    read = read_text(tmp_path, arguments_of(bf16=True), "arguments.json", model=model)
    assert said in next(note.message for note in read.warnings if note.code == "loaded-dtype")


@pytest.mark.parametrize(
    "repository",
    [
        *("microsoft/Phi-4-mini-instruct", "microsoft/Phi-3.5-mini-instruct", "google/gemma-3-27b-it"),
        *("Qwen/Qwen2.5-0.5B", "Qwen/Qwen3.5-27B", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "tiiuae/Falcon3-7B-Instruct"),
        *("meta-llama/Meta-Llama-3-70B", "deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K2-Instruct"),
    ],
)
def test_published_checkpoints_in_bf16(repository: str, tmp_path: Path) -> None:
    """``torch_dtype`` of each one's ``config.json``."""
    read = read_text(tmp_path, arguments_of(bf16=True), "arguments.json", model=repository)
    assert read.plan.precision.parameters == "bf16"


def test_a_spec_of_ones_own_may_say_it(tmp_path: Path) -> None:
    spec = tmp_path / "mine.yaml"
    spec.write_text(model_specs()["llama-2-7b"].read_text("utf-8").replace("saved_dtype: fp16", "saved_dtype: bf16"))
    assert stored(read_text(tmp_path, arguments_of(bf16=True), "arguments.json", model=str(spec))) == "bf16"


def test_a_plan_says_which_dtype_it_means() -> None:
    """A published dtype is one that a checkpoint can have, and ``auto`` in a plan stays refused."""
    assert {published_dtype(name) for name in model_specs()} == {"bf16", "fp16", None}
    with pytest.raises(PlanError, match="must be one of fp32, fp16, bf16"):
        read_plan(None, {"model": "llama-3.1-8b", "dtype": "auto"})
