"""What a plan's GPUs and links sustain: published peaks times the parts of them that are reached."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...gpus import GPUS, MULTIPROCESSORS
from ...plan.errors import ABSENT, PlanError
from ...plan.plan import Plan
from .efficiency import Efficiency, default
from .hardware import GIGA, SPEEDS, Figure

RACK = 8
"""GPUs above which links join the nodes of a rack."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one GPU and of its links; FLOP/s, and bytes/s in one direction."""

    peak: float
    """Published, of products in the plan's dtype; what MFU refers to."""
    matrix: float
    """Sustained by large products whose tiles fill every wave."""
    ordinary: float
    """Sustained by fp32 products on ordinary cores."""
    attention_forward: float
    attention_backward: float
    memory: float
    processors: int
    overlapped_epilogue: bool
    """Hopper and later: kernels write a tile while they compute the next one."""
    link: float
    link_gpus: int
    """GPUs that the links join; others are reached through host or network."""
    host: float
    network: float | None
    node: int
    """GPUs of a node, or of a rack whose GPUs are joined by links."""
    loss: float
    """Bytes/s of the cross entropy's kernels."""
    collective: float | None
    hop: float | None
    """Seconds of a collective over links, and of each of its steps, where they were measured."""


def rates_of(plan: Plan, efficiency: Efficiency | None = None) -> Rates:
    """Rates of the GPU that ``plan`` names. ``PlanError`` where there is none, or nobody published its speed."""
    gpu = plan.hardware.gpu
    if gpu is None:
        raise PlanError("hardware.gpu", ABSENT, "is missing: the time of a step depends on the GPU (--gpu h100-80gb)")
    fused = plan.framework == "megatron"
    dtype = plan.quantisation.compute or plan.precision.dtype
    network = None if plan.hardware.network is None else plan.hardware.network * GIGA
    return _rates(gpu, dtype, plan.hardware.gpus_per_node, network, fused, efficiency)


@lru_cache(maxsize=1024)
def _rates(gpu: str, dtype: str, node: int, network: float | None, fused: bool, efficiency: Efficiency | None) -> Rates:
    speed, processors = SPEEDS.get(gpu), MULTIPROCESSORS.get(gpu)
    if speed is None or processors is None:
        known = ", ".join(sorted(set(SPEEDS) & set(MULTIPROCESSORS)))
        raise PlanError("hardware.gpu", gpu, f"has no published speed, and so no time; these have: {known}")
    capability = GPUS[gpu].compute_capability
    parts = efficiency or default(gpu, capability, fused_kernels=fused)
    fp32 = _published(gpu, speed.fp32, "fp32 rate")
    if dtype == "fp32":
        peak = fp32
    else:
        if dtype == "bf16" and not speed.bf16:
            problem = f"must be fp16 or fp32 on {gpu}: its tensor cores do not take bf16, and no rate is published"
            raise PlanError("precision.dtype", dtype, problem)
        peak = _published(gpu, speed.matrix, "tensor rate")
    if network is None and speed.network is not None:
        network = speed.network.value
    memory = _published(gpu, speed.memory, "memory bandwidth")
    return Rates(
        peak=peak,
        matrix=peak * parts.matrix,
        ordinary=fp32 * parts.matrix,
        attention_forward=peak * parts.attention_forward,
        attention_backward=peak * parts.attention_backward,
        memory=memory * parts.memory,
        processors=processors,
        overlapped_epilogue=capability is None or capability >= (9, 0),
        link=0.0 if speed.link is None else speed.link.value * parts.link,
        link_gpus=speed.link_gpus,
        host=_published(gpu, speed.host, "bandwidth to the host") * parts.host,
        network=None if network is None else network * parts.network,
        node=max(node, speed.link_gpus) if speed.link_gpus > RACK else node,
        loss=memory * (parts.memory if parts.loss is None else parts.loss),
        collective=parts.collective,
        hop=parts.hop,
    )


def _published(gpu: str, figure: Figure | None, what: str) -> float:
    if figure is None:
        raise PlanError("hardware.gpu", gpu, f"has no published {what}, and so no time")
    return figure.value


def assumptions(plan: Plan, efficiency: Efficiency | None = None) -> tuple[str, ...]:
    """What was assumed of machine and kernels, a line each."""
    gpu = plan.hardware.gpu
    assert gpu is not None
    system, notes = SPEEDS[gpu].system, []
    crosses = (plan.hardware.gpus or 1) > plan.hardware.gpus_per_node
    if crosses and plan.hardware.network is None and system is not None:
        notes.append(f"network: {system} (hardware.network says otherwise)")
    parts = efficiency or default(gpu, GPUS[gpu].compute_capability, fused_kernels=plan.framework == "megatron")
    return (*notes, *parts.sources)
