"""What a campaign runs on, without touching the GPU with more than its driver."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from typing import Any

from memplan.plan.errors import LackingError
from memplan.validate.devices import check_free, devices, gpu_of, visible
from memplan.validate.run import versions_of

PACKAGES = ("transformers", "accelerate", "peft", "bitsandbytes", "megatron-core", "deepspeed", "flash-attn")


def described(device: str) -> dict[str, Any]:
    """GPU, driver, versions and the hour. ``LackingError`` where ``device`` asks for a GPU, and none is free."""
    found: dict[str, Any] = {"device": device, "began": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}
    driver = None
    if device == "cuda":
        shown = visible(devices(), os.environ)
        if not shown:
            raise LackingError("no CUDA device here: CUDA_VISIBLE_DEVICES shows none")
        check_free(shown[:1], share=False)
        gpu, driver = shown[0], shown[0].driver
        found |= {"gpu": gpu_of(gpu.name, gpu.total), "name": gpu.name, "total": gpu.total, "used": gpu.used}
    versions = versions_of(PACKAGES, driver)
    found |= versions.model_dump(exclude={"others"})
    return {**found, "cores": os.cpu_count(), "machine": platform.machine(), "packages": versions.others}


def busy() -> bool:
    """Whether anything computes on the first GPU that is shown."""
    try:
        shown = visible(devices(), os.environ)
    except LackingError:
        return False
    return bool(shown) and shown[0].busy
