"""The joint space of layouts: which values of which fields are tried, and by what rules some are left out.

A *point* is one value of every axis. Framework by framework the axes are what a user can change without changing what
is trained: parallel sizes, ZeRO stage, micro-batch, recompute, offload, the kernel of the loss. The global batch is
kept. What changes the numbers that training computes with (8-bit states, an approximate softmax) is in the space as
well, marked, and preferred to nothing that keeps them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from itertools import product
from math import lcm
from typing import Any

from ..frameworks import framework
from ..frameworks.base import Framework
from ..plan.errors import PlanError
from ..plan.plan import Layout, Plan, ResolvedPlan
from ..plan.resolve import resolve
from ..plan.section import MOST_CHUNKS, MOST_STAGES
from ..values import NamedTuple, dataclass
from .cuts import StageLayers, norm_behind_layers
from .framework import FrameworkSearch, divisors
from .point import UNCUT, UNCUT_FIELDS, Extra, Point, Recomputing, changed, updated


class Sizes(NamedTuple):
    """Of a layout, as in ``Point``."""

    tp: int
    cp: int
    pp: int
    vpp: int
    dp: int
    ep: int
    etp: int


@dataclass(frozen=True, slots=True)
class Space:
    """Values of each axis, and what they are values of."""

    base: Plan
    """Before defaults are filled in, so that those follow the point."""
    resolved: ResolvedPlan
    gpus: int
    gbs: int
    seq: int
    tp: tuple[int, ...]
    cp: tuple[int, ...]
    pp: tuple[int, ...]
    vpp: tuple[int, ...]
    ep: tuple[int, ...]
    etp: tuple[int, ...]
    zero: tuple[int, ...]
    mbs: tuple[int, ...] | None
    """``None``: every divisor of a replica's share of the batch."""
    recompute: tuple[Recomputing, ...]
    extras: tuple[tuple[Extra, ...], ...]
    """Combinations of them; the first is no more than what all have (``FrameworkSearch.free``)."""
    dp: tuple[int, ...] | None = None
    """``None``: what the other sizes leave."""
    per_operator: bool = True
    """torchtitan's selective recompute is that per operator; ``False``: as the plan has it."""
    sequence_parallel: bool | None = None
    """``None``: wherever there is tensor parallelism."""
    cut: str | None = None
    """The field that fixes what stages hold; ``None`` where the search may choose."""
    _alone: dict[object, ResolvedPlan] = field(default_factory=dict, compare=False, repr=False)
    """``alone``, by what decides it."""

    @property
    def framework(self) -> Framework:
        return framework(self.base.framework)

    @property
    def search(self) -> FrameworkSearch:
        """The framework, as a search of this model sees it."""
        return self.framework.search.of(self.base)

    @property
    def chosen_beside_layout(self) -> frozenset[str]:
        """Fields beside layout, batch, recompute and cut that layouts have other values of, by their paths."""
        return frozenset(path for extras in self.extras for extra in extras for path, _ in extra.fields)

    def placed(self, cut: StageLayers) -> StageLayers:
        """``cut`` with the final norm where the model has it."""
        return norm_behind_layers(cut) if self.base.model.mtp_layers else cut

    @property
    def first(self) -> int:
        """Layers with an MLP that come before those with experts."""
        return len(self.base.model.dense_layers) if self.base.model.experts else 0

    def __iter__(self) -> Iterator[Point]:
        """Every point that the framework's rules of division allow, in a fixed order."""
        for layout, sizes in self.layouts(Counter()):
            shards = layout.dp * layout.cp
            for recompute, mbs, (zero, extras) in product(self.recompute, sizes, self.states(shards, layout.pp)):
                yield Point(*layout, zero, mbs, recompute, extras)

    def states(self, shards: int, pp: int = 1) -> list[tuple[int, tuple[Extra, ...]]]:
        """ZeRO stages with everything beside them: what changes neither passes nor schedule. Groups of replicas are not
        tried beside a pipeline."""
        return [
            (zero, extras)
            for zero, extras in product(self.zero, self.extras)
            if (shards > 1 or not zero or self.search.zero_of_one_rank)
            and all(zero >= extra.least_zero for extra in extras)
            and all(extra.groups == 1 or (pp == 1 and makes_groups(shards, extra.groups)) for extra in extras)
        ]

    def layouts(self, refused: Counter[str]) -> Iterator[tuple[Sizes, tuple[int, ...]]]:
        """Sizes of a layout, and the micro-batch sizes that go with them, ascending. Points that are left out are
        counted in ``refused``, by the rule."""
        for tp, cp, pp in product(self.tp, self.cp, self.pp):
            extras = sum(pp == 1 or all(one.groups == 1 for one in extras) for extras in self.extras)
            each = len(self.zero) * len(self.recompute) * extras
            combinations = each * len(self.ep) * len(self.etp)
            dp, rest = self.search.replicas(self, tp * cp * pp)
            why = self._undivided(dp, rest)
            if why:
                refused[why] += combinations * len(self.vpp)
                continue
            folded = list(self._folded(tp, tp * cp * dp))
            if not folded:
                refused["ep x etp must divide tp x cp x dp"] += combinations * len(self.vpp)
                continue
            combinations = each * len(folded)
            every = divisors(self.gbs // dp) if self.mbs is None else self.mbs
            for vpp in self.vpp:
                sizes = []
                for mbs in every:
                    why = self._unrunnable(tp, pp, vpp, cp, dp, mbs)
                    if why:
                        refused[why] += combinations
                    else:
                        sizes.append(mbs)
                for ep, etp in folded if sizes else ():
                    yield Sizes(tp, cp, pp, vpp, dp, ep, etp), tuple(sizes)

    def _folded(self, tp: int, ranks: int) -> Iterator[tuple[int, int]]:
        """Expert-parallel and expert-tensor-parallel sizes on so many ranks of a stage."""
        for ep, etp in product(self.ep, self.etp):
            if ranks % (ep * etp) == 0 and (len(self.etp) == 1 or self.search.divides_experts(tp, ep, etp)):
                yield ep, etp

    def _undivided(self, dp: int, rest: int) -> str:
        if rest:
            return f"tp x cp x pp must divide the {self.gpus:,} GPUs"
        if self.dp is not None and dp not in self.dp:
            return f"no tp x cp x pp leaves dp = {self.dp[0]}"
        if self.gbs % dp:
            return f"dp must divide the global batch of {self.gbs:,}"
        return ""

    def _unrunnable(self, tp: int, pp: int, vpp: int, cp: int, dp: int, mbs: int) -> str:
        """Why the framework would not start; empty where it would."""
        microbatches, rest = divmod(self.gbs, dp * mbs)
        if rest:
            return "mbs x dp must divide the global batch"
        if vpp > 1 and pp == 1:
            return "virtual stages need pp above 1"
        if vpp * pp > self.base.model.layers + 2 * (vpp > 1):
            return "more stages than layers"
        if vpp > 1 and vpp * pp > MOST_CHUNKS:
            return f"more virtual stages than {MOST_CHUNKS}"
        return self.search.unrunnable(self, tp, cp, pp, vpp, microbatches)

    def plan(self, point: Point, fields: Mapping[str, Any] | None = None) -> Plan:
        """``point`` as a plan before its defaults are filled in, with ``fields`` over it."""
        base, recompute = self.base, point.recompute
        changes: dict[str, Any] = {f"layout.{name}": getattr(point, name) for name in ("tp", "cp", "pp", "vpp", "zero")}
        changes |= {
            "layout.dp": None,
            "hardware.gpus": self.gpus,
            "batch.mbs": point.mbs,
            "batch.gbs": self.gbs,
            "batch.accumulation": None,
            "recompute.mode": recompute.mode,
            "recompute.method": recompute.method,
            "recompute.layers": recompute.layers,
            "recompute.modules": recompute.modules or base.recompute.modules,
        }
        if recompute.mode != "selective":
            changes["recompute.modules"] = None
        if point.pp != base.layout.pp or point.vpp != base.layout.vpp:
            changes |= UNCUT_FIELDS
        changes |= self.search.fields(self, point)
        for extra in point.extras:
            changes |= dict(extra.fields)
        return changed(base, changes | dict(fields or {}))

    @property
    def least_zero(self) -> int:
        """The smallest ZeRO stage that there is a point of."""
        return min(self.zero)

    def alone(self, point: Point) -> ResolvedPlan:
        """As few replicas of ``point`` as hold its experts, on one stage, defaults filled in: what a layer's time and
        bytes depend on. They add gradients up if ``point`` does."""
        dp = lcm(point.ep * point.etp, point.tp * point.cp) // (point.tp * point.cp)
        one, count = point._replace(pp=1, vpp=1, dp=dp), min(2, self.microbatches(point))
        known = self._alone.get((one, count))
        if known is None:
            plan = self.plan(one, {**UNCUT_FIELDS, "layout.dp": dp})
            hardware = plan.hardware.model_copy(update={"gpus": None})
            batch = plan.batch.model_copy(update={"gbs": point.mbs * dp * count})
            resolved = resolve(plan.model_copy(update={"hardware": hardware, "batch": batch}))
            known = self._alone[one, count] = resolved
        return known

    def microbatches(self, point: Point) -> int:
        """Of one replica in one step."""
        return self.gbs // (point.dp * point.mbs)


def filled(base: Plan) -> ResolvedPlan:
    """``base`` with its defaults filled in. Where its own layout does not run, they are those of one GPU."""
    own = framework(base.framework)
    base = own.search.completed(base)
    try:
        return resolve(base)
    except PlanError:
        if base.hardware.gpus is None or base.batch.gbs is None or own.supports.several_gpus_of_a_process:
            raise
    sharded = base.optimizer.precision_aware or base.precision.fp8_parameters
    alone = {
        "layout": Layout(zero=max(base.layout.zero, int(sharded))),
        "hardware": base.hardware.model_copy(update={"gpus": None}),
        "batch": base.batch.model_copy(update={"mbs": 1, "accumulation": None}),
        "pipeline": updated(base.pipeline, UNCUT),
    }
    one = resolve(base.model_copy(update=alone))
    return one.model_copy(update={"hardware": one.hardware.model_copy(update={"gpus": base.hardware.gpus})})


def space_of(base: Plan, resolved: ResolvedPlan, fixed: Mapping[str, Any], gpus: int | None = None) -> Space:
    """The space around ``base``, whose default values ``resolved`` has filled in, with some fields ``fixed``."""
    gpus = resolved.hardware.gpus if gpus is None else gpus
    search = framework(resolved.framework).search
    sizes, recompute = search.parallel_sizes(resolved, gpus), search.recomputing(resolved)
    sizes["pp"] = tuple([pp for pp in sizes["pp"] if pp <= MOST_STAGES])
    sizes = {name: _narrowed(f"layout.{name}", values, fixed) for name, values in sizes.items()}
    cuts = (path for path in sorted(fixed) if path.startswith("pipeline.") or path == "device_map")
    cut = next((path for path in cuts if path != "pipeline.schedule"), None)
    if cut is not None and cut != "device_map":
        sizes |= {"pp": (resolved.layout.pp,), "vpp": (resolved.layout.vpp,)}
    mbs = (int(fixed["batch.mbs"]),) if "batch.mbs" in fixed else None
    if any(path.startswith("recompute.") for path in fixed):
        given = base.recompute
        recompute = (Recomputing(given.mode, given.method, given.layers, given.modules or ()),)
    return Space(
        base=base,
        resolved=resolved,
        gpus=gpus,
        gbs=resolved.batch.gbs,
        seq=resolved.batch.seq,
        tp=sizes["tp"],
        cp=sizes["cp"],
        pp=sizes["pp"],
        vpp=sizes["vpp"],
        ep=sizes["ep"],
        etp=sizes["etp"],
        zero=sizes["zero"],
        mbs=mbs,
        recompute=recompute,
        extras=_combined(search.free(resolved), search.extras(resolved), fixed),
        dp=(int(fixed["layout.dp"]),) if "layout.dp" in fixed else None,
        per_operator=not any(path.startswith(("recompute.", "fsdp.per_operator", "fsdp.recompute")) for path in fixed),
        sequence_parallel=resolved.layout.sequence_parallel if "layout.sequence_parallel" in fixed else None,
        cut=cut,
    )


def _combined(
    always: Sequence[Extra], groups: Sequence[tuple[Extra, ...]], fixed: Mapping[str, Any]
) -> tuple[tuple[Extra, ...], ...]:
    """``always``, with every combination of one choice of each group, none of them first."""

    def may_change(one: Extra) -> bool:
        return not any(path in fixed for path, _ in one.fields)

    taken = tuple(filter(may_change, always))
    free = [group for group in groups if group and all(map(may_change, group))]
    combined = product(*[(None, *group) for group in free])
    return tuple((*taken, *(extra for extra in choice if extra is not None)) for choice in combined)


def makes_groups(shards: int, count: int) -> bool:
    """So many replicas are so many groups of several."""
    return shards > count and shards % count == 0


def _narrowed(path: str, values: tuple[int, ...], fixed: Mapping[str, Any]) -> tuple[int, ...]:
    if path not in fixed:
        return values
    if fixed[path] not in values:
        among = ", ".join(map(str, values[:12])) + (", …" if len(values) > 12 else "")
        raise PlanError(path, fixed[path], f"is not one of {among}, the values that are searched")
    return (fixed[path],)


def nearest_counts(base: Plan, resolved: ResolvedPlan, fixed: Mapping[str, Any], gpus: int) -> Sequence[int]:
    """Numbers of GPUs around ``gpus`` for which the space has a point: the next below, and the next above."""

    def has_points(count: int) -> bool:
        try:
            return next(iter(space_of(base, resolved, fixed, count)), None) is not None
        except PlanError:
            return False

    below = next((count for count in range(gpus - 1, max(0, gpus - FAR), -1) if has_points(count)), None)
    above = next((count for count in range(gpus + 1, gpus + FAR) if has_points(count)), None)
    return [count for count in (below, above) if count is not None]


FAR = 4096
"""How far around a number of GPUs others are looked for."""
