"""What a layout of a framework whose cut nobody chooses needs at least: bytes of tensors, before any tape is built.

At some moment of an iteration a rank holds what it keeps between iterations, and beside it

* what earlier micro-batches left, and what one micro-batch takes at its peak, hooks left out: these only hold more; or
* its gradients, and what the optimizer's step takes.

The larger sum is a bound from below (``tests/search/test_floors.py``). The first part of either does not depend on the
micro-batch and the second not on how states are kept, so that few of them are folded for many layouts; a micro-batch of
many sequences is not folded at all (``parts.Growing``).
"""

from __future__ import annotations

from collections.abc import Callable

from ...plan.errors import PlanError
from ...plan.plan import Plan
from ...plan.resolve import resolve
from ...plan.traced_spec import TracedSpec
from ..point import NO_RECOMPUTE, Extra, Point
from ..space import Space
from . import sharded, staged, whole, zero
from .parts import NONE, Growing, Kept

TENSORS = 64
"""More than are alive at once of one layer."""

KEPT: dict[str, Callable[[Plan], Kept]] = {
    "single": whole.kept, "ddp": whole.kept, "device-map": whole.kept, "deepspeed": zero.kept, "fsdp": sharded.kept
}  # fmt: skip
PASSING: dict[str, Callable[[Plan, bool], tuple[int, ...]]] = {
    "single": whole.passing, "ddp": whole.passing, "device-map": whole.passing, "deepspeed": zero.passing,
    "fsdp": sharded.passing,
}  # fmt: skip


class Floors:
    """Of the points of one space."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.framework = space.base.framework
        self._kept: dict[object, Kept] = {}
        self._passing: dict[object, Growing] = {}
        self._saved: dict[object, staged.Saved] = {}
        self._ranks: dict[object, tuple[staged.Rank, ...]] = {}

    def __call__(self, point: Point) -> int:
        """Bytes that the fullest rank requests at least; 0 where nothing is known."""
        if self.framework not in KEPT or isinstance(self.space.base.model, TracedSpec):
            return 0
        try:
            return self._least(point)
        except PlanError:
            return 0  # the layout itself is refused when it is built, or another one that stands for it

    def _least(self, point: Point) -> int:
        if self.framework == "fsdp" and point.pp > 1:
            ranks = self._ranks_of(point)
            return staged.least(resolve(self.space.plan(point)), ranks, self._saved_of(point))
        accumulates = self.space.microbatches(point) > 1
        kept, passing = self._kept_of(point), self._passing_of(point, accumulates).at(point.mbs)
        held = kept.static + passing + (kept.gradients if accumulates else 0)
        total = max(held, kept.static + kept.step)
        return -(-total // self.space.gpus) if self.framework == "device-map" else total

    def _kept_of(self, point: Point) -> Kept:
        extras = tuple(extra for extra in point.extras if not extra.changes_passes)
        key = (point.tp, point.dp, point.zero, extras)
        if key not in self._kept:
            self._kept[key] = NONE
            alone = point._replace(mbs=1, recompute=NO_RECOMPUTE, extras=extras)
            self._kept[key] = KEPT[self.framework](self._plan(alone, 1, False))
        return self._kept[key]

    def _passing_of(self, point: Point, accumulates: bool) -> Growing:
        extras = tuple(extra for extra in point.extras if extra.changes_passes or _regroups(extra))
        zero = point.zero if self.framework == "deepspeed" else self.space.least_zero
        key = (point.tp, point.dp, zero, point.recompute, extras, accumulates)
        if key not in self._passing:
            alone = point._replace(zero=zero, extras=extras)
            self._passing[key] = Growing(
                lambda sequences: PASSING[self.framework](self._plan(alone, sequences, accumulates), accumulates),
                TENSORS * (self.space.base.model.layers + 4),
            )
        return self._passing[key]

    def _ranks_of(self, point: Point) -> tuple[staged.Rank, ...]:
        key = (point.tp, point.pp, point.vpp, point.dp, point.extras)
        if key not in self._ranks:
            self._ranks[key] = staged.ranks_of(resolve(self.space.plan(point)))
        return self._ranks[key]

    def _saved_of(self, point: Point) -> staged.Saved:
        key = (point.tp, point.recompute)
        if key not in self._saved:
            plan = resolve(self.space.plan(point))
            alone = point._replace(pp=1, vpp=1, dp=self.space.gpus // point.tp)
            self._saved[key] = staged.saved(plan, lambda sequences: self._plan(alone, sequences, False))
        return self._saved[key]

    def _plan(self, point: Point, sequences: int, accumulates: bool) -> Plan:
        """``point`` with so many sequences in a micro-batch and one or two of those; a device map is of one device."""
        fields = None
        if self.framework == "device-map":
            fields = {"device_map": {0: tuple(range(self.space.base.model.layers))}}
        plan = self.space.plan(point, fields)
        gbs = sequences * point.dp * (2 if accumulates else 1)
        batch = plan.batch.model_copy(update={"mbs": sequences, "gbs": gbs})
        return resolve(plan.model_copy(update={"batch": batch}))


def _regroups(extra: Extra) -> bool:
    """Shards and what is summed between their groups are gathered and held in passes."""
    return any(path == "fsdp.replicas" for path, _ in extra.fields)
