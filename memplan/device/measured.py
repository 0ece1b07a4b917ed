"""What this user's own runs measured of a GPU, where others have published something else, or nothing.

A measurement holds for the settings that it was taken under and for no others. What those are is said here, once, for
the run that was recorded and for the plan that is estimated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, NamedTuple

from ..frameworks import ROOMS, framework
from ..plan.resolved import ResolvedPlan
from ..values import dataclass
from .facts import Version
from .workspaces import torch_version

CONTEXT, NCCL, WORKSPACES = "cuda_context", "nccl", "cublas_workspaces"
"""What is learned; nothing else has a name of its own in what a run measures."""
LARGEST = 1 << 40
"""Bytes: more than any device has."""


def code_of(name: str) -> str:
    """Whose code must have run for its measurements to hold for the framework ``name``, which a record of another
    release may have; nothing runs BigScience's of 2021."""
    return framework(name).measured_code if name in ROOMS else "torch"


@dataclass(frozen=True, slots=True)
class Measurement:
    """One size, and when and by which run it was measured."""

    name: str
    gpu: str
    """As ``memplan gpus`` names it."""
    setting: str
    """What must be the same for it to hold (``setting``)."""
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
    _kinds: frozenset[tuple[str, str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_age = sorted(self.measurements, key=lambda one: (not one.imported, one.time, one.run))
        by_key = {(one.name, one.gpu, one.setting, one.stage): one for one in by_age}
        object.__setattr__(self, "_by_key", by_key)
        object.__setattr__(self, "_kinds", frozenset((one.name, one.gpu) for one in by_age))

    def context(self, plan: ResolvedPlan) -> Measurement | None:
        """Of a resolved plan: the CUDA context, and the kernels that were loaded by the time it was measured.

        Where communicators exist that is before they do, and kernels that are loaded later count as NCCL's: the two
        belong together. Elsewhere it is the whole run.
        """
        whole, early = self.contexts(plan)
        return early if self.nccl(plan, 0) is not None else whole or early

    def contexts(self, plan: ResolvedPlan) -> tuple[Measurement | None, Measurement | None]:
        """Of runs without communicators, and of runs before theirs."""
        return self._find(CONTEXT, plan), self._find(CONTEXT, plan, communicators=True)

    def nccl(self, plan: ResolvedPlan, stage: int) -> Measurement | None:
        """What communicators take on a rank of ``stage``, of the same layout on as many GPUs and nodes."""
        return self._find(NCCL, plan, stage)

    def workspaces(self, plan: ResolvedPlan) -> Measurement | None:
        """cuBLAS's on a rank, all together."""
        return self._find(WORKSPACES, plan)

    def _find(
        self, name: str, plan: ResolvedPlan, stage: int | None = None, *, communicators: bool = False
    ) -> Measurement | None:
        gpu = plan.hardware.gpu
        if gpu is None or (name, gpu) not in self._kinds:
            return None
        gpus = plan.hardware.gpus or 1
        nodes = -(-gpus // plan.hardware.gpus_per_node)
        ran = Ran(code_of(plan.framework), torch_version(plan), gpus, nodes, communicators)
        return self._by_key.get((name, gpu, setting(name, plan.model_dump(mode="json", include=_READ), ran), stage))


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


class Ran(NamedTuple):
    """What a measurement depends on besides the plan."""

    code: str
    torch: Version
    gpus: int
    nodes: int
    communicators: bool
    """Were any made in the run?"""


def setting(name: str, plan: Mapping[str, Any], ran: Ran) -> str:
    """What the measurement ``name`` depends on besides the GPU, as text. ``plan``: a resolved one as JSON.

    The context: PyTorch's release, whose code, whether all kernels are loaded at the start, and whether communicators
    were made in the run. NCCL: the framework, the sizes of all groups, the machine, and NCCL's variables. cuBLAS: which
    products there are, and its variables.
    """
    environment = plan.get("environment") or {}
    own: dict[str, Any] = {
        "eager": environment.get("CUDA_MODULE_LOADING") == "EAGER",
        "communicators": ran.communicators,
    }
    if name == NCCL:
        own = {
            "framework": plan.get("framework"),
            "layout": plan.get("layout"),
            "replicas": (plan.get("fsdp") or {}).get("replicas"),
            "gpus": ran.gpus,
            "nodes": ran.nodes,
            "environment": _variables(environment, ("NCCL_", "TORCH_NCCL_")),
        }
    elif name == WORKSPACES:
        own = {
            "framework": plan.get("framework"),
            "family": (plan.get("model") or {}).get("family"),
            "precision": plan.get("precision"),
            "quantisation": plan.get("quantisation"),
            "environment": _variables(environment, ("CUBLAS", "TORCH_CUBLAS")),
        }
    return json.dumps({"code": ran.code, "torch": ran.torch, **own}, sort_keys=True)


def _variables(environment: Mapping[str, str], prefixes: Iterable[str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(tuple(prefixes))}
