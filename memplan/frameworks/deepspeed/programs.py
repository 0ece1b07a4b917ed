"""What a plan says of ZeRO, checked, and the program that every rank runs under DeepSpeed's engine."""

from __future__ import annotations

from ...layers.module import Options
from ...plan.plan import ResolvedPlan
from ...tape.program import Program
from ...values import replace
from . import engine as deepspeed
from .config import check_model, fields_of_a_plan, zero_of
from .states import shard


def programs(plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
    """The one program that all ranks run, with what a rank keeps on the host and on NVMe."""
    zero = zero_of(plan)
    with fields_of_a_plan(plan):
        check_model(plan)
        (made,) = deepspeed.programs(plan, options, zero)
        host, nvme = deepspeed.host_bytes(plan, zero)
    model, dp = deepspeed.parameters_of(plan), plan.layout.dp
    sharded = zero.stage == 3
    tensors = (one for instance in model.instances for one in instance.hooked.module.parameters)
    elements = sum(shard(one.elements, dp) if sharded else one.elements for one in tensors)
    return (replace(made, elements=elements, host=host, nvme=nvme),)


def fullest_rank(plan: ResolvedPlan) -> int:
    """The rank that needs most, whose program the estimate is of."""
    with fields_of_a_plan(plan):
        return deepspeed.fullest_rank(plan, zero_of(plan))


def program_of_rank(plan: ResolvedPlan, options: Options, rank: int) -> Program:
    """What ``rank`` runs, which at stages 1 and 2 may need less than the estimate's."""
    with fields_of_a_plan(plan):
        return deepspeed.program_of_rank(plan, options, zero_of(plan), rank)
