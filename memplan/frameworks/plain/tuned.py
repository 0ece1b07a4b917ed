"""A model of which some parameters are frozen: what is trained where, and what every parameter keeps.

bitsandbytes 0.50: ``functional.py`` (``quantize_4bit``, ``QuantState``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from ...families import family
from ...layers.autograd import ITEMSIZE
from ...layers.module import Parameter, hold_bytes
from ...layers.quantised import Awq, Gptq, Int8
from ...layers.tuning import NESTED_CODE, Adapters, FourBit, Packed, Tuning
from ...layers.work import FOUR_BITS, FOUR_BITS_BY_BRANCHES
from ...optimizers.base import EMBEDDINGS, State, optimizer_states
from ...plan.errors import PlanError
from ...plan.lora import HEAD, WORD, adapted, of_experts, saved
from ...plan.plan import Optimizer, ResolvedPlan
from ...plan.releases import CODE_COPIED, FLUSHES_MIB, GPTQ_CASTS, LOOKED_UP, casts_back, parsed, release
from ...plan.tuning_checks import is_tuned
from ...tape.events import Category, Hold, Tape, rounded
from ...tape.program import drop_all
from ...values import replace

ENDS = {"word.weight", "position.weight", "head.weight"}
"""What trl casts back: ``lm_head``, ``embed_tokens``, ``wte``, ``wpe`` (``peft_module_casting_to_bf16``)."""

Groups = tuple[tuple[tuple[Parameter, ...], int], ...]
"""Parameters of each module of a device, and how many such modules follow one another."""


def tuning_of(plan: ResolvedPlan) -> Tuning | None:
    """What is trained of a module outside the first ``frozen.layers`` layers; ``None`` where all of it is."""
    if not is_tuned(plan):
        return None
    lora, quantisation = plan.lora, plan.quantisation
    adapters = None
    if lora.rank is not None:
        assert lora.dtype is not None
        dropout = lora.dropout if plan.trainer.kind.drops_out else 0.0
        scaling = (8.0 if lora.alpha is None else lora.alpha) / (lora.rank**0.5 if lora.rslora else lora.rank)
        experts = of_experts(plan)
        adapters = Adapters(lora.rank, adapted(plan), dropout, lora.dtype, lora.dora, experts, scaling != 1)
    four_bit: Packed | None = None
    match quantisation.kind:
        case "gptq":
            newer = plan.torch is None or parsed(plan.torch) >= FLUSHES_MIB
            flushed = 256 << 20 if newer else 256_000_000
            four_bit = Gptq("fp16", quantisation.group, release(plan, "peft") >= GPTQ_CASTS, flushed)
        case "awq":
            four_bit = Awq("fp16", quantisation.group)
        case "int8":
            four_bit = Int8(plan.precision.dtype)
        case _:
            four_bit = four_bit_of(plan)
    prepared = quantisation.prepared
    linear = {f"{name}.{one}" for name in family(plan.model.family).linear_layers for one in ("weight", "bias")}
    return Tuning(
        base=adapters is None,
        frozen=frozenset({*EMBEDDINGS, "embedding_norm.weight", "embedding_norm.bias"})
        if plan.frozen.embedding
        else frozenset(),
        adapters=adapters,
        saved=saved(plan),
        four_bit=four_bit,
        fused=plan.kernels.lora == "unsloth",
        compute=quantisation.compute or plan.precision.dtype,
        input_requires_grad=plan.recompute.mode == "full",
        fp32=prepared,
        not_fp32=frozenset(linear | (ENDS if casts_back(plan) else set())) if prepared else frozenset(),
    )


def four_bit_of(plan: ResolvedPlan) -> FourBit | None:
    """bitsandbytes' 4-bit weights."""
    if plan.quantisation.kind not in ("nf4", "fp4"):
        return None
    library = release(plan, "bitsandbytes")
    issue = FOUR_BITS if library >= LOOKED_UP else FOUR_BITS_BY_BRANCHES
    return FourBit(plan.precision.dtype, plan.quantisation.double, library >= CODE_COPIED, issue)


def frozen_layer(tuning: Tuning) -> Tuning:
    """That of a layer of which nothing is trained."""
    return replace(tuning, base=False, adapters=None, saved=frozenset())


def trains_layers(plan: ResolvedPlan, tuning: Tuning | None) -> bool:
    """Whether some layer has parameters that are trained."""
    if tuning is None or tuning.adapters is None:
        return plan.frozen.layers < plan.model.layers
    return bool(tuning.adapters.targets - {"transform", WORD, HEAD} or tuning.adapters.experts)


def check_tuned(plan: ResolvedPlan) -> None:
    """Refuses what the recipes do not cover."""
    known, frozen = family(plan.model.family), plan.frozen
    if not known.returns_weights or not is_tuned(plan):
        return
    why = f"with family {known.name}: its layers return attention weights, which must not end before they are"
    if frozen.embedding and frozen.layers:
        raise plan.wrong("frozen.layers", f"must be 0 where the embedding is frozen {why}")
    if plan.lora.rank is not None and not adapted(plan) & {"qkv", "query", "key", "value"}:
        others = " or ".join(
            name.rpartition(".")[2]
            for part, name in known.linear_layers.items()
            if part in ("qkv", "query", "key", "value")
        )
        raise PlanError("lora.targets", list(plan.lora.targets or ()), f"must include {others} {why}")


# -- what is kept -----------------------------------------------------------------------------------


def tuned_states(optimizer: Optimizer, dtype: str) -> tuple[State, ...]:
    """Each parameter as it is stored, and the optimizer's states, in its dtype, of those that are trained."""
    return (*stored(dtype), *kept_beside(), *trained_states(optimizer))


def sharded_states(optimizer: Optimizer, dtype: str, shard: Callable[[Parameter], Parameter]) -> tuple[State, ...]:
    """The same of parameters that are cut: of each this rank's ``shard``; of a 4-bit weight that is a piece of what it
    is packed into, and its ``quant_state`` is whole."""

    def of(state: State) -> State:
        return State(state.name, state.category, lambda parameter: state.size(shard(parameter)))

    return (*map(of, stored(dtype)), *kept_beside(), *map(of, trained_states(optimizer)))


def packed(parameter: Parameter, dtype: str) -> Parameter:
    """``parameter`` as what wraps it sees it: four bits are numbers of ``dtype``, one a row (``functional.py``,
    ``quantize_4bit`` with ``quant_storage``)."""
    if parameter.four_bit is None:
        return parameter
    rows = -(-parameter.elements // (2 * ITEMSIZE[dtype]))
    return replace(parameter, shape=(rows, 1), dtype=dtype, four_bit=None)


@lru_cache(maxsize=64)
def stored(dtype: str) -> tuple[State, ...]:
    """A parameter in its own dtype, or packed to 4 bits: zeros are a tensor of their own."""

    def plain(parameter: Parameter) -> int:
        if parameter.four_bit is not None:
            return rounded(parameter.four_bit.packed(parameter.shape)[0])
        return parameter.bytes(parameter.dtype or dtype)

    def zeros(parameter: Parameter) -> int:
        return (
            sum(map(rounded, parameter.four_bit.packed(parameter.shape)[1:])) if parameter.four_bit is not None else 0
        )

    return (State("parameter", Category.PARAMETERS, plain), State("zeros", Category.PARAMETERS, zeros))


@lru_cache(maxsize=1)
def kept_beside() -> tuple[State, ...]:
    """What belongs to a packed weight, and is whole on every rank."""

    def beside(name: str) -> State:
        def size(parameter: Parameter) -> int:
            return parameter.four_bit.beside(parameter.shape).get(name, 0) if parameter.four_bit is not None else 0

        return State(name, Category.PARAMETERS, size)

    return tuple(map(beside, BESIDE))


BESIDE = ("absmax", "code", "nested_absmax", "nested_code", "offset", "scales", "g_idx")
"""What libraries keep beside a packed weight."""


@lru_cache(maxsize=64)
def trained_states(optimizer: Optimizer) -> tuple[State, ...]:
    """The optimizer's states of trained parameters, each in its parameter's dtype."""
    by_dtype = {
        dtype: optimizer_states(optimizer, dtype, embeddings_32bit=optimizer.embeddings_32bit)
        for dtype in ("fp32", "bf16", "fp16")
    }

    def of_trained(at: int) -> State:
        def size(parameter: Parameter) -> int:
            assert parameter.dtype is not None
            return by_dtype[parameter.dtype][at].size(parameter)

        state = by_dtype["fp32"][at]
        return State(state.name, state.category, size)

    return tuple(of_trained(at) for at in range(len(by_dtype["fp32"])))


def trained_only(groups: Groups) -> Groups:
    """``groups`` without frozen parameters."""
    trained = ((tuple(one for one in parameters if one.trained), count) for parameters, count in groups)
    return tuple((parameters, count) for parameters, count in trained if parameters)


def warmup(plan: ResolvedPlan, groups: Groups) -> Tape:
    """What ``from_pretrained`` takes at once and gives back before it loads weights to the GPU, which it does of a
    model that is quantised (transformers 5.23, ``modeling_utils.py``, ``caching_allocator_warmup``): every weight, as
    it is stored before ``prepare_model_for_kbit_training`` casts it. The weights then lie in this one segment."""
    if plan.quantisation.kind not in ("nf4", "fp4") or release(plan, "transformers") < WARMED:
        return ()
    dtype = plan.precision.dtype
    base = ((one, count) for parameters, count in groups for one in parameters if not one.trained)
    size = sum(
        count * (one.elements * ITEMSIZE[dtype] if one.four_bit is None else one.four_bit.packed_bytes(one.shape))
        for one, count in base
    )
    return drop_all([Hold(0, rounded(size), Category.PARAMETERS, "caching_allocator_warmup")], 1)


WARMED = (5,)
"""The release of transformers from which it is known; earlier ones take other multiples."""


def shared_table(plan: ResolvedPlan) -> tuple[Hold, ...]:
    """bitsandbytes' one table of 8-bit values (``functional.py``, ``name2qmap``), of which every weight has a copy."""
    if not plan.quantisation.double:
        return ()
    return (Hold(0, hold_bytes((NESTED_CODE,), "fp32"), Category.BUFFERS, "dynamic_map", (NESTED_CODE,), "fp32"),)
