"""What the report says of ZeRO: what ZeRO-3 gathers and moves, what is on the host, and what is taken for granted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...plan.releases import forces_reentrance
from ...plan.resolved import ResolvedPlan
from ...result import Notice
from ...tape.program import Program, ranks_on_node
from ..plain import preferences
from .states import is_fused_adam
from .traffic import traffic

GIB = 2**30

ENGINE = (
    "DeepSpeed 0.19's engine around a model of transformers 5.x, dropout active",
    "the model's output and logits are freed before backward begins, as in transformers' Trainer",
    "the optimizer's fp32 parameters and states are flat tensors; no DeepCompile, no torch_autocast",
    "refused because not modelled: quantised weights and gradients (ZeRO++), hpZ, MiCS, ZenFlow, "
    "partial offload of states (ratio), overlap_comm at ZeRO-1, contiguous_gradients: false at ZeRO-1 "
    "and 2",
)
OWN_ADAM = "DeepSpeed's FusedAdam updates in place; DeepSpeed's CPUAdam updates offloaded states"
PARTITIONED = (
    "each rank keeps gradients of different parameters, some ranks earlier than others; the report "
    "shows the most loaded rank"
)
SHARDED = (
    "the model is created under zero.Init; the parameter coordinator's trace is complete, as from the third step on",
    "side streams (gathers and reductions) run in the main stream's order",
)
UNTRACED = (
    "passes with and without adapters come in turns, so that the parameter coordinator's trace never holds: parameters "
    "are gathered when they are needed and released at once, persistent ones too"
)
BUILT = (
    "while DeepSpeed builds the engine, the device holds the unsharded model in its training dtype "
    "until each parameter group is flattened"
)
BUILDING = (
    "peak of initialisation unknown: it depends on the model's creation (under zero.Init or not), on "
    "host memory, or on a wrapper without measurements"
)
OVERFLOW = "fp16's overflow check is read from DeepSpeed's source, not measured"
NVME = "swapping to and from NVMe is read from DeepSpeed's source, not measured"


def of_adapters(plan: ResolvedPlan) -> Iterator[str]:
    """Of parameters that are not trained."""
    dtype, partitioned = plan.precision.dtype, plan.layout.zero == 3
    if plan.lora.rank is None:
        return
    frozen = "partitioned like the others, one by one" if partitioned else "whole on every rank"
    yield (
        f"the engine casts adapters to {dtype}; their main parameters, gradients and states alone are ZeRO's, and "
        f"frozen parameters are {frozen}"
    )
    if partitioned:
        yield "ZeRO-3's own linear function saves its input, though the weight is frozen (zero/linear.py)"
    if plan.quantisation.kind != "none" and partitioned:
        yield (
            f"4-bit weights are stored in {dtype} (bnb_4bit_quant_storage) and partitioned; their scales are whole on "
            "every rank; transformers loads such a model without zero.Init, whole on each GPU at first"
        )


def assumptions(plan: ResolvedPlan) -> tuple[str, ...]:
    """What an estimate under DeepSpeed takes for granted."""
    result = list(ENGINE)
    if is_fused_adam(plan.optimizer) and plan.optimizer.implementation is None:
        result.append(OWN_ADAM)
    result += of_adapters(plan)
    if plan.layout.zero in (1, 2):
        result.append(PARTITIONED)
    if plan.layout.zero == 3:
        alone = plan.runs_reference and not preferences.has_model(plan)
        result += (UNTRACED if alone else SHARDED[0], *SHARDED[1:])
    result.append(BUILT if builds_as_measured(plan) else BUILDING)
    if plan.precision.dtype == "fp16":
        result.append(OVERFLOW)
    if "nvme" in (plan.deepspeed.offload_optimizer, plan.deepspeed.offload_param):
        result.append(NVME)
    return tuple(result)


def builds_as_measured(plan: ResolvedPlan) -> bool:
    """``deepspeed.programs`` knows the peak of initialisation: ``DeepSpeedZeroOptimizer`` with states on the device."""
    wide = plan.layout.zero == 1 and (plan.precision.dtype, plan.precision.gradients) == ("bf16", "fp32")
    return plan.layout.zero in (1, 2) and plan.deepspeed.offload_optimizer == "none" and not wide


def notices(plan: ResolvedPlan, programs: Sequence[Program]) -> Iterator[Notice]:
    """Lines about a plan of framework ``deepspeed``."""
    (program,) = programs
    if program.host or program.nvme:
        yield _away(plan, program)
    if plan.layout.zero == 3 and plan.hardware.gpus != 1:
        yield from _sharded(plan, program)
    if forces_reentrance(plan):
        yield Notice(
            "checkpoints-when-sharded",
            "trl makes checkpoints reentrant (use_reentrant: true) with adapters under ZeRO-3: they are taken to hold "
            "what others hold",
        )


PINNED = "; not counted: PyTorch rounds pinned tensors up to a power of two, up to twice their bytes"


def _away(plan: ResolvedPlan, program: Program) -> Notice:
    ranks = ranks_on_node(plan, program)
    host, away = ranks * program.host, ranks * program.nvme
    pinned = plan.deepspeed.offload_optimizer_pin or plan.deepspeed.offload_param_pin
    nvme = f", and {away:,} ({away / GIB:.2f} GiB) on its NVMe" if away else ""
    return Notice(
        "zero-offloaded",
        f"offloaded states take {host:,} bytes ({host / GIB:.2f} GiB) of each node's host memory{nvme} "
        f"({ranks} rank{'s together' if ranks > 1 else ''}){PINNED if pinned else ''}",
    )


def _sharded(plan: ResolvedPlan, program: Program) -> Iterator[Notice]:
    found, dp = traffic(plan, program), len(program.ranks)
    layer, gathered = found.layer, found.gathered
    at_once = f", {gathered.most / layer.gathered:.1f} layers" if layer.gathered else ""
    yield Notice(
        "zero3-gathering",
        f"a layer has {layer.elements:,} parameters, {layer.shard:,} on each rank; unsharded, a layer has "
        f"{layer.whole:,} bytes: every pass gathers {layer.gathered:,}, and {layer.persistent:,} are never sharded; "
        f"at most {gathered.most:,} bytes are gathered at once ({gathered.most / GIB:.2f} GiB{at_once})",
    )
    yield Notice(
        "zero3-traffic",
        f"in each micro-batch a rank gathers {gathered.forward:,} bytes in forward and {gathered.backward:,} in "
        f"backward, copies {gathered.copied:,} of these bytes out of shared buffers, and reduces {gathered.reduced:,} "
        f"bytes of gradients: the rank receives {gathered.moved(dp):,} bytes over the network",
    )
