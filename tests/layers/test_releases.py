"""Releases of transformers and peft: a training step against recorded ones of their own code.

Each release is installed in an environment of its own, so its steps are on file: ``python -m
tests.layers.test_releases`` records those of the transformers and the peft that it finds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).with_name("release_steps.json")
S, RANK = 64, 8
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1003,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "hidden_size": 192,
    "intermediate_size": 448,
    "max_position_embeddings": 160,
}


SIZES = {
    "llama": LLAMA,
    "mixtral": LLAMA
    | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt_bigcode": {
        **{name: value for name, value in LLAMA.items() if name.startswith(("vocab", "max", "num_hidden", "hidden"))},
        **{"model_type": "gpt_bigcode", "num_attention_heads": 4, "n_inner": 448, "tie_word_embeddings": False},
    },
    "llama4_text": {
        **{**LLAMA, "model_type": "llama4_text", "intermediate_size": 96, "intermediate_size_mlp": 448},
        **{"num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [0, 2], "no_rope_layer_interval": 2},
    },
    "granite": {**LLAMA, "model_type": "granite", "hidden_size": 288, "embedding_multiplier": 8.0},
}


@dataclass(frozen=True)
class Case:
    """A small model in bf16 in one setting."""

    transformers: str
    b: int
    recompute: str = "none"
    attention: str = "flash"
    autocast: bool = False
    lora: bool = False
    peft: str = "0.13.2"
    model: str = "llama"

    def __str__(self) -> str:
        words = [
            *[self.model] * (self.model != "llama"),
            self.transformers,
            f"b{self.b}",
            self.recompute,
            self.attention,
        ]
        return "-".join([*words, *["autocast"] * self.autocast, *[f"peft-{self.peft}"] * self.lora])

    @property
    def targets(self) -> list[str]:
        return ["c_attn"] if self.model == "gpt_bigcode" else ["q_proj", "v_proj", "o_proj"]

    def settings(self) -> dict[str, Any]:
        """Before 4.48 sdpa's callers have no variables for keys and values once these are repeated."""
        early = self.transformers < "4.48" and self.attention == "flash"
        return SIZES[self.model] | ({"num_key_value_heads": 6} if early else {})

    def flags(self) -> dict[str, str]:
        flags = {
            "dtype": "bf16",
            "attention": self.attention,
            "recompute": self.recompute,
            "mbs": str(self.b),
            "seq": str(S),
            "versions": f"transformers={self.transformers},peft={self.peft}",
        }
        if self.autocast:
            flags |= {"autocast": "true", "autocast-parameters": "bf16"}
        if self.lora:
            flags |= {"lora-rank": str(RANK), "lora-targets": ",".join(self.targets), "lora-dropout": "0.1"}
        return flags


RELEASES = ("4.45.2", "4.48.1", "4.57.1")
CASES = (
    *(Case(release, b, recompute) for release in RELEASES for b, recompute in ((1, "none"), (2, "none"), (2, "full"))),
    *(Case("4.48.1", 2, "full", "flash_attention_2", autocast, lora=True) for autocast in (False, True)),
    Case("4.48.1", 1, "none", "flash_attention_2", lora=True),
    Case("4.57.1", 2, "full", "flash_attention_2", autocast=True, lora=True),
    *(Case("4.48.1", b, recompute, model="mixtral") for b, recompute in ((1, "none"), (2, "full"))),
    Case("4.48.1", 2, "full", "flash_attention_2", autocast=True, lora=True, model="mixtral"),
    *(Case("4.57.1", b, recompute, model="llama4_text") for b, recompute in ((1, "none"), (2, "full"))),
    *(
        Case(release, b, recompute, model="granite")
        for release in RELEASES
        for b, recompute in ((1, "none"), (2, "full"))
    ),
    Case("4.48.1", 2, "full", "flash_attention_2", autocast=True, lora=True, model="granite"),
    *(
        Case(release, b, recompute, "flash_attention_2", model="gpt_bigcode")
        for release in RELEASES[:2]
        for b, recompute in ((1, "none"), (2, "full"))
    ),
    Case("4.45.2", 2, "full", "flash_attention_2", autocast=True, lora=True, model="gpt_bigcode"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step_of_a_release(case: Case, tmp_path: Path) -> None:
    """Parameters, what is held before, and every event of forward and backward."""
    from .test_against_transformers import drops_sorted, named, peak, sizes, without_scalars  # of today's release
    from .tuned_comparison import events, planned

    step = json.loads(RECORDED.read_text(encoding="utf-8"))[str(case)]
    (tmp_path / "config.json").write_text(json.dumps(case.settings()), encoding="utf-8")
    program = planned(tmp_path, case.flags())
    ends = [one for span in program.spans for _ in span.names for one in named(span.module, span.module.first.end)]
    forward = sizes([*events(program, False), *ends])
    backward = sizes(without_scalars(events(program, True)))
    assert program.parameters() == step["parameters"]
    assert drops_sorted(forward) == drops_sorted(step["forward"])
    assert [size for size in backward if size > 0] == [size for size in step["backward"] if size > 0]
    assert sorted(backward) == sorted(step["backward"])
    if case.recompute == "none":
        assert drops_sorted(backward) == drops_sorted(step["backward"])
    assert peak(0, forward + backward) == peak(0, [*step["forward"], *step["backward"]])


def record() -> None:
    """Writes the steps of what is installed into ``RECORDED``, beside those of other releases."""
    import transformers

    from ..oracle.release_step import traced_release_step

    steps = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    for case in CASES:
        if case.transformers == transformers.__version__:
            steps[str(case)] = traced_release_step(
                case.settings(),
                case.b,
                S,
                package=case.attention != "flash",
                recompute=case.recompute == "full",
                autocast=case.autocast,
                rank=RANK if case.lora else None,
                targets=case.targets,
            )
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(step, separators=(',', ':'))}" for name, step in steps.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    record()
