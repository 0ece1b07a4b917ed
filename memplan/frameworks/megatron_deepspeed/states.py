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
from functools import lru_cache
from itertools import chain

from ...layers.autograd import ITEMSIZE
from ...layers.module import Parameter
from ...optimizers.base import State, full, optimizer_states, step_temporaries
from ...optimizers.bitsandbytes import quantisation_maps
from ...plan.errors import PlanError
from ...plan.plan import Optimizer, Precision, ResolvedPlan
from ...tape.events import Category, Drop, Hold, Stretch, Tape, rounded
from ...tape.program import drop_all
from ...values import dataclass

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
    step: Stretch
    late_step: Stretch
    moves_gradients: bool
    initialisation: int
    """Peak bytes while the optimizer is built, with the parameters."""
    building: tuple[Hold, ...] = ()
    """Held only while optimizer states are made."""
    before: Tape = ()
    """What comes and goes while flat tensors are made, which are in it, too."""
    made: int = 0
    """How many of ``flat`` are in ``before``."""
    gradients_kept: int = 0
    """Bytes of the gradients that the second half of the step still reads."""


@dataclass(frozen=True, slots=True)
class Setting:
    """All of a plan that the wrapper sees: plans that agree in it share the answer."""

    precision: Precision
    optimizer: Optimizer
    zero: int
    dp: int


def keep(plan: ResolvedPlan, parameters: Sequence[Parameter]) -> Kept:
    """States and step for the plan's dtype, ZeRO stage and optimizer."""
    return _keep(Setting(plan.precision, plan.optimizer, plan.layout.zero, plan.layout.dp), tuple(parameters))


@lru_cache(maxsize=256)
def _keep(plan: Setting, parameters: tuple[Parameter, ...]) -> Kept:
    dtype = plan.precision.dtype
    if dtype == "bf16":
        return _bf16(plan, parameters)
    if plan.precision.gradients != dtype:
        raise PlanError(
            "precision.gradients",
            plan.precision.gradients,
            f"DeepSpeed accumulates {dtype} gradients in {dtype}; only bf16 parameters can have fp32 gradients",
        )
    if plan.zero == 1:
        if dtype != "fp16":
            raise PlanError("layout.zero", 1, f"ZeRO needs fp16 or bf16 parameters here, not {dtype}")
        return _zero1(plan, parameters)
    return _fp32(plan, parameters) if dtype == "fp32" else _unfused(plan, parameters)


def _fp32(plan: Setting, parameters: Sequence[Parameter]) -> Kept:
    """No wrapper: the optimizer works on the parameters themselves."""
    states = (
        full("parameter", Category.PARAMETERS, "fp32"),
        *optimizer_states(plan.optimizer, "fp32", embeddings_32bit=plan.optimizer.embeddings_32bit),
    )
    step = _buckets(parameters, "fp32") + drop_all(step_temporaries(plan.optimizer, list(parameters), "fp32"), 100)
    return Kept(
        states,
        quantisation_maps(plan.optimizer),
        Stretch(step),
        Stretch(),
        False,
        _total(states, parameters),
    )


def _unfused(plan: Setting, parameters: Sequence[Parameter]) -> Kept:
    """``FP16_UnfusedOptimizer``: an fp32 copy of every parameter. In the step every fp16 gradient is
    cast to fp32 at once, while the fp16 ones stay; so it is when states are initialised with zeros."""
    states = (
        full("parameter", Category.PARAMETERS, "fp16"),
        full("main_parameter", Category.MAIN_PARAMETERS, "fp32"),
        *optimizer_states(plan.optimizer, "fp32", embeddings_32bit=plan.optimizer.embeddings_32bit),
    )
    ordered = [parameter for _, group in _groups(parameters) for parameter in group]
    casts = [
        Hold(0, parameter.bytes("fp32"), Category.GRADIENTS, f"{parameter.name}/grad_fp32", parameter.shape, "fp32")
        for parameter in ordered
    ]
    temporaries = step_temporaries(plan.optimizer, list(parameters), "fp32")
    step = _buckets(parameters, "fp16") + _in_fp32(ordered) + drop_all([*casts, *temporaries], 100)
    zeros = [
        Hold(0, parameter.bytes("fp16"), Category.GRADIENTS, f"{parameter.name}/zeros", parameter.shape, "fp16")
        for parameter in ordered
    ]
    building = (*zeros, *casts, *temporaries)
    initial = _total(states, parameters) + sum(hold.bytes for hold in building)
    return Kept(states, quantisation_maps(plan.optimizer), Stretch(step), Stretch(), False, initial, building)


def _zero1(plan: Setting, parameters: Sequence[Parameter]) -> Kept:
    """``FP16_DeepSpeedZeroOptimizer(partition_grads=False)``: flat groups, states of a share of each.

    The model's own parameter tensors go to the CPU first, group by group, and leave their blocks behind in the
    allocator's cache. So do the copy of its share that becomes fp32 (``clone().float()``) and the gradients of zeros
    with which states are made (``initialize_optimizer_states``). Gradients of all micro-batches accumulate whole; for
    the step this rank keeps those of its share (``averaged_gradients`` are views of them), looks for overflows in fp32
    (``_has_inf_or_nan``) and measures their norm in fp64 one tensor at a time, flattens them and casts them to fp32.
    Updated parameters are gathered in shards; NCCL's list ``all_gather`` goes through a flat copy of each.
    """
    dp = plan.dp
    flat: list[Hold] = []
    moved: list[Tape] = []
    states: list[Hold] = []
    building: list[Hold] = []
    overflows: list[Tape] = []
    late: list[Tape] = []
    gathers: list[Tape] = []
    kept = 0
    for at, (name, group) in enumerate(_groups(parameters)):
        padded = _padded([p.elements for p in group], dp)
        share = padded // dp
        kept += rounded(2 * share)
        whole = _flat(f"{name}/parameters", Category.PARAMETERS, padded, "fp16")
        main = _flat(f"{name}/main_parameters", Category.MAIN_PARAMETERS, share, "fp32")
        clone = _flat(f"{name}/clone", Category.TEMPORARIES, share, "fp16")._replace(tensor=1)
        moved.append((whole, clone, main, Drop(1, clone.bytes, clone.category)))
        flat += [whole, main]
        states += _flat_states(plan, name, share)
        gradient = _flat(f"{name}/gradients_fp32", Category.GRADIENTS, share, "fp32")
        building.append(gradient)
        largest = min(share, max(p.elements for p in group))
        overflows.append(_passing(rounded(4 * largest), Category.TEMPORARIES, f"{name}/overflow_fp32", "fp32"))
        norm = Hold(0, rounded(8 * largest), Category.TEMPORARIES, f"{name}/norm_fp64", (largest,), "fp64")
        copied = _flat(f"{name}/flat_gradients", Category.GRADIENTS, share, "fp16")
        start = 100 * (at + 1)
        late.append((*drop_all([norm], start), *_cast(copied, gradient, start + 1)))
        gathered = dp * (share // max(1, padded // BUCKET_ELEMENTS))
        gathers.append(
            drop_all([_flat(f"{name}/all_gather_flat", Category.COMMUNICATION_BUFFERS, gathered, "fp16")], start + 9)
        )
    ends = tuple(Drop(100 * (at + 1) + 2, hold.bytes, hold.category) for at, hold in enumerate(building))
    late_step = (*chain(*overflows), *chain(*late), *ends, *chain(*(gathers if dp > 1 else [])))
    originals = tuple(
        Hold(0, parameter.bytes("fp16"), Category.PARAMETERS, parameter.name, parameter.shape, "fp16")
        for parameter in parameters
    )
    zeros = drop_all(building, 1)
    before = (*drop_all(originals, 1), *chain(*moved), *zeros[: len(building)], *states, *zeros[len(building) :])
    flat += states
    initial = sum(hold.bytes for hold in (*flat, *building))
    return Kept(
        (),
        (*flat, *quantisation_maps(plan.optimizer)),
        Stretch(_independent_buckets(parameters)),
        Stretch(late_step),
        False,
        initial,
        before=before,
        made=len(flat),
        gradients_kept=kept,
    )


def _cast(source: Hold, target: Hold, start: int) -> Tape:
    """``flatten(…).to(float32)``: the flat copy ends once it is cast; the cast stays."""
    source, target = source._replace(tensor=start), target._replace(tensor=start + 1)
    return (source, target, Drop(start, source.bytes, source.category))


def _bf16(plan: Setting, parameters: Sequence[Parameter]) -> Kept:
    """``BF16_Optimizer``: partitioned over dp at ZeRO 0 and 1 alike; a static buffer accumulates gradients.

    A micro-batch's bf16 gradients all live until its backward has ended, then they are added to the
    buffer (``update_hp_grads``).
    """
    dp, accumulate = plan.dp, plan.precision.gradients
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
    return Kept((), (*flat, *quantisation_maps(plan.optimizer)), Stretch(), Stretch(late), True, initial)


def _flat_states(plan: Setting, group: str, share: int) -> list[Hold]:
    """Optimizer states over one flat share of a group."""
    parameter = Parameter(group, (share,))
    states = optimizer_states(plan.optimizer, "fp32", embeddings_32bit=False)
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


def _buckets(parameters: Sequence[Parameter], dtype: str) -> Tape:
    """``allreduce_no_retain``: flat copies of buckets of gradients, one after the other, even at dp = 1.

    A bucket is closed by the tensor that takes it beyond ``BUCKET_ELEMENTS``.
    """
    tapes: list[Tape] = []
    current = 0
    for at, parameter in enumerate(parameters):
        current += parameter.elements
        if current > BUCKET_ELEMENTS or at == len(parameters) - 1:
            size = rounded(current * ITEMSIZE[dtype])
            tapes.append(_passing(size, Category.COMMUNICATION_BUFFERS, "reduce_bucket", dtype))
            current = 0
    return tuple(chain(*tapes))


def _independent_buckets(parameters: Sequence[Parameter]) -> Tape:
    """``reduce_independent_p_g_buckets_and_remove_grads``: as ``_buckets``, but group by group, and closed
    before the tensor that would take a bucket beyond ``BUCKET_ELEMENTS``."""
    tapes: list[Tape] = []
    current = 0
    for parameter in (p for _, group in _groups(parameters) for p in group):
        if current and current + parameter.elements > BUCKET_ELEMENTS:
            tapes.append(_passing(rounded(2 * current), Category.COMMUNICATION_BUFFERS, "reduce_bucket", "fp16"))
            current = 0
        current += parameter.elements
    tapes.append(_passing(rounded(2 * current), Category.COMMUNICATION_BUFFERS, "reduce_bucket", "fp16"))
    return tuple(chain(*tapes))


def _passing(size: int, category: Category, name: str, dtype: str) -> Tape:
    """Something that comes and goes at once."""
    return drop_all([Hold(0, size, category, name, (), dtype)], 1)


def _in_fp32(parameters: Sequence[Parameter]) -> Tape:
    """``CheckOverflow._has_inf_or_nan`` and ``get_grad_norm``: ``grad.float()`` of one parameter at a time."""
    tapes = (_passing(p.bytes("fp32"), Category.TEMPORARIES, f"{p.name}/grad_float", "fp32") for p in parameters)
    return tuple(chain(*tapes))


def _total(states: Sequence[State], parameters: Iterable[Parameter]) -> int:
    return sum(state.size(parameter) for parameter in parameters for state in states)
