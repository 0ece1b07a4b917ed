"""``memplan estimate --from deepspeed``: a ``ds_config.json`` with the flags that go with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import main
from memplan.commands.launched import LaunchFlags, read_launched
from memplan.formats.launch import launched_plan
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import ReadPlan

MODEL = {"model": "gpt2", "gpus": "4"}

TRAINER = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""The example of transformers' documentation for ZeRO-3."""

Read = Callable[..., ReadPlan]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Reads a configuration with flags; ``strict`` and ``varied`` as on the command line."""
    monkeypatch.chdir(tmp_path)

    def read(config: object, *, strict: bool = False, varied: tuple[str, ...] = (), **flags: str) -> ReadPlan:
        text = config if isinstance(config, str) else json.dumps(config, indent=1)
        (tmp_path / "ds.json").write_text(text, encoding="utf-8")
        given = {**MODEL, **{name.replace("_", "-"): value for name, value in flags.items()}}
        given = {name: value for name, value in given.items() if value}
        launch = read_launched("ds.json", LaunchFlags(("deepspeed",), (), strict, None), given, varied)
        return launched_plan(launch, given)

    return read


def refusal(read: Read, config: object, **given: Any) -> str:
    with pytest.raises(PlanError) as caught:
        read(config, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def batch(plan: Plan) -> tuple[int, int | None]:
    return plan.batch.mbs, plan.batch.gbs


def test_sections_and_their_lines(read: Read) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "fp16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"torch_adam": True, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 2e8},
        "gradient_clipping": 1.0,
    }
    found = read(config, seq="64")
    plan = found.plan
    assert (plan.framework, plan.layout.zero, plan.precision.dtype, plan.batch.seq) == ("deepspeed", 2, "fp16", 64)
    assert (plan.deepspeed.overlap_comm, plan.deepspeed.reduce_bucket_size) == (False, 200_000_000)
    assert plan.deepspeed.gradient_clipping == 1.0
    optimizer = plan.optimizer
    assert (optimizer.name, optimizer.implementation, optimizer.weight_decay) == ("adamw", "foreach", 0.1)
    assert str(found.origins["deepspeed.reduce_bucket_size"]) == "ds.json:16"
    assert not found.warnings


def test_what_the_trainer_fills_in(read: Read) -> None:
    """h = 768: 589,824, 530,841 and 7,680."""
    plan = read(TRAINER, mbs="2", gbs="32", dtype="bf16").plan
    zero = plan.deepspeed
    assert (zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size) == (768**2, 530_841)
    assert (zero.stage3_param_persistence_threshold, zero.sub_group_size) == (7_680, 10**9)
    assert (zero.offload_optimizer, zero.overlap_comm, batch(plan)) == ("cpu", True, (2, 32))
    assert read(TRAINER, hidden="1536", mbs="2", gbs="32", dtype="bf16").plan.deepspeed.reduce_bucket_size == 1536**2


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ({"mbs": "2", "gbs": "32"}, {"--dtype (bf16.enabled is auto)"}),
        ({"mbs": "2", "dtype": "bf16"}, {"--accumulation N (gradient_accumulation_steps is auto)"}),
        (
            {"gpus": ""},
            {
                "--mbs N (train_micro_batch_size_per_gpu is auto)",
                "--dtype (bf16.enabled is auto)",
                "--accumulation N (gradient_accumulation_steps is auto)",
                "--gpus N (nothing here says how many there are)",
            },
        ),
    ],
)
def test_what_only_the_trainer_has_is_asked_for_at_once(read: Read, flags: dict[str, str], asked: set[str]) -> None:
    line = refusal(read, TRAINER, **flags)
    assert line.startswith("ds.json: needs ")
    assert {*line.removeprefix("ds.json: needs ").replace(" and ", ", ").split(", ")} == asked


def test_accumulation_answers_its_own_key(read: Read) -> None:
    """8 GPUs x 2 sequences x 4 micro-batches."""
    assert batch(read(TRAINER, mbs="2", accumulation="4", dtype="bf16", gpus="8").plan) == (2, 64)


@pytest.mark.parametrize(
    ("config", "flags", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": 2}, {}, (2, 8)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, {}, (2, 24)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, {"mbs": "1"}, (1, 12)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, {"gbs": "8"}, (2, 8)),
        ({"train_batch_size": 24}, {}, (6, 24)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, {}, (2, 24)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}, {}, (3, 24)),
        ({"train_batch_size": 24}, {"gpus": "", "dp": "8"}, (3, 24)),
        ({"gradient_accumulation_steps": 3}, {"mbs": "2"}, (2, 24)),
    ],
)
def test_batches_follow_from_the_ranks(
    read: Read, config: dict[str, int], flags: dict[str, str], expected: tuple[int, int]
) -> None:
    assert batch(read(config, **flags).plan) == expected


@pytest.mark.parametrize(
    ("config", "given", "line"),
    [
        ({}, {}, "ds.json: train_micro_batch_size_per_gpu: is missing, and so is train_batch_size"),
        ({"train_batch_size": 10}, {}, "ds.json:2: train_batch_size = 10: must be a multiple of 4 ranks"),
        (
            {"train_batch_size": 24, "gradient_accumulation_steps": 4},
            {},
            "ds.json:2: train_batch_size = 24: must be a multiple of gradient_accumulation_steps 4 x 4 ranks",
        ),
        (
            {"train_batch_size": 24, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2},
            {},
            "must be train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 2 x 4 ranks = 16",
        ),
        (TRAINER, {"gpus": ""}, "--gpus N (nothing here says how many there are)"),
        ({"train_batch_size": 8}, {"model": ""}, "model: is missing: name one"),
        (
            {"train_batch_size": 8, "zero_optimization": {"reduce_bucket_size": "auto"}},
            {"model": ""},
            "ds.json: needs --model NAME (reduce_bucket_size is auto)",
        ),
        (
            {"train_batch_size": 8, "zero_optimization": {"reduce_bucket_size": "auto"}},
            {"varied": ("hidden=768,1024",)},
            "ds.json: needs --model NAME (reduce_bucket_size is auto)",
        ),
        ({"train_batch_size": 8, "zero_optimisation": {}}, {}, "ds.json:3: zero_optimisation: is no key that is read"),
        ({"train_batch_size": 8, "bfloat16": {}}, {}, "is no key that is read; did you mean bf16?"),
        ({"train_batch_size": 8, "mine": 1}, {"strict": True}, "ds.json:3: mine: is no key that is read"),
        ({"communication_data_type": "fp32"}, {}, "ds.json:2: communication_data_type = fp32: is not modelled"),
        ({"torch_autocast": {"enabled": True}}, {}, "is not modelled"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, {}, "ds.json:4: bf16.bf16_master"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
            {},
            "zero_optimization.offload_optimizer.super_offload = true: is not modelled",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memroy": True}}},
            {},
            "zero_optimization.offload_param.pin_memroy: is no key of DeepSpeed; did you mean pin_memory?",
        ),
        ({"data_types": {"param_dtype": "bf16"}}, {}, "data_types.param_dtype = bf16: is not modelled"),
        ({"optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": False}}}, {}, "is not modelled"),
        ({"model": "gpt2", "framework": "deepspeed"}, {}, "is a plan, not a ds_config.json; leave out --from"),
        ("#!/bin/bash\ndeepspeed train.py --zero 3\n", {}, "must be a mapping, as a ds_config.json is"),
        ("{'a': [", {}, "is not valid YAML"),
    ],
)
def test_one_line_for_what_is_wrong(read: Read, config: object, given: dict[str, Any], line: str) -> None:
    assert line in refusal(read, config, **given)


def test_what_is_off_by_default_may_say_so(read: Read) -> None:
    off: dict[str, object] = {name: {"enabled": False} for name in ("torch_autocast", "amp", "hybrid_engine")}
    plan = read({"train_batch_size": 8, **off, "compile": {"deepcompile": False}}).plan
    assert plan.precision.dtype == "fp32"


def test_notes(read: Read) -> None:
    codes = [note.code for note in read({"train_batch_size": 8, "mine": 1, "_comment": "ours"}).warnings]
    assert codes == ["argument-unknown", "optimizer-elsewhere", "loaded-dtype"]
    for told in ({"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}):
        assert "loaded-dtype" not in [note.code for note in read({"train_batch_size": 8, **told}).warnings]
    assert not read({"train_batch_size": 8, "bf16": {"enabled": True}}, optimizer="sgd").warnings


def test_json_may_be_indented_with_tabs(read: Read) -> None:
    assert read(json.dumps(TRAINER, indent="\t"), mbs="1", gbs="4", dtype="bf16").plan.layout.zero == 3


def test_the_command(read: Read, capsys: pytest.CaptureFixture[str]) -> None:
    read({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}})
    command = ("estimate", "--from", "deepspeed", "ds.json", "--model", "gpt2", "--gpus", "4", "--seq", "128")
    assert main((*command, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["plan"]["framework"], found["plan"]["layout"]["zero"]) == ("deepspeed", 3)
    assert {"zero3-gathering", "zero3-traffic"} <= {warning["code"] for warning in found["warnings"]}
    assert main((*command, "--vary", "mbs=1,2", "--json")) == 0
    variants = json.loads(capsys.readouterr().out)["variants"]
    assert [variant["plan"]["batch"]["gbs"] for variant in variants] == [4, 8]
    assert main((*command, "--offload-param-max-in-cpu", "5", "--offload-param", "gpu")) == 2
    assert main((*command, "--set", "A=1")) == 2
    assert main((*command, "--explain-args")) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert "belongs to launch scripts" in errors[1]


def test_an_error_of_the_framework_names_the_line(read: Read, capsys: pytest.CaptureFixture[str]) -> None:
    read({"train_batch_size": 4, "zero_optimization": {"stage": 1, "overlap_comm": True}})
    assert main(("estimate", "--from", "deepspeed", "ds.json", "--model", "gpt2", "--gpus", "4")) == 2
    line = capsys.readouterr().err
    assert line == "ds.json:5: deepspeed.overlap_comm = true: is not modelled at stage 1\n"
