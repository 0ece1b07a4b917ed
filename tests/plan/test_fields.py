"""Every field has a flag, and the flag takes effect."""

from __future__ import annotations

from typing import Any

import pytest

from memplan.plan.fields import PlanField, by_flag, plan_fields
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan

CONTRACT = (
    "model framework gpu gpus tp pp dp cp ep vpp zero mbs gbs seq layers optimizer dtype recompute attention partition "
    "schedule headroom"
)
ABOUT_A_SPEC = {"model.published_parameters", "model.source"}

VALUES: dict[str, tuple[str, object]] = {
    "model.name": ("mine", "mine"),
    "model.heads": ("6", 6),
    "model.mtp_pattern": ("*E", "*E"),
    "model.layer_pattern": ("M-" * 6, "M-" * 6),
    "model.layer_blocks": ("8:64,none:linear", ("8:64", "none:linear")),
    "model.hidden": ("1536", 1536),
    "hardware.gpu": ("h200", "h200"),
    "hardware.capacity": ("1GiB", 1 << 30),
    "trainer.generation_memory": ("1GiB", 1 << 30),
    "loss.cutoffs": ("10,20", (10, 20)),
    "loss.div_value": ("2.5", 2.5),
    "loss.liger": ("0.8.2", "0.8.2"),
    "lora.targets": ("q_proj,fc1", ("q_proj", "fc1")),
    "lora.modules_to_save": ("lm_head", ("lm_head",)),
    "lora.target_parameters": ("experts.down_proj", ("experts.down_proj",)),
    "pipeline.partition": ("0,3,7", (0, 3, 7)),
    "pipeline.layout": ("Ettt|tttL", "Ettt|tttL"),
    "recompute.modules": ("core_attn,mlp", ("core_attn", "mlp")),
    "megatron.transformer_engine": ("2.11", "2.11"),
    "megatron.offload_modules": ("attn_norm,moe_act", ("attn_norm", "moe_act")),
    "megatron.cuda_graph_modules": ("attn,mlp", ("attn", "mlp")),
    "megatron.cuda_graph_warmup": ("0", 0),
    "megatron.empty_cache": ("2", 2),
    "megatron.fp32_gradients_of": ("all,*router*", ("all", "*router*")),
    "megatron.precision_of": ("*fc1*=16bit,*=low", ("*fc1*=16bit", "*=low")),
    "megatron.nccl_blocks": ("tp=-8,dp_cp=2-16", "tp=-8,dp_cp=2-16"),
    "deepspeed.overlap_comm": ("true", True),
    "device_map": ("{0: 0-2}", {0: (0, 1, 2)}),
    "environment": ("A=b=c", {"A": "b=c"}),
    "recompute.reentrant": ("true", True),
    "versions": ("transformers=5.0.1, peft=0.20", {"transformers": "5.0.1", "peft": "0.20"}),
    "torch": ("2.7", "2.7"),
    "headroom": ("5%", "5%"),
    "experts.imbalance": ("1.5", "1.5"),
    "experts.megatron_core": ("0.14", "0.14"),
    "model.dense_layers": ("0,2", (0, 2)),
    "fsdp.fqns": ("layers,lm_head", ("layers", "lm_head")),
    "fsdp.filter_fqns": ("output,attention.wk", ("output", "attention.wk")),
}


def written(field: PlanField) -> tuple[str, object]:
    """A value for ``field`` that is not its default nor GPT-2's, as a flag's text and as the plan holds it."""
    if field.path in VALUES:
        return VALUES[field.path]
    if field.choices:
        now = value_of(read_plan(None, {"model": "gpt2"}).plan, field.path)
        choice = next(choice for choice in field.choices if choice != now)
        return choice, choice
    now = value_of(read_plan(None, {"model": "gpt2"}).plan, field.path)
    if isinstance(now, bool):
        return str(not now).lower(), not now
    if isinstance(now, float):
        return "0.25", 0.25
    return ("3", 3)


def value_of(plan: Plan, path: str) -> Any:
    value: Any = plan
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(
    "field", [f for f in plan_fields().values() if f.path != "model"], ids=lambda field: field.path
)
def test_every_field_has_a_flag_that_takes_effect(field: PlanField) -> None:
    if field.path in ABOUT_A_SPEC:
        assert not field.flag
        return
    text, value = written(field)
    before = read_plan(None, {"model": "gpt2"}).plan
    after = read_plan(None, {"model": "gpt2", field.flag[2:]: text})
    assert value_of(before, field.path) != value
    assert value_of(after.plan, field.path) == value
    assert str(after.origins[field.path]) == field.flag


def test_the_flags_of_the_contract_are_there_and_all_differ() -> None:
    assert set(CONTRACT.split()) <= set(by_flag())
    flags = [field.flag for field in plan_fields().values() if field.flag]
    assert len(flags) == len(set(flags))


def test_every_field_is_described() -> None:
    for field in plan_fields().values():
        assert field.description or field.path in ABOUT_A_SPEC, field.path
        assert "[" not in field.description, "would be markup in the help"
