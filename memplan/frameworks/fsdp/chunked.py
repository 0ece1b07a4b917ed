"""torchtitan's loss in chunks under ``fully_shard``: head, loss and their backward run outside of the model.

``torchtitan/components/loss.py`` (``ChunkedLossWrapper.__call__``) of 21 August 2026 (commit b5bcd76), and torch 2.13,
``_fully_shard/_fsdp_state.py`` (``_force_complete_incomplete_states``) and ``_fsdp_param_group.py``
(``post_backward``, ``unshard``). Norm and head are one unit, which the model's forward leaves incomplete. Its own end
completes it, and reshards it, for the loss has left ``set_reshard_after_forward(True)`` the iteration before; the loss
gathers it again, on the default stream, and reshards it behind the last chunk. The head's gradient is kept whole from
chunk to chunk, in the reduction's dtype, and reduced with the last one; that of the norm is in the model's backward,
for which the unit is gathered once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ...layers.fused_losses import CHUNKS, HeadLoss
from ...layers.module import Parameter
from ...plan.plan import ResolvedPlan
from ...tape.events import Hold, Scope, Tape
from ...values import replace
from .hooks import GRADIENTS, Explicit, Gradient, Role
from .titan import titan_of_plan
from .units import Sharding, Unit, size

ENDS = "ends"
"""The unit of norm and head, and of the embedding where it shares the head's weight."""

KEPT = (1 << 16) - 1
"""Number of the head's gradient among what hooks hold within a module."""

OF_SEVERAL = f"{CHUNKS} of several micro-batches"
"""The unit of chunks whose gradient is added to that of another micro-batch, which is there from the first backward on:
one more in the forward pass of the first micro-batch would never be the most."""


def loss_of(plan: ResolvedPlan) -> HeadLoss | None:
    """The loss that runs in chunks, if it does."""
    if plan.loss.kind != "chunked":
        return None
    return HeadLoss(
        "chunked",
        chunks=plan.loss.chunks,
        accumulates=plan.microbatches > 1,
        sharded=True,
        casts=plan.fsdp.reduce != plan.precision.dtype,
        parallel=plan.layout.tp > 1,
        compiled=plan.fsdp.compile_loss,
        around_head=titan_of_plan(plan).around_head,
    )


def check(plan: ResolvedPlan) -> None:
    """Refuses what chunks are not modelled with."""
    given, layout = plan.fsdp, plan.layout
    if plan.loss.kind != "chunked":
        return
    if given.code != "torchtitan":
        raise plan.wrong(
            "loss.kind",
            "must be another with transformers' code: only torchtitan has a loss that gathers its head by itself",
        )
    for path, kept in (
        ("fsdp.ends_apart", True),
        ("fsdp.offload", False),
        ("fsdp.gradient_sync", True),
        ("fsdp.reshard_after_forward", layout.pp == 1),
    ):
        if plan.at(path) is not kept:
            raise plan.wrong(path, f"must be {str(kept).lower()} with loss.kind chunked: no other is modelled")
    if plan.loss.chunks == 1:
        raise plan.wrong("loss.chunks", "must be 2 or more under fsdp: one chunk holds what loss.kind plain does")
    if given.compile_loss:
        _check_compiled(plan)


def _check_compiled(plan: ResolvedPlan) -> None:
    for path, must in (("layout.tp", 1), ("precision.dtype", "bf16")):
        if plan.at(path) != must:
            raise plan.wrong(
                path,
                f"must be {must} with fsdp.compile_loss and chunks: no other was learnt; "
                "--no-compile-loss takes the loss as it is",
            )


def of_head(parameters: Sequence[Parameter]) -> Parameter:
    """The head's weight among those of norm and head."""
    return next(one for one in parameters if len(one.shape) > 1)


def apart(units: Sequence[Unit], *, accumulates: bool = False, with_norm: bool = False) -> tuple[Unit, ...]:
    """``units``, that of norm and head where the head's gradient is a matter of its own, or is reduced ``with_norm``'s.
    A weight that is also the embedding's has another gradient, behind the backward of all."""
    at = next(at for at, one in enumerate(units) if one.name == ENDS)
    ends, name = units[at], OF_SEVERAL if accumulates else CHUNKS
    head = of_head(ends.parameters)
    tied = ends.first == 0
    both = tuple(replace(one, trained=one.trained and (tied or one is not head)) for one in ends.parameters)
    whole = replace(ends, parameters=both, last=ends.last - 1, reshard=True)
    reduced = ends.parameters if with_norm else (head,)
    return (*units[:at], whole, *units[at + 1 :], Unit(name, reduced, ends.last, ends.last, True, inner=True))


class ChunkedHooks(Explicit):
    """The last unit, and that of the norm, are those of ``apart``."""

    opening: Tape = ()
    """What hooks do behind the first chunk's backward,"""
    closing: Tape = ()
    """and behind the last one's."""

    @property
    def chunks(self) -> int:
        return len(self.units) - 1

    @cached_property
    def ends(self) -> int:
        """The unit of norm and head."""
        return self.named[ENDS]

    def pre_forward(self, at: int) -> None:
        if at < self.chunks:
            super().pre_forward(at)
            return
        self.gather(self.ends)
        self.wait(self.ends)

    def post_forward(self, at: int) -> None:
        if at < self.chunks:
            super().post_forward(at)
            return
        head = of_head(self.units[at].parameters)
        if not head.trained:
            self.free(self.ends)
            return
        kept = self._gradient(head.elements, self.sharding.reduce)
        self.opening = (kept,)
        self.gradients[at] = [Gradient(kept.end, head.elements, head.elements, kept.tensor)]
        role, beside, held = self.role, self.beside, len(self.reduced)
        self.role, self.beside = Role.STEADY if self.adds else Role.FIRST, False
        super().post_backward(at)
        self.role, self.beside = role, beside
        self.reduced_beside += self.reduced[held:]  # every micro-batch does so
        self.closing = self.take()
        self.free(self.ends)

    def pre_backward(self, at: int) -> None:
        if at == self.chunks:
            self.events += self.opening
            return
        super().pre_backward(at)
        if at == self.ends and of_head(self.units[-1].parameters).trained and self.adds:
            self.by_role(self._begin_gradient)

    def _begin_gradient(self) -> None:
        """The first micro-batch's, to which others add."""
        if self.role is Role.FIRST:
            self.events.append(self._gradient(self.units[-1].reduced(self.sharding.shards), self.sharding.trained))

    def post_backward(self, at: int) -> None:
        if at < self.chunks:
            super().post_backward(at)
            return
        self.states[at].ran = True
        self.events += self.closing

    @property
    def adds(self) -> bool:
        return self.units[-1].name == OF_SEVERAL

    def _gradient(self, elements: int, dtype: str) -> Hold:
        """Of the head's weight."""
        return self._named(elements, dtype, Scope.MODULE.id(KEPT))

    @staticmethod
    def _named(elements: int, dtype: str, number: int) -> Hold:
        return Hold(number, size(elements, dtype), GRADIENTS, "gradient_of_head", (elements,), dtype)


def hooks_of(
    units: Sequence[Unit], sharding: Sharding, gradients: Sequence[Sequence[Gradient]], role: Role, *, beside: bool
) -> Explicit:
    """The hooks of one micro-batch."""
    made = ChunkedHooks if units[-1].name.startswith(CHUNKS) else Explicit
    return made(units, sharding, gradients, role, beside=beside)
