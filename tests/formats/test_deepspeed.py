"""Plans as ``ds_config.json``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from memplan.formats.deepspeed.exporter import TARGET, configuration
from memplan.formats.exported import exported
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve

from .deepspeed_plans import plans
from .plans import round_trip

UNFILTERED = [HealthCheck.filter_too_much, HealthCheck.too_slow]


@settings(max_examples=40, deadline=None, suppress_health_check=UNFILTERED)
@given(plans())
def test_what_is_exported_reads_back_as_the_plan(plan: Plan) -> None:
    round_trip(plan, TARGET)


@settings(max_examples=40, deadline=None, suppress_health_check=UNFILTERED)
@given(plans())
def test_deepspeed_takes_the_configuration(plan: Plan) -> None:
    config = pytest.importorskip("deepspeed.runtime.config", reason="DeepSpeed is not installed")
    plan = resolve(plan)
    written = configuration(plan)
    made = config.DeepSpeedConfig(json.loads(json.dumps(written)))
    assert made.train_micro_batch_size_per_gpu == plan.batch.mbs
    assert made.zero_config.stage == plan.layout.zero
    assert made.zero_config.reduce_bucket_size == plan.deepspeed.reduce_bucket_size
    offload = made.zero_config.offload_optimizer
    assert (offload.device.value if offload else "none") == plan.deepspeed.offload_optimizer
    assert made.gradient_clipping == plan.deepspeed.gradient_clipping
    assert (made.optimizer_name or "none").lower() == written.get("optimizer", {}).get("type", "none").lower()


def of(**flags: str) -> dict[str, Any]:
    plan = read_plan(None, {"model": "gpt2", "framework": "deepspeed", "gpus": "8", **flags}).plan
    return dict(json.loads(round_trip(plan, TARGET).text))


def test_the_example() -> None:
    done = round_trip(read_plan("bert-5.1b-zero3").plan, TARGET)
    assert done.command_line() == (
        "memplan estimate --from deepspeed FILE --model bert-5.1b --gpus 8 --gpu a100-40gb --recompute full "
        "--attention eager"
    )
    written = json.loads(done.text)
    assert written["fp16"] == {"enabled": True}
    assert written["zero_optimization"]["stage"] == 3


def test_the_batch_is_that_of_a_rank() -> None:
    written = of(mbs="2", gbs="64")
    assert (written["train_micro_batch_size_per_gpu"], written["gradient_accumulation_steps"]) == (2, 4)


def test_adam_is_not_adamw() -> None:
    assert of(optimizer="adam")["optimizer"] == {"type": "Adam", "params": {"adam_w_mode": False}}
    assert of(optimizer="adamw")["optimizer"] == {"type": "AdamW"}
    loop = of(optimizer="adamw", **{"optimizer-implementation": "for-loop"})["optimizer"]["params"]
    assert loop == {"torch_adam": True, "foreach": False}


def test_optimizers_of_the_training_script_are_not_in_the_configuration() -> None:
    written = of(optimizer="adam8bit", zero="2")
    assert "optimizer" not in written
    assert written["zero_allow_untested_optimizer"] is True


def test_what_it_has_no_word_for_is_refused() -> None:
    flags = {"model": "gpt2", "framework": "deepspeed", "gpus": "8", "loss": "vocab-parallel"}
    with pytest.raises(PlanError, match=r"loss\.kind"):
        exported(read_plan(None, flags).plan, TARGET)
