"""``memplan estimate --from torchtitan``: one line for whatever is wrong with a configuration."""

# ruff: noqa: E501 (a table of configurations and the lines that they get)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .torchtitan_jobs import (
    DECEMBER_2024,
    RELEASE_0_1,
    RELEASE_0_2,
    SUMMER_2024,
    Read,
    pipelined,
    reader,
    refusal,
    saved,
)


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    return reader(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("config", "over", "given", "line"),
    [
        (DECEMBER_2024.replace("compile = false", "compile = maybe"), (), {}, "job.toml"),
        (RELEASE_0_2, (), {"gpus": ""}, "job.toml:13: parallelism.data_parallel_shard_degree = -1: takes the GPUs that are left"),
        (RELEASE_0_2, (), {"gpus": "1"}, "job.toml:13: parallelism.data_parallel_shard_degree: means one rank without fully_shard"),
        (RELEASE_0_2, ("parallelism.tensor_parallel_degree=8",), {"gpus": "12"}, "hardware.gpus = 12: must be a multiple of tp x pp x cp = 8"),
        (RELEASE_0_2, ("parallelism.data_parallel_replicate_degree=8",), {}, "--set: parallelism.data_parallel_replicate_degree: means DDP"),
        (RELEASE_0_1, (), {"gpus": "8"}, "hardware.gpus = 8: must be tp x pp x dp x cp"),
        (RELEASE_0_2, ("training.batch_size=2",), {}, "training.batch_size = 2: is no key of torchtitan 0.2.2 (2026-02-20): it went on 2025-06-05, as training.local_batch_size, training"),
        (RELEASE_0_2, ("trainin.seq_len=2",), {}, "--set: trainin.seq_len is no key of torchtitan's; did you mean training.seq_len?"),
        (RELEASE_0_2, ("torchtitan=9",), {}, "--set: torchtitan = 9: must be a release (0.1.0, 0.2.0, 0.2.1, 0.2.2) or a day"),
        (RELEASE_0_2, ("NGPU=4",), {}, "--set: 4 GPUs are not the 8 of --gpus"),
        (RELEASE_0_2, ("NGPU=x",), {}, "--set: NGPU = x: must be a number of GPUs"),
        (RELEASE_0_2, ("training.seq_len",), {}, "--set: training.seq_len must be NAME=value"),
        (RELEASE_0_2, ("activation_checkpoint.mode=memory_budget",), {}, "activation_checkpoint.mode = memory_budget: is not modelled"),
        (RELEASE_0_2, ("activation_checkpoint.selective_ac_option=two",), {}, "must be op, or a number"),
        (RELEASE_0_1, ("parallelism.fsdp_reshard_after_forward=always",), {"gpus": ""}, "must be default or never: that the last layer"),
        (pipelined('fsdp_reshard_after_forward = "always"'), (), {"model": "llama-3-8b"}, "job.toml:5: fsdp.reshard_root = true: must be false (torchtitan's policy default or never) unless layout.pp is 1: in stages"),
        (RELEASE_0_2, ("optimizer.early_step_in_backward=true",), {}, "optimizer.early_step_in_backward = true: is not modelled: each gradient"),
        (RELEASE_0_2, ("training.global_batch_size=100",), {}, "--set: batch.gbs = 100: must be a multiple of mbs 8 x dp 8 = 64"),
        (RELEASE_0_2.replace('"8B"', '"8B_flex"'), (), {}, "job.toml:4: model.flavor = 8B_flex: has another attention"),
        (RELEASE_0_2.replace('"8B"', '"9B"'), (), {}, "job.toml:4: model.flavor = 9B: of model llama3 has no sizes here"),
        (RELEASE_0_2.replace("local_batch_size = 8", "local_batch_size = 1.5"), (), {}, "job.toml:8: training.local_batch_size = 1.5: must be a whole number"),
        (RELEASE_0_2, ("debug.deterministic=true",), {"strict": True}, "debug.deterministic = true: is not modelled yet and may push"),
        (RELEASE_0_2.replace("seq_len", "seq_lenn"), (), {}, "is no key of torchtitan 0.2.2 (2026-02-20); did you mean training.seq_len?"),
        (RELEASE_0_2 + "sede = 1\n", (), {"strict": True}, "job.toml:27: debug.sede = 1: is no key of torchtitan 0.2.2 (2026-02-20); did you mean debug.seed?"),
        ("[model]\nname = llama3\n", (), {}, "job.toml:2: is not valid TOML: invalid value"),
        ("[model]\nname = 'a'\nname = 'b'\n", (), {}, "job.toml:3: is not valid TOML: cannot overwrite a value"),
        ("a = " + "[" * 5000, (), {}, "job.toml: is nested too deeply"),
        ("  \n", (), {}, "job.toml: is empty"),
        ("[tool]\nname = 'a'\n", (), {}, "job.toml: has none of the keys of torchtitan's configuration"),
        ({"model": "gpt2", "framework": "fsdp"}, (), {}, "job.json: is a plan, not a configuration of torchtitan; leave out --from"),
        (SUMMER_2024, ("torchtitan=2024-03-01",), {}, "job.toml:7: optimizer.fused = true: is no key of torchtitan of 2024-03-01: it came on 2024-06-06; --set torchtitan="),
        ("[training]\nsequence_parallel_degree = 1\n", (), {}, "job.toml: is read as torchtitan of 2024-03-24, which had FSDP1"),
        (saved(training={"disable_cuda_graphs": False}, parallelism={"pipeline_parallel_degree": 2}), (), {}, "layout.pp = 2: must be 1 with CUDA graphs"),
        (saved(model_spec={"model": {"dim": 2048}}), (), {}, "model_spec.model.dim = 2048: is not the 4096 of the flavour"),
        (saved(model_spec={"model": {"layers": [{"wq": {"rank": 8, "alpha": 16.0}}] * 32}}), (), {}, "model_spec.model.layers: have LoRA adapters"),
        (saved(optimizer={"param_groups": [{"optimizer_name": "DistMuon"}]}), (), {}, "optimizer.param_groups: must be one group of Adam or AdamW"),
        (saved(optimizer={"implementation": "fused_opt_states_bf16"}), (), {}, "optimizer.implementation = fused_opt_states_bf16: is not modelled"),
        (saved(training={"num_tokens_per_microbatch_per_dp_rank": 1000}), (), {}, "= 1000: must be a multiple of training.max_context_length, which is 8192: other packing is not modelled (--set training.max_context_length=1000 takes"),
        (pipelined('pipeline_parallel_schedule = "ZBVZeroBubble"'), (), {"model": "llama-3-8b"}, "job.toml:5: parallelism.pipeline_parallel_schedule = ZBVZeroBubble: must be 1F1B, GPipe or Interleaved1F1B"),
        (pipelined("pipeline_parallel_layers_per_stage = 3"), (), {"model": "llama-3-8b"}, "needs one of the stages on every rank, and there are 12 for 4 ranks"),
        (pipelined("pipeline_parallel_microbatch_size = 3"), (), {"model": "llama-3-8b"}, "= 3: must divide the batch of 8"),
        (pipelined('module_fqns_per_model_part = [["layers.0"], ["norm"]]'), (), {"model": "llama-3-8b"}, "must name tok_embeddings, layers.0 to layers.31, norm and output in this order"),
        (pipelined('pipeline_parallel_split_points = ["layers.99"]'), ("torchtitan=0.1.0",), {"model": "llama-3-8b"}, "= layers.99: is no module of a model of 32 layers"),
    ],
)  # fmt: skip
def test_one_line_for_what_is_wrong(
    read: Read, config: object, over: tuple[str, ...], given: dict[str, Any], line: str
) -> None:
    assert line in refusal(read, config, *over, **given)
