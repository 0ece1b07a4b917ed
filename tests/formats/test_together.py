"""Files of one job together: the Trainer's arguments, Accelerate's configuration, a ``ds_config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.cli import main

ARGUMENTS: dict[str, Any] = {
    "model_name_or_path": "gpt2",
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "bf16": True,
    "gradient_checkpointing": True,
    "max_length": 512,
}
ZERO_3: dict[str, Any] = {
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": "auto"},
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
}
BY_DEEPSPEED = """
distributed_type: DEEPSPEED
deepspeed_config: {deepspeed_config_file: zero3.json}
num_processes: 4
"""
SHARDED = """
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
mixed_precision: bf16
num_processes: 4
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("args.json").write_text(json.dumps(ARGUMENTS))
    Path("zero3.json").write_text(json.dumps(ZERO_3))
    Path("engine.yaml").write_text(BY_DEEPSPEED)
    Path("sharded.yaml").write_text(SHARDED)
    Path("many.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["estimate", *words, "--json", "--no-records"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def figures(found: dict[str, Any]) -> tuple[Any, ...]:
    """What the job is, and what it takes."""
    plan = found["plan"]
    sizes = plan["hardware"]["gpus"], plan["batch"]["mbs"], plan["batch"]["gbs"], plan["batch"]["seq"]
    return plan["framework"], plan["recompute"]["mode"], *sizes, found["stages"][0]["allocated_bytes"]


def test_the_same_job_in_different_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed, whose configuration Accelerate names, or the Trainer, or that stands beside the arguments."""
    Path("whole.json").write_text(json.dumps({**ARGUMENTS, "deepspeed": ZERO_3}))
    expected = figures(answer(capsys, "whole.json", "--gpus=4"))
    assert expected[:6] == ("deepspeed", "full", 4, 2, 32, 512)
    for words in (
        ["args.json", "zero3.json", "--gpus=4"],
        ["args.json", "engine.yaml"],
        ["args.json", "--config_file=engine.yaml"],
        ["--config", "args.json", "--deepspeed", "zero3.json", "--gpus=4"],
        ["engine.yaml", "args.json", "zero3.json"],
        ["many.yaml", "args.json", "zero3.json"],
        ["--from=trainer", "args.json", "--from=accelerate", "engine.yaml"],
    ):
        assert figures(answer(capsys, *words)) == expected, words


GROUPS = """
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 1
"""


def test_replicas_of_shards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``parallelism_config`` in the file, as flags of the launcher, and what memplan calls it."""
    Path("groups.yaml").write_text(SHARDED + GROUPS)
    Path("run.sh").write_text(
        "accelerate launch --config_file sharded.yaml --use_parallelism_config true --parallelism_config_dp_shard_size "
        "2 --parallelism_config_dp_replicate_size 2 train.py args.json\n"
    )
    found = answer(capsys, "args.json", "groups.yaml")
    assert found["plan"]["fsdp"]["replicas"] == 2
    whole = figures(answer(capsys, "args.json", "sharded.yaml"))
    assert figures(answer(capsys, "args.json", "sharded.yaml", "--fsdp-replicas=2")) == figures(found) != whole
    assert figures(answer(capsys, "run.sh")) == figures(found)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (SHARDED + GROUPS.replace("tp_size: 1", "tp_size: 2"), "tp_size = 2: must be 1: of Accelerate's parallelism"),
        (SHARDED + GROUPS.replace("shard_size: 2", "shard_size: 4"), "comes to 8 GPUs, and num_processes is 4"),
        (SHARDED + GROUPS.replace("shard_size: 2", "shard_size: two"), "dp_shard_size = two: must be a whole number"),
        (SHARDED.replace("version: 2", "version: 1") + GROUPS, "must be left out with fsdp.version 1"),
        (
            "distributed_type: MULTI_GPU" + GROUPS,
            "parallelism_config: must be left out: Accelerate takes it with FSDP 2 alone",
        ),
        (
            SHARDED.replace("version: 2", "version: 1, fsdp_sharding_strategy: HYBRID_SHARD"),
            "fsdp_sharding_strategy = HYBRID_SHARD: must be true (FULL_SHARD) or false (SHARD_GRAD_OP); replicas",
        ),
    ],
)
def test_groups_that_are_not_modelled(text: str, line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("groups.yaml").write_text(text)
    assert main(["estimate", "args.json", "groups.yaml"]) == 2
    assert line in capsys.readouterr().err


def test_a_recipes_folder_says_which_trainer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``recipes/zephyr-7b-beta/dpo/config_full.yaml`` of the alignment handbook; a flag says it before the folder."""
    for name in ("dpo", "bco"):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps({**ARGUMENTS, "beta": 0.01}))
    found = answer(capsys, "dpo/config.json", "--config-file", "many.yaml")
    assert found["plan"]["trainer"]["loop"] == "dpo"
    assert [one["code"] for one in found["warnings"]].count("trainer-assumed") == 1
    assert main(["estimate", "bco/config.json"]) == 2
    assert "bco: is not modelled" in capsys.readouterr().err
    assert answer(capsys, "bco/config.json", "--trainer", "dpo")["plan"]["trainer"]["loop"] == "dpo"


@pytest.mark.parametrize(
    ("name", "keys", "loop"),
    [
        ("sft/config.yaml", {"dataset_num_proc": 12}, "sft"),  # recipes/zephyr-7b-beta/sft/config_full.yaml
        ("dpo/config.yaml", {"dataset_num_proc": 12}, "dpo"),
        ("config.yaml", {"dataset_mixture": {"datasets": []}}, "sft"),
        ("config.yaml", {"dataset_name": "trl-lib/Capybara"}, "sft"),  # trl's example_config.yaml
        ("config.json", {"dataset_name": "wikitext"}, "transformers"),  # run_clm.py
        ("config.yaml", {"dataset_num_proc": 12, "f_divergence_type": "js"}, "dpo"),
    ],
)
def test_a_file_of_trls_is_no_trainers(
    name: str, keys: dict[str, object], loop: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its loss makes no logits, and its defaults are others: a job of SFT was estimated at two to twenty times."""
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(json.dumps({**ARGUMENTS, "model_name_or_path": "gpt2", **keys}))
    found = answer(capsys, name)
    assert found["plan"]["trainer"]["loop"] == loop
    told = [one["code"] for one in found["warnings"]]
    assert told.count("trainer-assumed") == (loop != "transformers" and "f_divergence_type" not in keys)


def test_generation_in_evaluation_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``Seq2SeqTrainingArguments`` has it; how long texts are says nothing of training (``trainer_seq2seq.py``)."""
    for generates in (True, False):
        keys = {"predict_with_generate": generates, "generation_max_length": 225, "sortish_sampler": False}
        Path("seq2seq.json").write_text(json.dumps({**ARGUMENTS, "model_name_or_path": "gpt2", **keys}))
        told = [one["message"] for one in answer(capsys, "seq2seq.json")["warnings"]]
        assert any("evaluation generates text" in one for one in told) == generates
        assert not any("generation_max_length" in one for one in told)


def test_arguments_beside_accelerates_sharding(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "args.json", "sharded.yaml")
    assert figures(found)[:6] == ("fsdp", "full", 4, 2, 32, 512)
    assert {"args.json is a launch file of trainer (--from names another)"} < {*found["assumptions"]}


@pytest.mark.parametrize(
    "words",
    [
        "accelerate launch --config_file sharded.yaml train.py args.json",
        "accelerate launch --config_file=sharded.yaml run_sft.py --config args.json",
        "torchrun --nproc_per_node 4 train.py args.json --fsdp full_shard --fsdp_config fsdp.json",
        "torchrun --nproc_per_node 4 train.py --fsdp_config fsdp.json --fsdp 'full_shard auto_wrap' --config args.json",
    ],
)
def test_a_script_that_names_files_of_arguments(words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``HfArgumentParser.parse_json_file`` takes the one word behind the script, ``TrlParser`` ``--config``."""
    Path("run.sh").write_text(f"#!/bin/bash\n{words}\n")
    Path("fsdp.json").write_text('{"version": 2}')
    expected = figures(answer(capsys, "args.json", "sharded.yaml"))
    assert figures(answer(capsys, "run.sh")) == expected


def test_flags_stand_over_a_file_of_arguments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.sh").write_text("#!/bin/bash\ntrl sft --config args.json --per_device_train_batch_size 1\n")
    assert figures(answer(capsys, "run.sh"))[:5] == ("single", "full", 1, 1, 4)


def test_a_script_beside_accelerates_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.sh").write_text("#!/bin/bash\naccelerate launch train.py args.json\n")
    assert figures(answer(capsys, "run.sh", "sharded.yaml")) == figures(answer(capsys, "args.json", "sharded.yaml"))


def test_launch_files_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.json").write_text(json.dumps({**ARGUMENTS, "per_device_train_batch_size": 1}))
    found = answer(capsys, "args.json", "--compare", "other.json")
    assert [one["plan"]["batch"]["mbs"] for one in found["variants"]] == [2, 1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["sharded.yaml", "zero3.json"],
            "sharded.yaml:2: distributed_type = FSDP: must be DEEPSPEED beside zero3.json",
        ),
        (["sharded.yaml", "many.yaml"], "many.yaml: is a file of accelerate, as sharded.yaml is; give one"),
        (["args.json", "other.json"], "other.json:1: bf16 = false: is True at args.json:1; give one"),
        (["gpt2-xl-4gpu", "zero3"], "zero3 is no file: a field of a plan is a flag, --zero 3"),
        (["tp=2"], "tp=2 is no file: a field of a plan is a flag, --tp 2"),
        (["a" * 5000], "is neither a file nor a built-in example"),
        (["args.json", "gpt2-xl-4gpu"], "args.json and gpt2-xl-4gpu are no launch files of one job; --compare puts"),
        (["--from=trainer", "args.json", "zero3.json"], "--from: is given 1x for 2 files"),
        (["missing.sh"], "a.json, which line 1 gives it, is not there or holds no arguments that are read"),
        (["tune.yaml"], "torchtune, which is not read: say the job in flags: memplan estimate --model llama-3-8b"),
        (["nemo.sh"], "NeMo, whose configuration is not read: say the job in flags: memplan estimate --framework"),
        (["own.sh"], "own.py takes arguments of its own (batch_size, seq_len, lr)"),
        (
            ["foundry.yaml"],
            "estimate --framework fsdp --fsdp-version 1 --fsdp-reduce bf16 --gpus N --model llama-3.1-8b --seq 2048",
        ),
        (
            ["arctic.yaml"],
            "ArcticTraining, which is not read: say the job in flags: memplan estimate --framework deepspeed",
        ),
        (
            ["olmo.py"],
            "memplan estimate --framework fsdp --gpus N --mbs N --model olmo-2-32b --seq 4096",
        ),
    ],
)
def test_what_does_not_go_together(
    words: list[str], line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other.json").write_text(json.dumps({"output_dir": "out", "bf16": False}))
    Path("missing.sh").write_text("accelerate launch train.py a.json\n")
    Path("tune.yaml").write_text("model:\n  _component_: torchtune.models.llama3.llama3_8b\n")
    layout = "model.tensor_model_parallel_size=4 model.micro_batch_size=2 model.global_batch_size=256"
    Path("nemo.sh").write_text(f"python megatron_gpt_pretraining.py --config-path=conf {layout}\n")
    Path("own.sh").write_text("torchrun own.py --batch-size 2 --seq-len 4096 --lr 1e-4\n")
    foundry = "variables: {max_seq_len: 2048}\nmax_seq_len: ${variables.max_seq_len}\nglobal_train_batch_size: 8\n"
    Path("foundry.yaml").write_text(f"{foundry}model: {{pretrained_model_name_or_path: meta-llama/Llama-3.1-8B}}\n")
    Path("arctic.yaml").write_text("type: sft\nmodel: {name_or_path: meta-llama/Llama-3.1-8B}\n")
    Path("olmo.py").write_text("DEFAULT_SEQUENCE_LENGTH = 4096\nmodel = TransformerConfig.olmo2_32B(vocab_size=1)\n")
    assert main(["estimate", *words]) == 2
    told = capsys.readouterr()
    assert line in told.err
    assert told.err.count("\n") == 1


def test_python_takes_what_stands_in_the_files(folder: Path) -> None:
    by_path = memplan.estimate(["args.json", "engine.yaml", "zero3.json"])
    mapped = memplan.estimate([ARGUMENTS, ZERO_3], gpus=4)
    whole = memplan.estimate({**ARGUMENTS, "deepspeed": ZERO_3}, gpus=4)
    assert by_path.stages[0].allocated == mapped.stages[0].allocated == whole.stages[0].allocated
    assert memplan.estimate(ZERO_3, model="gpt2", gpus=4, mbs=1, accumulation=1, dtype="bf16").plan.layout.zero == 3
    with pytest.raises(memplan.PlanError, match="a list is of launch files of one job"):
        memplan.estimate(["args.json", {"tp": 2}])
