"""The plans that one command estimates: several files, several values of a field, or both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from ..plan.errors import ABSENT, Origin, PlanError
from ..plan.fields import Kind, by_flag
from ..plan.read import COMMAND_LINE, Flags, ReadPlan, Source, build_plan, load_source

MOST_VARIANTS = 64
"""Estimates that one table can hold."""


def read_variants(
    source: str | None,
    flags: Flags,
    compare: Sequence[str],
    vary: Sequence[str],
    load: Callable[[str | None], Source] = load_source,
) -> dict[str, ReadPlan]:
    """Every combination of the plans and of the values to vary, by the name that tells it apart.

    ``load`` reads a plan from where ``source`` or ``compare`` say it is.
    """
    if [source, *compare].count("-") > 1:
        raise PlanError("", ABSENT, "can be read only once, as one of the plans", origin=Origin("standard input"))
    choices = [_values(assignment) for assignment in vary]
    combinations: list[dict[str, str]] = [dict(combination) for combination in product(*choices)]
    sources = _named_sources(source, compare, flags)
    if len(combinations) * len(sources) > MOST_VARIANTS:
        problem = f"makes {len(combinations) * len(sources)} variants; at most {MOST_VARIANTS} fit side by side"
        raise PlanError("", ABSENT, problem, origin=Origin("--vary"))
    plans: dict[str, ReadPlan] = {}
    for source_name, place in sources.items():
        loaded = load(place)
        for values in combinations:
            changes = " ".join(f"{name}={value}" for name, value in values.items())
            name = " ".join(part for part in (source_name if len(sources) > 1 else "", changes) if part)
            plans[name or source_name] = build_plan(loaded, flags, values, traced=True)
    return plans


def _named_sources(source: str | None, compare: Sequence[str], flags: Flags) -> dict[str, str | None]:
    """Where plans are read, by a short name; the plan that is only flags is left out when others are compared."""
    places = [source] if source is not None or not compare or "model" in flags else []
    named: dict[str, str | None] = {}
    for place in [*places, *compare]:
        name = "flags" if place is None else place
        if name in named:
            raise PlanError(
                "plan", name, "is there twice; compare different plans, or --vary a field", origin=COMMAND_LINE
            )
        named[name] = place
    return named


def _values(assignment: str) -> list[tuple[str, str]]:
    """``optimizer=adamw,adam8bit`` as pairs of the flag's name and a value."""
    name, equals, values = assignment.partition("=")
    name = name.strip().removeprefix("--")
    field = by_flag().get(name)
    origin = Origin("--vary")
    if field is None:
        problem = f"{name!r} is not a field that can vary; names are those of the flags, as optimizer or tp"
        raise PlanError(name, ABSENT, problem, origin=origin, known=by_flag())
    lists = field.kind in (Kind.INTEGERS, Kind.NAMES, Kind.PARTITION, Kind.DEVICE_MAP)
    parts = [part.strip() for part in values.split(";" if lists and ";" in values else ",")]
    if lists and ";" not in values and field.kind is not Kind.PARTITION:
        parts = [values]
    if not equals or not all(parts):
        problem = f"needs values, as --vary {name}=A,B"
        raise PlanError(name, ABSENT, problem, origin=origin)
    return [(name, part) for part in dict.fromkeys(parts)]
