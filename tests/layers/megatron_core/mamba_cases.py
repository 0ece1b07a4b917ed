"""The Mamba mixer between its projections in settings that change its tensors, as a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from memplan.layers.autograd import Recorder, Tensor
from memplan.layers.megatron_core import mamba
from memplan.layers.megatron_core.mamba_scan import Sizes
from memplan.layers.megatron_core.shape import CoreShape
from memplan.layers.module import Run
from memplan.plan.spec import ModelSpec


@dataclass(frozen=True)
class Case:
    """On one rank, of ``cp`` that share sequences."""

    b: int = 2
    s: int = 384
    heads: int = 8
    groups: int = 2
    cp: int = 1
    state: int = 96
    apart: bool = False
    kept: str | None = None
    chunk: int = 128

    def __str__(self) -> str:
        default = Case()
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(default, name)]
        return "-".join(["mamba", *changed])

    @property
    def shape(self) -> CoreShape:
        spec = ModelSpec(
            name="case", family="hybrid", layers=1, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=2048, vocab=1024,
            positions_max=1024, norm="rmsnorm", positions="none", activation="relu2", embedding_dropout=0.0,
            attention_dropout=0.0, hidden_dropout=0.0, layer_pattern="M", mamba_heads=self.heads, mamba_head_dim=64,
            mamba_groups=self.groups, mamba_state_dim=self.state,
        )  # fmt: skip
        choices = {"mamba_apart": self.apart, "mamba_states": self.kept, "mamba_chunk": self.chunk}
        return CoreShape(spec, self.b, self.s // self.cp, 1, "bf16", 1024, cp=self.cp, **choices)

    @property
    def own(self) -> Sizes:
        """As the projections have it."""
        return mamba.own_sizes(self.shape)


CASES = [
    Case(),
    Case(b=1),
    Case(s=500),
    Case(heads=12),
    Case(b=1, heads=6, groups=1),
    Case(cp=2),
    Case(s=1000, chunk=256),
    Case(s=500, chunk=64, apart=True),
    Case(b=1, groups=4, cp=4),
    Case(groups=1, cp=4),
    Case(kept="fp32"),
    Case(b=1, heads=6, groups=1, kept="fp32"),
    Case(apart=True),
    Case(b=1, s=500, apart=True),
    Case(heads=12, apart=True, kept="fp32"),
    Case(cp=2, apart=True),
    Case(groups=1, cp=4, apart=True),
]
"""One sequence and several; a last chunk that is not full; rows that do not begin at a multiple of 8 elements; groups
that context-parallel ranks share and that they do not; states in fp32; convolution and scan apart."""


def run(r: Recorder, x: Tensor | None, shape: CoreShape) -> Run:
    assert x is not None
    return Run(mamba.between(r, x, shape))
