"""Jobs of several releases of torchtitan, as their configurations are written, and how a test reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memplan.commands.launched import LaunchFlags, read_launched
from memplan.formats.launch import launched_plan
from memplan.plan.errors import PlanError
from memplan.plan.read import ReadPlan
from memplan.plan.resolve import resolve

DECEMBER_2024 = """
[job]
description = "8B"  # as the preset of commit 9dec370

[model]
name = "llama3"
flavor = "8B"
norm_type = "rmsnorm"
tokenizer_path = "./tokenizer/original/tokenizer.model"

[optimizer]
name = "AdamW"
lr = 3e-4

[training]
batch_size = 1
seq_len = 8192
max_norm = 1.0
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
compile = false

[experimental]
context_parallel_degree = 1
pipeline_parallel_degree = 1

[checkpoint]
enable_checkpoint = false
interval_type = "steps"
async_mode = "disabled"

[activation_checkpoint]
mode = 'selective'
selective_ac_option = 'op'

[float8]
enable_float8_linear = false
"""

SUMMER_2024 = """
[model]
name = "llama2"
flavor = "7B"
[optimizer]
name = "Adam"
fused = true
[training]
batch_size = 4
seq_len = 4096
data_parallel_degree = -1
tensor_parallel_degree = 1
enable_loss_parallel = true
[experimental]
pipeline_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "3"
"""

RELEASE_0_1 = """
[model]
name = "llama3"
flavor = "70B"
tokenizer_path = "./assets/tokenizer/original/tokenizer.model"
[optimizer]
name = "AdamW"
implementation = "foreach"
[lr_scheduler]
lr_min = 0.0
[training]
local_batch_size = 8
global_batch_size = 256
seq_len = 8192
mixed_precision_param = "bfloat16"
compile = false
[parallelism]
data_parallel_shard_degree = 8
data_parallel_replicate_degree = 2
fsdp_reshard_after_forward = "never"
[activation_checkpoint]
mode = "full"
[checkpoint]
last_save_model_weights_only = false
"""

RELEASE_0_2 = """
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = []
[training]
local_batch_size = 8
seq_len = 8192
dtype = "bfloat16"
enable_cpu_offload = false
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
pipeline_parallel_schedule = "1F1B"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = false
components = ["model", "loss"]
[quantize.linear.float8]
filter_fqns = ["output"]
[debug]
deterministic = false
"""

SAVED: dict[str, Any] = {
    "model_spec": {
        "name": "llama3",
        "flavor": "8B",
        "model": {"dim": 4096, "vocab_size": 128256, "layers": [{"w": None}] * 32, "enable_weight_tying": False},
    },
    "dump_folder": "./outputs",
    "tokenizer": {},
    "dataloader": {"dataset": {"source": {"path": "c4"}}, "seed": 42},
    "optimizer": {
        "param_groups": [
            {"pattern": ".*", "optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 3e-4, "weight_decay": 0.1}}
        ],
        "implementation": "fused",
        "optimizer_factory_kwargs_by_name": {},
    },
    "training": {
        "num_tokens_per_microbatch_per_dp_rank": 16384,
        "num_tokens_per_train_step": -1,
        "max_context_length": 8192,
        "disable_cuda_graphs": True,
        "dtype": "float32",
    },
    "parallelism": {"data_parallel_shard_degree": -1, "spmd_backend": "spmd_types", "pipeline_parallel_degree": 1},
    "activation_checkpoint": {"preserve_rng_state": True, "determinism_check": "default", "debug": False},
    "compile": {"enable": False, "components": ["model", "loss"]},
    "override": {"imports": []},
}
"""The shape of what ``Trainer.Config.to_dict`` writes on 21 August 2026, with full recompute."""

Read = Callable[..., ReadPlan]


def reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Reads a configuration with flags; ``over`` as ``--set``."""
    monkeypatch.chdir(folder)

    def read(config: object, *over: str, strict: bool = False, vocab: int | None = None, **flags: str) -> ReadPlan:
        text = config if isinstance(config, str) else json.dumps(config, indent=1)
        name = "job.toml" if isinstance(config, str) else "job.json"
        (folder / name).write_text(text, encoding="utf-8")
        given = {"gpus": "8", **{flag.replace("_", "-"): value for flag, value in flags.items()}}
        given = {flag: value for flag, value in given.items() if value}
        return launched_plan(read_launched(name, LaunchFlags(("torchtitan",), over, strict, vocab), given), given)

    return read


def refusal(read: Read, config: object, *over: str, **given: Any) -> str:
    def resolved() -> None:
        found = read(config, *over, **given)
        try:
            resolve(found.plan)
        except PlanError as error:
            raise error.located(found.origins) from None

    with pytest.raises(PlanError) as caught:
        resolved()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def codes(found: ReadPlan) -> list[str]:
    return [note.code for note in found.warnings]


def saved(**changes: Any) -> dict[str, Any]:
    """``SAVED`` with sections, or parts of them, replaced."""
    return {
        **SAVED,
        **{
            name: {**SAVED.get(name, {}), **value}
            if isinstance(value, dict) and name != "activation_checkpoint"
            else value
            for name, value in changes.items()
        },
    }


def pipelined(*lines: str, batch: int = 8) -> str:
    """A job of release 0.2.2 with four pipeline stages."""
    return "\n".join(
        [
            "[training]",
            f"local_batch_size = {batch}",
            "[parallelism]",
            "pipeline_parallel_degree = 4",
            *lines,
            "[debug]",
        ]
    )
