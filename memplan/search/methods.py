"""The proposed cut beside those that a framework's own methods make, for the same layout: what each stage's memory
comes to. ``estimate --partition METHOD`` gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..estimate import fold
from ..plan.errors import PlanError
from ..plan.plan import Plan
from ..plan.resolve import resolve
from .clock import Clock
from .cuts import CUT, smallest
from .fields import UNCUT_FIELDS, changed
from .result import Suggestion
from .space import space_of
from .timing import step_time
from .works import fields_of

DEEPSPEED = ("type:transformer", "type:embed|transformer", "parameters", "uniform")
"""Methods of DeepSpeed's ``PipelineModule._partition_layers``, with the two patterns that BigScience used."""

LEAST = "least memory"
"""What the search's own cut by memory is called, where the proposed one is faster and needs more."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way to cut the recommended layout, and what comes of it."""

    name: str
    requested: int | None
    """Bytes of its fullest stage; ``None`` where the method cannot make a cut of it."""
    fullest: int | None
    seconds: float | None
    problem: str = ""
    """Why it cannot."""


def methods_of(suggestion: Suggestion) -> tuple[Method, ...]:
    """The cut of ``suggestion``, then others of its layout; empty where there is nothing to cut."""
    plan = suggestion.plan
    if len(suggestion.works) < 2:
        return ()
    proposed = Method("proposed", suggestion.requested, suggestion.fullest, suggestion.seconds)
    others = (_measured(name, plan, fields) for name, fields in _fields(suggestion))
    return (proposed, *(one for one in others if one.name != LEAST or one.requested != proposed.requested))


def _fields(suggestion: Suggestion) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Ways to cut by their name, each as fields of a plan by their paths."""
    framework = suggestion.plan.framework
    if framework == "device-map":
        yield "equal shares", {"device_map": None}
        return
    least = _least(suggestion)
    if least is not None:
        yield LEAST, least
    if framework == "megatron":
        yield "even", UNCUT_FIELDS
    elif framework == "megatron-deepspeed":
        for method in DEEPSPEED:
            yield method, {"pipeline.partition": method}


def _least(suggestion: Suggestion) -> Mapping[str, Any] | None:
    """The cut whose fullest stage needs least, if it is another one."""
    resolved = resolve(suggestion.plan)
    if resolved.framework not in CUT:
        return None
    ratios = Clock(space_of(suggestion.plan, resolved, {})).ratios(suggestion.point)
    works = smallest(resolved, ratios)
    return None if works is None or works == suggestion.works else dict(fields_of(resolved.framework, works))


def _measured(name: str, plan: Plan, fields: Mapping[str, Any]) -> Method:
    try:
        resolved = resolve(changed(plan, fields))
        peaks = [folded.peak for folded in fold(resolved)]
        return Method(name, max(peaks), peaks.index(max(peaks)), step_time(resolved).total)
    except PlanError as error:
        return Method(name, None, None, None, f"{error.field}: {error.problem}")
