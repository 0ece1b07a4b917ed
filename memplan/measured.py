"""What this user's own runs measured of a GPU, where others have published something else, or nothing.

A measurement holds for the settings that it was taken under and for no others. What those are is said here, once, for
the run that was recorded and for the plan that is estimated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .plan.plan import Plan

CONTEXT, NCCL, WORKSPACES = "cuda_context", "nccl", "cublas_workspaces"
"""What is learned; nothing else has a name of its own in what a run measures."""

_CODES = {"megatron": "megatron", "deepspeed": "deepspeed", "megatron-deepspeed": "megatron-deepspeed"}


def code_of(framework: str) -> str:
    """Whose code must have run for its measurements to hold for ``framework``; nothing runs BigScience's of 2021."""
    return _CODES.get(framework, "torch")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One size, and when and by which run it was measured."""

    name: str
    gpu: str
    """As ``memplan gpus`` names it."""
    setting: str
    """What must be the same for it to hold (``settings``)."""
    stage: int | None
    bytes: int
    time: str
    """UTC, as 2026-11-21T20:15:03Z."""
    run: str
    versions: str
    """``torch 2.13.0+cu130, driver 590.48.01``."""
    imported: bool = False
    """By somebody else, or on another machine: what was measured here comes first."""

    @property
    def source(self) -> str:
        where = "imported run" if self.imported else "run"
        return f"as measured on {self.time[:10]} by {where} {self.run} ({self.versions})"


@dataclass(frozen=True)
class Measured:
    """All that holds for some plan or other: the newest of each kind, what ran here before what was imported."""

    measurements: tuple[Measurement, ...] = ()
    _by_key: Mapping[tuple[str, str, str, int | None], Measurement] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_age = sorted(self.measurements, key=lambda one: (not one.imported, one.time, one.run))
        by_key = {(one.name, one.gpu, one.setting, one.stage): one for one in by_age}
        object.__setattr__(self, "_by_key", by_key)

    def context(self, plan: Plan) -> Measurement | None:
        """Of a resolved plan: the CUDA context, and the kernels that were loaded by the time it was measured.

        Where communicators exist that is before they do, and kernels that are loaded later count as NCCL's: the two
        belong together. Elsewhere it is the whole run.
        """
        if self.nccl(plan, 0) is not None:
            return self._find(CONTEXT, plan, communicators=True)
        return self._find(CONTEXT, plan) or self._find(CONTEXT, plan, communicators=True)

    def nccl(self, plan: Plan, stage: int) -> Measurement | None:
        """What communicators take on a rank of ``stage``, of the same layout on as many GPUs and nodes."""
        return self._find(NCCL, plan, stage)

    def workspaces(self, plan: Plan) -> Measurement | None:
        """cuBLAS's on a rank, all together."""
        return self._find(WORKSPACES, plan)

    def _find(
        self, name: str, plan: Plan, stage: int | None = None, *, communicators: bool = False
    ) -> Measurement | None:
        gpu = plan.hardware.gpu
        if not self._by_key or gpu is None:
            return None
        data, version = plan.model_dump(mode="json", include=_READ), plan.torch or "2.13"
        code, gpus = code_of(plan.framework), plan.hardware.gpus or 1
        nodes = -(-gpus // plan.hardware.gpus_per_node)
        setting = settings(data, code, version, gpus, nodes, communicators=communicators)[name]
        return self._by_key.get((name, gpu, setting, stage))


NOTHING = Measured()

_READ: Any = {
    "framework": True,
    "layout": True,
    "precision": True,
    "quantisation": True,
    "environment": True,
    "fsdp": {"replicas"},
    "model": {"family"},
}


def settings(
    plan: Mapping[str, Any], code: str, torch: str, gpus: int, nodes: int, *, communicators: bool
) -> dict[str, str]:
    """What each measurement depends on besides the GPU, as text, by name. ``plan``: a resolved one as JSON.

    The context: PyTorch's release, whose code, whether all kernels are loaded at the start, and whether communicators
    were made in the run. NCCL: the framework, the sizes of all groups, the machine, and NCCL's variables. cuBLAS: which
    products there are, and its variables.
    """
    release = ".".join(torch.split("+")[0].split(".")[:2])
    environment = plan.get("environment") or {}
    base = {"code": code, "torch": release}
    chosen: dict[str, dict[str, Any]] = {
        CONTEXT: {"eager": environment.get("CUDA_MODULE_LOADING") == "EAGER", "communicators": communicators},
        NCCL: {
            "framework": plan.get("framework"),
            "layout": plan.get("layout"),
            "replicas": (plan.get("fsdp") or {}).get("replicas"),
            "gpus": gpus,
            "nodes": nodes,
            "environment": _variables(environment, ("NCCL_", "TORCH_NCCL_")),
        },
        WORKSPACES: {
            "framework": plan.get("framework"),
            "family": (plan.get("model") or {}).get("family"),
            "precision": plan.get("precision"),
            "quantisation": plan.get("quantisation"),
            "environment": _variables(environment, ("CUBLAS", "TORCH_CUBLAS")),
        },
    }
    return {name: json.dumps({**base, **own}, sort_keys=True) for name, own in chosen.items()}


def _variables(environment: Mapping[str, str], prefixes: Iterable[str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(tuple(prefixes))}
