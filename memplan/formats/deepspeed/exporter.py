"""A plan as DeepSpeed's ``ds_config.json``.

Keys and what they mean: ``runtime/config.py``, ``runtime/zero/config.py``, ``runtime/zero/offload_config.py`` and
``runtime/engine.py`` (``_configure_basic_optimizer``) of DeepSpeed 0.19. It says how states are kept and sharded; the
model, its recompute and the number of ranks are the training script's, and flags of the command that reads it back.
"""

from __future__ import annotations

import json
from typing import Any

from ...plan.framework_sections import Deepspeed
from ...plan.plan import Plan, ResolvedPlan
from ...plan.read import Flags
from ..exported import PLACE, Draft, Target, model_flags
from ..launch import Asked, launched_plan
from .config import ROWS, ZERO
from .reader import ds_config_of


def write(plan: ResolvedPlan) -> Draft:
    """The configuration of ``plan``."""
    config = configuration(plan)
    flags = {**model_flags(plan.model), "gpus": str(plan.hardware.gpus)}
    return Draft(json.dumps(config, indent=2) + "\n", {"ds_config": config}, flags)


def configuration(plan: ResolvedPlan) -> dict[str, Any]:
    """``ds_config.json`` as a mapping."""
    config: dict[str, Any] = {}
    for row in ROWS:
        value = row.written(plan)
        if value is None:
            continue
        *sections, key = row.name.split(".")
        if row.name == f"{ZERO}.stage":
            config |= _optimizer(plan)
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return config


def _optimizer(plan: ResolvedPlan) -> dict[str, Any]:
    """The section ``optimizer``, where DeepSpeed makes it, and ZeRO's consent to one that it does not know."""
    optimizer, made = plan.optimizer, plan.optimizer.algorithm.deepspeed
    tested = made is not None and made.tested
    consent = {} if tested or not plan.layout.zero else {"zero_allow_untested_optimizer": True}
    if made is None or optimizer.implementation == "transformers":
        return consent
    parameters: dict[str, Any] = {}
    if made.decoupled is not None:
        parameters["adam_w_mode"] = False
    if made.torch_switch is not None and optimizer.implementation is not None:
        parameters[made.torch_switch] = True
    if optimizer.implementation == "fused":
        parameters["fused"] = True
    elif optimizer.implementation not in (None, optimizer.algorithm.torch_default):
        parameters["foreach"] = optimizer.implementation == "foreach"
    if optimizer.momentum:
        parameters["momentum"] = optimizer.momentum
    if optimizer.weight_decay is not None:
        parameters["weight_decay"] = optimizer.weight_decay
    return {"optimizer": {"type": made.name, **({"params": parameters} if parameters else {})}, **consent}


def read(text: str, flags: Flags, settings: tuple[str, ...]) -> Plan:
    """The plan that ``--from deepspeed`` reads from the configuration."""
    return launched_plan(ds_config_of(text, "ds_config.json", Asked(flags=flags)), flags).plan


def settled(plan: ResolvedPlan) -> dict[str, Any]:
    """Two fields name the dtype of gradients; what nobody offloads has no place."""
    given = plan.deepspeed
    unused = [end for end in ("offload_optimizer", "offload_param") if getattr(given, end) == "none"]
    changes: dict[str, Any] = {
        name: field.default
        for name, field in Deepspeed.model_fields.items()
        if any(name.startswith(f"{end}_") for end in unused)
    }
    changes["gradient_accumulation_dtype"] = plan.precision.gradients
    return {"deepspeed": given.model_copy(update=changes)}


TARGET = Target(
    name="deepspeed",
    framework="deepspeed",
    what="a ds_config.json",
    write=write,
    read=read,
    command=("--from", "deepspeed", PLACE),
    beside=frozenset(
        {"hardware", "model", "batch.seq", "recompute", "optimizer", "loss", "attention", "code"}
        | {"torch", "headroom", "environment", "deepspeed.groups", "layout.dp"}
    ),
    settled=settled,
)
