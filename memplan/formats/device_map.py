"""A plan as the ``device_map`` that Accelerate and transformers take: modules by name, each with its device.

``accelerate/utils/modeling.py`` (``check_device_map``, ``dispatch_model``) of 1.15. Embedding and head are on the
first device, as the estimate has them, so that a tied weight is on one; the final norm is on the last.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..families import family
from ..plan.errors import ABSENT, Node, PlanError
from ..plan.fields import plan_fields, sections
from ..plan.module_names import modules
from ..plan.plan import Plan, ResolvedPlan
from ..plan.read import COMMAND_LINE, Flags, Source, build_plan
from .exported import PLACE, Draft, Target, model_flags


def write(plan: ResolvedPlan) -> Draft:
    """The map of ``plan`` as JSON."""
    made = device_map(plan)
    return Draft(json.dumps(made, indent=2) + "\n", {"device_map": made}, dict(model_flags(plan.model)))


def device_map(plan: ResolvedPlan) -> dict[str, int]:
    """Every module of ``plan``'s model that has parameters or buffers, with its device, in the order of forward."""
    placed, names = plan.device_map, family(plan.model.family).modules
    if names is None:
        raise plan.wrong("model.family", f"has no names of modules here; {', '.join(modules())} have")
    if placed is None:
        raise PlanError("device_map", ABSENT, "is missing")
    first, last = min(placed), max(placed)
    devices = {layer: device for device, layers in placed.items() for layer in layers}
    return {
        **dict.fromkeys(names.embedding, first),
        **{f"{names.layers}.{layer}": devices[layer] for layer in sorted(devices)},
        **dict.fromkeys(names.norm if plan.model.final_norm else (), last),
        **dict.fromkeys(names.head, first),
    }


def read(text: str, flags: Flags, settings: tuple[str, ...]) -> Plan:
    """The plan that ``--device-map FILE`` reads from the map."""
    nothing = Source(Node({}, COMMAND_LINE), Path())
    return build_plan(nothing, {**flags, "framework": "device-map", "device-map": text}).plan


TARGET = Target(
    name="device-map",
    framework="device-map",
    what="a device map",
    write=write,
    read=read,
    command=("--framework", "device-map", "--device-map", PLACE),
    beside=frozenset({*sections(), *(path for path in plan_fields() if "." not in path)} - {"framework", "device_map"}),
)
