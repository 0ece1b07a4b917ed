"""Plans as YAML that reads back as the same plan (``memplan/plan/write.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from memplan.plan.fields import plan_fields
from memplan.plan.library import examples
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.plan.write import plan_yaml

FLAGS: dict[str, dict[str, str | tuple[str, ...]]] = {
    "default": {"model": "gpt2"},
    "cut layers": {"model": "llama-3-8b", "layers": "3", "seq": "512"},
    "other sizes": {"model": "gpt2", "hidden": "64", "heads": "4", "head-dim": "8", "ffn": "100"},
    "renamed": {"model": "gpt2", "model-name": "mine: a #1"},
    "environment": {"model": "gpt2", "env": ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "A=1")},
    "layout": {
        "model": "llama-3-8b", "framework": "megatron", "gpus": "8", "pp": "2", "layers": "5", "gpu": "h100-80gb",
        "pipeline-layout": "Ett|tttL", "attention": "flash", "capacity": "70GiB", "headroom": "5%", "price": "2.5",
    },
    "list": {
        "model": "bigscience-104b", "framework": "megatron-deepspeed", "layers": "4", "pp": "2", "gpus": "2",
        "partition": "0,5,11", "dtype": "fp16", "optimizer": "adam", "torch": "1.8",
    },
    "its own default": {
        "model": "llama-3-8b", "framework": "fsdp", "fsdp-code": "torchtitan", "pp": "2", "gpus": "4", "layers": "4",
        "reshard-after-forward": "true", "gbs": "8", "seq": "512",
    },
    "adaptive": {
        "model": "bigscience-104b-250k", "framework": "megatron-deepspeed", "layers": "2", "loss": "adaptive-softmax",
        "cutoffs": "20000,80000", "dtype": "fp16", "optimizer": "adam",
    },
    "tuned": {"model": "llama-3-8b", "lora-rank": "8", "lora-targets": "q_proj,v_proj", "quantisation": "nf4"},
    "map": {"model": "gpt2", "framework": "device-map", "device-map": "{0: 0-3, 1: 4-11}"},
}  # fmt: skip


@pytest.mark.parametrize("flags", FLAGS.values(), ids=list(FLAGS))
def test_it_reads_back(flags: dict[str, str | tuple[str, ...]], tmp_path: Path) -> None:
    plan = read_plan(None, flags).plan
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan), encoding="utf-8")
    again = read_plan(str(tmp_path / "plan.yaml")).plan
    assert again.model == plan.model
    assert resolve(again) == resolve(plan)


@pytest.mark.parametrize("name", examples())
def test_examples_read_back(name: str, tmp_path: Path) -> None:
    plan = read_plan(name).plan
    (tmp_path / "plan.yaml").write_text(plan_yaml(plan), encoding="utf-8")
    assert resolve(read_plan(str(tmp_path / "plan.yaml")).plan) == resolve(plan)


def test_a_model_of_no_name_is_written_whole(tmp_path: Path) -> None:
    plan = read_plan(None, {"model": "gpt2", "hidden": "64", "heads": "4", "model-name": "tiny"}).plan
    written = yaml.safe_load(plan_yaml(plan))
    assert "base" not in written["model"]
    assert written["model"]["hidden"] == 64


def test_only_what_is_no_default_under_its_description() -> None:
    text = plan_yaml(read_plan(None, {"model": "gpt2", "tp": "1", "mbs": "4"}).plan, ["By hand"])
    assert text.startswith("# By hand\n")
    assert yaml.safe_load(text) == {"model": "gpt2", "batch": {"mbs": 4}}
    assert f"  # {plan_fields()['batch.mbs'].description[:1].upper()}" in text
