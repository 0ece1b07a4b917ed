"""AWQ: a training step on autoawq's 4-bit weights, against recorded ones of its own layers in today's transformers.

``python -m tests.layers.test_awq`` records them anew, with what ``VERSIONS`` names. Releases of transformers and peft
that load such a model are older ones; what those do elsewhere is compared in ``tests/release``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from memplan.estimate import estimate
from memplan.layers.quantised import Awq
from memplan.plan import tuning_checks
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import rounded

from .tuned_comparison import Witness, assert_equal, config_of, program_of, recorded, write_steps

VERSIONS = "autoawq 0.2.9, peft 0.21.2, transformers 5.23.0, torch 2.13.0"
RECORDED = Path(__file__).with_name("awq_steps.json")
S, RANK, GROUP = 64, 8, 16


@dataclass(frozen=True)
class Case:
    """One model in one setting; eager attention."""

    model: str
    recompute: str
    targets: str
    b: int = 2
    dropout: float = 0.1

    def __str__(self) -> str:
        return "-".join([self.model, self.recompute, self.targets, str(self.b)])

    def flags(self) -> dict[str, str]:
        return {
            "dtype": "fp16",
            "attention": "eager",
            "recompute": self.recompute,
            "mbs": str(self.b),
            "seq": str(S),
            "lora-rank": str(RANK),
            "lora-targets": self.targets,
            "lora-dropout": str(self.dropout),
            "quantisation": "awq",
            "group-size": str(GROUP),
        }


ALL = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
CASES = (
    Case("llama", "none", "q_proj,v_proj", dropout=0.0),
    Case("llama", "full", ALL),
    Case("llama", "none", "q_proj,v_proj", b=16),
    Case("llama-mha-biased", "none", ALL),
    Case("phi3", "none", "qkv_proj,o_proj,gate_up_proj,down_proj"),
)
"""Of the third forward makes whole weights."""


@pytest.fixture
def any_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_checks, "AWQ_RELEASES", {})


@pytest.mark.usefixtures("any_release")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_with_weights_of_awq(case: Case, tmp_path: Path) -> None:
    witness = Witness(**json.loads(RECORDED.read_text(encoding="utf-8"))["steps"][str(case)])
    assert_equal(program_of(case.model, tmp_path, case.flags()), witness, rounded(8 * case.b * S))


def test_half_a_byte_for_each_weight() -> None:
    """And for every group of 128 inputs a scale in fp16 and a zero in half a byte."""
    packed = Awq("fp16", 128)
    assert packed.packed_bytes((11008, 4096)) == 11008 * 4096 // 2 + 32 * 11008 // 2
    assert packed.beside((11008, 4096)) == {"scales": 2 * 32 * 11008}


GIVEN = {"model": "llama-3-8b", "lora-rank": "8", "quantisation": "awq", "dtype": "fp16"}
GIVEN |= {"versions": "transformers=4.57.6,peft=0.18.1", "seq": "512"}


def test_releases_that_load_it() -> None:
    plan = resolve(read_plan(None, GIVEN).plan)
    assert plan.quantisation.group == 128


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"versions": ""},
            r"versions\.transformers = 5\.23: must be below 5\.0 with quantisation\.kind awq: from there",
        ),
        (
            {"versions": "transformers=4.57.6"},
            r"versions\.peft = 0\.21: must be below 0\.19 with quantisation\.kind awq",
        ),
        ({"dtype": "bf16"}, r"precision\.dtype = bf16: must be fp16 with quantisation\.kind awq"),
        ({"autocast": "true"}, r"precision\.autocast = true: must be false with quantisation\.kind awq"),
        ({"double-quantisation": "true"}, r"quantisation\.double = true: must be left out with quantisation\.kind awq"),
        ({"kbit-preparation": "true"}, r"quantisation\.prepared = true: must be left out with quantisation\.kind awq"),
        (
            {"use-dora": "true"},
            r"lora\.dora = true: must be false with quantisation\.kind awq: peft refuses DoRA there",
        ),
        (
            {"lora-targets": "all-linear"},
            r"lora\.targets = \[all-linear\]: must be names of layers with quantisation\.kind",
        ),
        ({"lora-kernel": "unsloth"}, r"kernels\.lora = unsloth: "),
        ({"lora-rank": ""}, r"quantisation\.kind = awq: must be none without adapters"),
        ({"group-size": "96"}, r"quantisation\.group = 96: must divide the 4096 inputs of "),
        (
            {"framework": "fsdp", "gpus": "2"},
            r"quantisation\.kind = awq: must be none, nf4 or fp4 .* AWQ's weights are",
        ),
        ({"framework": "deepspeed", "gpus": "2"}, r"quantisation\.kind = awq: must be none, nf4 or fp4 with framework"),
        (
            {"framework": "ddp", "gpus": "2"},
            r"ddp\.broadcast_buffers = true: must be false with quantisation\.kind awq",
        ),
        ({"framework": "device-map", "gpus": "2"}, r"quantisation\.kind = awq: must be none, nf4, fp4 or gptq on a"),
    ],
)
def test_refused(flags: dict[str, str], message: str) -> None:
    given = {name: value for name, value in {**GIVEN, **flags}.items() if value}
    with pytest.raises(PlanError, match=message):
        estimate(resolve(read_plan(None, given).plan))


def record() -> None:
    """Writes ``RECORDED``."""
    import peft

    from ..oracle.awq_step import traced_awq_step

    tuning_checks.AWQ_RELEASES = {}
    steps = {}
    for case in CASES:
        adapters = peft.LoraConfig(r=RANK, target_modules=case.targets.split(","), lora_dropout=case.dropout)
        config, recompute = config_of(case.model), case.recompute == "full"
        step = traced_awq_step(config, case.b, S, adapters, group=GROUP, recompute=recompute)
        steps[str(case)] = recorded(step, case.model, case.flags())
    write_steps(RECORDED, VERSIONS, steps)


if __name__ == "__main__":
    record()
