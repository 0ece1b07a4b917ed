"""``ddp``: PyTorch's DistributedDataParallel."""

from __future__ import annotations

from ...plan.plan import ResolvedPlan
from ..base import PYTORCH_SECTIONS, Communicator, Framework, Parts, Supports, world

COPIES = "DDP with gradient_as_bucket_view=False: buckets are a second copy of the gradients"
VIEWS = (
    "DDP with gradient_as_bucket_view: gradients are views of buckets, and buckets stay between "
    "iterations; the first iteration has one bucket as large as all later buckets together (with "
    "zero_grad(set_to_none=False) old and new buckets coexist while DDP rebuilds buckets)"
)
NO_SYNC = (
    "gradients of micro-batches under no_sync are not views of buckets: two copies exist until the last micro-batch"
)
UNUSED = "find_unused_parameters: DDP clones the model's output, including the logits, in every forward"
ZERO = (
    "ZeroRedundancyOptimizer without overlap_with_ddp, one parameter group: whole tensors go, largest "
    "first, to the rank with the fewest elements; the report shows the most loaded rank"
)


class Ddp(Framework):
    name = "ddp"
    parts = Parts(".searching:DdpSearch", ".timing:DdpTime", ".running:DdpRunning")
    supports = Supports(
        sizes=frozenset({"dp"}),
        zero=(0, 1),
        sections=(*PYTORCH_SECTIONS, "ddp"),
        compiled="",
        compiled_as="buckets",
        losses=("plain", "liger", "cut", "liger-cross-entropy", "unsloth"),
        losses_refused={"chunked": "chunks run backward within forward, where DDP's hooks fire too early"},
    )

    def check(self, plan: ResolvedPlan) -> None:
        if plan.quantisation.kind == "awq" and plan.ddp.broadcast_buffers:
            raise plan.wrong(
                "ddp.broadcast_buffers",
                "must be false with quantisation.kind awq: its weights are buffers, and their broadcast is not "
                "modelled",
            )

    def communicators(self, plan: ResolvedPlan, stage: int) -> tuple[Communicator, ...]:
        """One process group for all: buckets are all-reduced, parameters broadcast when the model is wrapped."""
        return (world(plan.hardware.gpus)._replace(gathers=True, few_bytes=False),) if plan.hardware.gpus > 1 else ()

    def layout_assumptions(self, plan: ResolvedPlan) -> tuple[str, ...]:
        given = plan.ddp
        result = [VIEWS if given.gradient_as_bucket_view else COPIES]
        if given.gradient_as_bucket_view and not given.gradient_sync:
            result.append(NO_SYNC)
        if given.find_unused_parameters and not given.static_graph:
            result.append(UNUSED)
        if plan.layout.zero:
            result.append(ZERO)
        return tuple(result)


FRAMEWORK = Ddp()
