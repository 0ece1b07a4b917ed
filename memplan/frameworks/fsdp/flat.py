"""FSDP1 (``FullyShardedDataParallel``) as Accelerate wraps a model of transformers, with flat parameters.

torch 2.4 to 2.13, ``distributed/fsdp/_runtime_utils.py``, ``_flat_param.py``, ``_exec_order_utils.py``; Accelerate,
``accelerator.py`` (``prepare_model``); peft, ``utils/other.py`` (``fsdp_auto_wrap_policy``). Every layer is a unit, and
so is each adapter's weight; the root has what is left: embedding, final norm, head. A unit's parameters are one flat
tensor, cut into as many equal pieces as there are ranks.

* *forward*: the flat tensor is gathered, and ends behind the layer, but for the root's (``_post_forward_reshard``).
* *backward*: it is gathered again, and the one before it ahead (``BACKWARD_PRE``). Reentrant recompute has run forward
  without a graph, where no hook says that a unit will be needed (``_register_pre_backward_hooks``): nothing is ahead.
* Gradients of views of the flat tensor come together as one flat gradient (``SplitWithSizesBackward``), which is
  reduced to a piece of it; the whole one ends.
* A unit of frozen parameters waits for the gradient of its input (``_register_post_backward_reshard_only_hook``),
  behind the hook that gathers for the unit before, unless that input is a leaf. The hook holds on to the input's
  ``AccumulateGrad``, and so, where the input is a leaf of a reentrant recompute, to the input and its gradient, until
  backward has ended (``_finalize_params``).
* With mixed precision, what is trained is in fp32, gathered and reduced in 16 bits; buffers aside, frozen parameters
  stay as they were loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import lru_cache, partial
from typing import Any

from ...families import family
from ...layers.autograd import ITEMSIZE
from ...layers.module import Module, Options, Parameter
from ...optimizers.base import step_temporaries
from ...optimizers.bitsandbytes import quantisation_maps
from ...plan.framework_sections import Fsdp
from ...plan.plan import ResolvedPlan
from ...plan.releases import WEIGHTS_ON_META, release
from ...plan.section import Dtype
from ...plan.tuning_checks import is_tuned
from ...schedules.one_chunk import one_chunk
from ...tape.events import GRAD_OUTPUT, INPUT, Category, Drop, Event, Hold, Scope, Stretch, Tape, rounded
from ...tape.program import Program, Span, drop_all
from ...values import NamedTuple, dataclass, replace
from ..plain import preferences, programs as plain, trainer
from ..plain.programs import buffers, inputs
from ..plain.recipes import keeps_embedded
from ..plain.tuned import shared_table
from .flat_states import FASTEST, SLOWEST, Flat, Unit, flat_states, managed_states, pieces_of, units_held, wrapping
from .hooks import GATHERING, REDUCING
from .modules import MODEL, Ids, hooked, left_gradients, lowest_of, with_seams
from .passing import Around, pass_through
from .reference import flat_pass, flat_reference, with_pass, without_pass

BUFFERS, GATHERED, GRADIENTS = Category.COMMUNICATION_BUFFERS, Category.GATHERED_PARAMETERS, Category.GRADIENTS

FIELDS = ("code", "version", "backward_prefetch", "reshard_after_forward", "parameters", "reduce")
"""Of the section ``fsdp``, what FSDP1 has here."""


def dtypes(plan: ResolvedPlan) -> tuple[Dtype, Dtype]:
    """Of shards that are trained, and of the gradients' reduction."""
    return "fp32" if plan.precision.autocast else plan.precision.dtype, plan.precision.dtype


def check(plan: ResolvedPlan, given: Fsdp) -> None:
    """Refuses what is not modelled."""
    for name, _ in given.changed():
        if name not in FIELDS:
            raise plan.wrong(
                f"fsdp.{name}",
                "must be left out with fsdp.version 1: it is modelled with FSDP2 only (--fsdp-version 2)",
            )
    if given.code != "transformers":
        raise plan.wrong("fsdp.code", "must be transformers with fsdp.version 1")
    for name, must in zip(("parameters", "reduce"), dtypes(plan), strict=True):
        if getattr(given, name) != must:
            raise plan.wrong(f"fsdp.{name}", f"must be {must} with fsdp.version 1, as Accelerate has it")
    plan.refuse(
        (
            "compile",
            plan.compile,
            "must be false with fsdp.version 1, whose units are views of flat parameters: not modelled; with FSDP2 it "
            "is (--fsdp-version 2)",
        ),
        ("fsdp.version", plan.layout.tp * plan.layout.pp > 1, "must be 2 with tensor or pipeline parallelism"),
        (
            "quantisation.prepared",
            plan.quantisation.prepared,
            "must be false with fsdp.version 1: trl and peft leave 4-bit models that are sharded unprepared",
        ),
        (
            "quantisation.storage",
            plan.quantisation.storage not in (None, plan.precision.dtype),
            f"must be {plan.precision.dtype} with fsdp.version 1: flat parameters are of one dtype",
        ),
        (
            "lora.modules_to_save",
            plan.lora.modules_to_save,
            "must be left out with fsdp.version 1, where each is a unit of its own: not modelled",
        ),
        (
            "fsdp.version",
            plan.frozen.embedding or plan.frozen.layers,
            "must be 2 or left out with frozen parts: these are modelled with adapters",
        ),
    )


# -- units ------------------------------------------------------------------------------------------


def _packed(parameter: Parameter, dtype: str) -> tuple[int, ...]:
    """Bytes of each tensor that stands for it, on all ranks together; four bits are in storage of another dtype."""
    four_bit = parameter.four_bit
    return (parameter.bytes(parameter.dtype or dtype),) if four_bit is None else four_bit.packed(parameter.shape)


def ignores_adapters(plan: ResolvedPlan) -> bool:
    """Unsloth's functions read adapters' weights without calling their modules, which FSDP is told to ignore: they are
    whole on every rank, and hooks reduce their gradients (fms-acceleration, ``fms_acceleration_foak/utils.py``,
    ``lora_adapters_switch_ddp_from_fsdp``)."""
    return plan.kernels.lora == "unsloth"


def units_of(spans: Sequence[Span], dtype: str, reshard: bool, keeps: bool, ignored: bool) -> tuple[Flat, ...]:
    """The root, then each layer, and behind it its adapters, unless they are ``ignored``, as one, which are as many
    units in truth: each is gathered for its own product."""
    modules = [(span.module, name) for span in spans for name in span.names]
    ends = [module.parameters for module, name in modules if not name.startswith("layer.")]
    root = [one for parameters in ends for one in parameters]
    result = [_unit(MODEL, 0, len(modules) - 1, root, dtype, False)]
    for at, (module, name) in enumerate(modules):
        if not name.startswith("layer."):
            continue
        trained = [one for one in module.parameters if one.trained]
        if len(trained) == len(module.parameters):
            result.append(_unit(name, at, at, trained, dtype, reshard))
            continue
        frozen = [one for one in module.parameters if not one.trained]
        kept = _kept(module) if keeps else (0, 0)
        result.append(replace(_unit(name, at, at, frozen, dtype, reshard), kept=kept))
        if trained and not ignored:
            result.append(_unit(f"{name}/adapters", at, at, trained, dtype, reshard))
    return tuple(result)


def _unit(name: str, first: int, last: int, parameters: Sequence[Parameter], dtype: str, reshard: bool) -> Flat:
    parts = tuple([size for one in parameters for size in _packed(one, dtype)])
    trained = sum(one.elements for one in parameters if one.trained)
    sent = sum(one.four_bit.sent for one in parameters if one.four_bit is not None)
    whole, members = sum(parts), tuple(parameters)
    return Flat(name, first, last, whole, trained, reshard, members[0].name, parts=parts, members=members, sent=sent)


def _kept(module: Module) -> tuple[int, int]:
    """Bytes of a layer's input and of its output's gradient, which are of one shape."""
    ended = {event.tensor: event.bytes for event in module.first.backward if isinstance(event, Drop)}
    gradient = ended.get(GRAD_OUTPUT, 0)
    return ended.get(INPUT, gradient), gradient


# -- hooks ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class FlatHooks:
    """One micro-batch of a model with these ``units``, in the order of ``named_modules()``."""

    units: Sequence[Flat]
    ranks: int
    compute: str
    mixed: bool
    """What is trained has fp32 shards, and is gathered and reduced in 16 bits."""
    gradients: Sequence[Sequence[Drop]]
    """Of each unit, the ends of what autograd leaves at its parameters."""
    appears: bool
    """The first micro-batch, in which the sharded gradients appear."""
    ahead: bool
    """The unit before is gathered ahead in backward."""
    gathered: dict[int, Hold] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    held: list[Hold] = field(default_factory=list)
    """By hooks of frozen units, until backward has ended."""
    above: bool = False
    """A frozen layer's backward has ended."""
    waiting: list[int] = field(default_factory=list)
    """Frozen units that end behind the next one's pre-backward hook."""
    events: list[Event] = field(default_factory=list)
    ids: int = 0

    def hold(self, size: int, category: Category, name: str, dtype: str, stream: int = 0, *, own: bool = False) -> Hold:
        """``own``: one module ends it."""
        self.ids += 1
        id = Scope.MODULE.id(self.ids) if own else Scope.HOOKS.id(self.ids)
        hold = Hold(id, rounded(size), category, name, (), dtype, stream)
        self.events.append(hold)
        return hold

    def drop(self, hold: Hold) -> None:
        self.events.append(hold.end)

    def take(self) -> Tape:
        events = tuple(self.events)
        self.events.clear()
        return events

    def flush(self) -> None:
        """Nothing waits for the end of forward."""

    def unshard(self, at: int) -> None:
        unit = self.units[at]
        if at in self.gathered or not unit.whole:
            return
        cast = None
        if unit.trained and self.mixed:  # ``_mp_shard``
            size = -(-unit.whole // self.ranks)
            cast = self.hold(size, BUFFERS, "shard_in_16_bits", self.compute, GATHERING)
        self.gathered[at] = self.hold(unit.whole, GATHERED, "flat_parameter", self.compute, GATHERING)
        if cast is not None:
            self.drop(cast)

    def reshard(self, at: int) -> None:
        if at in self.gathered:
            self.drop(self.gathered.pop(at))

    def pre_forward(self, at: int) -> None:
        self.unshard(at)

    def post_forward(self, at: int) -> None:
        if self.units[at].reshard:
            self.reshard(at)
        self.order.append(at)

    def pre_backward(self, at: int) -> None:
        self.unshard(at)
        before = self.order.index(at) - 1
        if self.ahead and before >= 0:
            self.unshard(self.order[before])
        while self.waiting:
            self.reshard(self.waiting.pop())

    def post_backward(self, at: int) -> None:
        unit = self.units[at]
        if unit.trained:
            self._reduce(at)
        if self.ahead and not unit.trained:
            self.waiting.append(at)
        else:
            self.reshard(at)
        given, gradient = unit.kept
        if given:
            if self.above:  # of the layer above, whose input's gradient this one's is
                self.held.append(self.hold(gradient, Category.ACTIVATIONS, "gradient_of_leaf", self.compute))
            self.held.append(self.hold(given, Category.ACTIVATIONS, "leaf", self.compute))
            self.above = True

    def _reduce(self, at: int) -> None:
        """One flat gradient, and a piece of it that stays or is added."""
        ends = self.gradients[at]
        flat = self.hold(sum(end.bytes for end in ends), BUFFERS, "flat_gradient", self.compute)
        self.events += ends
        self.reshard(at)
        size = -(-flat.bytes // self.ranks)
        keeps = GRADIENTS if self.appears else BUFFERS
        piece = self.hold(size, BUFFERS if self.mixed else keeps, "sharded_gradient", self.compute, REDUCING)
        if self.mixed:
            wider = self.hold(2 * size, keeps, "sharded_gradient_fp32", "fp32", REDUCING)
            self.drop(piece)
            piece = wider
        self.drop(flat)
        if not self.appears:
            self.drop(piece)

    def finalise(self) -> None:
        """``_post_backward_final_callback``."""
        for at, unit in enumerate(self.units):
            if unit.name == MODEL:
                self.post_backward(at)
        for at in list(self.gathered):
            self.reshard(at)
        for hold in self.held:
            self.drop(hold)
        self.held.clear()


# -- the program ------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def with_hooks(
    spans: tuple[Span, ...], units: tuple[Flat, ...], end: str, ranks: int, compute: str, mixed: bool, ahead: bool
) -> tuple[Span, ...]:
    """``spans`` with the hooks of ``units``; the model's own modules end with the one called ``end``."""
    around = around_modules(spans, units, end, ranks, compute, mixed, ahead)
    return tuple(
        Span(hooked(module, ids, (one, two), (False, adds)), (name,))
        for (module, name), ids, one, two, adds in zip(*around, strict=True)
    )


class AroundModules(NamedTuple):
    """What hooks do around each module of a model."""

    modules: list[tuple[Module, str]]
    renamed: list[Ids]
    """Gradients, and the numbers under which hooks end them."""
    first: list[Around]
    """In the first micro-batch,"""
    steady: list[Around]
    """and in others."""
    whole: list[bool]
    """No unit has the module's gradients, which stay as they are."""


def around_modules(
    spans: tuple[Span, ...], units: tuple[Flat, ...], end: str, ranks: int, compute: str, mixed: bool, ahead: bool
) -> AroundModules:
    """As ``with_hooks``."""
    modules = [(span.module, name) for span in spans for name in span.names]
    known: list[Ids] = []
    ends: list[list[Drop]] = [[] for _ in units]
    whole: list[bool] = []
    shared = 0
    for place, (module, name) in enumerate(modules):
        owner = max(
            at for at, unit in enumerate(units) if unit.first <= place <= unit.last and (unit.trained or not at)
        )
        alone = bool(owner)
        holds = left_gradients(module)
        whole.append(bool(holds) and not alone and name.startswith("layer."))
        holds = () if whole[-1] else holds
        ids = [Scope.KEPT.id(at) if alone else Scope.GRADIENTS.id(shared + at) for at in range(len(holds))]
        shared += 0 if alone else len(holds)
        known.append(tuple((hold.tensor, id) for hold, id in zip(holds, ids, strict=True)))
        ends[owner] += [Drop(id, hold.bytes, hold.category) for hold, id in zip(holds, ids, strict=True)]
    last = next(place for place, (_, name) in enumerate(modules) if name == end)

    lowest = lowest_of(modules)

    def passed(appears: bool) -> list[Around]:
        hooks = FlatHooks(units, ranks, compute, mixed, ends, appears, ahead)
        return pass_through(hooks, len(modules), last, lowest)

    return AroundModules(modules, known, passed(True), passed(False), whole)


def of_one_device(plan: ResolvedPlan) -> ResolvedPlan:
    """What one device runs of a module that is gathered: ``MixedPrecision`` gathers in the dtype of compute under
    autocast, too, so that no weight is cast again."""
    compute = dtypes(plan)[1]
    precision = plan.precision.model_copy(update={"gradients": compute, "parameters": compute})
    if not plan.precision.autocast:
        precision = precision.model_copy(update={"parameters": None})
    lora = plan.lora
    if lora.rank is not None and plan.precision.autocast and not ignores_adapters(plan):
        lora = lora.model_copy(update={"dtype": compute})
    return plan.model_copy(update={"framework": "single", "precision": precision, "lora": lora})


def programs(plan: ResolvedPlan, options: Options) -> tuple[Program, ...]:
    """The one program that all ranks run."""
    given = plan.fsdp
    check(plan, given)
    shards, compute = dtypes(plan)
    ignored, inner = ignores_adapters(plan), of_one_device(plan)
    (single,) = plain.programs(without_pass(inner), with_seams(options))
    if plan.lora.rank is not None and any(not span.module.first.backward for span in single.spans[1:-2]):
        raise plan.wrong(
            "lora.targets",
            "must be in the first layer with fsdp.version 1 and no recompute, whose units without a backward are not "
            "modelled: name some of its linear layers, or take --fsdp-version 2 or --recompute full",
        )
    reentrant = bool(plan.recompute.reentrant)
    ahead = not reentrant and given.backward_prefetch == "pre"
    units = units_of(single.spans, compute, given.reshard_after_forward, reentrant, ignored)
    names = [name for span in single.spans for name in span.names]
    trained = plan.lora.dtype if plan.lora.rank is not None and not plan.precision.autocast else shards
    assert trained is not None
    spans = with_hooks(single.spans, units, names[-1], plan.layout.dp, compute, plan.precision.autocast, ahead)
    if plan.runs_reference:
        made = partial(
            FlatHooks,
            ranks=plan.layout.dp,
            compute=compute,
            mixed=plan.precision.autocast,
            gradients=(),
            appears=True,
            ahead=ahead,
        )
        own = flat_pass(inner, with_seams(options), units, made)
        spans = with_pass(plan, spans, own, keeps_embedded(plain.layer_shape(plan)))
    spans, flats = units_held(spans, units, family(plan.model.family).registered)
    tensors = tuple(one for span in spans for one in span.module.parameters)
    ranks = 1 if ignored else plan.layout.dp
    states = flat_states(plan.optimizer, plan.layout.dp, ranks, flats, trained)
    pieces = pieces_of(plan.optimizer, tensors, plan.layout.dp, ranks, flats, trained)
    shape = plain.layer_shape(plan)
    ids = inputs(shape, 0, plan.loop.inputs)
    extra = [*ids, *buffers(plan, 0), *preferences.beside(plan, (shape.b, shape.s))]
    extra += quantisation_maps(plan.optimizer)
    extra += flat_reference(plan, units, plan.layout.dp, ITEMSIZE[shards] // ITEMSIZE[compute], compute)
    if is_tuned(plan):
        extra += shared_table(plan)
    if trainer.runs(plan):
        extra += trainer.SCALARS
    return (
        Program(
            stage=0,
            ranks=tuple(range(plan.layout.dp)),
            entries=tuple(name for name in names if name not in plain.EDGES),
            order=one_chunk(spans, plan.microbatches),
            states=states,
            extra=tuple(extra),
            step=Stretch(drop_all(step_temporaries(plan.optimizer, pieces, trained), 1)),
            evaluated=trainer.kept_logits(plan, plain.layer_shape(plan)),
            saving=saving_of(units_of(single.spans, shards, True, False, ignored), trained, plan.layout.dp),
            late_states=True,
            managed=managed_states(plan.optimizer, tensors, plan.layout.dp, ranks, flats, trained),
            **wrapping_of(plan, units, ahead),
            elements=sum(-(-one.elements // plan.layout.dp) for one in tensors),
        ),
    )


def _at_once(units: Sequence[Flat], ahead: bool) -> int:
    """How many layers are gathered at the same time: the one that runs, the one before it ``ahead``, and a frozen one
    that waits for the next hook."""
    if not ahead:
        return 1
    return 2 if all(unit.trained for unit in units) else 3


@lru_cache(maxsize=64)
def wrapped(units: tuple[Flat, ...], ranks: int, ahead: bool, *, mixed: bool, copying: float | None = None) -> Tape:
    """What comes and goes until every unit is flat; ``copying`` as of ``wrapping``."""
    root, *others = units
    in_order = (*others, root)
    casts = [-(-unit.trained // ranks) * ITEMSIZE["fp32"] if mixed else 0 for unit in in_order]
    # Adapters of a layer are as many units as they have weights.
    wraps = [len(unit.parts) if unit.name.endswith("/adapters") else 1 for unit in in_order]
    made = [Unit(unit.parts, cast, unit.sent, n) for unit, cast, n in zip(in_order, casts, wraps, strict=True)]
    return wrapping(made, ranks, _at_once(units, ahead), copying)


def wrapping_of(plan: ResolvedPlan, units: tuple[Flat, ...], ahead: bool) -> dict[str, Any]:
    """What a program says of the time before its first iteration."""
    how = partial(wrapped, units, plan.layout.dp, ahead, mixed=plan.precision.autocast)
    if not on_meta(plan):
        return {"before": how()}
    return {"before": how(copying=SLOWEST), "before_elsewhere": (how(), how(copying=FASTEST))}


def on_meta(plan: ResolvedPlan) -> bool:
    """Ranks but the first load no weights, and make them on the GPU when they are wrapped
    (``cpu_ram_efficient_loading``). transformers does so since 5.23, and since 4.45 at least with quantised models
    (``modeling_utils.py``, ``_load_state_dict_into_meta_model``: ``param_to``), as does fms-acceleration's copy of
    gptqmodel (``models/base.py``, ``from_quantized``); of others each rank has its own on the CPU."""
    quantised = plan.quantisation.kind != "none"
    return plan.layout.dp > 1 and (quantised or release(plan, "transformers") >= WEIGHTS_ON_META)


def saving_of(units: Sequence[Flat], trained: str, ranks: int) -> int:
    """Bytes of the largest unit while a whole state dictionary is made. Units are gathered one after the other in the
    dtype of their shards, and leave for the CPU (``_unshard_fsdp_state_params``); of what is trained each of the
    optimizer's states, too, from a copy of the piece (``_allgather_orig_param_states`` of ``_optim_utils.py``)."""
    if ranks == 1:
        return 0
    states = (-(-unit.trained // ranks) * ITEMSIZE[trained] * (ranks + 1) for unit in units)
    return rounded(max(*states, *(unit.whole for unit in units)))
