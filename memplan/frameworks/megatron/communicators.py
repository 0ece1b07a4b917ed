"""Communicators of Megatron-Core's groups (``megatron/core/parallel_state.py``, ``initialize_model_parallel``).

Ranks lie in the order tensor, context, data, pipeline, from the innermost. Of the groups that it makes, these are the
ones in which a collective runs. Beside them: buffers of collectives that run beside products.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...layers.megatron_core.shape import CoreShape
from ...layers.work import ITEMSIZE
from ...plan import megatron_layout
from ...plan.plan import ResolvedPlan
from ..base import Communicator, world


def communicators(plan: ResolvedPlan, stage: int) -> tuple[Communicator, ...]:
    """On a rank of ``stage``."""
    if plan.hardware.gpus == 1:
        return ()
    blocks = configured(plan.megatron.nccl_blocks)
    instances = plan.megatron.distributed_optimizer_instances > 1
    names = GROUPS | ({"data parallel": "intra_dp_cp", "replicas of experts": "intra_ep_dp"} if instances else {})
    found = _communicators(plan, stage)
    found = (one._replace(blocks=blocks.get(names.get(one.name, ""), (0, 0))) for one in found)
    sharp = plan.megatron.sharp
    return tuple(one._replace(in_network=sharp and one.name == "data parallel") for one in found)


GROUPS = {
    "gradient statistics": "intra_dist_opt_instance",
    "model parallel": "mp",
    "tensor parallel": "tp",
    "data parallel": "dp_cp",
    "context parallel": "cp",
    "context parallel, heads": "hcp",
    "context parallel, ring": "hcp",
    "experts and their tensors": "tp_ep_mp",
    "experts": "ep",
    "replicas of experts": "ep_dp",
    "neighbouring stages": "pp",
    "pipeline": "pp",
    "embeddings": "embd",
}
"""What options of groups are called (``get_nccl_options``); all ranks' group has none."""


def configured(text: str | None) -> dict[str, tuple[int, int]]:
    """Fewest and most channels of each group that ``nccl_blocks`` names; 0 where one is left out."""
    found: dict[str, tuple[int, int]] = {}
    for one in text.split(",") if text else ():
        name, _, limits = one.partition("=")
        least, _, most = limits.partition("-")
        found[name] = int(least or 0), int(most or 0)
    return found


def _communicators(plan: ResolvedPlan, stage: int) -> Iterator[Communicator]:
    layout = plan.layout
    t, c, d, p = layout.tp, layout.cp, layout.dp, layout.pp
    ranks = t * c * d * p
    # Barriers and the time of the start (``initialize.py``, ``training.py``).
    yield world(ranks)
    # The gradients' norm: of the distributed optimizer over all of its instance, else over the model's ranks.
    if layout.zero:
        yield world(ranks)._replace(name="gradient statistics")
    elif t * p > 1:
        yield Communicator("model parallel", t * p, t, t * c * d, reduces=True, few_bytes=True)
    if t > 1:
        yield Communicator("tensor parallel", t, t, t, reduces=True, gathers=True)
    if c * d > 1:
        # Gradients, and the losses of a step (``training.py``, ``train_step``); parameters that are in shards.
        gathers = layout.zero > 0 or plan.megatron.torch_fsdp != "none"
        yield Communicator("data parallel", c * d, 1, t, reduces=True, gathers=gathers)
    if c > 1:
        yield from _context(plan)
    if plan.model.experts:
        yield from _experts(plan, t * c * d)
    if p > 1:
        yield from _pipeline(plan, stage, t * c * d)


def _context(plan: ResolvedPlan) -> Iterator[Communicator]:
    """Keys and values go round or are gathered, or every rank trades heads with every other one, as Mamba layers and
    gated delta nets do in any case (Transformer Engine's ``context_parallel.py``)."""
    t, c, way = plan.layout.tp, plan.layout.cp, plan.megatron.cp_communication
    if way == "a2a+p2p":
        inner = plan.megatron.cp_inner or 1
        if inner > 1:
            yield Communicator("context parallel, heads", inner, 1, t, peers=inner - 1)
        if c > inner:
            yield Communicator("context parallel, ring", c // inner, 1, t * inner, peers=min(2, c // inner - 1))
        return
    all_trade = way == "a2a" or bool(plan.model.layer_pattern or plan.model.linear_interval)
    peers = c - 1 if all_trade else min(2, c - 1) if way == "p2p" else 0
    yield Communicator("context parallel", c, 1, t, gathers=way == "all_gather", peers=peers)


def _experts(plan: ResolvedPlan, ranks: int) -> Iterator[Communicator]:
    """Of the ``ranks`` of a stage, in the order experts' tensors, experts, replicas (``token_dispatcher.py``)."""
    together = (plan.layout.etp or plan.layout.tp) * plan.layout.ep
    gathered = plan.experts.dispatcher == "allgather"
    if together > 1:
        # Tokens, or how many of them each expert gets.
        yield Communicator("experts and their tensors", together, together, ranks, gathers=True, few_bytes=not gathered)
    if plan.layout.ep > 1 and not gathered:
        yield Communicator("experts", plan.layout.ep, 1, together // plan.layout.ep, peers=plan.layout.ep - 1)
    if ranks > together:
        gathers = bool(plan.layout.zero)
        yield Communicator("replicas of experts", ranks // together, 1, together, reduces=True, gathers=gathers)


def _pipeline(plan: ResolvedPlan, stage: int, stride: int) -> Iterator[Communicator]:
    """``p2p_communication.py``. Alone, each send and receive has a communicator of the two ranks
    (``ProcessGroupNCCL::pointToPoint``; two stages use the default group for one direction, ``_p2p_ops``); in a batch,
    that of the group."""
    p, wraps = plan.layout.pp, plan.layout.vpp > 1
    peers = min(2, p - 1) if wraps or 0 < stage < p - 1 else 1
    if wraps and plan.pipeline.overlap_p2p:
        yield Communicator("neighbouring stages", 2, 1, stride, peers=1, times=2)
    else:
        yield Communicator("pipeline", p, 1, stride, peers=peers)
    holding = _embedded(plan)
    if len(holding) > 1 and stage in holding:
        yield Communicator("embeddings", len(holding), 1, stride * (holding[1] - holding[0]), reduces=True)


def _embedded(plan: ResolvedPlan) -> list[int]:
    """Stages that have the embedding's weight: a tied head's, too, and that of layers which predict further tokens
    (``pretrain_gpt.py``, ``get_embedding_ranks``; ``_get_shared_word_embedding_weight``)."""
    pp, model = plan.layout.pp, plan.model
    tied = {pp - 1} if model.tied_embeddings else set()
    further = {megatron_layout.further_stage(plan.pipeline.layout, pp)} if model.mtp_layers else set()
    return sorted({0} | tied | further)


USER_BUFFERS = "Transformer Engine, initialize_ub: one buffer for every exchange of a layer, with its default ways"
GATHERED = (
    "qkv_fprop", "qkv_dgrad", "proj_dgrad", "proj_wgrad", "fc1_fprop", "fc1_dgrad", "fc2_dgrad", "fc2_wgrad",
)  # fmt: skip
REDUCED = ("proj_fprop", "fc2_fprop", "qkv_wgrad", "fc1_wgrad")


def user_buffers(shape: CoreShape) -> int:
    """Bytes of the buffers through which tensor-parallel ranks exchange beside products (``--tp-comm-overlap``):
    Transformer Engine's user buffers (``pytorch/module/base.py``, ``initialize_ub``; ``comm_gemm_overlap.cpp``), which
    lie outside of PyTorch.

    One of s b h elements for every exchange of a layer, by its default way: those that are gathered are in 8 bits with
    fp8. Layers in 16 bits beside others have a set of their own. What PyTorch allocates is estimated as without them,
    though gathered inputs then lie in these buffers."""
    elements, wide = shape.s * shape.b * shape.spec.hidden, ITEMSIZE[shape.dtype]
    eight = shape.low is not None and shape.low.recipe != "nvfp4"  # --fp8-format decides
    narrow = 1 if eight else wide
    size = len(GATHERED) * narrow + len(REDUCED) * wide
    if eight and any(shape.sixteen_bit):
        size += (len(GATHERED) + len(REDUCED)) * wide
    return elements * size
