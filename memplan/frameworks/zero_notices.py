"""What the report says of ZeRO: what ZeRO-3 gathers and moves, what is on the host, and what is taken for granted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..plan.plan import Plan
from ..program import Program, ranks_on_node
from ..result import Notice
from .deepspeed_programs import traffic

GIB = 2**30

ENGINE = (
    "DeepSpeed 0.19's engine around a model of transformers 5.x, dropout active",
    "the model's output, and its logits with it, is dropped before backward begins, as in transformers' Trainer",
    "the optimizer's fp32 parameters and states are flat; nothing is compiled (no DeepCompile), no torch_autocast",
    "refused, not modelled: quantised weights and gradients (ZeRO++), hpZ, MiCS, ZenFlow, part of the states offloaded "
    "(ratio), overlap_comm at stage 1, gradients that are not contiguous at stages 1 and 2",
)
OWN_ADAM = "DeepSpeed's FusedAdam, which updates in place; CPUAdam where states are offloaded"
PARTITIONED = "ranks keep gradients of other parameters, some earlier than others; the rank that needs most is shown"
SHARDED = (
    "the model is made under zero.Init; the coordinator's trace is complete, as from the third step on",
    "side streams (gathers and reductions) keep the order of events of the main stream",
)
BUILT = "while the engine is built, the model is whole on the device in its training dtype, until each group is flat"
BUILDING = (
    "initialisation is not known: it depends on how the model came (zero.Init or whole), on what the host holds, or on "
    "a wrapper that has not been measured"
)
OVERFLOW = "fp16's overflow check is read from DeepSpeed's source, not measured"
NVME = "swapping to and from NVMe is read from DeepSpeed's source, not measured"


def assumptions(plan: Plan) -> tuple[str, ...]:
    """What an estimate under DeepSpeed takes for granted."""
    result = list(ENGINE)
    if plan.optimizer.name in ("adam", "adamw") and plan.optimizer.implementation is None:
        result.append(OWN_ADAM)
    if plan.layout.zero in (1, 2):
        result.append(PARTITIONED)
    if plan.layout.zero == 3:
        result += SHARDED
    result.append(BUILT if builds_as_measured(plan) else BUILDING)
    if plan.precision.dtype == "fp16":
        result.append(OVERFLOW)
    if "nvme" in (plan.deepspeed.offload_optimizer, plan.deepspeed.offload_param):
        result.append(NVME)
    return tuple(result)


def builds_as_measured(plan: Plan) -> bool:
    """``deepspeed.programs`` knows the peak of initialisation: ``DeepSpeedZeroOptimizer`` with states on the device."""
    wide = plan.layout.zero == 1 and (plan.precision.dtype, plan.precision.gradients) == ("bf16", "fp32")
    return plan.layout.zero in (1, 2) and plan.deepspeed.offload_optimizer == "none" and not wide


def notices(plan: Plan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Lines about a plan of framework ``deepspeed``."""
    (program,) = programs
    if program.host or program.nvme:
        yield _away(plan, program)
    if plan.layout.zero == 3 and plan.hardware.gpus != 1:
        yield from _sharded(plan, program)


PINNED = "; PyTorch rounds pinned tensors up to a power of two, up to twice their bytes, which is not counted"


def _away(plan: Plan, program: Program) -> Notice:
    ranks = ranks_on_node(plan, program)
    host, away = ranks * program.host, ranks * program.nvme
    pinned = plan.deepspeed.offload_optimizer_pin or plan.deepspeed.offload_param_pin
    nvme = f", and {away:,} ({away / GIB:.2f} GiB) on its NVMe" if away else ""
    return Notice(
        "zero-offloaded",
        f"offloaded states take {host:,} bytes ({host / GIB:.2f} GiB) of each node's host memory{nvme} "
        f"(its {ranks} rank{'s' if ranks > 1 else ''} together){PINNED if pinned else ''}",
    )


def _sharded(plan: Plan, program: Program) -> Iterator[Notice]:
    found, dp = traffic(plan, program), len(program.ranks)
    layer, gathered = found.layer, found.gathered
    at_once = f", {gathered.most / layer.gathered:.1f} layers" if layer.gathered else ""
    yield Notice(
        "zero3-gathering",
        f"a layer is {layer.elements:,} parameters, {layer.shard:,} on each rank: {layer.whole:,} bytes when whole, of "
        f"which {layer.gathered:,} are gathered for every pass and {layer.persistent:,} stay; at most "
        f"{gathered.most:,} bytes are gathered at once ({gathered.most / GIB:.2f} GiB{at_once})",
    )
    yield Notice(
        "zero3-traffic",
        f"in each micro-batch a rank gathers {gathered.forward:,} bytes in forward and {gathered.backward:,} in "
        f"backward, copies {gathered.copied:,} of them out of shared buffers, and reduces {gathered.reduced:,} bytes "
        f"of gradients: {gathered.moved(dp):,} bytes enter it over the network",
    )
