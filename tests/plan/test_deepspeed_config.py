"""``ds_config.json``: what is read, what is asked for, and one line for everything that is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from memplan.formats.deepspeed.config import Configuration, configuration_of
from memplan.formats.settings import Building
from memplan.plan.errors import Node, PlanError
from memplan.plan.text import parse_yaml

from .outcomes import error_of

NVME = {"device": "nvme", "nvme_path": "/local"}


def read(config: object, **known: Any) -> tuple[Node, Configuration]:
    written = parse_yaml(json.dumps(config, indent=1), "ds_config.json")
    building = Building(written.origin)
    settings = configuration_of(written, building, **known)
    settings.check()
    return building.plan(), settings


def zero(config: dict[str, Any], **known: Any) -> dict[str, object]:
    section = read({"zero_optimization": config}, **known)[0].mapping.get("deepspeed")
    return {} if section is None else {name: node.plain() for name, node in section.mapping.items()}


def refusal(config: object, **known: Any) -> str:
    with pytest.raises(PlanError) as caught:
        read(config, **known)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("type", "expected"),
    [
        ("Lion", {"name": "lion"}),
        ("Adafactor", {"name": "adafactor", "implementation": "for-loop"}),
        ("AdamW", {"name": "adamw"}),
    ],
)
def test_optimizers_that_deepspeed_makes(type: str, expected: dict[str, object]) -> None:
    plan, _ = read({"optimizer": {"type": type, "params": {"lr": 1e-4}}})
    assert plan.mapping["optimizer"].plain() == expected


def test_sections_of_a_plan() -> None:
    config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
    }
    plan, _ = read(config)
    assert plan.without("deepspeed").plain() == {
        "framework": "deepspeed",
        "layout": {"zero": 2},
        "batch": {"mbs": 4, "gbs": 64},
        "precision": {"dtype": "bf16"},
        "optimizer": {"name": "adamw"},
    }
    expected = {"overlap_comm": True, "reduce_bucket_size": 500_000_000, "gradient_accumulation_dtype": "fp32"}
    assert plan.mapping["deepspeed"].plain() == expected
    assert plan.mapping["deepspeed"].mapping["overlap_comm"].origin.line == 19


def test_nothing_is_stage_0_in_fp32() -> None:
    assert read({})[0].plain() == {
        "framework": "deepspeed",
        "layout": {"zero": 0},
        "precision": {"dtype": "fp32"},
    }


def test_auto_of_the_hidden_size() -> None:
    """h = 4096: 16,777,216 = h², 15,099,494 = ⌊0.9 h²⌋, 40,960 = 10 h."""
    config = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    assert zero(config, hidden=4096) == {
        "reduce_bucket_size": 16_777_216,
        "stage3_prefetch_bucket_size": 15_099_494,
        "stage3_param_persistence_threshold": 40_960,
    }
    line = refusal({"zero_optimization": config})
    assert "needs --model NAME (reduce_bucket_size is auto, stage3_prefetch_bucket_size is auto, " in line


def test_auto_is_asked_for_unless_given() -> None:
    config = {"bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    assert refusal(config).endswith(
        "needs --mbs N (train_micro_batch_size_per_gpu is auto) and --dtype (bf16.enabled is auto)"
    )
    plan, asked = read(config, given={"batch.mbs", "precision.dtype"})
    assert plan.plain() == {"framework": "deepspeed", "layout": {"zero": 0}}
    assert set(asked.asked) == {"batch.mbs", "precision.dtype"}


def test_offload_at_the_stages_that_allow_it() -> None:
    assert zero({"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": True}}) == {
        "offload_optimizer": "cpu",
        "offload_optimizer_pin": True,
    }
    found = zero({"stage": 3, "offload_optimizer": NVME, "offload_param": NVME})
    assert found == {"offload_optimizer": "nvme", "offload_param": "nvme"}
    assert zero({"stage": 2, "cpu_offload": True}) == {"offload_optimizer": "cpu"}
    assert zero({"stage": 2, "offload_param": {"device": "none"}}) == {}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([1], "must be a mapping"),
        ({"zero_optimization": {"stage": 4}}, "must be from 0 to 3"),
        ({"zero_optimization": {"stage": "two"}}, "must be a whole number"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "needs stage 3, not 2"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": NVME}}, "needs stage 3, not 2"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "needs stage 1, 2 or 3, not 0"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "must be given for nvme"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}, "must be none, cpu or nvme"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": NVME}}, "contradicts"),
        ({"zero_optimization": {"reduce_bucket_sise": 5}}, "did you mean reduce_bucket_size?"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "is not modelled"),
        ({"zero_optimization": {"reduce_bucket_size": 1.5}}, "must be a whole number"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "must be at least 1"),
        ({"zero_optimization": {"overlap_comm": "yes please"}}, "must be true or false"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 2}}}, "from 0 to 1"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "contradicts fp16.enabled"),
        ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, "must be a multiple of"),
        ({"optimizer": {"type": "Lamb"}}, "is not modelled"),
        ({"data_types": {"grad_accum_dtype": "int8"}}, "must be one of fp32"),
        ({"zero_optimization": 2}, "zero_optimization = 2: must be a mapping"),
        ({"tensor_parallel": {"autotp_size": 4}}, "is not modelled"),
    ],
)
def test_refusals(config: object, words: str) -> None:
    text = refusal(config)
    assert words in text
    assert text.startswith("ds_config.json")


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**10),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=6),
)
keys = st.sampled_from(
    ["stage", "reduce_bucket_size", "overlap_comm", "offload_param", "offload_optimizer", "device", "sub_group_size"]
)
values = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(keys, inner, max_size=3))
)


@given(st.dictionaries(st.sampled_from(["zero_optimization", "fp16", "bf16", "train_batch_size", "optimizer"]), values))
def test_whatever_is_written_is_read_or_refused_in_one_line(config: dict[str, Any]) -> None:
    text = error_of(lambda: read(config))
    assert "\n" not in text
