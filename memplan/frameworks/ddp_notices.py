"""What an estimate under DistributedDataParallel takes for granted."""

from __future__ import annotations

from ..plan.plan import Plan

COPIES = "DDP with gradient_as_bucket_view=False: buckets beside the gradients"
VIEWS = (
    "DDP with gradient_as_bucket_view: gradients end in their buckets, which stay between iterations; the first "
    "iteration's one bucket is as large as the later ones together (with zero_grad(set_to_none=False) both are there "
    "while buckets are rebuilt)"
)
NO_SYNC = (
    "micro-batches under no_sync leave gradients that are no views: there are two copies until the last micro-batch"
)
UNUSED = "find_unused_parameters: DDP clones the model's output, logits too, in every forward"
ZERO = (
    "ZeroRedundancyOptimizer without overlap_with_ddp, one parameter group: whole tensors, the largest first, each to "
    "the rank with the fewest elements; the rank that needs most is shown"
)


def assumptions(plan: Plan) -> tuple[str, ...]:
    given = plan.ddp
    result = [VIEWS if given.gradient_as_bucket_view else COPIES]
    if given.gradient_as_bucket_view and not given.gradient_sync:
        result.append(NO_SYNC)
    if given.find_unused_parameters and not given.static_graph:
        result.append(UNUSED)
    if plan.layout.zero:
        result.append(ZERO)
    return tuple(result)
