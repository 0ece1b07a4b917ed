"""Jobs of other tools by Megatron, and adapters of scripts with arguments of their own: the flags that say them run,
and come to the plan that the tool's own code makes of its keys."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import main

SWIFT = "PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' NPROC_PER_NODE=8 megatron sft --model {} {}\n"
MOE = "Qwen/Qwen1.5-MoE-A2.7B"
FACTORY = """\
model_name_or_path: Qwen/Qwen3-8B
stage: sft
finetuning_type: {}
cutoff_len: 1024
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
tensor_model_parallel_size: 2
pipeline_model_parallel_size: 2
sequence_parallel: true
use_distributed_optimizer: true
overlap_grad_reduce: true
overlap_param_gather: true
"""
RLHF = "deepspeed --module openrlhf.cli.train_sft --data.max_len 1024 --data.dataset x --train.batch_size 16 "
RLHF += "--train.micro_batch_size 2 --model.model_name_or_path Qwen/Qwen3-8B --ds.zero_stage 3 --ds.param_dtype bf16 "


def meant(path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[Mapping[str, Any], str]:
    """The plan of the flags that the refusal of ``text`` names, and what it says beside them."""
    path.write_text(text, encoding="utf-8")
    assert main(["estimate", str(path)]) == 2
    said = capsys.readouterr().err
    same, _, left = said.strip().partition("say the job in flags: memplan ")[2].partition(", beside what ")
    assert main([*shlex.split(same.replace("--gpus N", "--gpus 8")), "--gpu=h100", "--json", "--no-records"]) in (0, 1)
    plan: Mapping[str, Any] = json.loads(capsys.readouterr().out)["plan"]
    return plan, left


def test_what_swift_shards_and_fuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``examples/megatron/moe/moe.sh``: keys whose flags were once left out in silence."""
    words = (
        "--pipeline_model_parallel_size 2 --decoder_last_pipeline_num_layers 11 --expert_model_parallel_size 4 "
        "--moe_permute_fusion true --moe_grouped_gemm true --moe_expert_capacity_factor 2 --overlap_grad_reduce true "
        "--overlap_param_gather true --recompute_granularity selective --recompute_modules moe_act layernorm "
        "--max_length 1024 --exp_avg_dtype bf16 --exp_avg_sq_dtype bf16 --use_precision_aware_optimizer true"
    )
    plan, left = meant(tmp_path / "a.sh", SWIFT.format(MOE, words), capsys)
    assert not left
    assert plan["hardware"]["gpus"] == 8
    assert plan["pipeline"]["last_layers"] == 11
    assert (plan["layout"]["pp"], plan["layout"]["ep"], plan["layout"]["zero"]) == (2, 4, 1)
    assert (plan["batch"]["mbs"], plan["batch"]["gbs"], plan["batch"]["seq"]) == (1, 16, 1024)
    assert plan["recompute"]["modules"] == ["moe_act", "layernorm"]
    assert plan["megatron"]["overlap_param_gather"] is True
    assert plan["megatron"]["rope_fusion"] is False  # apply_rope_fusion of MegatronArguments
    assert plan["megatron"]["attention_backend"] == "flash"
    assert plan["megatron"]["cross_entropy_fusion"] == "native"
    assert plan["experts"]["capacity_factor"] == 2
    assert plan["optimizer"]["exp_avg"] == plan["optimizer"]["exp_avg_sq"] == "bf16"


@pytest.mark.parametrize(
    ("words", "rank"),
    [
        ("--tuner_type lora", 8),
        ("--train_type lora --lora_rank 32 --target_modules all-linear", 32),
        ("--tuner_type full --lora_rank 32", None),
        ("--lora_rank 32", None),
    ],
)
def test_swift_trains_adapters_where_it_is_told_so(
    words: str, rank: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``MegatronTunerMixin``: ``tuner_type`` is full by default, and ``lora_rank`` 8."""
    plan, left = meant(tmp_path / "a.sh", SWIFT.format("Qwen/Qwen3-8B", f"{words} --max_length 1024"), capsys)
    assert not left
    assert (plan.get("lora") or {}).get("rank") == rank


@pytest.mark.parametrize(
    ("words", "fp8"), [("--fp8_recipe blockwise --fp8_format e4m3", "blockwise"), ("--fp8_recipe blockwise", None)]
)
def test_swift_multiplies_in_8_bits_where_a_format_stands(
    words: str, fp8: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``self.fp8 = self.fp8_format``."""
    plan, _ = meant(tmp_path / "a.sh", SWIFT.format("Qwen/Qwen3-8B", f"{words} --max_length 1024"), capsys)
    assert plan["precision"].get("fp8") == fp8


def test_states_that_swift_keeps_on_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--optimizer_cpu_offload true --use_precision_aware_optimizer true --max_length 1024"
    plan, left = meant(tmp_path / "a.sh", SWIFT.format("Qwen/Qwen3-8B", words), capsys)
    assert not left
    assert plan["megatron"]["optimizer_offload"] == 1.0
    plan, _ = meant(
        tmp_path / "a.sh", SWIFT.format("Qwen/Qwen3-8B", "--optimizer_offload_fraction 1 --max_length 1024"), capsys
    )
    assert not plan["megatron"].get("optimizer_offload")


def test_nodes_whose_number_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``NNODES=$WORLD_SIZE`` says nothing of how many there are; ``NNODES=2`` does."""
    script = SWIFT.format("Qwen/Qwen3-8B", "--max_length 1024")
    for nodes, gpus in (("$WORLD_SIZE", "--gpus N "), ("2", "--gpus 16 ")):
        (tmp_path / "a.sh").write_text(f"NNODES={nodes} {script}", encoding="utf-8")
        assert main(["estimate", str(tmp_path / "a.sh")]) == 2
        assert gpus in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "rank"), [("full", None), ("lora", 8)])
def test_a_job_of_llama_factory_by_megatron(
    kind: str, rank: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``examples/megatron_bridge``: ``lora_rank`` is 8 by default (``finetuning_args.py``)."""
    plan, left = meant(tmp_path / "a.yaml", FACTORY.format(kind), capsys)
    assert not left
    assert (plan["framework"], plan["layout"]["tp"], plan["layout"]["pp"]) == ("megatron", 2, 2)
    assert (plan["layout"]["sequence_parallel"], plan["layout"]["zero"]) == (True, 1)
    assert (plan["batch"]["mbs"], plan["batch"]["seq"], plan["batch"]["gbs"]) == (2, 1024, 2 * 4 * 2)
    assert (plan.get("lora") or {}).get("rank") == rank


@pytest.mark.parametrize("kind", ["freeze", "oft"])
def test_a_part_of_the_parameters_is_not_said_as_all(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(FACTORY.format(kind), encoding="utf-8")
    assert main(["estimate", str(tmp_path / "a.yaml")]) == 2
    told = capsys.readouterr().err
    assert "it trains a part of the parameters (finetuning_type), which is not modelled either" in told
    assert "memplan estimate" not in told


@pytest.mark.parametrize(
    ("words", "targets"),
    [("", ["all-linear"]), ("--ds.lora.target_modules q_proj v_proj", ["q_proj", "v_proj"])],
)
def test_adapters_of_openrlhf(
    words: str, targets: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``openrlhf/cli/train_sft.py``: ``ds.lora.target_modules`` is all-linear by default, and its rank 0."""
    plan, left = meant(tmp_path / "a.sh", f"{RLHF}--ds.lora.rank 64 --ds.adam_offload {words}\n", capsys)
    assert not left
    assert (plan["lora"]["rank"], plan["lora"]["targets"]) == (64, targets)
    assert plan["deepspeed"]["offload_optimizer"] == "cpu"
    assert not meant(tmp_path / "a.sh", f"{RLHF}--ds.lora.rank 0\n", capsys)[0]["lora"]["rank"]


def test_what_swift_calls_otherwise_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys of memory without a flag here stand beside the flags."""
    _, left = meant(
        tmp_path / "a.sh",
        SWIFT.format("Qwen/Qwen3-8B", "--max_length 1024 --mlp_padding_free true --dsa_x_offload true"),
        capsys,
    )
    assert left == "these flags do not say: dsa_x_offload=true"
