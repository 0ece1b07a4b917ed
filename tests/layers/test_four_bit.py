"""QLoRA: a training step on bitsandbytes' 4-bit weights, against recorded ones of the real libraries.

bitsandbytes is large, so its steps are on file: ``python -m tests.layers.test_four_bit`` records them anew, with what
``VERSIONS`` names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from memplan.layers.tuning import FourBit
from memplan.tape.events import rounded

from .tuned_comparison import Witness, assert_equal, config_of, program_of, recorded, write_steps

VERSIONS = "bitsandbytes 0.50.2, peft 0.21.2, accelerate 1.15.0, transformers 5.23.0, torch 2.13.0"
RECORDED = Path(__file__).with_name("four_bit_steps.json")
B, S, RANK = 2, 64, 8


@dataclass(frozen=True)
class Case:
    """One model in one setting; eager attention."""

    model: str
    recompute: str
    targets: str
    kind: str = "nf4"
    double: bool = True
    compute: str = "bf16"
    prepared: bool = False
    dtype: str = "bf16"
    dropout: float = 0.1

    def __str__(self) -> str:
        words = [self.model, self.dtype, self.recompute, self.targets, self.kind, self.compute]
        words += ["double"] * self.double + ["prepared"] * self.prepared
        return "-".join(words)

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
            "quantisation": self.kind,
            "double-quantisation": str(self.double).lower(),
            "compute-dtype": self.compute,
            "kbit-preparation": str(self.prepared).lower(),
            **({"delta-kernel": "fla"} if self.model == "qwen3_5" else {}),
        }


CASES = (
    Case("llama", "none", "q_proj,v_proj", dropout=0.0),
    Case("llama", "full", "all-linear"),
    Case("llama-mha-biased", "none", "all-linear", double=False),
    Case("llama-mha-biased", "full", "all-linear", prepared=True),
    Case("llama", "none", "all-linear", compute="fp32"),
    Case("gpt2", "full", "c_attn", prepared=True),
    Case("opt", "none", "all-linear"),
    Case("opt-dropout", "full", "k_proj,fc1", prepared=True),
    Case("gpt_neox-dropout", "full", "all-linear"),
    Case("gptj", "none", "q_proj,v_proj"),
    Case("gemma2", "none", "all-linear", prepared=True),
    Case("phi3", "none", "all-linear"),
    Case("qwen2-tied-dropout", "none", "all-linear", kind="fp4", double=False, dtype="fp32"),
    Case("qwen3_5", "none", "all-linear"),
    Case("qwen3_5", "full", "all-linear", prepared=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_with_four_bit_weights(case: Case, tmp_path: Path) -> None:
    witness = Witness(**json.loads(RECORDED.read_text(encoding="utf-8"))["steps"][str(case)])
    assert_equal(program_of(case.model, tmp_path, case.flags()), witness, rounded(8 * B * S))


def test_scales_are_counted_in_blocks_of_64() -> None:
    """4096 x 11008 weights, as the paper's 7B model has: 704,512 scales."""
    assert FourBit("bf16", True).blocks(4096 * 11008) == 704_512
    assert FourBit("bf16", True).blocks(65) == 2


def record() -> None:
    """Writes ``RECORDED``."""
    import peft

    from ..oracle.four_bit_step import traced_four_bit_step

    steps = {}
    for case in CASES:
        named = case.targets if case.targets == "all-linear" else case.targets.split(",")
        step = traced_four_bit_step(
            config_of(case.model),
            B,
            S,
            case.dtype,
            peft.LoraConfig(r=RANK, target_modules=named, lora_dropout=case.dropout),
            double=case.double,
            compute=case.compute,
            prepared=case.prepared,
            recompute=case.recompute == "full",
            kind=case.kind,
        )
        steps[str(case)] = recorded(step, case.model, case.flags())
    write_steps(RECORDED, VERSIONS, steps)


if __name__ == "__main__":
    record()
