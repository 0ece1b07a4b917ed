"""What a search found as JSON, schema 1, and as CSV: bytes are integers, times seconds. ``docs/suggest.md`` has every
field."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from .. import __version__
from ..plan.plan import ResolvedPlan
from ..plan.resolve import resolve
from ..search.changes import Method
from ..search.result import Change, Counts, Found, Offer, Suggestion
from ..search.time import cost_of_step, cost_of_tokens, step_time
from .json import SCHEMA, stage_to_json
from .suggestion import Answer
from .suggestion_words import cut_words

_PARTS = (
    "compute", "recompute", "tensor_parallel", "pipeline_bubble", "pipeline_send", "data_parallel", "optimizer",
    "offload",
)  # fmt: skip

TIMES = (
    "seconds", "parts_seconds", "tokens_per_second", "mfu", "hfu", "cost_per_step", "cost_per_billion_tokens",
)  # fmt: skip


def suggestion_to_json(answer: Answer) -> dict[str, Any]:
    """What ``memplan suggest-partition --json`` prints. All but ``search.seconds`` is the same in every run."""
    found = answer.found
    best, *alternatives = found.best or (None,)
    stated = best or found.closest
    return {
        "schema": SCHEMA,
        "memplan": __version__,
        "objective": found.objective,
        "fixed": {path: list(value) if isinstance(value, tuple) else value for path, value in found.fixed.items()},
        "fits": best is not None,
        "capacity_bytes": found.capacity,
        "limit_bytes": found.limit,
        "default_headroom": found.keeps_free or None,
        "time_error": found.error,
        "equally_fast_within": found.within,
        "recommended": _or_null(best),
        "flags": answer.flags or None,
        "alternatives": [_suggestion(one) for one in alternatives],
        "front": [_suggestion(one) for one in found.front],
        "given": _or_null(found.given),
        "given_refused": str(found.given_refused) if found.given_refused is not None else None,
        "started_from": list(answer.started),
        "closest": _or_null(found.closest),
        "changes": [change_to_json(change) for change in found.changes],
        **({"ends_retries": _suggestion(found.ends_retries)} if found.ends_retries is not None else {}),
        "cuts": [_method(method, timed=best is not None and best.timed) for method in answer.methods],
        **({"frameworks": [_offer(offer) for offer in answer.offers]} if answer.offers else {}),
        "search": _search(found.counts, found.seconds),
        "warnings": [{"code": notice.code, "message": notice.message} for notice in answer.warnings(stated)],
        "assumptions": _assumptions(answer, stated),
        "written": list(answer.written),
    }


def _assumptions(answer: Answer, stated: Suggestion | None) -> list[str]:
    step = stated.step if stated is not None and stated.timed else None
    estimate = stated.estimate if stated is not None else None
    return [
        *answer.assumptions,
        *(step.assumptions if step is not None else ()),
        *(estimate.assumptions if estimate is not None else ()),
    ]


def _or_null(suggestion: Suggestion | None) -> dict[str, Any] | None:
    return None if suggestion is None else _suggestion(suggestion)


def _suggestion(one: Suggestion) -> dict[str, Any]:
    plan = resolve(one.plan)
    estimate = one.estimate
    replayed = one.device is not None or estimate is not None
    return {
        "plan": plan.model_dump(mode="json"),
        "layout": _layout(one, plan),
        "layers": [[chunk.layers for chunk in stage] for stage in one.cut],
        "requested_bytes": one.requested,
        "device_bytes": one.reading if replayed else None,
        "worst_moment": {"moment": one.worst_moment[0], "device_bytes": one.needs} if replayed else None,
        "verdict": one.judged.verdict.value,
        "retries_per_iteration": one.judged.retries_in_iteration,
        "fullest_stage": one.fullest,
        **_times(one, plan),
        "stages": None if estimate is None else [stage_to_json(stage) for stage in estimate.stages],
    }


def _times(one: Suggestion, plan: ResolvedPlan) -> dict[str, Any]:
    """All ``null`` on a GPU whose speed nobody has published."""
    if not one.timed:
        return dict.fromkeys(TIMES)
    step = step_time(resolve(one.plan)) if one.step is None else one.step
    parts = {part: getattr(step, part) for part in _PARTS}
    costs = cost_of_step(plan, step), cost_of_tokens(plan, step)
    found = one.seconds, parts, step.tokens_per_second, step.mfu, step.hfu, *costs
    return dict(zip(TIMES, found, strict=True))


def _offer(offer: Offer) -> dict[str, Any]:
    return {
        "framework": offer.framework,
        "fits": offer.best is not None,
        "recommended": _or_null(offer.best),
        "closest": _or_null(offer.closest),
        "refused": str(offer.refused) if offer.refused is not None else None,
    }


def _layout(one: Suggestion, plan: ResolvedPlan) -> dict[str, Any]:
    point = one.point
    return {
        **{name: getattr(point, name) for name in ("tp", "cp", "pp", "vpp", "dp", "zero", "mbs")},
        **({"ep": point.ep, "etp": point.etp} if plan.model.experts else {}),
        "gpus": plan.hardware.gpus,
        "recompute": point.recompute.mode,
        "recompute_layers": point.recompute.layers if point.recompute.method == "block" else None,
        **({"recompute_modules": list(point.recompute.modules)} if plan.model.experts else {}),
        "extras": [extra.label for extra in point.extras],
        "keeps_numerics": point.keeps_numerics,
    }


def change_to_json(change: Change) -> dict[str, Any]:
    """One of ``changes``."""
    return {
        "change": change.what,
        "fields": {path: list(value) if isinstance(value, tuple) else value for path, value in change.fields},
        "gained_bytes": change.gained,
        "lost_seconds": change.lost if change.suggestion.timed else None,
        "fits": change.fits,
        "requested_bytes": change.suggestion.requested,
        "device_bytes": change.suggestion.device,
        "seconds": change.suggestion.seconds if change.suggestion.timed else None,
    }


def _method(method: Method, *, timed: bool) -> dict[str, Any]:
    return {
        "cut": method.name,
        "requested_bytes": method.requested,
        "fullest_stage": method.fullest,
        "seconds": method.seconds if timed else None,
        "problem": method.problem or None,
    }


def _search(counts: Counts, seconds: float) -> dict[str, Any]:
    return {
        "total": counts.total,
        "considered": counts.considered,
        "refused": dict(sorted(counts.refused.items())),
        "too_large": counts.too_large,
        "slower": counts.slower,
        "folded": counts.folded,
        "replayed": counts.replayed,
        "seconds": seconds,
    }


# -- CSV ----------------------------------------------------------------------------------------------------

COLUMNS = (
    "kind", "tp", "cp", "pp", "vpp", "dp", "zero", "mbs", "gpus", "recompute", "recompute_layers", "extras",
    "keeps_numerics", "layers", "requested_bytes", "device_bytes", "seconds", "tokens_per_second", "mfu",
    "cost_per_step",
)  # fmt: skip


def suggestion_to_csv(found: Found) -> str:
    """A row for each layout: the recommended, the alternatives, the front, the plan as given, the closest."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for kind, one in _kinds(found):
        whole = _suggestion(one)
        row = {**whole, **whole["layout"], "kind": kind, "layers": cut_words(one.cut)}
        row["extras"] = "; ".join(extra.label for extra in one.point.extras)
        row["keeps_numerics"] = str(one.point.keeps_numerics).lower()
        writer.writerow({name: row[name] for name in COLUMNS})
    return out.getvalue()


def _kinds(found: Found) -> Iterator[tuple[str, Suggestion]]:
    for at, one in enumerate(found.best):
        yield "alternative" if at else "recommended", one
    for one in found.front:
        yield "front", one
    if found.given is not None:
        yield "given", found.given
    if found.closest is not None:
        yield "closest", found.closest
