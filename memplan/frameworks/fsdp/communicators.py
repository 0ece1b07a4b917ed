"""Communicators of the groups of a device mesh, as torchtitan builds it (``ParallelDims.build_mesh``)."""

from __future__ import annotations

from collections.abc import Iterator

from ...plan.plan import ResolvedPlan
from ..base import Communicator, world


def communicators(plan: ResolvedPlan, stage: int) -> tuple[Communicator, ...]:
    """Axes from the innermost: tensor, shards, replicas, pipeline. A mesh of one axis is the default group itself
    (``DeviceMesh._init_process_groups``), in which all runs."""
    ranks = plan.hardware.gpus
    if ranks == 1:
        return ()
    axes = tuple(_axes(plan, stage))
    if len(axes) == 1:
        return (axes[0]._replace(block=ranks),)
    return (*axes, world(ranks, certain=False))


def _axes(plan: ResolvedPlan, stage: int) -> Iterator[Communicator]:
    t, p, c, replicas = plan.layout.tp, plan.layout.pp, plan.layout.cp, plan.fsdp.replicas
    d, ep, etp = plan.layout.dp * c, plan.layout.ep, plan.layout.etp or 1
    shards = d // replicas
    if t > 1:
        yield Communicator("tensor parallel", t, t, t, reduces=True, gathers=True)
    if c > 1:
        yield Communicator("context parallel", c, 1, t, gathers=True)
    if shards > 1:
        yield Communicator("shards", shards, 1, t, reduces=True, gathers=True)
    if ep > 1:
        # Rows of experts go to and fro in the innermost axis, or beside parts of each expert, whose gradients are
        # summed; those with the same experts shard them.
        if etp > 1:
            yield Communicator("expert tensor parallel", etp, etp, etp, reduces=True)
        block = ep if etp == 1 else 1
        yield Communicator("expert parallel", ep, block, block * etp, peers=ep - 1)
        if shards * t > ep * etp:
            yield Communicator("shards of experts", shards * t // (ep * etp), 1, ep * etp, reduces=True, gathers=True)
    if replicas > 1:
        yield Communicator("replicas", replicas, 1, t * shards, reduces=True)
        # Losses and norms are reduced over both at once (the mesh "loss" of torchtitan's ParallelDims).
        yield Communicator("data parallel", d, 1, t, reduces=True, few_bytes=True)
    if p > 1:
        # Stages send in batches in the pipeline's group, where norms are reduced, too (clip_grad_norm_).
        peers = 2 if 0 < stage < p - 1 or (plan.layout.vpp > 1 and p > 2) else 1
        yield Communicator("pipeline", p, 1, t * d, reduces=True, few_bytes=True, peers=peers)
