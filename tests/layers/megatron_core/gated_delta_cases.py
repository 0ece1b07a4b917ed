"""Parts of gated delta nets in settings that change their tensors, as recipes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from memplan.layers import gated_delta
from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.gated_delta import Sizes
from memplan.layers.megatron_core.shape import CoreShape
from memplan.plan.spec import ModelSpec


@dataclass(frozen=True)
class Case:
    """On one rank."""

    part: Literal["rule", "convolution", "packed rule", "packed convolution", "grouped rule"] = "rule"
    """Packed: of one row with the tokens of all sequences, and with queries and keys that the rule norms. Grouped:
    normed, too, of views of what the convolution gives, and each for several heads of values."""
    b: int = 2
    s: int = 384
    keys: int = 2
    values: int = 4
    d: int = 64
    e: int = 128

    def __str__(self) -> str:
        default = Case()
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(default, name)]
        return "-".join(["delta", *changed])

    @property
    def at(self) -> Sizes:
        return Sizes(self.b, self.s, self.keys, self.values, self.d, self.e, 4)


CASES = [
    Case(),
    Case(b=1),
    Case(s=500),
    Case(d=256),
    Case(part="convolution"),
    Case(part="convolution", b=1, s=500),
    Case(part="packed rule"),
    Case(part="packed rule", s=500, d=128),
    Case(part="packed convolution", s=500),
    Case(part="grouped rule"),
    Case(part="grouped rule", b=1, s=500, d=256, values=6),
    Case(part="grouped rule", keys=4, d=128),
]


TorchSize = tuple[int, int, int, int, int]
"""Sequences, tokens, heads, features of a key and of a value."""
TORCH_SIZES: list[TorchSize] = [(2, 130, 2, 32, 64), (2, 128, 1, 32, 32), (1, 64, 3, 32, 32)]


def torch_inputs(size: TorchSize) -> list[tuple[tuple[int, ...], str]]:
    """Queries, keys, values, decays and steps."""
    *heads, d, e = size
    rows = tuple(heads)
    return [((*rows, d), "bf16"), ((*rows, d), "bf16"), ((*rows, e), "bf16"), (rows, "fp32"), (rows, "bf16")]


def run(r: Recorder, given: list[Tensor], case: Case) -> Tensor:
    """The rule of queries, keys, values, decays and steps, or the convolution of an input by a weight."""
    if case.part == "rule":
        return gated_delta.rule(r, given, case.at)
    if case.part == "packed rule":
        return gated_delta.rule_of_normed(r, given, replace(case.at, k=case.values))
    if case.part == "grouped rule":
        return gated_delta.rule_of_normed(r, given, case.at, strided=True)
    return gated_delta.convolution(r, given[0], given[1], case.at)


def spec(**changes: object) -> ModelSpec:
    fields: dict[str, object] = {
        "name": "case", "family": "gpt", "layers": 4, "hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64,
        "ffn": 1024, "vocab": 1024, "positions_max": 1024, "norm": "rmsnorm", "positions": "rotary",
        "activation": "swiglu", "attention_bias": False, "attention_output_bias": False, "mlp_bias": False,
        "embedding_dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0, "tied_embeddings": False,
        "linear_interval": 4, "linear_key_heads": 4, "linear_value_heads": 8, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }  # fmt: skip
    return ModelSpec.model_validate({**fields, **changes})


def shape(b: int = 2, s: int = 384, t: int = 1, **changes: object) -> CoreShape:
    return CoreShape(spec(), b, s, t, "bf16", 1024, linear=True, **changes)  # type: ignore[arg-type]
