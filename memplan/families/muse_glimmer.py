"""Muse Glimmer, whose code is torchtitan's (``torchtitan/models/muse_glimmer``)."""

from __future__ import annotations

from .base import Family

NOWHERE_ELSE = "only torchtitan has its code: --framework fsdp --fsdp-code torchtitan"

FAMILIES = {
    "muse_glimmer": Family(
        "muse_glimmer", no_transformers=NOWHERE_ELSE, no_megatron_core=NOWHERE_ELSE, caps_in_head=True
    ),
}
