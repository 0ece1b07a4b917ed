"""A plan whose defaults are all filled in, as a type: ``resolve`` returns it, and every figure is derived from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .plan import AttentionImplementation, Batch, Hardware, Layout, Loss, LossKind, Plan, Precision
from .section import Dtype

if TYPE_CHECKING:
    # The sections' own types, told apart for the type checker alone: at run time they are those of ``Plan``.
    class ResolvedHardware(Hardware):
        gpus: int

    class ResolvedLayout(Layout):
        dp: int

    class ResolvedBatch(Batch):
        gbs: int
        seq: int

    class ResolvedPrecision(Precision):
        gradients: Dtype

    class ResolvedLoss(Loss):
        kind: LossKind


class ResolvedPlan(Plan, defer_build=True):
    """A plan without contradictions whose sizes are all numbers, and what follows from them.

    The JSON is that of ``Plan``. A copy with other values (``model_copy``) has to be resolved again.
    """

    if TYPE_CHECKING:
        hardware: ResolvedHardware
        layout: ResolvedLayout
        batch: ResolvedBatch
        precision: ResolvedPrecision
        loss: ResolvedLoss
        attention: AttentionImplementation
        torch: str

    @property
    def flash(self) -> bool:
        """Attention runs in a fused kernel, which never holds all scores."""
        return self.attention != "eager"

    @property
    def samples(self) -> int:
        """Samples in one micro-batch of a rank; the Trainer's DataParallel default multiplies ``mbs``."""
        return self.batch.mbs * (self.hardware.gpus if self.batch.multiply_by_visible_gpus else 1)

    @property
    def sequences(self) -> int:
        """Sequences in one micro-batch of a rank: two of each sample that is a pair."""
        return self.samples * self.trainer.kind.sequences

    @property
    def tokens_of_step(self) -> int:
        """Tokens in one step of all ranks, those of both sequences of a pair."""
        return self.batch.gbs * self.trainer.kind.sequences * self.batch.seq

    @property
    def tokens(self) -> int:
        """Tokens in one micro-batch of a rank, before context parallelism splits them."""
        return self.sequences * self.batch.seq

    @property
    def microbatches(self) -> int:
        """Micro-batches of a rank in one iteration."""
        return self.batch.gbs // (self.samples * self.layout.dp)

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding on all ranks together, as the framework pads the vocabulary."""
        from ..frameworks import framework

        return framework(self.framework).padded_vocab(self)
