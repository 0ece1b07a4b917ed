"""``--from accelerate``, and the Trainer's ``fsdp`` and ``deepspeed``: beside the same plan in flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.utils import FullyShardedDataParallelPlugin

from memplan.commands.launched import flags_of_launch, read_given
from memplan.estimate import estimate
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

FSDP = {
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_processes": 8,
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True},
}
ZERO = {
    "distributed_type": "DEEPSPEED",
    "mixed_precision": "bf16",
    "num_processes": 8,
    "deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 4, "offload_optimizer_device": "cpu"},
}
TRAINER = {"model_name_or_path": "gpt2", "per_device_train_batch_size": 2, "bf16": True, "block_size": 512}


def read(folder: Path, content: object, name: str = "it.yaml", **flags: str) -> Plan:
    """The plan in ``content``, recognised without ``--from``."""
    (folder / name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    place = str(folder / name)
    return resolve(read_given(place, flags_of_launch(place, None), flags).plan)


def same(found: Plan, **flags: str) -> None:
    """``found`` is the plan that ``flags`` say."""
    expected = resolve(read_plan(None, flags).plan)
    for section in ("framework", "layout", "batch", "precision", "recompute", "fsdp", "deepspeed", "optimizer"):
        assert getattr(found, section) == getattr(expected, section), section
    assert found.hardware.gpus == expected.hardware.gpus


def test_fsdp_of_accelerate(tmp_path: Path) -> None:
    """Shards in fp32, computing and reducing in bf16; every unit is resharded, the root's too."""
    flags = {"model": "gpt2", "framework": "fsdp", "gpus": "8", "fsdp-reduce": "bf16", "reshard-root": "true"}
    same(read(tmp_path, FSDP, model="gpt2"), **flags)
    kept = {**FSDP, "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "false"}}
    same(read(tmp_path, kept, model="gpt2"), **flags, **{"reshard-after-forward": "false"})
    recomputed = {**FSDP, "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}
    same(read(tmp_path, recomputed, model="gpt2"), **flags, recompute="full")


def test_accelerates_own_default_is_fsdp_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSDP_VERSION", raising=False)
    assert FullyShardedDataParallelPlugin().fsdp_version == 1
    section = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_backward_prefetch": "BACKWARD_PRE"}
    flags = {"model": "llama-3.2-1b", "framework": "fsdp", "gpus": "8", "fsdp-version": "1", "autocast": "true"}
    same(
        read(tmp_path, {**FSDP, "fsdp_config": section}, model="llama-3.2-1b"),
        **flags,
        **{"reshard-after-forward": "true"},
    )


@pytest.mark.parametrize(
    ("given", "meant"), [("BACKWARD_PRE", "pre"), ("backward_post", "post"), (2, "post"), ("3", "none"), (None, "none")]
)
def test_what_fsdp_1_gathers_ahead_in_backward(tmp_path: Path, given: object, meant: str) -> None:
    """By name or number; nothing where nobody asks for it."""
    section = {"fsdp_version": 1} if given is None else {"fsdp_version": 1, "fsdp_backward_prefetch": given}
    assert read(tmp_path, {**FSDP, "fsdp_config": section}, model="gpt2").fsdp.backward_prefetch == meant


def test_no_other_word_for_it(tmp_path: Path) -> None:
    section = {"fsdp_version": 1, "fsdp_backward_prefetch": "SOMETIMES"}
    with pytest.raises(PlanError, match="must be one of BACKWARD_PRE, BACKWARD_POST, NO_PREFETCH"):
        read(tmp_path, {**FSDP, "fsdp_config": section}, model="gpt2")


def test_checkpoints_of_accelerate_are_not_reentrant(tmp_path: Path) -> None:
    """``CheckpointImpl.NO_REENTRANT`` in ``accelerator.py``, beside a transformers whose own are."""
    flat = {**FSDP, "fsdp_config": {"fsdp_version": 1, "fsdp_activation_checkpointing": True}}
    for config in (flat, {**FSDP, "fsdp_config": {**flat["fsdp_config"], "fsdp_version": 2}}):
        found = read(tmp_path, config, model="gpt2", versions="transformers=4.57.6").recompute
        assert (found.mode, found.reentrant) == ("full", False)


def test_gathers_of_fsdp_1_that_are_not_counted_are_told(tmp_path: Path) -> None:
    """And a flag's version stands over the file's."""
    section = {"fsdp_version": 1, "fsdp_forward_prefetch": True, "fsdp_limit_all_gathers": False}
    place = tmp_path / "it.yaml"
    place.write_text(yaml.safe_dump({**FSDP, "fsdp_config": section}))

    def told(**flags: str) -> list[str]:
        found = read_given(str(place), flags_of_launch(str(place), None), {"model": "gpt2", **flags})
        return [note.message.partition(" (")[0] for note in found.warnings if note.code == "argument-not-modelled"]

    assert told() == ["fsdp_forward_prefetch", "fsdp_limit_all_gathers"]
    assert told(**{"fsdp-version": "2"}) == []


def test_deepspeed_of_accelerate(tmp_path: Path) -> None:
    """8 ranks x 2 sequences x 4 micro-batches."""
    found = read(tmp_path, ZERO, model="gpt2", mbs="2")
    same(
        found,
        **{"model": "gpt2", "framework": "deepspeed", "gpus": "8", "zero": "3", "mbs": "2", "gbs": "64"},
        **{"dtype": "bf16", "offload-optimizer": "cpu"},
    )


def test_one_process_for_each_gpu(tmp_path: Path) -> None:
    several = {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_processes": 4}
    same(read(tmp_path, several, model="gpt2"), model="gpt2", framework="ddp", gpus="4", autocast="true")
    alone = {"distributed_type": "NO", "mixed_precision": "no", "num_processes": 1}
    same(read(tmp_path, alone, model="gpt2"), model="gpt2", framework="single", dtype="fp32")


def test_the_trainers_fsdp(tmp_path: Path) -> None:
    """transformers 5 takes FSDP 2 where nothing else is said, and turns the words of its first version into keys."""
    flags = {
        **{"model": "gpt2", "framework": "fsdp", "gpus": "4", "mbs": "2", "accumulation": "1", "weight-decay": "0"},
        **{"fsdp-reduce": "bf16", "reshard-root": "true", "optimizer-implementation": "fused", "seq": "512"},
    }
    same(read(tmp_path, {**TRAINER, "fsdp": True}, gpus="4"), **flags)
    same(read(tmp_path, {**TRAINER, "fsdp": "full_shard auto_wrap"}, gpus="4"), **flags)
    same(read(tmp_path, {**TRAINER, "fsdp": ["full_shard"]}, gpus="4"), **flags)
    kept = read(tmp_path, {**TRAINER, "fsdp": "shard_grad_op offload"}, gpus="4")
    assert (kept.fsdp.reshard_after_forward, kept.fsdp.offload) == (False, True)


@pytest.mark.parametrize("inline", [True, False])
def test_the_trainers_deepspeed(tmp_path: Path, inline: bool) -> None:
    """``auto`` is filled in from the Trainer's own arguments; h = 768."""
    config: dict[str, Any] = {
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    given = {**TRAINER, "gradient_accumulation_steps": 3, "deepspeed": config if inline else "ds.json"}
    same(
        read(tmp_path, given, gpus="4"),
        **{"model": "gpt2", "framework": "deepspeed", "gpus": "4", "zero": "2", "mbs": "2", "gbs": "24"},
        **{"accumulation": "3", "reduce-bucket-size": str(768**2), "weight-decay": "0", "seq": "512"},
    )


@pytest.mark.parametrize("engine", [{"fsdp": True}, {"deepspeed": {"zero_optimization": {"stage": 2}}}])
def test_batches_that_a_collator_may_pad_are_told(engine: dict[str, Any], tmp_path: Path) -> None:
    """``sdpa`` is transformers' own choice; a single sequence has nothing to be padded to."""

    def told(flags: dict[str, str], **more: object) -> bool:
        (tmp_path / "it.json").write_text(json.dumps({**TRAINER, **engine, **more}))
        place = str(tmp_path / "it.json")
        given = {"gpus": "4", **flags}
        notes = read_given(place, flags_of_launch(place, None), given).warnings
        return any("every sequence is assumed to be full" in note.message for note in notes)

    assert told({})
    assert not told({}, per_device_train_batch_size=1)
    assert not told({}, attn_implementation="flash_attention_2")
    assert not told({}, gradient_checkpointing=True)
    assert told({}, gradient_checkpointing=True, per_device_train_batch_size=16, block_size=4096)
    assert not told({"padding": "true"})


SCRIPT = """#!/bin/bash
MODEL=gpt2
accelerate launch --config_file it.yaml {more} run_clm.py --model_name_or_path $MODEL \\
  --per_device_train_batch_size 2 --block_size=512 --bf16 --learning-rate $RATE
"""


def test_a_script_that_accelerate_launches(tmp_path: Path) -> None:
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(FSDP))
    found = read(tmp_path, SCRIPT.format(more=""), "train.sh")
    assert (found.framework, found.hardware.gpus, found.batch.mbs, found.batch.seq) == ("fsdp", 8, 2, 512)
    assert found.model.name == "gpt2"
    found = read(tmp_path, SCRIPT.format(more="--num_processes 2 --fsdp_offload_params true"), "train.sh")
    assert (found.hardware.gpus, found.fsdp.offload) == (2, True)


def test_a_script_that_deepspeed_launches(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}))
    script = "deepspeed --num_gpus 4 run_clm.py --deepspeed ds.json --model_name_or_path gpt2 --bf16 True\n"
    found = read(tmp_path, script, "train.sh")
    assert (found.framework, found.layout.zero, found.hardware.gpus, found.batch.mbs) == ("deepspeed", 1, 4, 8)


def test_what_is_compiled(tmp_path: Path) -> None:
    """The whole model, or its regions, which a launcher's flag says, too; a Trainer's arguments say the first."""
    whole = read(tmp_path, {**FSDP, "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, model="gpt2")
    assert (whole.compile, whole.compile_regions) == (True, False)
    regions = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    for content in ({**FSDP, "dynamo_config": regions}, {**FSDP, **regions}):
        found = read(tmp_path, content, model="gpt2")
        assert (found.compile, found.compile_regions) == (True, True)
    off = {"dynamo_backend": "NO", "dynamo_use_regional_compilation": True}
    assert not read(tmp_path, {**FSDP, "dynamo_config": off}, model="gpt2").compile_regions
    given = {**TRAINER, "fsdp": "full_shard", "fsdp_config": {"version": 2}, "torch_compile": True}
    trained = read(tmp_path, json.dumps(given), "args.json", gpus="8")
    assert (trained.framework, trained.compile, trained.compile_regions) == ("fsdp", True, False)


def test_what_is_compiled_has_the_units_that_it_was_learnt_with(tmp_path: Path) -> None:
    """Without the compiler embedding and head are units of their own; what ships compiled is of a root that has them,
    and a file alone is estimated."""
    size = {"model": "llama-3-8b", "dtype": "bf16", "seq": "4096"}
    config = {**FSDP, "mixed_precision": "no", "num_processes": 8}
    assert resolve(read(tmp_path, config, **size)).fsdp.ends_apart
    compiled = resolve(read(tmp_path, {**config, "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, **size))
    assert (compiled.fsdp.ends_apart, compiled.fsdp.reshard_root) == (False, True)
    assert estimate(compiled).stages[0].requested > 0


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({**FSDP, "distributed_type": "TPU"}, "distributed_type = TPU: must be one of NO, MULTI_GPU, FSDP, DEEPSPEED"),
        ({**FSDP, "mixed_precision": "fp8"}, "mixed_precision = fp8: must be no, bf16 or fp16"),
        ({**FSDP, "use_cpu": True}, "use_cpu: must be left out: there is no GPU then"),
        ({**FSDP, "mixed_precison": "bf16"}, "mixed_precison: is no key that is read; did you mean mixed_precision?"),
        ({**FSDP, "fsdp_config": {"fsdp_ofload_params": True}}, "fsdp_ofload_params: is no key; did you mean fsdp_off"),
        ({**FSDP, "num_processes": 0}, "num_processes = 0: must be a whole number from 1 on"),
        ({**FSDP, "megatron_lm_config": {"tp": 2}}, "megatron_lm_config: must be left out"),
        ({**FSDP, "dynamo_config": {"dynamo_backend": "AOT_EAGER"}}, "dynamo_backend = AOT_EAGER: must be inductor"),
        (
            {**FSDP, "dynamo_backend": "INDUCTOR", "fsdp_config": {"fsdp_activation_checkpointing": True}},
            "fsdp_activation_checkpointing = true: must be false with torch.compile, which passes over layers",
        ),
        ({**ZERO, "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "must be false with framework deepspeed: it"),
        ({**FSDP, "fsdp_config": {"fsdp_version": 2, "auto_wrap_policy": "NO_WRAP"}}, "must be TRANSFORMER_BASED_WRAP"),
        ({**FSDP, "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": 7}}, "cpu_offload = 7: must be true or"),
        ({**ZERO, "deepspeed_config": {"zero_stage": 7}}, "zero_optimization.stage = 7: must be from 0 to 3"),
        ({**ZERO, "deepspeed_config": {"deepspeed_config_file": "no.json"}}, "deepspeed = no.json: no such file"),
        ({**ZERO, "deepspeed_config": {"deepspeed_config_file": 7}}, "must be the path to a ds_config.json"),
    ],
)
def test_one_line_for_what_is_wrong(tmp_path: Path, content: dict[str, object], line: str) -> None:
    with pytest.raises(PlanError) as caught:
        read(tmp_path, content, model="gpt2", mbs="1")
    assert (line.partition(" = ")[2] or line) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_mapping_is_refused(tmp_path: Path) -> None:
    (tmp_path / "it.yaml").write_text("- distributed_type\n")
    with pytest.raises(PlanError, match="must be a mapping, as Accelerate's configuration is"):
        read_given(
            str(tmp_path / "it.yaml"), flags_of_launch(str(tmp_path / "it.yaml"), ["accelerate"]), {"model": "gpt2"}
        )


def test_unknown_keys_are_told_under_deepspeed_too(tmp_path: Path) -> None:
    (tmp_path / "it.yaml").write_text(yaml.safe_dump({**ZERO, "my_own_setting": 1}))
    place = str(tmp_path / "it.yaml")
    found = read_given(place, flags_of_launch(place, None), {"model": "gpt2", "mbs": "2"})
    assert any("my_own_setting" in note.message for note in found.warnings)


def test_parallelism_of_ones_asks_for_nothing(tmp_path: Path) -> None:
    """``accelerate config`` writes all sizes, whoever runs the model."""
    ones = {"parallelism_config": {f"parallelism_config_{name}_size": 1 for name in ("tp", "cp", "sp", "dp_replicate")}}
    for written in (FSDP, ZERO, {"distributed_type": "MULTI_GPU", "num_processes": 2}):
        flags = {"model": "gpt2", "mbs": "2"}
        assert read(tmp_path, {**written, **ones}, **flags) == read(tmp_path, written, **flags)


@pytest.mark.parametrize(
    ("name", "closest"),
    [("tp_size", "--fsdp-code torchtitan --tp N"), ("cp_size", "--fsdp-newest --cp N"), ("sp_size", "Ulysses")],
)
def test_other_parallelism_is_told_what_is_closest(name: str, closest: str, tmp_path: Path) -> None:
    for written in (FSDP, ZERO):
        with pytest.raises(PlanError, match=f"{name} = 2: must be 1") as caught:
            read(tmp_path, {**written, "parallelism_config": {name: 2}}, model="gpt2", mbs="1")
        assert closest in str(caught.value)


@pytest.mark.parametrize("said", [{}, {"num_processes": None}])
def test_a_number_of_gpus_that_nobody_says_is_asked_for(said: dict[str, None], tmp_path: Path) -> None:
    """``accelerate launch`` takes all GPUs of the machine then, and one GPU would be another job."""
    written = {**{key: value for key, value in FSDP.items() if key != "num_processes"}, **said}
    with pytest.raises(PlanError, match="needs --gpus N"):
        read(tmp_path, written, model="gpt2")
    assert read(tmp_path, written, model="gpt2", gpus="8") == read(tmp_path, FSDP, model="gpt2")


@pytest.mark.parametrize("section", ["fsdp_config", "parallelism_config", "deepspeed_config"])
@pytest.mark.parametrize("value", [3, "full", [1], True])
def test_a_section_is_a_mapping(section: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=f"{section} = .*: must be a mapping, as accelerate config writes it"):
        read(tmp_path, {**FSDP, section: value}, model="gpt2")
