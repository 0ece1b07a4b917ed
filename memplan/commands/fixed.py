"""What a search keeps, which is what ``--fix`` names; and where it starts: flags of fields that it chooses itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ..plan.errors import Origin, PlanError, guessed, wrong_at
from ..plan.fields import Kind, by_flag, plan_fields
from ..plan.plan import Plan
from ..plan.read import Flags
from ..plan.spellings import OPEN

ALWAYS = frozenset(
    {
        *(f"layout.{name}" for name in ("tp", "pp", "dp", "cp", "vpp", "zero", "ep", "etp", "sequence_parallel")),
        "batch.mbs",
        *(f"recompute.{name}" for name in ("mode", "method", "layers", "modules")),
        *(f"pipeline.{name}" for name in ("partition", "first_layers", "last_layers", "layout", "group")),
        *(f"pipeline.{name}" for name in ("count_embedding", "count_loss")),
        "device_map",
    }
)
"""Fields that every search chooses values of, by their paths."""
AXES = ALWAYS | frozenset(
    {
        *(f"optimizer.{name}" for name in ("name", "implementation", "embeddings_32bit")),
        *(f"optimizer.{name}" for name in ("precision_aware", "exp_avg", "exp_avg_sq")),
        "loss.kind",
        "deepspeed.offload_optimizer",
        "deepspeed.offload_param",
        "fsdp.offload",
        "fsdp.replicas",
        "fsdp.reshard_after_forward",
        "megatron.cross_entropy_fusion",
        "megatron.attention_mask_in_dataloader",
    }
)
"""Those, and fields that a search chooses values of where the plan leaves it others."""

FIX = "--fix"
_ORIGIN = Origin(FIX)


def fixes_of(assignments: Sequence[str]) -> dict[str, str | None]:
    """``tp=4,pp`` as flags by name: with a value, or ``None`` where the plan's own is meant."""
    fixes: dict[str, str | None] = {}
    for assignment in assignments:
        for name, value in _pairs(assignment):
            if name in fixes and fixes[name] != value:
                raise wrong_at(_ORIGIN, f"{name} is there twice, with different values")
            fixes[name] = value
    return fixes


def _pairs(assignment: str) -> list[tuple[str, str | None]]:
    """A comma divides two of them, unless it stands in a list: what follows it is then no field's name."""
    from ..plan.near_misses import called

    pairs: list[tuple[str, str | None]] = []
    for part in assignment.split(","):
        name, equals, value = part.partition("=")
        name = called(name)
        if pairs and not equals and name not in by_flag() and _is_list(pairs[-1][0]):
            before, text = pairs.pop()
            pairs.append((before, f"{text},{part}"))
            continue
        pairs.append((_known(name, part), value.strip() if equals else None))
        if equals and not value.strip():
            raise wrong_at(_ORIGIN, f"{name} needs a value, as --fix {name}=A, or none: --fix {name}")
    return pairs


def _is_list(name: str) -> bool:
    return by_flag()[name].kind in (Kind.INTEGERS, Kind.NAMES, Kind.PARTITION, Kind.DEVICE_MAP)


def _known(name: str, part: str) -> str:
    if name in by_flag():
        return name
    from ..plan.near_misses import likely

    axes = [plan_fields()[path].flag for path in sorted(AXES)]
    guess = likely(f"--{name}", axes) or likely(f"--{name}", [field.flag for field in by_flag().values()])
    guess = guess.removeprefix("--") if guess else None
    problem = f"{part.strip() or 'an empty name'} names no field; names are those of the flags, as tp=4"
    raise wrong_at(_ORIGIN, guessed(problem, guess))


def with_fixes(flags: Flags, fixes: Mapping[str, str | None]) -> Flags:
    """``flags`` with the values of ``fixes`` among them."""
    for name, value in fixes.items():
        if value is not None and name in flags and flags[name] != value:
            raise wrong_at(_ORIGIN, f"{name}={value} contradicts --{name} {flags[name]}; give one of them")
    return {**flags, **{name: value for name, value in fixes.items() if value is not None}}


def without_open(flags: Flags) -> Flags:
    """``flags`` without those that leave to the search what it chooses: ``--mbs auto``."""
    return {name: value for name, value in flags.items() if value not in OPEN or by_flag()[name].path not in AXES}


def starts(flags: Flags, fixes: Mapping[str, str | None], chosen: Collection[str]) -> tuple[str, ...]:
    """Flags whose values a search may change: ``mbs 8``; ``chosen`` are fields that it chose beside ``ALWAYS``."""
    free = [name for name in flags if name not in fixes and by_flag()[name].path in {*ALWAYS, *chosen}]
    return tuple(f"{name} {flags[name]}" for name in free)


def kept_beside(flags: Flags, fixes: Mapping[str, str | None]) -> Iterator[str]:
    """Paths of fields whose values only ``fixes`` says: ``memplan estimate`` has no ``--fix``, but their flags."""
    for name, value in fixes.items():
        if value is not None and name not in flags:
            yield by_flag()[name].path


def fixed_values(plan: Plan, fixes: Mapping[str, str | None]) -> dict[str, Any]:
    """Values of the fields that a search keeps, by path: as in ``plan``, or, where that leaves them open, their
    defaults."""
    fixed: dict[str, Any] = {}
    resolved = _resolved(plan) if any(value is None for value in fixes.values()) else None
    for name in fixes:
        path = by_flag()[name].path
        if path not in AXES:
            continue
        value = plan.at(path)
        if value is None and resolved is not None:
            value = resolved.at(path)
        if value is None:
            raise wrong_at(_ORIGIN, f"{name}: the plan does not say what it is; give a value, as --fix {name}=A")
        if value is not None:
            fixed[path] = value
    return fixed


def _resolved(plan: Plan) -> Plan | None:
    """``None`` where the plan does not run as it is."""
    from ..plan.resolve import resolve

    try:
        return resolve(plan)
    except PlanError:
        return None


def located(error: PlanError, fixes: Mapping[str, str | None]) -> PlanError:
    """``error`` with ``--fix tp`` where it says ``--tp`` and nobody gave that flag."""
    named = {f"--{name}": name for name, value in fixes.items() if value is not None}

    def renamed(one: PlanError) -> PlanError:
        name = named.get(one.origin.source) if one.origin is not None else None
        return one if name is None else one.but(origin=Origin(f"{FIX} {name}"))

    return error.each(renamed)
