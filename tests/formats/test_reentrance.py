"""Whose checkpoints are reentrant, by what shards the model: files of tools beside Accelerate's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from memplan.formats import reader
from memplan.formats.launch import Asked, Launch, launched_plan
from memplan.plan.errors import PlanError

FSDP = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 4}
LAUNCHERS: dict[str, dict[str, object]] = {
    "ddp": {"distributed_type": "MULTI_GPU", "num_processes": 4},
    "fsdp-1": {**FSDP, "fsdp_config": {"fsdp_version": 1}},
    "fsdp-2": {**FSDP, "fsdp_config": {"fsdp_version": 2}},
    "zero-3": {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "num_processes": 4,
        "deepspeed_config": {"zero_stage": 3},
    },
}
FACTORY = """
model_name_or_path: Qwen/Qwen3-4B
stage: sft
do_train: true
finetuning_type: lora
cutoff_len: 2048
bf16: true
"""
AXOLOTL = """
base_model: Qwen/Qwen3-4B
sequence_len: 2048
adapter: lora
lora_r: 8
lora_target_linear: true
bf16: true
gradient_checkpointing: true
"""
COMMANDS = {
    "llama-factory": "src/train.py given.yaml",
    "axolotl": "-m axolotl.cli.train given.yaml",
    "ms-swift": "swift/cli/sft.py --model Qwen/Qwen3-4B --tuner_type lora --torch_dtype bfloat16 --max_length 2048",
}


def launch(tool: str, launcher: str, folder: Path, without: str = "") -> Launch:
    (folder / "given.yaml").write_text((AXOLOTL if tool == "axolotl" else FACTORY).replace(without, ""))
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(LAUNCHERS[launcher]))
    (folder / "train.sh").write_text(f"accelerate launch --config_file accelerate.yaml {COMMANDS[tool]}\n")
    return reader("trainer")(str(folder / "train.sh"), Asked("trainer", {}))


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("tool", COMMANDS)
def test_checkpoints_are_reentrant_where_that_is_modelled_and_told_elsewhere(
    tool: str, launcher: str, tmp_path: Path
) -> None:
    """LLaMA-Factory's ``use_reentrant_gc``, Axolotl's ``normalize_config`` and ms-swift's
    ``_fix_gradient_checkpointing`` ask for reentrance whatever shards the model; the last one not under DDP. FSDP 2 and
    DeepSpeed are modelled without."""
    found = launch(tool, launcher, tmp_path)
    modelled = launcher in ("ddp", "fsdp-1")
    asked = (tool, launcher) != ("ms-swift", "ddp")
    recompute = launched_plan(found, {}).plan.recompute
    assert (recompute.mode, bool(recompute.reentrant)) == ("full", modelled and asked)
    assert ("checkpoints-when-sharded" in {note.code for note in found.notes}) is not modelled


def test_a_launcher_that_shards_nothing_changes_nothing_of_a_whole_model(tmp_path: Path) -> None:
    """``_configure_embedding_dtypes``: Axolotl casts norms, embeddings and head to fp32 in each process, whoever starts
    it; a sharded model is in fp32 as a whole."""
    adapters = "adapter: lora\nlora_r: 8\nlora_target_linear: true\n"
    launch("axolotl", "fsdp-1", tmp_path, without=adapters)
    with pytest.raises(PlanError, match="keeps norms, embeddings and head in fp32, which is not modelled"):
        launch("axolotl", "ddp", tmp_path, without=adapters)
