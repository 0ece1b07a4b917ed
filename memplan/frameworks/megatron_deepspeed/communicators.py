"""Communicators of Megatron-DeepSpeed's groups: Megatron's ``mpu`` and the grid of DeepSpeed's pipeline engine
(``deepspeed/runtime/pipe/topology.py``, ``PipelineParallelGrid``), which makes groups of its own.

Ranks lie in the order tensor, data, pipeline, from the innermost.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...plan.plan import ResolvedPlan
from ..base import Communicator, world


def communicators(plan: ResolvedPlan, stage: int) -> tuple[Communicator, ...]:
    """On a rank of ``stage``."""
    return tuple(_communicators(plan, stage)) if plan.hardware.gpus > 1 else ()


def _communicators(plan: ResolvedPlan, stage: int) -> Iterator[Communicator]:
    t, d, p = plan.layout.tp, plan.layout.dp, plan.layout.pp
    # Barriers and the time of the start (Megatron's ``initialize.py``, ``training.py``).
    yield world(t * d * p)
    if t > 1:
        yield Communicator("tensor parallel", t, t, t, reduces=True)
    if t * p > 1:
        # Overflows and the norm (``ds_model_proc_group``).
        yield Communicator("model parallel", t * p, t, t * d, reduces=True, few_bytes=True)
    if d > 1:
        yield Communicator("data parallel", d, 1, t, reduces=True, gathers=bool(plan.layout.zero))
        yield Communicator("data parallel of mpu", d, 1, t, reduces=True, few_bytes=True, certain=False)
    if p > 1:
        # Sends and receives of two stages (``pipe/p2p.py``), the loss broadcast (``_aggregate_total_loss``).
        peers = 2 if 0 < stage < p - 1 else 1
        yield Communicator("neighbouring stages", 2, 1, t * d, peers=1, times=peers)
        yield Communicator("pipeline", p, 1, t * d, gathers=True)
        if plan.model.tied_embeddings and stage in (0, p - 1):
            yield Communicator("embeddings", 2, 1, t * d * (p - 1), reduces=True)
