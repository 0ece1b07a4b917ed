"""DeepSpeed's engine (0.19) with ZeRO 0 to 3 on Hugging Face transformers: one program for all ranks.

Which wrapper keeps the states (``runtime/engine.py``, ``_do_optimizer_sanity_check``, ``_configure_optimizer``):

=========  ==================================  =====================================================
stage      gradients accumulate in             wrapper
=========  ==================================  =====================================================
0          the parameters' dtype               ``FP16_Optimizer`` (bf16 too); none for fp32
1          fp32, bf16 parameters, on device    ``BF16_Optimizer``
1, 2       anything else                       ``DeepSpeedZeroOptimizer`` (``stage_1_and_2.py``)
3          either                              ``DeepSpeedZeroOptimizer_Stage3``
=========  ==================================  =====================================================

Ranks of stages 1 and 2 keep gradients of different parameters; the program is that of the one that needs most.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ...families import family
from ...layers.fused_losses import PLAIN, HeadLoss
from ...layers.huggingface import LayerShape
from ...layers.kernels import Kernels
from ...layers.module import Module, Options
from ...layers.tuning import Tuning
from ...optimizers.bitsandbytes import quantisation_maps
from ...plan.plan import Optimizer, ResolvedPlan
from ...schedules.one_chunk import one_chunk
from ...tape.events import Category, Hold, Stretch
from ...tape.program import Program, Span, fold_program
from ...values import dataclass, replace
from ..plain import hooked, preferences, trainer
from ..plain.hooked import Model
from ..plain.programs import buffers, head_loss, inputs, kernels_of, layer_shape
from ..plain.recipes import EMBEDDED, keeps_embedded
from ..plain.returned import NOTHING, Returned, kept
from ..plain.tuned import frozen_layer, kept_beside, shared_table, tuning_of
from . import states as zero_states, step as zero_step
from .buckets import ReducingBucket, ScatteringBucket
from .config import Zero, check, check_model, fields_of_a_plan, zero_of
from .hooks import Keeping, Reducer, insert_hooks, insert_into_evaluation, modules
from .states import Group, Placed, groups, sub_groups, touched
from .step import Step


@dataclass(frozen=True)
class Setting:
    """All that decides a rank's memory, the model's sizes aside."""

    zero: Zero
    dp: int
    dtype: str
    optimizer: Optimizer
    recompute: bool
    microbatches: int
    tuning: Tuning | None = None
    loss: HeadLoss = PLAIN
    kernels: Kernels | None = None

    @property
    def options(self) -> Options:
        """Of recipes."""
        return Options(tuning=self.tuning, kernels=self.kernels)

    @property
    def accumulates(self) -> str:
        """dtype of accumulated gradients."""
        return self.zero.gradient_accumulation_dtype or self.dtype

    @property
    def builds_as_measured(self) -> bool:
        """How much is there while the engine is built is known (``notices.BUILDING``)."""
        return self.zero.stage in (1, 2) and not self.bf16_wrapper and self.zero.offload_optimizer == "none"

    @property
    def bf16_wrapper(self) -> bool:
        zero = self.zero
        fp32_sums = self.dtype == "bf16" and self.accumulates == "fp32"
        return zero.stage == 1 and fp32_sums and zero.offload_optimizer == "none"


def setting_of(plan: ResolvedPlan, zero: Zero) -> Setting:
    """That of a resolved plan."""
    recompute = plan.recompute.mode == "full"
    how = (plan.optimizer, recompute, plan.microbatches, cast_tuning(plan), head_loss(plan), kernels_of(plan))
    if plan.runs_reference and not preferences.has_model(plan):
        zero = untraced(zero)
    return Setting(zero, plan.layout.dp, layer_shape(plan).dtype, *how)


def untraced(zero: Zero) -> Zero:
    """ZeRO-3 where no trace of a pass ever holds: forward with and without adapters come in turns, and each finds that
    the other's modules were others (``trace_prologue``). Nothing is gathered ahead, but for what the first modules
    have of it and give back, and all of a module is released behind it, persistent or not (``release_sub_module``)."""
    nothing = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    return zero.model_copy(update={**nothing, "stage3_param_persistence_threshold": -1})


def cast_tuning(plan: ResolvedPlan) -> Tuning | None:
    """What is trained. The engine casts all floating-point parameters, adapters too, to the dtype of training
    (``engine.py``, ``_cast_module_mixed_precision``)."""
    if plan.lora.rank is None:
        return None
    lora = plan.lora.model_copy(update={"dtype": plan.precision.dtype})
    return tuning_of(plan.model_copy(update={"lora": lora}))


@dataclass(frozen=True, eq=False)
class Rank:
    """One rank: modules with what is inserted into them, what is kept, and the step."""

    modules: tuple[Module, ...]
    names: tuple[str, ...]
    placed: Placed
    step: Step


def programs(plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
    """The one program that all ranks run, of the rank that needs most, with what it keeps on the host and on NVMe."""
    zero = zero_of(plan)
    with fields_of_a_plan(plan):
        check_model(plan)
        _, made = fullest(plan, options, zero)
        host, nvme = host_bytes(plan, zero)
    model, dp = parameters_of(plan), plan.layout.dp
    tensors = (one for instance in model.instances for one in instance.hooked.module.parameters)
    elements = sum(zero_states.shard(one.elements, dp) if zero.stage == 3 else one.elements for one in tensors)
    return (replace(made, elements=elements, host=host, nvme=nvme),)


def fullest_rank(plan: ResolvedPlan) -> int:
    """The rank that needs most, whose program the estimate is of."""
    with fields_of_a_plan(plan):
        return fullest(plan, Options(), zero_of(plan))[0]


def program_of_rank(plan: ResolvedPlan, options: Options, rank: int) -> Program:
    """What ``rank`` runs, which at stages 1 and 2 may need less than the estimate's."""
    with fields_of_a_plan(plan):
        return by_rank(plan, options, zero_of(plan), rank)[rank]


def fullest(plan: ResolvedPlan, options: Options, zero: Zero) -> tuple[int, Program]:
    """The rank that needs most under ``zero``, and what it runs."""
    made = by_rank(plan, options, zero)
    return max(made.items(), key=lambda one: fold_program(one[1]).peak if len(made) > 1 else 0)


def by_rank(plan: ResolvedPlan, options: Options, zero: Zero, rank: int | None = None) -> dict[int, Program]:
    """Programs by rank: of all that may need most, or of ``rank`` alone; at stages 1 and 2 others keep other
    gradients."""
    check(plan, zero)
    shape, setting = layer_shape(plan), setting_of(plan, zero)
    options = replace(options, tuning=setting.tuning, kernels=setting.kernels)
    given = [*inputs(shape, 0, plan.loop.inputs), *preferences.batch(plan, (shape.b, shape.s))]
    beside = (
        *given * (plan.microbatches if trainer.runs(plan) else 1),
        *buffers(plan, 0),
        *quantisation_maps(plan.optimizer),
        *scales_of(setting, shape, plan),
        *(trainer.SCALARS if trainer.runs(plan) else ()),
        *reference_of(setting, shape, plan).device,
        *preferences.generation(plan),
    )
    own = _reference(setting, shape, plan, options)
    building = _initialisation(setting, shape, plan)
    numbers = _candidates(setting, shape, plan.model.layers) if rank is None else [rank]
    ranks = {number: _rank(setting, shape, plan.model.layers, options, number) for number in numbers}
    keeps = keeps_embedded(shape)
    what = preferences.returned(plan, setting.loss)
    of_own = preferences.of_reference(plan, what)
    made = {number: program_of(one, setting, beside, own, keeps, what, of_own) for number, one in ranks.items()}
    return {number: replace(one, initialisation=building) for number, one in made.items()}


def reference_of(setting: Setting, shape: LayerShape, plan: ResolvedPlan) -> Placed:
    """The second model of trl, in an engine without an optimizer (``models/utils.py``, ``prepare_deepspeed``): at stage
    3 in shards, else whole on every rank (stage 0)."""
    if not preferences.has_model(plan):
        return Placed(())
    model = model_of(shape, plan.model.layers, Options(), setting.zero.stage, False)
    return zero_states.without_optimizer(model, setting.zero, setting.dp, buffers(plan, 0))


def _reference(setting: Setting, shape: LayerShape, plan: ResolvedPlan, options: Options) -> tuple[Span, ...]:
    """Its modules, or the model's own without adapters, with the hooks of a pass without a graph: layers that are
    nowhere gathered count once."""
    if not plan.runs_reference:
        return ()
    zero, tuning, loss = setting.zero, setting.tuning, preferences.loss_of_reference(setting.loss)
    every = zero.stage == 3 or preferences.of_reference(plan, preferences.returned(plan, setting.loss))
    layers = plan.model.layers if every else min(plan.model.layers, preferences.MOST)
    options = replace(options, tuning=tuning and frozen_layer(tuning))
    model = model_of(shape, layers, options, zero.stage, False, loss)
    tapes = zip(model.instances, insert_into_evaluation(model, zero, setting.dp), strict=True)
    spans = (Span(replace(one.hooked.module, evaluation=tape), (one.name,)) for one, tape in tapes)
    return tuple(span for span in spans if span.names != ("return",))


def _initialisation(setting: Setting, shape: LayerShape, plan: ResolvedPlan) -> int | None:
    """Peak bytes while the engine is built; ``None`` where it is not known (``notices.BUILDING``)."""
    if not setting.builds_as_measured:
        return None
    model = model_of(shape, plan.model.layers, setting.options, setting.zero.stage, setting.recompute)
    besides = sum(hold.bytes for hold in (*buffers(plan, 0), *reference_of(setting, shape, plan).device))
    return zero_states.initialisation_peak(model, groups_of(setting, model), besides, plan.hardware.capacity)


def program_of(
    rank: Rank,
    setting: Setting,
    beside: Sequence[Hold],
    own: tuple[Span, ...] = (),
    keeps_input: bool = False,
    what: Returned = NOTHING,
    of_own: Returned = NOTHING,
) -> Program:
    """``own``: modules of a reference; ``what`` the model returns besides logits, and ``of_own`` that."""
    spans = tuple(Span(module, (name,)) for module, name in zip(rank.modules, rank.names, strict=True))
    spans = kept(spans, what, EMBEDDED) if what else spans
    spans = preferences.with_reference(spans, own, keeps_input, of_own) if own else spans
    return Program(
        stage=0,
        ranks=tuple(range(setting.dp)),
        entries=tuple(name for name in rank.names if name != "return"),
        order=one_chunk(spans, setting.microbatches),
        extra=(*rank.placed.device, *beside),
        managed=rank.placed.managed,
        step=Stretch(rank.step.before),
        late_step=Stretch(rank.step.after),
    )


def host_bytes(plan: ResolvedPlan, zero: Zero) -> tuple[int, int]:
    """Bytes of host memory (pinned or not) and of NVMe that one rank takes."""
    check(plan, zero)
    shape, setting = layer_shape(plan), setting_of(plan, zero)
    model = model_of(shape, plan.model.layers, setting.options, zero.stage, False)
    placed = placed_of(setting, model, groups_of(setting, model))
    every = placed, reference_of(setting, shape, plan)
    return sum(one.on("host") for one in every), sum(one.on("nvme") for one in every)


def model_of(
    shape: LayerShape, layers: int, options: Options, stage: int, recompute: bool, loss: HeadLoss = PLAIN
) -> Model:
    """The model with hooks; its gradients end with them from stage 2 on."""
    options = replace(options, consumes_gradients=stage >= 2)
    return hooked.model_of(shape, layers, options, recompute, stage < 3 or family(shape.spec.family).conv1d, loss)


@lru_cache(maxsize=32)
def _rank(setting: Setting, shape: LayerShape, layers: int, options: Options, rank: int) -> Rank:
    model = model_of(shape, layers, options, setting.zero.stage, setting.recompute, setting.loss)
    return rank_of(setting, model, groups_of(setting, model), rank)


def _candidates(setting: Setting, shape: LayerShape, layers: int) -> list[int]:
    return candidates(setting, model_of(shape, layers, setting.options, setting.zero.stage, setting.recompute))


def candidates(setting: Setting, model: Model) -> list[int]:
    """Ranks of which one needs most: at stages 1 and 2 what a rank keeps, and from when on, differ."""
    return foremost(touched(groups_of(setting, model), setting.dp)) if setting.zero.stage in (1, 2) else [0]


def rank_of(setting: Setting, model: Model, parts: Sequence[Group], rank: int) -> Rank:
    """Rank ``rank`` of ``setting.dp``."""
    zero, dp = setting.zero, setting.dp
    first, steady = _reducers(setting, model, parts, rank)
    earlier = insert_hooks(model, zero, dp, first, first=True)
    later = insert_hooks(model, zero, dp, steady, first=False) if setting.microbatches > 1 else earlier
    made = modules(model, earlier, later, insert_into_evaluation(model, zero, dp))
    names = tuple(instance.name for instance in model.instances)
    return Rank(made, names, placed_of(setting, model, parts), step_of(setting, model, parts, rank))


def foremost(kept: Sequence[int]) -> list[int]:
    """Ranks that keep more than every rank behind them: shares of later ranks lie later in the model, so that their
    gradients arrive earlier in backward, and a rank that keeps no more than a later one never holds more."""
    result: list[int] = []
    for rank in reversed(range(len(kept))):
        if not result or kept[rank] > kept[result[-1]]:
            result.append(rank)
    return result


def groups_of(setting: Setting, model: Model) -> tuple[Group, ...]:
    zero = setting.zero
    return groups(model.parameters, zero.groups, setting.dp, round_robin=zero.round_robin_gradients and zero.stage < 3)


def _sub_groups(setting: Setting, model: Model, parts: Sequence[Group]) -> list[tuple[tuple[int, ...], ...]]:
    sizes = [parameter.elements for parameter in model.parameters]
    return [sub_groups(part.ids, sizes, setting.dp, setting.zero.sub_group_size) for part in parts]


def _reducers(setting: Setting, model: Model, parts: Sequence[Group], rank: int) -> tuple[Reducer, Reducer]:
    """What gradients set off in the first and in further micro-batches."""
    zero, dtype, accumulates = setting.zero, setting.dtype, setting.accumulates
    match zero.stage:
        case 3:
            last = setting.microbatches == 1
            return (
                ScatteringBucket(zero, setting.dp, dtype, accumulates, last),
                ScatteringBucket(zero, setting.dp, dtype, accumulates, True),
            )
        case 2:
            return (
                ReducingBucket(
                    zero, parts, rank, dtype, True, last_microbatch=setting.microbatches == 1, accumulates=accumulates
                ),
                ReducingBucket(zero, parts, rank, dtype, False, accumulates=accumulates),
            )
        case 1 if not setting.bf16_wrapper:
            bucket = Hold(zero_step.BUCKET, bucket_bytes(setting), Category.GRADIENTS, "ipg_bucket")
            return Keeping(True, (bucket,)), Keeping(False)
    return Keeping(True), Keeping(False)


def bucket_bytes(setting: Setting) -> int:
    return zero_states.flat("", Category.GRADIENTS, setting.zero.reduce_bucket_size, setting.dtype).bytes


def placed_of(setting: Setting, model: Model, parts: Sequence[Group]) -> Placed:
    zero, dtype, optimizer = setting.zero, setting.dtype, setting.optimizer
    if zero.stage == 0:
        return zero_states.replicated(model, parts, optimizer, dtype)
    if setting.bf16_wrapper:
        kept = zero_states.partitioned(model, parts, zero, optimizer, dtype)
        flat = [
            zero_states.flat(f"{part.name}/gradients_fp32", Category.GRADIENTS, part.padded, "fp32") for part in parts
        ]
        return Placed((*kept.device, *flat), managed=kept.managed)
    if zero.stage < 3:
        sums = max(touched(parts, setting.dp)) if zero.stage == 2 and setting.microbatches > 1 else 0
        return zero_states.partitioned(model, parts, zero, optimizer, dtype, sums)
    subs = _sub_groups(setting, model, parts)
    return zero_states.sharded_states(model, zero, setting.dp, subs, optimizer, dtype, setting.accumulates)


def step_of(setting: Setting, model: Model, parts: Sequence[Group], rank: int) -> Step:
    zero, optimizer, dtype = setting.zero, setting.optimizer, setting.dtype
    if zero.stage == 0:
        return zero_step.unpartitioned(model, parts, optimizer, dtype)
    if zero.offload_optimizer != "none":
        nothing = Step((), ())
        return zero_step.behind_reduction(model, zero, parts, rank, nothing) if zero.stage == 1 else nothing
    if zero.stage == 3:
        subs = [sub for group in _sub_groups(setting, model, parts) for sub in group]
        return zero_step.sharded(model, setting.dp, subs, optimizer, setting.accumulates, dtype)
    if setting.bf16_wrapper:
        return zero_step.with_sums(model, parts, optimizer, dtype)
    compact = zero.stage == 2 and setting.accumulates == "fp32" and dtype != "fp32"
    step = zero_step.partitioned(model, parts, rank, optimizer, setting.accumulates, compact=compact)
    return zero_step.behind_reduction(model, zero, parts, rank, step) if zero.stage == 1 else step


def parameters_of(plan: ResolvedPlan) -> Model:
    """The model's parameters, as the engine registers them."""
    return _parameters(layer_shape(plan), plan.model.layers, plan.layout.zero, cast_tuning(plan))


@lru_cache(maxsize=32)
def _parameters(shape: LayerShape, layers: int, stage: int, tuning: Tuning | None) -> Model:
    return model_of(shape, layers, Options(tuning=tuning), stage, False)


def scales_of(setting: Setting, shape: LayerShape, plan: ResolvedPlan) -> tuple[Hold, ...]:
    """What 4-bit weights keep beside them, which no stage of ZeRO cuts."""
    if plan.quantisation.kind == "none":
        return ()
    return beside_packed(model_of(shape, plan.model.layers, setting.options, setting.zero.stage, False), plan)


def beside_packed(model: Model, plan: ResolvedPlan) -> tuple[Hold, ...]:
    """The same of any ``model``."""
    quantised = [one for instance in model.instances for one in instance.hooked.module.parameters if one.four_bit]
    held = (state.hold(one, 0) for one in quantised for state in kept_beside())
    return (*shared_table(plan), *filter(None, held))
