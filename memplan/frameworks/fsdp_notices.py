"""What a user of ``fully_shard`` should know of a pipeline, and of one shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..plan.plan import Plan
from ..program import Program
from ..result import Notice
from ..tape import Category
from ..timeline import Timeline

GIB = 2**30

PIPELINE = (
    "layers as torchtitan's, in stages of torch.distributed.pipelining 2.13; NCCL's work of a lone send keeps its "
    "tensor, so GPipe and the interleaved schedule hold all that they have sent until the iteration ends",
    "one call of the schedule is an iteration; unless fsdp.return_outputs is set (torchtitan before October 2025) the "
    "last stage drops each micro-batch's logits; receive buffers stay for good",
    "shapes known beforehand: that the first iteration infers them by a pass of its own is not replayed",
)
"""Taken for granted with pipeline parallelism."""

ONE_SHARD = (
    "fully_shard over one rank, as torchtitan has it since 9 April 2026 (#2900; before, it left it away there): "
    "parameters are copied, gathered from nobody; gradients are divided by 1.0 (set_gradient_divide_factor) in a copy",
)
"""Taken for granted of torchtitan's models where no two ranks share a parameter's shards."""


def assumptions(plan: Plan) -> tuple[str, ...]:
    """Of layouts, beside what holds for all of ``fully_shard``."""
    alone = plan.fsdp.code == "torchtitan" and plan.layout.dp == plan.fsdp.replicas
    return (*(ONE_SHARD if alone else ()), *(PIPELINE if plan.layout.pp > 1 else ()))


def warnings(plan: Plan, programs: Sequence[Program]) -> Iterator[Notice]:
    """What a pipeline's schedule keeps and few expect, where it comes to a gibibyte or more on a rank."""
    timelines = [(program.stage, program.timeline) for program in programs if program.timeline is not None]
    if not timelines:
        return
    size, stage = max((_whole_gradients(timeline), -stage) for stage, timeline in timelines)
    if size >= GIB:
        yield Notice(
            "gradients-whole",
            f"a pipeline reduces gradients once, behind its last backward: until then they are whole, {size:,} bytes "
            f"({size / GIB:.2f} GiB) in {plan.fsdp.reduce} on stage {-stage}, however many ranks shard them",
        )
    size, stage = max((_sent(timeline), -stage) for stage, timeline in timelines)
    if size >= GIB:
        yield Notice(
            "sends-kept",
            f"what stage {-stage} has sent, {size:,} bytes ({size / GIB:.2f} GiB), stays until its iteration ends, for "
            "the schedule waits for sends there; fewer micro-batches, or 1f1b without virtual stages, keep less",
        )


def _whole_gradients(timeline: Timeline) -> int:
    """Bytes of gradients in front of the first reduction."""
    total = 0
    for action in timeline.actions:
        if action.what == "reduce":
            break
        total += timeline.excursion(action).net_by[Category.GRADIENTS]
    return total


def _sent(timeline: Timeline) -> int:
    """Bytes of the hidden states and gradients that end behind the last pass."""
    last = max(at for at, action in enumerate(timeline.actions) if action.what == "backward")
    ended = (one for one in timeline.actions[last:] if one.tensor in ("output", "input_gradient"))
    return sum(-timeline.excursion(one).net for one in ended if not timeline.kept or one.tensor == "input_gradient")
