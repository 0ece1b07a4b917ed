"""``single``: plain PyTorch, one process on one GPU."""

from __future__ import annotations

from ..base import Framework, Parts, Supports


class Single(Framework):
    name = "single"
    parts = Parts("...search.framework:FrameworkSearch", ".timing:PlainTime", ".running:PlainRunning")
    supports = Supports(mixtures=("experts", "latent_kv_rank", "index_heads", "linear_interval"), compiled="")


FRAMEWORK = Single()
