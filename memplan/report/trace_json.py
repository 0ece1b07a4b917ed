"""A trace beside the estimate as JSON, schema 1: integers in bytes, ``null`` where nothing is estimated."""

from __future__ import annotations

from typing import Any

from .. import __version__
from ..tape import Category, Excursion
from ..trace.comparison import Comparison
from ..trace.planned import Planned
from ..trace.traced import Traced
from .json import SCHEMA


def trace_to_json(asked: Planned, traced: Traced, comparison: Comparison) -> dict[str, Any]:
    """What ``memplan trace --json`` prints."""
    return {
        "schema": SCHEMA,
        "memplan": __version__,
        "torch": traced.torch,
        "transformers": traced.transformers or None,
        "model": asked.name,
        "plan": asked.plan.model_dump(mode="json") if asked.plan is not None else None,
        "no_recipe": asked.reason or None,
        "job": asked.job.to_json(),
        "parameters": traced.outline.parameters,
        "events": len(traced.recording.events),
        "substitutions": list(traced.substitutions),
        "breakdown": breakdown(traced),
        "points": [
            {"name": one.name, "traced_bytes": one.traced, "estimated_bytes": one.estimated}
            for one in comparison.points
        ],
        "modules": [
            {
                "module": row.entry,
                "phase": row.phase,
                "microbatch": row.microbatch,
                "traced": _excursion(row.traced),
                "estimated": _excursion(row.estimated) if row.estimated is not None else None,
            }
            for row in comparison.rows
        ],
    }


def breakdown(traced: Traced) -> dict[str, int]:
    """What is held at the peak of the whole step, by category."""
    peak = traced.whole.peak_by
    return {category.key: peak[category] for category in Category if peak[category]}


def _excursion(excursion: Excursion) -> dict[str, int]:
    return {"net_bytes": excursion.net, "peak_bytes": excursion.peak}
