"""An estimate as JSON, schema 1: integers in bytes, ``null`` for what cannot be derived. Others build on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..plan.errors import PlanError
from ..plan.plan import Plan
from ..result import Estimate, Failure, StageEstimate, WayOut
from ..tape.events import Category

SCHEMA = 1
MOMENTS = ("initialisation", "steady", "evaluation", "checkpoint", "first_iteration_device")


def to_json(estimate: Estimate) -> dict[str, Any]:
    """What ``memplan estimate --json`` prints."""
    ways = {"ways_out": [way_out_to_json(way) for way in estimate.ways_out]} if estimate.judged.verdict.is_short else {}
    return {"schema": SCHEMA, "memplan": __version__, **_estimate(estimate), **ways}


def comparison_to_json(names: Sequence[str], variants: Sequence[Estimate | PlanError]) -> dict[str, Any]:
    """What ``--compare`` and ``--vary`` print with ``--json``: in order; the first that is answered is the base."""
    return {"schema": SCHEMA, "memplan": __version__, "variants": list(map(_variant, names, variants))}


def _variant(name: str, variant: Estimate | PlanError) -> dict[str, Any]:
    if isinstance(variant, PlanError):
        return {"name": name, "refused": str(variant), "fits": None, "verdict": None}
    return {"name": name, **_estimate(variant)}


def to_csv(names: Sequence[str], estimates: Sequence[Estimate]) -> str:
    """What ``memplan estimate --csv`` prints: a row for each stage of each variant. Sizes in bytes, empty where one is
    not known."""
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for at, (name, estimate) in enumerate(zip(names, estimates, strict=True)):
        for place, stage in enumerate(estimate.stages):
            row = {"variant": name, "capacity_bytes": estimate.capacity, **_flat(stage_to_json(stage))}
            if not at and not place:
                writer.writerow(row)
            writer.writerow(row.values())
    return out.getvalue()


def _flat(stage: dict[str, Any]) -> dict[str, Any]:
    """What is in the objects of a stage beside what is not: ``breakdown.activations``; lists with blanks between."""
    row: dict[str, Any] = {}
    for key, value in stage.items():
        if isinstance(value, dict):
            row.update({f"{key}.{name}": one for name, one in value.items()})
        else:
            row[key] = " ".join(map(str, value)) if isinstance(value, list) else value
    return row


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {
        "plan": Plan.__pydantic_serializer__.to_python(estimate.plan, mode="json"),  # the one that read the plan
        "fits": estimate.fits,
        "verdict": estimate.judged.verdict.value,
        "retries_per_iteration": estimate.judged.retries_in_iteration,
        "does_not_fit": [failure_to_json(stage.stage, failure) for stage, failure in estimate.failures],
        "capacity_bytes": estimate.capacity,
        "headroom_bytes": estimate.headroom,
        "peak_bytes": estimate.peak,
        "peak_stage": estimate.peak_stage,
        "stages": [stage_to_json(stage) for stage in estimate.stages],
        "warnings": [{"code": notice.code, "message": notice.message} for notice in estimate.warnings],
        "assumptions": list(estimate.assumptions),
    }


def way_out_to_json(way: WayOut) -> dict[str, Any]:
    """One of ``ways_out``."""
    return {
        "change": way.what,
        "fields": {path: list(value) if isinstance(value, tuple) else value for path, value in way.fields},
        "flags": way.flags,
        "fits": way.fits,
        "verdict": way.judged.verdict.value,
        "retries_per_iteration": way.judged.retries_in_iteration,
        "gained_bytes": way.gained,
        "peak_bytes": way.needs,
        "slower": way.slower,
        "costs": way.costs or None,
    }


def failure_to_json(stage: int, failure: Failure) -> dict[str, Any]:
    """One of ``does_not_fit``; ``null`` where only a moment's sum is known."""
    return {
        "stage": stage,
        "moment": failure.moment,
        "request_bytes": failure.request or None,
        "tensor": failure.tensor or None,
        "phase": failure.phase or None,
        "module": failure.module or None,
        "microbatch": failure.microbatch,
        "iteration": failure.iteration or None,
    }


def stage_to_json(stage: StageEstimate) -> dict[str, Any]:
    """One of ``stages``."""
    peak, beyond = stage.peak, stage.beyond
    return {
        "stage": stage.stage,
        "ranks": list(stage.ranks),
        "modules": list(stage.modules),
        "parameters": stage.parameters,
        "requested_bytes": stage.requested,
        "allocated_bytes": stage.allocated,
        "reserved_bytes": stage.reserved,
        "device_bytes": stage.device,
        "device_range_bytes": None if stage.device_range is None else list(stage.device_range),
        "device_reading_range_bytes": None if stage.reading_range is None else list(stage.reading_range),
        "verdict": stage.judged.verdict.value,
        "retries_per_iteration": stage.judged.retries_in_iteration,
        "static_bytes": stage.static,
        "peak": {
            "moment": peak.moment,
            "phase": peak.phase,
            "module": peak.module,
            "microbatch": peak.microbatch,
            "upper_bound": peak.upper_bound,
        },
        "breakdown": {category.key: stage.of(category) for category in Category},
        "beyond_allocated": {
            "allocator_cache": beyond.allocator_cache,
            "cuda_context": beyond.cuda_context,
            "nccl": beyond.nccl,
            "other": beyond.other,
        },
        "host_bytes": stage.host,
        "nvme_bytes": stage.nvme,
        "moments": {moment: stage.moments.get(moment) for moment in MOMENTS},
    }
