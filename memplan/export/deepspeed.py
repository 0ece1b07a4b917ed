"""A plan as DeepSpeed's ``ds_config.json``.

Keys and what they mean: ``runtime/config.py``, ``runtime/zero/config.py``, ``runtime/zero/offload_config.py`` and
``runtime/engine.py`` (``_configure_basic_optimizer``) of DeepSpeed 0.19. It says how states are kept and sharded; the
model, its recompute and the number of ranks are the training script's, and flags of the command that reads it back.
"""

from __future__ import annotations

import json
from typing import Any

from ..plan.completion import launched_plan
from ..plan.deepspeed_config import SIZES, SWITCHES, ZERO
from ..plan.framework_sections import Deepspeed
from ..plan.launch.ds_config import ds_config_of
from ..plan.plan import Plan
from ..plan.read import Flags
from .beside import model_flags
from .exported import PLACE, Draft, Target

TYPES = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "lion": "Lion", "adafactor": "Adafactor"}
"""Names of ``optimizer.type``; 8-bit optimizers are made by the training script."""
TESTED = ("adam", "adamw", "lion")
"""Optimizers that ZeRO takes unasked (``runtime/zero/utils.py``, ``ZERO_SUPPORTED_OPTIMIZERS``)."""
OF_STAGE_3 = tuple(name for name in SIZES if name.startswith("stage3_") or name == "sub_group_size")
NVME = "/local_nvme"
"""A place for ``nvme_path``, which no plan has."""


def write(plan: Plan) -> Draft:
    """The configuration of ``plan``."""
    config = configuration(plan)
    flags = {**model_flags(plan.model), "gpus": str(plan.hardware.gpus)}
    return Draft(json.dumps(config, indent=2) + "\n", {"ds_config": config}, flags)


def configuration(plan: Plan) -> dict[str, Any]:
    """``ds_config.json`` as a mapping."""
    batch, precision, given = plan.batch, plan.precision, plan.deepspeed
    assert batch.gbs is not None
    assert plan.layout.dp is not None
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch.mbs,
        "gradient_accumulation_steps": batch.gbs // (batch.mbs * plan.layout.dp),
    }
    if precision.dtype != "fp32":
        config[precision.dtype] = {"enabled": True}
    if precision.gradients != precision.dtype or given.gradient_accumulation_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": precision.gradients}
    config["gradient_clipping"] = given.gradient_clipping  # DeepSpeed's default was 0 before it was 1
    config |= _optimizer(plan)
    config[ZERO] = _zero(plan.layout.zero, given)
    return config


def _optimizer(plan: Plan) -> dict[str, Any]:
    """The section ``optimizer``, where DeepSpeed makes it, and ZeRO's consent to one that it does not know."""
    optimizer = plan.optimizer
    consent = {} if optimizer.name in TESTED or not plan.layout.zero else {"zero_allow_untested_optimizer": True}
    kind = TYPES.get(optimizer.name)
    if kind is None or optimizer.implementation == "transformers":
        return consent
    parameters: dict[str, Any] = {}
    if optimizer.name == "adam":
        parameters["adam_w_mode"] = False
    if optimizer.name in ("adam", "adamw") and optimizer.implementation is not None:
        parameters["torch_adam"] = True
    by_default = "for-loop" if optimizer.name == "adafactor" else "foreach"
    if optimizer.implementation == "fused":
        parameters["fused"] = True
    elif optimizer.implementation not in (None, by_default):
        parameters["foreach"] = optimizer.implementation == "foreach"
    if optimizer.momentum:
        parameters["momentum"] = optimizer.momentum
    if optimizer.weight_decay is not None:
        parameters["weight_decay"] = optimizer.weight_decay
    return {"optimizer": {"type": kind, **({"params": parameters} if parameters else {})}, **consent}


def _zero(stage: int, given: Deepspeed) -> dict[str, Any]:
    """``zero_optimization``: what the stage reads, and whatever else is not at its default."""
    fields = Deepspeed.model_fields
    shown = {"reduce_bucket_size", "allgather_bucket_size"} if stage else set()
    shown |= set(OF_STAGE_3) - {"stage3_model_persistence_threshold"} if stage == 3 else set()
    section: dict[str, Any] = {"stage": stage}
    for name in (*SIZES, *SWITCHES):
        value = getattr(given, name)
        if name in shown or value != fields[name].default:
            section[name] = value
    if given.offload_optimizer != "none":
        section["offload_optimizer"] = {
            **_place(given.offload_optimizer, given.offload_optimizer_pin),
            "buffer_count": given.offload_optimizer_buffer_count,
            "ratio": given.offload_optimizer_ratio,
        }
    if given.offload_param != "none":
        section["offload_param"] = {
            **_place(given.offload_param, given.offload_param_pin),
            "buffer_count": given.offload_param_buffer_count,
            "buffer_size": given.offload_param_buffer_size,
            "max_in_cpu": given.offload_param_max_in_cpu,
        }
    return section


def _place(device: str, pinned: bool) -> dict[str, Any]:
    return {"device": device, **({"nvme_path": NVME} if device == "nvme" else {}), "pin_memory": pinned}


def read(text: str, flags: Flags, settings: tuple[str, ...]) -> Plan:
    """What ``--from deepspeed`` makes of the configuration."""
    return launched_plan(ds_config_of(text, "ds_config.json", flags), flags).plan


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
)
