"""What a job of torchtitan's Llama says besides, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Checkpointing = Literal["none", "full", "op"]


@dataclass(frozen=True, slots=True)
class Part:
    """A stage's part of the model, or all of it: layers from ``low`` up to ``high``."""

    low: int
    high: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Stages:
    """A rank of a pipeline, and what it runs."""

    rank: int
    ranks: int
    chunks: int
    """Stages of a rank: number k of rank r is stage ``r + k · ranks``."""
    edges: tuple[int, ...]
    """First layer of every stage, and the number of layers."""
    schedule: str
    """``gpipe`` or ``1f1b``; with several chunks, interleaved 1F1B."""
    microbatches: int
    """Of one iteration: all of them."""
    return_outputs: bool

    @property
    def count(self) -> int:
        """Stages of the pipeline."""
        return self.ranks * self.chunks

    @property
    def numbers(self) -> tuple[int, ...]:
        """This rank's stages."""
        return tuple(range(self.rank, self.count, self.ranks))

    def part(self, stage: int) -> Part:
        low, high = self.edges[stage : stage + 2]
        return Part(low, high, not stage, stage == self.count - 1)


@dataclass(frozen=True, slots=True)
class Torchtitan:
    """Sizes of the model (b, s and dtypes are the job's), and how it is recomputed and cut."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    layers: int
    recompute: Checkpointing
    """Of a layer: nothing, all of it, or all but attention and every second product."""
    every: int
    """With ``full``: every n-th layer of a rank."""
    tensor: int
    """Tensor-parallel size."""
    parallel_loss: bool
    """Logits stay in parts (``loss_parallel``)."""
    ends_apart: bool
    """The embedding is a unit, and norm and head are another."""
    stages: Stages | None = None

    @property
    def scores(self) -> int:
        """Logits of one token that a rank has."""
        return self.vocab // (self.tensor if self.parallel_loss else 1)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Torchtitan:
        given = data["stages"]
        stages = Stages(**{**given, "edges": tuple(given["edges"])}) if given is not None else None
        return Torchtitan(**{**data, "stages": stages})
