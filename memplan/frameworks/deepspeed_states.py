"""How DeepSpeed keeps states under its pipeline engine, and what its optimizer step adds.

P is the number of parameters on the rank, dp the data-parallel size. Read in DeepSpeed's branch
``big-science`` (August 2021), v0.5.7 (``runtime/fp16/unfused_optimizer.py``, ``runtime/zero/stage2.py``,
later ``stage_1_and_2.py``) and v0.6.3 (``runtime/bf16_optimizer.py``).

====================  ================  =======================  ====================================
wrapper               kept              forward and backward      step
====================  ================  =======================  ====================================
fp16, ZeRO 0          2P + 4P + 8P      + 2P gradients            + 4P: every gradient in fp32 at once
fp16, ZeRO 1          2P + 12P/dp       + 2P gradients            gradients end but for 2P/dp, + 6P/dp
bf16                  2P + 12P/dp + A   + 2P gradients            nothing large; A = 4P or 2P static
====================  ================  =======================  ====================================

(With 8-bit Adam 8P becomes 2P and the scales.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..layers.autograd import ITEMSIZE
from ..layers.module import Parameter
from ..plan.errors import PlanError
from ..plan.plan import Plan
from ..program import Gradients, drop_all
from ..tape import Category, Hold, Tape, rounded
from .states import QUANTISATION_MAPS, State, eight_bit_states, full, optimizer_states, step_temporaries

BUCKET_ELEMENTS = 500_000_000
"""Elements after which a gradient bucket is reduced (``allreduce_gradients``; ``reduce_bucket_size``)."""

ALIGNMENT = 2
"""Flat groups are padded to a multiple of this times dp (``nccl_start_alignment_factor``)."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The wrapper's answer for one rank."""

    states: tuple[State, ...]
    """Per parameter tensor."""
    flat: tuple[Hold, ...]
    """Per parameter group."""
    step: Tape
    late_step: Tape
    gradients: Gradients
    initialisation: int
    """Peak bytes while the optimizer is built, with the parameters."""


def keep(plan: Plan, parameters: Sequence[Parameter]) -> Kept:
    """States and step for the plan's dtype, ZeRO stage and optimizer."""
    dtype = plan.precision.dtype
    if dtype == "bf16":
        return _bf16(plan, parameters)
    if plan.precision.gradients != dtype:
        raise PlanError(
            "precision.gradients",
            plan.precision.gradients,
            f"DeepSpeed accumulates {dtype} gradients in {dtype}; only bf16 parameters can have fp32 gradients",
        )
    if plan.layout.zero == 1:
        if dtype != "fp16":
            raise PlanError("layout.zero", 1, f"ZeRO needs fp16 or bf16 parameters here, not {dtype}")
        return _zero1(plan, parameters)
    return _fp32(plan, parameters) if dtype == "fp32" else _unfused(plan, parameters)


def _fp32(plan: Plan, parameters: Sequence[Parameter]) -> Kept:
    """No wrapper: the optimizer works on the parameters themselves."""
    states = (
        full("parameter", Category.PARAMETERS, "fp32"),
        *optimizer_states(plan.optimizer, "fp32", embeddings_32bit=plan.optimizer.embeddings_32bit),
    )
    step = _bucket(parameters, "fp32") + drop_all(step_temporaries(plan.optimizer, list(parameters), "fp32"), 100)
    return Kept(states, _maps(plan), step, (), Gradients.ACCUMULATE, _total(states, parameters))


def _unfused(plan: Plan, parameters: Sequence[Parameter]) -> Kept:
    """``FP16_UnfusedOptimizer``: an fp32 copy of every parameter. In the step every fp16 gradient is
    cast to fp32 at once, while the fp16 ones stay; so it is when states are initialised with zeros."""
    states = (
        full("parameter", Category.PARAMETERS, "fp16"),
        full("main_parameter", Category.MAIN_PARAMETERS, "fp32"),
        *optimizer_states(plan.optimizer, "fp32", embeddings_32bit=plan.optimizer.embeddings_32bit),
    )
    casts = [
        Hold(0, parameter.bytes("fp32"), Category.GRADIENTS, f"{parameter.name}/grad_fp32", parameter.shape, "fp32")
        for parameter in parameters
    ]
    temporaries = step_temporaries(plan.optimizer, list(parameters), "fp32")
    step = _bucket(parameters, "fp16") + drop_all([*casts, *temporaries], 100)
    gradients = sum(parameter.bytes("fp16") + parameter.bytes("fp32") for parameter in parameters)
    extra = sum(hold.bytes for hold in temporaries)
    return Kept(states, _maps(plan), step, (), Gradients.ACCUMULATE, _total(states, parameters) + gradients + extra)


def _zero1(plan: Plan, parameters: Sequence[Parameter]) -> Kept:
    """``FP16_DeepSpeedZeroOptimizer(partition_grads=False)``: flat groups, states of a share of each.

    Gradients of all micro-batches accumulate whole. For the step this rank keeps those of its share,
    measures their norm in fp64 one slice at a time, flattens them and casts them to fp32.
    """
    dp = plan.layout.dp
    assert dp is not None
    flat: list[Hold] = []
    late: list[Hold] = []
    norm = 0
    for name, group in _groups(parameters):
        padded = _padded([p.elements for p in group], dp)
        share = padded // dp
        flat += [_flat(f"{name}/parameters", Category.PARAMETERS, padded, "fp16")]
        flat += [_flat(f"{name}/main_parameters", Category.MAIN_PARAMETERS, share, "fp32")]
        flat += _flat_states(plan, name, share)
        late += [
            _flat(f"{name}/averaged_gradients", Category.GRADIENTS, share, "fp16"),
            _flat(f"{name}/flat_gradients", Category.GRADIENTS, share, "fp16"),
            _flat(f"{name}/gradients_fp32", Category.GRADIENTS, share, "fp32"),
        ]
        norm = max(norm, min(share, max(p.elements for p in group)))
    norm_fp64 = Hold(0, rounded(8 * norm), Category.TEMPORARIES, "gradient_norm_fp64", (norm,), "fp64")
    step = _bucket(parameters, "fp16")
    initial = sum(hold.bytes for hold in flat) + sum(
        _flat(name, Category.GRADIENTS, _padded([p.elements for p in group], dp) // dp, "fp32").bytes
        for name, group in _groups(parameters)
    )
    late_step = _with_norm(late, norm_fp64, len(list(_groups(parameters))))
    return Kept((), (*flat, *_maps(plan)), step, late_step, Gradients.ACCUMULATE, initial)


def _with_norm(late: list[Hold], norm: Hold, groups: int) -> Tape:
    """The averaged gradients first, the norm over them, then their flat copies."""
    averaged = [hold for hold in late if hold.name.endswith("averaged_gradients")]
    copies = [hold for hold in late if not hold.name.endswith("averaged_gradients")]
    held = drop_all(averaged, 500)
    holds, drops = held[: len(averaged)], held[len(averaged) :]
    return (*holds, *drop_all([norm], 600), *drop_all(copies, 700), *drops)


def _bf16(plan: Plan, parameters: Sequence[Parameter]) -> Kept:
    """``BF16_Optimizer``: partitioned over dp at ZeRO 0 and 1 alike; a static buffer accumulates gradients.

    A micro-batch's bf16 gradients all live until its backward has ended, then they are added to the
    buffer (``update_hp_grads``).
    """
    dp, accumulate = plan.layout.dp, plan.precision.gradients
    assert dp is not None
    assert accumulate is not None
    if accumulate == "fp16":
        raise PlanError("precision.gradients", "fp16", "bf16 gradients accumulate in bf16 or fp32")
    flat: list[Hold] = []
    for name, group in _groups(parameters):
        padded = _padded([p.elements for p in group], dp)
        flat += [
            _flat(f"{name}/parameters", Category.PARAMETERS, padded, "bf16"),
            _flat(f"{name}/main_parameters", Category.MAIN_PARAMETERS, padded // dp, "fp32"),
            _flat(f"{name}/gradients", Category.GRADIENTS, padded, accumulate),
            *_flat_states(plan, name, padded // dp),
        ]
    shares = [Parameter(name, (_padded([p.elements for p in group], dp) // dp,)) for name, group in _groups(parameters)]
    late = drop_all(step_temporaries(plan.optimizer, shares, "fp32"), 100)
    initial = sum(hold.bytes for hold in flat)
    return Kept((), (*flat, *_maps(plan)), (), late, Gradients.PER_MICROBATCH, initial)


def _flat_states(plan: Plan, group: str, share: int) -> list[Hold]:
    """Optimizer states over one flat share of a group."""
    optimizer = plan.optimizer
    parameter = Parameter(group, (share,))
    if optimizer.name == "adam8bit":
        assert optimizer.block_size is not None
        states: tuple[State, ...] = eight_bit_states(optimizer.block_size, False)
    else:
        states = optimizer_states(optimizer, "fp32", embeddings_32bit=False)
    holds = (state.hold(parameter, 0) for state in states)
    return [hold for hold in holds if hold is not None]


def _groups(parameters: Iterable[Parameter]) -> list[tuple[str, list[Parameter]]]:
    """Megatron's two groups: matrices (weight decay), then norms and biases."""
    tensors = list(parameters)
    matrices = [p for p in tensors if len(p.shape) > 1]
    vectors = [p for p in tensors if len(p.shape) <= 1]
    return [(name, group) for name, group in (("decay", matrices), ("no_decay", vectors)) if group]


def _padded(elements: Iterable[int], dp: int) -> int:
    multiple = ALIGNMENT * dp
    return -(-sum(elements) // multiple) * multiple


def _flat(name: str, category: Category, elements: int, dtype: str) -> Hold:
    return Hold(0, rounded(elements * ITEMSIZE[dtype]), category, name, (elements,), dtype)


def _maps(plan: Plan) -> tuple[Hold, ...]:
    if plan.optimizer.name != "adam8bit":
        return ()
    return (Hold(0, rounded(QUANTISATION_MAPS), Category.OPTIMIZER_STATES, "quantisation_maps"),)


def _bucket(parameters: Sequence[Parameter], dtype: str) -> Tape:
    """``buffered_allreduce_fallback``: flat copies of buckets of gradients, even at dp = 1; the largest counts.

    A bucket is closed by the tensor that takes it beyond the limit.
    """
    largest = current = 0
    for parameter in parameters:
        current += parameter.elements
        if current > BUCKET_ELEMENTS:
            largest, current = max(largest, current), 0
    elements = max(largest, current)
    bucket = Hold(
        0, rounded(elements * ITEMSIZE[dtype]), Category.COMMUNICATION_BUFFERS, "reduce_bucket", (elements,), dtype
    )
    return drop_all([bucket], 1)


def _total(states: Sequence[State], parameters: Iterable[Parameter]) -> int:
    return sum(state.size(parameter) for parameter in parameters for state in states)
