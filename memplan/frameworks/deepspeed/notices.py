"""What the report says of ZeRO: what ZeRO-3 gathers and moves, what is on the host, and what is taken for granted.

Traffic is that of one micro-batch: how much is whole at once, what is copied, and what is moved.

Bytes are those of the parameters' dtype, per rank, unrounded. A ring moves (dp − 1) / dp of a gathered tensor into
every rank, and as much for a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...layers.autograd import ITEMSIZE
from ...plan.plan import ResolvedPlan
from ...plan.releases import forces_reentrance
from ...result import Notice
from ...tape.events import Category, Drop, Hold, Tape
from ...tape.program import Program, ranks_on_node
from ...values import dataclass
from ..plain import preferences
from ..plain.hooked import Model
from .config import Zero, zero_of
from .coordinator import Sharded
from .engine import parameters_of
from .hooks import Inserted, sharded
from .learned import learnt_model
from .states import is_fused_adam, shard


@dataclass(frozen=True, slots=True)
class LayerShards:
    """One module of the model under ZeRO-3."""

    elements: int
    shard: int
    """Elements on each rank."""
    whole: int
    """Bytes of all of its parameters."""
    persistent: int
    """Bytes of those that stay whole."""

    @property
    def gathered(self) -> int:
        """Bytes that every pass gathers again."""
        return self.whole - self.persistent


@dataclass(frozen=True, slots=True)
class Gathering:
    """One micro-batch, forward and backward."""

    most: int
    """Bytes of gathered parameters and flat buffers at their peak, persistent ones not counted."""
    forward: int
    """Bytes gathered in forward."""
    backward: int
    """Bytes gathered again in backward."""
    copied: int
    """Bytes copied out of flat buffers, which a gather of one parameter alone does not need."""
    reduced: int
    """Bytes of gradients that are reduced and scattered."""

    def moved(self, dp: int) -> int:
        """Bytes that enter a rank over the network: (dp − 1) / dp of everything gathered and reduced."""
        return (self.forward + self.backward + self.reduced) * (dp - 1) // dp


def layer_shards(model: Model, zero: Zero, dp: int, name: str) -> LayerShards:
    """The module called ``name``. Its shards are those of its parameters, one by one."""
    instance = next(instance for instance in model.instances if instance.name == name)
    ids = [model.id_of(instance, parameter.name) for parameter in instance.hooked.parameters]
    kept: list[Sharded] = [parameter for parameter in sharded(model, zero) if parameter.id in ids]
    size = ITEMSIZE[model.dtype]
    elements = sum(parameter.elements for parameter in kept)
    persistent = sum(parameter.elements for parameter in kept if parameter.persists)
    shards = sum(shard(parameter.elements, dp) for parameter in kept)
    return LayerShards(elements, shards, elements * size, persistent * size)


def gathering(model: Model, inserted: Inserted) -> Gathering:
    """Reads a micro-batch with what hooks insert."""
    size = ITEMSIZE[model.dtype]
    tapes = (*inserted.forward, *reversed(inserted.backward))
    forward, backward = (sum(map(_gathered, part)) * size for part in (inserted.forward, inserted.backward))
    copied = sum(
        event.shape[0] for tape in tapes for event in tape if isinstance(event, Hold) and event.name == "gathered"
    )
    reduced = sum(model.parameters[id].elements for id in model.trained) * size
    return Gathering(_most(tapes), forward, backward, copied * size, reduced)


def _gathered(tape: Tape) -> int:
    """Elements of gathers in ``tape``, with padding."""
    gathers = ("gather", "gather_flat")
    return sum(event.shape[0] for event in tape if isinstance(event, Hold) and event.name in gathers)


def _most(tapes: tuple[Tape, ...]) -> int:
    live = most = 0
    for tape in tapes:
        for event in tape:
            if isinstance(event, (Hold, Drop)) and event.category is Category.GATHERED_PARAMETERS:
                live += event.bytes if isinstance(event, Hold) else -event.bytes
                most = max(most, live)
    return most


@dataclass(frozen=True, slots=True)
class Traffic:
    """ZeRO-3 of one micro-batch on one rank."""

    layer: LayerShards
    """The first layer of the model; all are alike."""
    gathered: Gathering


def traffic(plan: ResolvedPlan, program: Program) -> Traffic:
    """What ``program``, of ZeRO-3, gathers and reduces in each micro-batch."""
    model = parameters_of(plan) if plan.model.has_sizes else learnt_model(plan)
    first, dp = next(one.name for one in model.instances if "." in one.name), plan.layout.dp
    assert dp is not None
    tapes = [span.module.first for span in program.spans]
    inserted = Inserted(tuple(one.forward for one in tapes), tuple(one.backward for one in tapes))
    return Traffic(layer_shards(model, zero_of(plan), dp, first), gathering(model, inserted))


# -- notices -------------------------------------------------------------------------------------------


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
    """``deepspeed.engine`` knows the peak of initialisation: ``DeepSpeedZeroOptimizer`` with states on the device."""
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
            "trl makes checkpoints reentrant (use_reentrant: true) with adapters under ZeRO-3; memplan assumes that "
            "they hold as much as others do",
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
