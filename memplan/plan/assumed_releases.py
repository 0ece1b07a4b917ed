"""The transformers beside a release of trl that is named alone: the newest of its time, not of today."""

from __future__ import annotations

from ..families import family
from .notes import RELEASE_ASSUMED, Note
from .plan import Plan
from .releases import LIBRARIES, MASKS, Version, shown, transformers_of
from .traced_spec import TracedSpec


def assumed(plan: Plan) -> Version | None:
    """That release; ``None`` where the newest runs, another one is named, or the model's layers are known of the newest
    alone. A model is not run by one that is older than its layers."""
    trl = plan.versions.get("trl")
    if trl is None or "transformers" in plan.versions or isinstance(plan.model, TracedSpec):
        return None
    own, found = family(plan.model.family), transformers_of(trl)
    if found is None or own.since >= LIBRARIES["transformers"].newest:
        return None
    first, until = own.not_followed or ((0,), (0,))
    found = max(found, own.since, own.alone_before, MASKS if own.no_flash else ())
    return until if first <= found < until else found


def with_assumed(plan: Plan) -> Plan:
    found = assumed(plan)
    return (
        plan if found is None else plan.model_copy(update={"versions": plan.versions | {"transformers": shown(found)}})
    )


def notes_of_releases(plan: Plan) -> tuple[Note, ...]:
    """What is said of it, of ``plan`` as it was read."""
    found, trl = assumed(plan), plan.versions.get("trl")
    if found is None:
        return ()
    why = f"the newest when trl {trl} came out, or the oldest whose layers are followed"
    message = f"transformers {shown(found)} is assumed, {why}"
    return (Note(RELEASE_ASSUMED, f"{message}; another one is --versions trl={trl},transformers=X.Y"),)
