"""Jobs of other tools in memplan's flags: what is suggested says all that the configuration says, and runs."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from memplan.cli import main

V1 = "model: Qwen/Qwen3-0.6B\nmodel_class: llm\nmicro_batch_size: 1\ncutoff_len: 2048\n"
TUNE = """\
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_rank: 8, apply_lora_to_mlp: True,
        lora_attn_modules: [q_proj, v_proj, output_proj]}
tokenizer: {max_seq_len: 2048}
batch_size: 2
"""
UNSLOTH = """\
from unsloth import FastLanguageModel
from trl import GRPOConfig, GRPOTrainer
model, tokenizer = FastLanguageModel.from_pretrained(model_name="unsloth/Qwen3-4B", max_seq_length=2048)
model = FastLanguageModel.get_peft_model(model, r=32, target_modules=["q_proj", "up_proj"])
args = GRPOConfig(per_device_train_batch_size=1, max_completion_length=512)
GRPOTrainer(model=model, args=args).train()
"""
SWIFT = (
    "megatron sft --model Qwen/Qwen3-8B --tensor_model_parallel_size {} --sequence_parallel true --micro_batch_size 1 "
)
SWIFT += "--global_batch_size 16 --max_length 2048\n"

FOUNDRY = """\
max_seq_len: 2048
global_train_batch_size: 64
device_train_microbatch_size: 1
precision: amp_bf16
model: {pretrained_model_name_or_path: meta-llama/Meta-Llama-3-8B}
fsdp_config: {sharding_strategy: FULL_SHARD, mixed_precision: PURE, activation_checkpointing: true}
"""
VERL = (
    "torchrun -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=Qwen/Qwen3-8B data.train_files=x data.val_files=y"
)
CHAT = "main.py --model_name_or_path facebook/opt-1.3b --data_split 2,4 --deepspeed --zero_stage 2 --max_seq_len 512"
CHAT += " --per_device_train_batch_size 4 --lora_dim 8 --lora_module_name decoder.layers."
NANOTRON = """\
data_stages: []
model:
  dtype: bfloat16
  model_config: {num_hidden_layers: 4, hidden_size: 512, intermediate_size: 2048, num_attention_heads: 8,
                 num_key_value_heads: 4, vocab_size: 4096}
optimizer: {accumulate_grad_in_fp32: true, zero_stage: 1}
parallelism: {dp: 2, pp: 1, tp: 2, tp_mode: REDUCE_SCATTER}
tokens: {sequence_length: 1024, micro_batch_size: 3, batch_accumulation_per_replica: 2}
"""

OWN = "own.py --model_name gpt2 --max_length 512 --batch_size 2 --log_interval 10"


def told(capsys: pytest.CaptureFixture[str], place: Path, text: str) -> str:
    place.write_text(text, encoding="utf-8")
    assert main(["estimate", str(place)]) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("name", "text", "flags"),
    [
        ("a.yaml", V1 + "dist_config: {name: fsdp2}\n", ["--framework fsdp"]),
        ("a.yaml", V1 + "dist_config: {name: deepspeed}\n", ["--framework deepspeed --zero N"]),
        (
            "a.yaml",
            V1 + "quant_config: {quantization_bit: 4}\npeft_config: {r: 8}\n",
            ["--quantisation nf4", "--lora-rank 8"],
        ),
        ("a.yaml", V1 + "kernel_config: {name: liger_kernel}\n", ["--liger"]),
        (
            "a.yaml",
            V1,
            ["--recompute full"],  # on unless said: v1/config/training_args.py
        ),
        (
            "a.yaml",
            FOUNDRY,
            ["--fsdp-version 1", "--fsdp-reduce bf16", "--recompute full", "--mbs 1 --gbs 64"],
        ),
        ("a.sh", VERL, ["--framework fsdp --gpus N --model qwen3-8b", "--recompute full --seq 1024 --mbs 4"]),
        ("a.sh", f"deepspeed {CHAT} --only_optimize_lora", ["--zero 2", "--lora-rank 8", "--mbs 4", "--seq 512"]),
        (
            "a.yaml",
            NANOTRON,
            ["--ffn 2048 --heads 8 --kv-heads 4 --vocab 4096", "--tp 2 --dp 2 --zero 1 --sequence-parallel"],
        ),
        ("a.yaml", TUNE, ["--lora-targets q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"]),
        ("a.yaml", TUNE, ["--framework fsdp --fsdp-parameters bf16 --fsdp-reduce bf16 --gpus N"]),
        (
            "a.py",
            UNSLOTH,
            ["--lora-targets q_proj,up_proj", "--completion-length 512", "--trainer grpo --generation-memory SIZE"],
        ),
        ("a.sh", SWIFT.format(2), ["--sequence-parallel", "--tp 2"]),
        ("a.sh", f"deepspeed {OWN}", ["--framework deepspeed --zero N"]),
        ("a.sh", f"torchrun {OWN} --deepspeed", ["--framework deepspeed --zero N"]),
        ("a.sh", f"torchrun {OWN} --deepspeed --zero_stage 3", ["--framework deepspeed", "--zero 3"]),
        ("a.sh", f"torchrun {OWN} --deepspeed_config=zero2.json", ["estimate zero2.json --gpus N --model gpt2"]),
        ("a.sh", f"torchrun {OWN} --deepspeed zero2.json", ["estimate zero2.json --gpus N --model gpt2"]),
        (
            "a.sh",
            "deepspeed main.py --model_name_or_path gpt2 --max_seq_len 512 --data_split 2,4 --lora_dim 8 "
            "--num_warmup_steps 0 --per_device_train_batch_size 4",
            ["--framework deepspeed --zero N"],
        ),
    ],
)
def test_what_is_suggested_says_all_and_runs(
    name: str,
    text: str,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("zero2.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}', encoding="utf-8")
    said = told(capsys, tmp_path / name, text)
    same = said.partition("say the job in flags: memplan ")[2].partition(", beside what")[0]
    assert all(flag in same for flag in flags), said
    same = same.replace("--model NAME", "--model llama-3-8b")
    words = shlex.split(same.replace("--gpus N", "--gpus 8").replace("--zero N", "--zero 3").replace("SIZE", "8GiB"))
    assert main([*words, "--gpu=h100", "--json"]) in (0, 1)
    answer = json.loads(capsys.readouterr().out)
    assert answer["peak_bytes"] > 0
    by_deepspeed = "deepspeed" in text
    assert (answer["plan"]["framework"] == "deepspeed") == by_deepspeed


def test_a_tool_whose_keys_another_has_is_called_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(
        capsys,
        tmp_path / "a.sh",
        "python chatlearn_entrypoint.py grpo --config-file a.yaml runtime_args.train_backend=megatron "
        "runtime_args.train_global_batch_size=32 models.policy_trainer.pipeline_model_parallel_size=16",
    )
    assert "starts ChatLearn" in said
    assert said.endswith("--model NAME --pp 16 --gbs 32 --framework megatron")


def test_what_deepspeed_is_not_told_to_shard_is_not_its(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--framework" not in told(capsys, tmp_path / "a.sh", f"torchrun {OWN}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (V1 + "peft_config: {name: freeze}\n", "it trains a few layers alone"),
        (V1 + "optim_config: {name: muon}\n", "it trains by Muon"),
        (V1 + "cp_size: 2\n", "it cuts sequences over GPUs"),
        (TUNE + "optimizer_in_bwd: True\n", "it steps in backward, tensor by tensor (optimizer_in_bwd)"),
        (TUNE + "enable_activation_offloading: True\n", "it keeps activations on the host"),
        (TUNE + "tensor_parallel_dim: 2\n", "it cuts layers over GPUs"),
    ],
)
def test_what_no_flag_says_is_named(text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, tmp_path / "a.yaml", text)
    assert why in said
    assert said.endswith("which is not modelled either")


NEMO = "model: {mcore_gpt: true, micro_batch_size: 1, global_batch_size: 64, encoder_seq_length: 2048, optim: {name: "
NEMO += "distributed_fused_adam}, activations_checkpoint_granularity: full, activations_checkpoint_method: uniform, "
NEMO += "activations_checkpoint_num_layers: 1}\ntrainer: {devices: 8, num_nodes: 2, precision: bf16}\n"
RECIPE = "from nemo.collections import llm\nrecipe = llm.llama3_8b.pretrain_recipe(num_nodes=2, num_gpus_per_node=8)\n"
ENGINE = (
    "torchrun -m verl.trainer.sft_trainer model.path=Qwen/Qwen3-8B data.max_token_len_per_gpu=4096 engine={} optim={}"
)


@pytest.mark.parametrize(
    ("name", "text", "same"),
    [
        (
            "a.yaml",
            NEMO,
            "--framework megatron --model NAME --nodes 2 --gpus-per-node 8 --mbs 1 --gbs 64 --seq 2048 "
            "--recompute full --recompute-method uniform --recompute-layers 1 --zero 1",
        ),
        (
            "a.py",
            RECIPE,
            "--framework megatron --zero 1 --model llama-3-8b --nodes 2 --gpus-per-node 8 --tp N --pp N --cp N --mbs N "
            "--gbs N --seq N",
        ),
        (
            "a.sh",
            ENGINE.format("fsdp", "fsdp"),
            "--gpus N --mbs 1 --model qwen3-8b --seq 4096 --framework fsdp --recompute full",
        ),
        (
            "a.sh",
            f"{ENGINE.format('megatron', 'megatron')} engine.tensor_model_parallel_size=2",
            "--gpus N --mbs 1 --model qwen3-8b --seq 4096 --tp 2 --framework megatron --zero 1",
        ),
    ],
)
def test_megatrons_distributed_optimizer_is_theirs_by_default(
    name: str, text: str, same: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``distributed_fused_adam`` of NeMo, and what verl's Megatron engine wraps (``use_distributed_optimizer``)."""
    assert told(capsys, tmp_path / name, text).endswith(f"say the job in flags: memplan estimate {same}")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (FOUNDRY, ""),
        (FOUNDRY.replace("PURE", "DEFAULT"), "fsdp_config.mixed_precision=DEFAULT"),
        (TUNE.replace("lora_rank: 8", "lora_rank: 8, quantize_base: true"), "model.quantize_base=true"),
        (TUNE.replace("lora_rank: 8", "lora_rank: 8, apply_lora_to_output: true"), "model.apply_lora_to_output=true"),
        (V1 + "gradient_offload: cpu\nmp_shard_size: 4\nuse_fp8: false\n", "gradient_offload=cpu, mp_shard_size=4"),
    ],
)
def test_what_is_suggested_names_what_it_leaves_out(
    text: str, left: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(capsys, tmp_path / "a.yaml", text)
    assert said.partition("beside what these flags do not say: ")[2] == left


@pytest.mark.parametrize(
    ("folder", "flags"),
    [
        ("step1_supervised_finetuning", ""),
        ("step2_dpo_finetuning", "--trainer dpo"),
        ("step2_reward_model_finetuning", "--trainer reward"),
    ],
)
def test_a_folder_says_what_a_script_trains(
    folder: str, flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed-Chat's scripts of all steps start a ``main.py`` with the same arguments."""
    place = tmp_path / folder / "training_scripts" / "opt"
    place.mkdir(parents=True)
    said = told(capsys, place / "run.sh", f"deepspeed {CHAT.partition(' --lora_dim')[0]}")
    assert said.endswith(f"--framework deepspeed {flags}".strip())


def test_adapters_beside_a_model_that_is_trained_are_not_lora(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``only_optimize_lora_parameters`` of DeepSpeed-Chat's ``main.py`` is called where the flag asks for it alone."""
    assert "it trains the model beside its adapters" in told(capsys, tmp_path / "a.sh", f"deepspeed {CHAT}")


def test_accelerates_launcher_says_who_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``scripts/finetune_with_accelerate.sh`` of Open-Instruct."""
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    launcher = "accelerate launch --num_processes 4 --use_deepspeed --deepspeed_config_file zero3.json"
    said = told(
        capsys,
        tmp_path / "a.sh",
        f"{launcher} finetune.py --model_name_or_path gpt2 --with_tracking --learning_rate 1e-5 --max_seq_length 1024",
    )
    assert said.endswith("memplan estimate --gpus 4 --model gpt2 --seq 1024 --zero 3 --framework deepspeed --mbs N")


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("base_emb_dim: 4096\nbase_num_decoder_layers: 32\n", "MaxText"),
        ("model_name: llama3-8b\nremat_policy: full\nscan_layers: true\n", "MaxText"),
        ("model: {type: llama, hidden_dim: 64}\ntrainer: {tracker: {}, mp: bf16, train_batch_size: 8}\n", "Levanter"),
    ],
)
def test_jobs_of_jax_are_refused_as_such(
    text: str, tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(capsys, tmp_path / "a.yaml", text)
    assert said.endswith(
        f"is a configuration of {tool}, which is not read: it trains by JAX, and memplan plans PyTorch alone"
    )


@pytest.mark.parametrize(
    ("command", "tool"),
    [
        ("python3 -m MaxText.train MaxText/configs/base.yml run_name=x per_device_batch_size=4", "MaxText"),
        ("python src/maxtext/trainers/pre_train/train.py src/maxtext/configs/base.yml run_name=x", "maxtext"),
        (
            "python -m levanter.main.train_lm --config_path gpt2.yaml --trainer.num_train_steps 9",
            "levanter",
        ),
    ],
)
def test_commands_of_jax_are_refused_as_such(
    command: str, tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(capsys, tmp_path / "a.sh", command)
    assert f"starts {tool}, which trains by JAX, and memplan plans PyTorch alone" in said


@pytest.mark.parametrize(
    ("name", "text", "end"),
    [
        ("a.yaml", TUNE.replace("torchtune.models.llama3_1.lora_llama3_1_8b", "[1, 2]"), "--seq 2048 --mbs 2"),
        ("a.sh", "megatron sft --model", "--help"),
        ("a.yaml", "mcore_gpt: 1\nmodel: {optim: {name: [1]}, num_layers: null}\ntrainer: {devices: [0, 1]}\n", "NAME"),
        ("a.yaml", "data_stages: null\nparallelism: []\ntokens: {micro_batch_size: {x: 1}}\n", "--help"),
        ("a.yaml", "global_train_batch_size: x\nfsdp_config: true\nmodel: 3\n", "--gbs x"),
        ("a.yaml", "model_class: llm\nmodel: {a: 1}\npeft_config: [r]\ndist_config: {name: null}\n", "--help"),
        ("a.yaml", "actor_rollout_ref: {model: [path]}\n", "--help"),
    ],
)
def test_values_of_another_kind_are_left_out(
    name: str, text: str, end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(capsys, tmp_path / name, text)
    assert end in said
    assert "Node(" not in said
    assert "--model True" not in said


def test_what_is_off_is_not_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"{TUNE}optimizer_in_bwd: False\nenable_activation_offloading: False\ntensor_parallel_dim: 1\n"
    assert "memplan estimate --model llama-3.1-8b" in told(capsys, tmp_path / "a.yaml", text)
    assert "--sequence-parallel" not in told(capsys, tmp_path / "a.sh", SWIFT.format(1))


INTERPOLATED = """\
size: 2
name: Qwen3-8B
actor_rollout_ref:
  model: {path: "${oc.env:MODELS,Qwen}/${name}", lora_rank: "${oc.env:RANK, 16}", enable_gradient_checkpointing: true}
  actor:
    ppo_micro_batch_size_per_gpu: "${oc.decode:${oc.env:MBS}}"
    megatron: {tensor_model_parallel_size: "${size}", pipeline_model_parallel_size: "${oc.select:stages,4}"}
trainer: {nnodes: "${oc.env:NODES,${oc.env:SLURM_NNODES,'1'}}", n_gpus_per_node: "${oc.env:GPUS}"}
data: {max_response_length: "${mul:2,512}"}
"""


@pytest.mark.parametrize(
    ("environment", "flags"),
    [
        (
            {"MBS": "3", "GPUS": "8"},
            "--model Qwen/Qwen3-8B --nodes 1 --gpus-per-node 8 --completion-length N --mbs 3 --lora-rank 16 ",
        ),
        (
            {"MBS": "4", "GPUS": "4", "RANK": "32", "SLURM_NNODES": "2", "MODELS": "/m"},
            "--model /m/Qwen3-8B --nodes 2 --gpus-per-node 4 --completion-length N --mbs 4 --lora-rank 32 ",
        ),
        (
            {"MBS": "4", "GPUS": "4", "NODES": "8", "SLURM_NNODES": "2"},
            "--model Qwen/Qwen3-8B --nodes 8 --gpus-per-node 4 --completion-length N --mbs 4 --lora-rank 16 ",
        ),
    ],
)
def test_a_shell_makes_of_what_is_suggested_what_omegaconf_makes_of_the_file(
    environment: dict[str, str], flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``mul`` is a resolver of the job's own, whose value stands as N."""
    said = told(capsys, tmp_path / "a.yaml", INTERPOLATED)
    same = said.partition("say the job in flags: memplan ")[2].partition(", beside what")[0]
    echoed = subprocess.run(["bash", "-c", f"echo {same}"], env=environment, capture_output=True, text=True, check=True)
    assert flags in echoed.stdout
    assert "--recompute full --tp 2 --pp 4" in echoed.stdout
    assert not echoed.stderr


@pytest.mark.parametrize(
    "value", ["${a}", "${.b}", "${oc.env}", "${oc.dict.keys:a}", "${now:%Y}", "${", "${oc.select:a}"]
)
def test_a_value_that_only_the_job_knows_stands_as_n(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = INTERPOLATED.replace('"${oc.env:RANK, 16}"', f'"{value}"')
    assert "--lora-rank N" in told(capsys, tmp_path / "a.yaml", f'{text}a: "${{b}}"\nb: "${{a}}"\n')
