"""transformers' example scripts that train in a loop of their own, and scripts whose arguments are nobody else's."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from memplan.formats.launch import Asked
from memplan.formats.trainer.reader import read
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import build_plan
from memplan.plan.resolve import resolve

CLM = "--model_name_or_path gpt2 --dataset_name wikitext --output_dir out"


def plan_of(folder: Path, command: str, **flags: str) -> Plan:
    (folder / "train.sh").write_text(f"{command}\n")
    return resolve(build_plan(read(str(folder / "train.sh"), Asked(flags=flags)).source, flags).plan)


def test_an_example_without_the_trainer_has_pytorchs_own_optimizer(tmp_path: Path) -> None:
    """``run_clm_no_trainer.py``: batches of 8 by default, rows of 1,024, ``torch.optim.AdamW``, which is foreach on
    CUDA unless told otherwise, where the Trainer takes the fused kernel; an evaluation behind each epoch."""
    taken = {name: inspect.signature(torch.optim.AdamW).parameters[name].default for name in ("foreach", "fused")}
    assert taken == {"foreach": None, "fused": None}
    found = plan_of(tmp_path, f"python run_clm_no_trainer.py {CLM}")
    assert (found.optimizer.name, found.optimizer.implementation) == ("adamw", "foreach")
    assert (found.batch.mbs, found.batch.seq, found.trainer.evaluation_mbs) == (8, 1024, 8)
    by_trainer = plan_of(tmp_path, f"python run_clm.py {CLM} --do_train --do_eval --optim adamw_torch")
    assert found.batch == by_trainer.batch
    assert found.optimizer == by_trainer.optimizer
    assert plan_of(tmp_path, f"python run_clm.py {CLM} --do_train").optimizer.implementation == "fused"


def test_what_only_its_schedule_needs_changes_nothing(tmp_path: Path) -> None:
    more = "--num_warmup_steps 10 --max_train_steps 100 --with_tracking --checkpointing_steps epoch"
    launcher = "accelerate launch --num_processes 4 --mixed_precision bf16 run_clm_no_trainer.py"
    found = plan_of(tmp_path, f"{launcher} {CLM} {more}")
    assert found == plan_of(tmp_path, f"{launcher} {CLM}")
    assert (found.framework, found.hardware.gpus, found.precision.dtype) == ("ddp", 4, "bf16")
    assert found.precision.autocast


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ("--lora_dim 128 --gradient_accumulation_steps 8", "--accumulation 8 --lora-rank 128 --mbs N --seq N"),
        ("--dropout 0.0 --per_device_train_batch_size 2", "--mbs 2 --seq N"),
        ("--with_tracking --per_device_train_batch_size 2 --max_length 512", "--seq 512 --mbs 2"),
    ],
)
def test_one_argument_of_a_loop_of_its_own_is_enough(arguments: str, flags: str, tmp_path: Path) -> None:
    """DeepSpeed-Chat's ``single_gpu/run_1.3b.sh`` has ``--lora_dim`` alone, and ``run_350m.sh`` ``--dropout``."""
    with pytest.raises(PlanError) as caught:
        plan_of(tmp_path, f"python main.py --model_name_or_path gpt2 {arguments}")
    said = str(caught.value)
    assert "starts main.py, which takes arguments of its own" in said
    assert said.endswith(f"memplan estimate --gpus N --model gpt2 {flags}")


SPLIT = f"run_clm.py {CLM} --do_train --accelerator_config '{{split_batches: true}}'"


@pytest.mark.parametrize("launcher", ["torchrun --nproc_per_node 4", "accelerate launch --num_processes 2"])
def test_a_batch_is_split_over_several_gpus_alone(launcher: str, tmp_path: Path) -> None:
    """Of one process, ``per_device_train_batch_size`` is its own whatever is split."""
    assert plan_of(tmp_path, f"python {SPLIT}") == plan_of(tmp_path, f"python run_clm.py {CLM} --do_train")
    with pytest.raises(PlanError, match="split_batches = true: must be false"):
        plan_of(tmp_path, f"{launcher} {SPLIT}")
    with pytest.raises(PlanError, match="split_batches = true: must be false"):
        plan_of(tmp_path, f"python {SPLIT}", gpus="2")


@pytest.mark.parametrize(
    ("script", "lengths", "rows"),
    [
        ("run_summarization", "", 1024),
        ("run_summarization", " --max_source_length 256 --max_target_length 32", 256),
        ("run_translation", " --source_lang en --target_lang ro --source_prefix to", 1024),
    ],
)
def test_an_encoders_rows_are_as_long_as_the_script_cuts_them(
    script: str, lengths: str, rows: int, tmp_path: Path
) -> None:
    """``max_source_length`` is 1024 by default, whatever the tokenizer's own limit (512 of T5) is."""
    command = f"python {script}.py --model_name_or_path t5-small --do_train --per_device_train_batch_size 4{lengths}"
    (tmp_path / "train.sh").write_text(f"{command}\n")
    launch = read(str(tmp_path / "train.sh"), Asked())
    assert build_plan(launch.source, {}, traced=True).plan.batch.seq == rows
    assert "the decoder's rows are taken to be as long as the encoder's" in launch.notes[0].message
