"""LLM.int8: a training step on bitsandbytes' 8-bit weights, against recorded ones of the real libraries.

``python -m tests.layers.test_int8`` records them anew, with what ``VERSIONS`` names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._flat_param import FlatParamHandle

from memplan.estimate import estimate
from memplan.frameworks.fsdp.framework import NO_INTEGERS
from memplan.layers.quantised import Int8
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import rounded

from .tuned_comparison import Witness, assert_equal, config_of, program_of, recorded, write_steps

VERSIONS = "bitsandbytes 0.50.0, peft 0.21.2, accelerate 1.15.0, transformers 5.23.0, torch 2.13.0"
RECORDED = Path(__file__).with_name("int8_steps.json")
B, S, RANK = 2, 64, 8


@dataclass(frozen=True)
class Case:
    """One model in one setting; eager attention."""

    model: str
    recompute: str
    targets: str
    prepared: bool = False
    dtype: str = "bf16"
    dropout: float = 0.1
    reentrant: bool = False

    def __str__(self) -> str:
        more = [*["prepared"] * self.prepared, *["reentrant"] * self.reentrant]
        return "-".join([self.model, self.dtype, self.recompute, self.targets, *more])

    def flags(self) -> dict[str, str]:
        return {
            "dtype": self.dtype,
            "attention": "eager",
            "recompute": self.recompute,
            "mbs": str(B),
            "seq": str(S),
            "lora-rank": str(RANK),
            "lora-targets": self.targets,
            "lora-dropout": str(self.dropout),
            "quantisation": "int8",
            "kbit-preparation": str(self.prepared).lower(),
            **({"use-reentrant": "true"} if self.reentrant else {}),
        }


CASES = (
    Case("llama", "none", "q_proj,v_proj", dropout=0.0),
    Case("llama", "full", "all-linear"),
    Case("llama-mha-biased", "none", "all-linear"),
    Case("llama-mha-biased", "full", "all-linear", prepared=True),
    Case("llama", "full", "all-linear", prepared=True, reentrant=True),
    Case("phi3", "none", "all-linear", prepared=True),
    Case("qwen2-tied-dropout", "none", "all-linear", dtype="fp32"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_with_int8_weights(case: Case, tmp_path: Path) -> None:
    witness = Witness(**json.loads(RECORDED.read_text(encoding="utf-8"))["steps"][str(case)])
    assert_equal(program_of(case.model, tmp_path, case.flags()), witness, rounded(8 * B * S))


def test_a_byte_for_each_weight_and_a_scale_for_each_row() -> None:
    assert Int8("bf16").packed_bytes((4096, 11008)) == 4096 * 11008
    assert Int8("bf16").beside((4096, 11008)) == {"scales": 4 * 4096}


@pytest.mark.parametrize("model", ["exaone-4.0-32b", "olmo-3-7b"])
def test_layers_that_hand_on_their_own_input_are_refused(model: str) -> None:
    """Of EXAONE 4 and OLMo 3 no norm comes before attention: what ``MatMul8bitLt`` keeps is the layer's input."""
    flags = {"model": model, "layers": "2", "seq": "64", "lora-rank": "8", "lora-targets": "all-linear"}
    with pytest.raises(PlanError, match=r"quantisation.kind = int8: must be nf4 or fp4 for family"):
        estimate(read_plan(None, {**flags, "quantisation": "int8"}).plan)


def test_fsdp1_refuses_integers() -> None:
    """As torch does of what it would make flat."""
    weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    handle: Any = FlatParamHandle
    with pytest.raises(ValueError, match=NO_INTEGERS):
        handle._validate_tensors_to_flatten(None, [weight])
    flags = {"model": "llama-3.2-1b", "lora-rank": "8", "quantisation": "int8", "framework": "fsdp", "gpus": "2"}
    with pytest.raises(PlanError, match=NO_INTEGERS):
        resolve(read_plan(None, {**flags, "fsdp-version": "1"}).plan)


def record() -> None:
    """Writes ``RECORDED``."""
    import peft

    from ..oracle.int8_step import traced_int8_step

    steps = {}
    for case in CASES:
        named = case.targets if case.targets == "all-linear" else case.targets.split(",")
        step = traced_int8_step(
            config_of(case.model),
            B,
            S,
            case.dtype,
            peft.LoraConfig(r=RANK, target_modules=named, lora_dropout=case.dropout),
            prepared=case.prepared,
            recompute=case.recompute == "full",
            reentrant=case.reentrant,
        )
        steps[str(case)] = recorded(step, case.model, case.flags())
    write_steps(RECORDED, VERSIONS, steps)


if __name__ == "__main__":
    record()
