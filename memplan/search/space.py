"""The joint space of layouts: which values of which fields are tried, and by what rules some are left out.

A *point* is one value of every axis. Framework by framework the axes are what a user can change without changing what
is trained: parallel sizes, ZeRO stage, micro-batch, recompute, offload, the kernel of the loss. The global batch is
kept. What changes the numbers that training computes with (8-bit states, an approximate softmax) is in the space as
well, marked, and preferred to nothing that keeps them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from ..plan.errors import PlanError
from ..plan.plan import Layout, Plan, Recompute
from ..plan.resolve import resolve

PARALLEL = ("tp", "cp", "pp", "vpp", "dp")


class Recomputing(NamedTuple):
    """How much is computed again in backward; fields as in the section ``recompute``."""

    mode: str = "none"
    method: str = "uniform"
    layers: int | None = None

    def __str__(self) -> str:
        if self.mode == "full" and self.method == "block":
            return f"full on {self.layers} layers"
        return self.mode


NO_RECOMPUTE = Recomputing()


class Extra(NamedTuple):
    """Fields that are changed together, and what a person calls that."""

    label: str
    fields: tuple[tuple[str, Any], ...]
    keeps_numerics: bool = True
    least_zero: int = 0
    """The smallest ZeRO stage that it goes with."""
    changes_passes: bool = False
    """Forward and backward take another time."""
    moves_states: bool = False
    """States or parameters are kept elsewhere than on the GPU."""


class Point(NamedTuple):
    """One value of every axis."""

    tp: int
    cp: int
    pp: int
    vpp: int
    dp: int
    zero: int
    mbs: int
    recompute: Recomputing
    extras: tuple[Extra, ...] = ()

    @property
    def keeps_numerics(self) -> bool:
        return all(extra.keeps_numerics for extra in self.extras)

    @property
    def order(self) -> tuple[object, ...]:
        """Smaller sizes and fewer changes first: what decides between equals."""
        changes = len(self.extras), tuple(extra.label for extra in self.extras)
        recompute = self.recompute.mode, self.recompute.layers or 0
        return (*changes, self.tp, self.cp, self.pp, self.vpp, -self.zero, self.mbs, *recompute)

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


@dataclass(frozen=True, slots=True)
class Space:
    """Values of each axis, and what they are values of."""

    base: Plan
    """Before defaults are filled in, so that those follow the point."""
    resolved: Plan
    gpus: int
    gbs: int
    seq: int
    tp: tuple[int, ...]
    cp: tuple[int, ...]
    pp: tuple[int, ...]
    vpp: tuple[int, ...]
    zero: tuple[int, ...]
    mbs: tuple[int, ...] | None
    """``None``: every divisor of a replica's share of the batch."""
    recompute: tuple[Recomputing, ...]
    extras: tuple[tuple[Extra, ...], ...]
    """Combinations of them; the first is none at all."""
    dp: tuple[int, ...] | None = None
    """``None``: what the other sizes leave."""
    per_operator: bool = True
    """torchtitan's selective recompute is that per operator; ``False``: as the plan has it."""
    sequence_parallel: bool | None = None
    """``None``: wherever there is tensor parallelism."""
    cut: str | None = None
    """The field that fixes what stages hold; ``None`` where the search may choose."""

    def __iter__(self) -> Iterator[Point]:
        """Every point that the framework's rules of division allow, in a fixed order."""
        for tp, cp, pp, vpp, dp, sizes in self.layouts(Counter()):
            for recompute, mbs, (zero, extras) in product(self.recompute, sizes, self.states(dp * cp)):
                yield Point(tp, cp, pp, vpp, dp, zero, mbs, recompute, extras)

    def states(self, shards: int) -> list[tuple[int, tuple[Extra, ...]]]:
        """ZeRO stages with everything beside them: what changes neither passes nor schedule."""
        return [
            (zero, extras)
            for zero, extras in product(self.zero, self.extras)
            if (shards > 1 or not zero or self.base.framework == "deepspeed")
            and all(zero >= extra.least_zero for extra in extras)
        ]

    def layouts(self, refused: Counter[str]) -> Iterator[tuple[int, int, int, int, int, tuple[int, ...]]]:
        """tp, cp, pp, vpp, dp, and the micro-batch sizes that go with them, ascending. Points that are left out are
        counted in ``refused``, by the rule."""
        combinations = len(self.zero) * len(self.recompute) * len(self.extras)
        for tp, cp, pp in product(self.tp, self.cp, self.pp):
            dp, rest = self._replicas(tp * cp * pp)
            why = self._undivided(dp, rest)
            if why:
                refused[why] += combinations * len(self.vpp)
                continue
            every = _divisors(self.gbs // dp) if self.mbs is None else self.mbs
            for vpp in self.vpp:
                sizes = []
                for mbs in every:
                    why = self._unrunnable(tp, pp, vpp, cp, dp, mbs)
                    if why:
                        refused[why] += combinations
                    else:
                        sizes.append(mbs)
                if sizes:
                    yield tp, cp, pp, vpp, dp, tuple(sizes)

    def _replicas(self, ranks: int) -> tuple[int, int]:
        """Replicas of so many ranks each, and GPUs that are left. Devices of a map are one process, which may see its
        batch multiplied by them."""
        if self.base.framework != "device-map":
            return divmod(self.gpus, ranks)
        return (self.gpus if self.base.batch.multiply_by_visible_gpus else 1), 0

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
        framework, layers = self.base.framework, self.base.model.layers
        microbatches, rest = divmod(self.gbs, dp * mbs)
        if rest:
            return "mbs x dp must divide the global batch"
        if vpp > 1 and pp == 1:
            return "virtual stages need pp above 1"
        if vpp * pp > layers + 2 * (vpp > 1):
            return "more stages than layers"
        if framework == "megatron":
            if vpp > 1 and microbatches % pp:
                return "interleaving needs micro-batches in multiples of pp"
            if cp > 1 and self.seq % (2 * cp):
                return "2 cp must divide the sequence"
            if self.sequence_parallel and tp == 1:
                return "sequence parallelism needs tp above 1"
            if tp > 1 and self.seq // cp % tp:
                return "cp x tp must divide the sequence"
        if framework == "fsdp" and pp > 1 and tp > 1:
            return "fsdp's tensor and pipeline parallelism together are not modelled"
        if framework == "fsdp" and pp > 1 and microbatches < pp:
            return "a pipeline needs as many micro-batches as stages"
        return ""

    def plan(self, point: Point, fields: Mapping[str, Any] | None = None) -> Plan:
        """``point`` as a plan before its defaults are filled in, with ``fields`` over it."""
        layout = {
            **{name: getattr(point, name) for name in ("tp", "cp", "pp", "vpp", "zero")},
            "dp": None if self.base.framework != "device-map" else 1,
        }
        if self.base.framework == "megatron":
            layout["sequence_parallel"] = point.tp > 1 if self.sequence_parallel is None else self.sequence_parallel
        changes: dict[str, dict[str, Any]] = {
            "layout": layout,
            "hardware": {"gpus": self.gpus},
            "batch": {"mbs": point.mbs, "gbs": self.gbs, "accumulation": None},
            "recompute": {
                "mode": point.recompute.mode,
                "method": point.recompute.method,
                "layers": point.recompute.layers,
                "modules": self.base.recompute.modules if point.recompute.mode == "selective" else None,
            },
            "pipeline": dict(UNCUT) if point.pp != self.base.layout.pp or point.vpp != self.base.layout.vpp else {},
        }
        if self.base.framework == "megatron" and not point.zero:
            changes["megatron"] = {"overlap_param_gather": False, "distributed_optimizer_instances": 1}
        if self.base.framework == "fsdp" and self.base.fsdp.code == "torchtitan" and self.per_operator:
            changes["fsdp"] = {"per_operator": point.recompute.mode == "selective", "recompute_every": 1}
        whole: dict[str, Any] = {}
        for path, value in [*(one for extra in point.extras for one in extra.fields), *(fields or {}).items()]:
            section, _, name = path.rpartition(".")
            if section:
                changes.setdefault(section, {})[name] = value
            else:
                whole[name] = value
        sections = {name: updated(getattr(self.base, name), values) for name, values in changes.items()}
        return self.base.model_copy(update={**sections, **whole})

    @property
    def least_zero(self) -> int:
        """The smallest ZeRO stage that there is a point of."""
        return min(self.zero)

    def alone(self, point: Point) -> Plan:
        """One replica of ``point`` on one stage, defaults filled in: what a layer's time and bytes depend on. It adds
        gradients up if ``point`` does."""
        plan = self.plan(point._replace(pp=1, vpp=1, dp=1), UNCUT_FIELDS)
        hardware = plan.hardware.model_copy(update={"gpus": None})
        batch = plan.batch.model_copy(update={"gbs": point.mbs * min(2, self.microbatches(point))})
        return resolve(plan.model_copy(update={"hardware": hardware, "batch": batch}))

    def microbatches(self, point: Point) -> int:
        """Of one replica in one step."""
        return self.gbs // (point.dp * point.mbs)


UNCUT: Mapping[str, Any] = {
    "first_layers": None, "last_layers": None, "count_embedding": False, "count_loss": False, "layout": None,
    "group": None, "partition": "type:transformer",
}  # fmt: skip
"""Fields that cut a model into stages in one particular way, taken back where the number of stages is another."""


UNCUT_FIELDS = {f"pipeline.{name}": value for name, value in UNCUT.items()}


def updated(section: Any, values: Mapping[str, Any]) -> Any:
    """``section`` with ``values``; those that are its defaults count as not set, as if nobody had said them."""
    copied = section.model_copy(update=values)
    defaults = {name for name in values if getattr(copied, name) == type(section).model_fields[name].default}
    copied.__pydantic_fields_set__.difference_update(defaults)
    return copied


def filled(base: Plan) -> Plan:
    """``base`` with its defaults filled in. Where its own layout does not run, they are those of one GPU."""
    if base.optimizer.precision_aware and base.framework == "megatron" and not base.layout.zero:
        base = base.model_copy(update={"layout": updated(base.layout, {"zero": 1})})  # its states are sharded ones
    try:
        return resolve(base)
    except PlanError:
        if base.hardware.gpus is None or base.batch.gbs is None or base.framework == "device-map":
            raise
    alone = {
        "layout": Layout(zero=max(base.layout.zero, int(base.optimizer.precision_aware))),
        "hardware": base.hardware.model_copy(update={"gpus": None}),
        "batch": base.batch.model_copy(update={"mbs": 1, "accumulation": None}),
        "pipeline": updated(base.pipeline, UNCUT),
    }
    one = resolve(base.model_copy(update=alone))
    return one.model_copy(update={"hardware": one.hardware.model_copy(update={"gpus": base.hardware.gpus})})


def space_of(base: Plan, resolved: Plan, fixed: Mapping[str, Any], gpus: int | None = None) -> Space:
    """The space around ``base``, whose default values ``resolved`` has filled in, with some fields ``fixed``."""
    assert resolved.batch.gbs is not None
    assert resolved.batch.seq is not None
    assert resolved.hardware.gpus is not None
    gpus = resolved.hardware.gpus if gpus is None else gpus
    sizes = _parallel_sizes(resolved, gpus)
    recompute = _recomputing(resolved)
    sizes = {name: _narrowed(f"layout.{name}", values, fixed) for name, values in sizes.items()}
    cuts = (path for path in sorted(fixed) if path.startswith("pipeline.") or path == "device_map")
    cut = next((path for path in cuts if path != "pipeline.schedule"), None)
    if cut is not None and cut != "device_map":
        sizes |= {"pp": (resolved.layout.pp,), "vpp": (resolved.layout.vpp,)}
    mbs = (int(fixed["batch.mbs"]),) if "batch.mbs" in fixed else None
    if any(path.startswith("recompute.") for path in fixed):
        recompute = (_of_section(base.recompute),)
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
        zero=sizes["zero"],
        mbs=mbs,
        recompute=recompute,
        extras=_extras(resolved, fixed),
        dp=(int(fixed["layout.dp"]),) if "layout.dp" in fixed else None,
        per_operator=not any(path.startswith(("recompute.", "fsdp.")) for path in fixed),
        sequence_parallel=resolved.layout.sequence_parallel if "layout.sequence_parallel" in fixed else None,
        cut=cut,
    )


def _of_section(recompute: Recompute) -> Recomputing:
    return Recomputing(recompute.mode, recompute.method, recompute.layers)


def _narrowed(path: str, values: tuple[int, ...], fixed: Mapping[str, Any]) -> tuple[int, ...]:
    if path not in fixed:
        return values
    if fixed[path] not in values:
        among = ", ".join(map(str, values[:12])) + (", …" if len(values) > 12 else "")
        raise PlanError(path, fixed[path], f"is not in the space that is searched: {among}")
    return (fixed[path],)


def _parallel_sizes(plan: Plan, gpus: int) -> dict[str, tuple[int, ...]]:
    """Values of every size in the section ``layout`` that a framework can have on so many GPUs."""
    framework, model, one = plan.framework, plan.model, (1,)
    sizes: dict[str, tuple[int, ...]] = {"tp": one, "cp": one, "pp": one, "vpp": one, "zero": (0,)}
    deep = tuple(pp for pp in _divisors(gpus) if pp <= model.layers)
    within_node = min(gpus, plan.hardware.gpus_per_node)
    divided = (model.heads, model.kv_heads, model.ffn, model.hidden)
    wide = tuple(t for t in _divisors(gpus) if t <= within_node and not any(size % t for size in divided))
    if framework in ("megatron", "megatron-deepspeed"):
        sizes |= {"tp": wide, "pp": deep, "zero": (1,) if plan.optimizer.precision_aware else (1, 0)}
    if framework == "megatron":
        longest = _powers(gpus) if plan.attention == "flash" else one
        sizes |= {"cp": tuple(cp for cp in longest if cp <= MOST_CONTEXT), "vpp": tuple(range(1, MOST_CHUNKS + 1))}
    if framework == "fsdp" and plan.fsdp.code == "torchtitan":
        whole = tuple(t for t in wide if not plan.model.vocab % t)
        sizes |= {"tp": whole, "pp": deep, "vpp": tuple(range(1, MOST_CHUNKS + 1))}
    if framework == "deepspeed":
        sizes["zero"] = (0, 1, 2, 3)
    if framework == "ddp":
        sizes["zero"] = (0, 1)
    return sizes


MOST_CONTEXT = 16
"""Context-parallel ranks: more than published runs of up to 128k tokens use."""
MOST_CHUNKS = 8
"""Virtual stages of a rank that are tried."""


def _recomputing(plan: Plan) -> tuple[Recomputing, ...]:
    """Ways to recompute that a framework has. How many layers, where that can be chosen, is found by the search."""
    none, full = NO_RECOMPUTE, Recomputing("full")
    if plan.framework == "megatron":
        return none, Recomputing("selective"), full
    if plan.framework == "megatron-deepspeed":
        return none, full
    if plan.framework == "fsdp" and plan.fsdp.code == "torchtitan":
        return none, Recomputing("selective"), full
    return none, full


def _extras(plan: Plan, fixed: Mapping[str, Any]) -> tuple[tuple[Extra, ...], ...]:
    """Every combination of one choice of each group, none of them first."""
    groups = [group for group in extras_of(plan) if not any(path in fixed for one in group for path, _ in one.fields)]
    combined = product(*[(None, *group) for group in groups])
    return tuple(tuple(extra for extra in choice if extra is not None) for choice in combined)


def extras_of(plan: Plan) -> list[tuple[Extra, ...]]:
    """Choices beside layout, batch and recompute, alternatives of one another in a group."""
    fields: tuple[tuple[str, Any], ...]
    framework, groups = plan.framework, list[tuple[Extra, ...]]()
    adam = plan.optimizer.name in ("adam", "adamw")
    if framework == "megatron" and plan.megatron.cross_entropy_fusion == "none":
        fused = "te" if plan.megatron.transformer_impl == "transformer_engine" else "native"
        groups.append((Extra("fused cross entropy", (("megatron.cross_entropy_fusion", fused),), changes_passes=True),))
    if framework == "megatron" and adam and not plan.optimizer.precision_aware and plan.precision.dtype == "bf16":
        fields = (("optimizer.precision_aware", True), ("optimizer.exp_avg", "bf16"), ("optimizer.exp_avg_sq", "bf16"))
        groups.append((Extra("Adam states in bf16", fields, keeps_numerics=False, least_zero=1),))
    if framework == "megatron-deepspeed" and plan.loss.kind == "vocab-parallel":
        fields = (("loss.kind", "adaptive-softmax"),)
        groups.append((Extra("adaptive softmax", fields, keeps_numerics=False, changes_passes=True),))
    if framework == "deepspeed" and plan.deepspeed.offload_optimizer == "none":
        groups.append((_OFFLOAD_STATES, _OFFLOAD_ALL))
    if framework == "fsdp" and not plan.fsdp.offload:
        groups.append((Extra("CPU offload", (("fsdp.offload", True),), moves_states=True),))
    if framework in ("single", "ddp", "device-map") and plan.loss.kind == "plain" and not plan.loss.logits_to_keep:
        groups.append((Extra("Liger's fused loss", (("loss.kind", "liger"),), changes_passes=True),))
    if framework not in ("megatron", "fsdp") and adam:
        fields = (("optimizer.name", "adam8bit"), ("optimizer.implementation", None))
        if framework == "megatron-deepspeed":
            fields = (*fields, ("optimizer.embeddings_32bit", False))
        groups.append((Extra("8-bit Adam", fields, keeps_numerics=False),))
    return groups


_OFFLOAD_STATES = Extra(
    "optimizer on the CPU", (("deepspeed.offload_optimizer", "cpu"),), least_zero=1, moves_states=True
)
_OFFLOAD_ALL = Extra(
    "optimizer and parameters on the CPU",
    (("deepspeed.offload_optimizer", "cpu"), ("deepspeed.offload_param", "cpu")),
    least_zero=3,
    moves_states=True,
)


def _divisors(number: int) -> tuple[int, ...]:
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return tuple(sorted({*small, *(number // one for one in small)}))


def _powers(limit: int) -> tuple[int, ...]:
    return tuple(1 << bit for bit in range(limit.bit_length()) if 1 << bit <= limit)


def nearest_counts(base: Plan, resolved: Plan, fixed: Mapping[str, Any], gpus: int) -> Sequence[int]:
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
