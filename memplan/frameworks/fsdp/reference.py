"""The pass of DPOTrainer's reference under FSDP: behind the policy's forward, without a graph.

trl 1.16, ``models/utils.py`` (``prepare_fsdp``), ``trainer/dpo_trainer.py`` (``_compute_loss``):

* *adapters*: the policy itself runs again with its adapters off. Its layers are gathered once more, each with what
  ``fully_shard`` manages together, and end behind their forward; the root is still whole.
* *a second model* under FSDP2 is one unit: ``fully_shard`` wraps it, and none of its layers. All of it is gathered
  before its forward begins, and the flat output of that gather stays beside the parameters that were copied out of it
  until forward has ended, for no other unit takes its turn (``_fsdp_state.py``, ``_post_forward``).
* *a second model* under FSDP1 is wrapped as the policy is. Its root, embedding, final norm and head, is gathered in the
  first step and never ends: FSDP1 leaves a root's parameters to backward (``_post_forward_reshard``), which this one
  has not.

Embedding and head as units of their own, as Accelerate shards a model of transformers since 1.14.

accelerate 1.15, ``utils/fsdp_utils.py`` (``fsdp2_prepare_model``, ``_find_final_norm``); torch 2.13,
``_fully_shard/_fsdp_state.py``. Behind the layers and before the model it calls ``fully_shard`` on

* the input embedding (``get_input_embeddings``), resharded as the layers are;
* final norm and output embedding together, which stay gathered from forward to backward; with tied embeddings the
  input embedding is among them, so that they are gathered before the first layer and end with the last gradient.

The model's own unit has what is left, position embeddings of GPT-2 for example, and stays gathered: Accelerate hands it
no ``reshard_after_forward`` any more, and of a root PyTorch's default is to keep it (``_lazy_init``).

The final norm is looked for among the children of ``getattr(model, base_model_prefix)``. OPT's is one level further
down, and peft's wrapper, asked for ``model``, hands out the model with its head, whose children are no norms: there
the root has the norm. A classifier has no output embedding: its norm is a unit, and the root has the scores.

A loss within the model's forward runs behind the head, whose hooks are at the logits: what backward gathers ahead, the
last layer, is gathered when the gradient of the logits has come. A loss that takes the head's weight without running
the head leaves its unit incomplete; the root's end completes it (``_force_complete_incomplete_states``), and backward
gathers ahead at once. Where the head is a unit without the norm, nobody gathers it then (``gathers_itself``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ...families import family
from ...layers.autograd import ITEMSIZE
from ...layers.fused_losses import LOG_PROBABILITIES
from ...layers.log_probabilities import VOCABULARY
from ...layers.module import Module, Options, Parameter
from ...plan.plan import ResolvedPlan
from ...tape.events import INPUT, Category, Drop, Hold, Hook, Seam, Tape, ahead, behind, drops, insert, rounded
from ...tape.program import Span
from ...values import replace
from ..plain import preferences, programs as plain
from ..plain.programs import buffers
from .chunked import ENDS
from .hooks import GATHERED, Hooks, Role
from .modules import MODEL
from .passing import OWN, Around, Running
from .units import Sharding, Unit, shard

if TYPE_CHECKING:
    from .flat_states import Flat


NOTHING = Around((), (), (), ())


def passed_again(hooks: Running, modules: int, end: int) -> list[Around]:
    """What ``hooks`` do in one more forward pass without a graph."""
    units, result = hooks.units, []
    for place in range(modules):
        for at, unit in enumerate(units):
            if unit.first == place:
                hooks.pre_forward(at)
        before = hooks.take()
        for at in reversed(range(len(units))):
            if units[at].last == place:
                hooks.post_forward(at)
        if place == end:
            hooks.flush()
        result.append(NOTHING._replace(before_forward=before, after_forward=hooks.take()))
    return result


def with_pass(plan: ResolvedPlan, spans: tuple[Span, ...], own: Sequence[Span], keeps_input: bool) -> tuple[Span, ...]:
    """``spans``, of which the last is the head, with the modules ``own`` behind the hooks of its forward; where the
    model returns before there is a loss, these ran then."""
    loss = plain.head_loss(plan)
    if loss.converts_itself:
        what = preferences.of_reference(plan, preferences.returned(plan, loss))
        return preferences.with_reference(spans, own, keeps_input, what)
    *others, last = spans
    head = last.module
    inserted = preferences.passed(own, head.largest_id + 1, keeps_input)

    def behind(tape: Tape) -> Tape:
        at = 1 + max(place for place, event in enumerate(tape) if isinstance(event, Hold))
        rest = tape[at:]
        ended = [one for one in rest if isinstance(one, Drop) and (one.tensor == INPUT or one.category in OF_HOOKS)]
        return (*tape[:at], *ended, *inserted, *(one for one in rest if one not in ended))

    return (*others, Span(head.changed(behind), last.names))


OF_HOOKS = (Category.COMMUNICATION_BUFFERS, Category.GATHERED_PARAMETERS)


def hooked(spans: Sequence[Span], arounds: Sequence[Around]) -> tuple[Span, ...]:
    """``spans``, a module each, with what hooks do at their places."""
    return tuple(
        replace(span, module=_evaluated(span.module, around)) for span, around in zip(spans, arounds, strict=True)
    )


def _evaluated(module: Module, around: Around) -> Module:
    return replace(module, evaluation=insert(module.evaluation, around.at))


def modules_of(plan: ResolvedPlan, options: Options) -> tuple[Span, ...]:
    """The reference's modules as one device runs them, in the dtype of compute: every layer but the first once."""
    made = plain.recipe_options(plan, options)
    if preferences.has_model(plan):  # it is one unit, whose layers have no hooks
        made = replace(made, casts_given=False)
    return plain.reference(plan, plain.layer_shape(plan), made, "", seams=True)


def without_pass(plan: ResolvedPlan) -> ResolvedPlan:
    """``plan`` as one that a pass of the reference is no part of."""
    if not plan.runs_reference:
        return plan
    without = {"precompute_ref_log_probs": True, "keeps_reference": False}
    return plan.model_copy(update={"trainer": plan.trainer.model_copy(update=without)})


# -- FSDP2 --------------------------------------------------------------------------------------------


def sharded_pass(inner: ResolvedPlan, options: Options, units: Sequence[Unit], sharding: Sharding) -> tuple[Span, ...]:
    """The reference's modules with ``fully_shard``'s hooks. ``units``: the policy's, which run again with adapters;
    a second model is one unit, of the dtypes that the policy has. ``inner``: the plan as one device runs it."""
    spans = modules_of(inner, options)
    last = len(spans) - 1
    if preferences.has_model(inner):
        every = tuple(one for unit in units for one in unit.parameters)
        layer = a_layer(units)
        own = [Unit(MODEL, every, 0, last, layer.reshard, False, among=layer.among)]
    else:
        layers = {unit.name: unit for unit in units if unit.alone}
        placed = [
            replace(layers[span.names[0]], first=at, last=at)
            for at, span in enumerate(spans)
            if span.names[0] in layers
        ]
        around = [replace(one, last=last) for one in units if one.name == MODEL]
        own = [one for one in (*around, *placed) if one.reshard]
    if not any(unit.reshard for unit in own):
        return spans
    hooks = Hooks(own, sharding, [()] * len(own), Role.FIRST)
    return hooked(spans, passed_again(hooks, len(spans), last))


def a_layer(units: Sequence[Unit]) -> Unit:
    """One whose ``reshard_after_forward`` is Accelerate's, which trl hands on: that of the layers."""
    return next((unit for unit in units if unit.alone), units[0])


def sharded_reference(plan: ResolvedPlan, units: Sequence[Unit], sharding: Sharding) -> list[Hold]:
    """The shards of a second model, and its parameters as they were gathered where they stay so."""
    if not preferences.has_model(plan):
        return []
    every = [one for unit in units for one in unit.parameters]
    held = [_held(shard(one, sharding.shards), one.dtype or sharding.parameters, Category.PARAMETERS) for one in every]
    if plan.runs_reference and not a_layer(units).reshard:
        held += [_held(one, sharding.compute, Category.GATHERED_PARAMETERS) for one in every]
    return [*held, *buffers(plan, 0)]


def _held(one: Parameter, dtype: str, category: Category) -> Hold:
    return Hold(0, one.bytes(dtype), category, f"reference/{one.name}", one.shape, dtype)


# -- FSDP1 --------------------------------------------------------------------------------------------


def flat_pass(
    inner: ResolvedPlan, options: Options, units: Sequence[Flat], made: Callable[[Sequence[Flat]], Running]
) -> tuple[Span, ...]:
    """The reference's modules with FSDP1's hooks, ``made`` of units. The root is whole already; no adapter runs."""
    spans = modules_of(inner, options)
    layers = {unit.name: unit for unit in units if unit.reshard}
    own = [
        replace(layers[span.names[0]], first=at, last=at) for at, span in enumerate(spans) if span.names[0] in layers
    ]
    return hooked(spans, passed_again(made(own), len(spans), len(spans) - 1))


def flat_reference(plan: ResolvedPlan, units: Sequence[Flat], ranks: int, widened: int, compute: str) -> list[Hold]:
    """Flat shards of a second model, ``widened`` times as wide as in compute, and its whole root."""
    if not preferences.has_model(plan):
        return []
    held = [
        Hold(0, rounded(-(-unit.whole // ranks) * widened), Category.PARAMETERS, f"reference/{unit.name}", (), "")
        for unit in units
    ]
    root = units[0]
    whole = Hold(0, rounded(root.whole), Category.GATHERED_PARAMETERS, f"reference/{root.name}", (), compute)
    return [*held, whole, *buffers(plan, 0)]


# -- ends ----------------------------------------------------------------------------------------------


WORD, NORM, HEAD = "word", "final_norm", "head"
"""Modules as recipes call them."""

LOOKUP, SCALED = "word_embeddings", "embedding_scaled"
OF_LOOKUP = ("grad_word_embeddings_weight",)
OF_SCALED = ("grad_embedding_scaled_self",)
OF_HEAD = ("grad_logits_weight", "grad_logits_input", "grad_logits_bias")
"""What the backward of embedding and head makes first."""


def with_seams(plan: ResolvedPlan, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """``spans`` of a model, with seams where the forward of its embedding ends, before positions and masks are made,
    and where its backward and that of the head begin."""
    scales = plan.model.embedding_scale and family(plan.model.family).scale_in_embedding
    first, *others, last = spans
    table = first.module.changed(
        partial(_behind, SCALED if scales else LOOKUP), partial(_of_table, OF_SCALED if scales else OF_LOOKUP)
    )
    head = last.module.changed(backward=partial(_before, OF_HEAD))
    return (replace(first, module=table), *others, replace(last, module=head))


def _behind(name: str, tape: Tape) -> Tape:
    """``tape`` with a seam behind what is called ``name`` and the ends of what made it."""
    at = 1 + next(at for at, one in enumerate(tape) if isinstance(one, Hold) and one.name == name)
    while isinstance(tape[at], Drop):
        at += 1
    return (*tape[:at], Seam(OWN, Hook.AFTER_FORWARD), *tape[at:])


def _before(names: tuple[str, ...], tape: Tape) -> Tape:
    at = next((at for at, one in enumerate(tape) if isinstance(one, Hold) and one.name in names), None)
    return tape if at is None else (*tape[:at], Seam(OWN, Hook.BEFORE_BACKWARD), *tape[at:])


def _of_table(names: tuple[str, ...], tape: Tape) -> Tape:
    """The same of a table. What is looked up in a frozen one may be a leaf, which ends with its gradient, behind all
    else (``enable_input_require_grads``)."""
    seamed = _before(names, tape)
    drops = [at for at, one in enumerate(tape) if isinstance(one, Drop)]
    if seamed is not tape or not drops:
        return seamed
    at = drops[-2]
    return (*tape[:at], Seam(OWN, Hook.BEFORE_BACKWARD), *tape[at:])


def units(
    plan: ResolvedPlan, spans: Sequence[Span], made: Sequence[Unit], *, reshard: bool, among: int | None
) -> list[Unit]:
    """The units of layers and model, ``made``, with those of the ends, in the order of ``named_modules()``. ``spans``
    have seams (``with_seams``)."""
    root, *layers = made
    places = {name: at for at, name in enumerate(name for span in spans for name in span.names)}
    edges = {one.name.partition(".")[0] for span in spans if not _is_layer(span) for one in span.module.parameters}
    tied = plan.model.tied_embeddings and not plan.model.labels
    norm, head = ((NORM,) if finds_norm(plan) else ()), () if plan.model.labels else (HEAD,)
    last = places[(*norm, *head)[-1]] if norm or head else 0
    narrow = any(isinstance(one, Seam) and one.name == OWN for one in spans[-1].module.first.backward)
    narrow = narrow and last == places.get(HEAD)
    if tied:
        first, own = [Unit(ENDS, (), 0, last, False, False, only=(*norm, WORD, HEAD), narrow=narrow)], []
    else:
        first = [Unit("embedding", (), 0, 0, reshard, False, only=(WORD,), narrow=True, among=among)]
        begins = places[(*norm, *head)[0]] if norm or head else 0
        own = [Unit(ENDS, (), begins, last, False, only=(*norm, *head), narrow=narrow)] if norm or head else []
    rest = edges - {name for one in (*first, *own) for name in one.only}
    return [*([root] if rest else []), *first, *layers, *own]


def gathers_itself(plan: ResolvedPlan, made: Sequence[Unit]) -> bool:
    """Whether the loss itself gathers the head's weight, a unit that no hook gathers, for the head does not run: trl's
    tiles do (1.16, ``trainer/utils.py``, ``add_fused_lm_head``: ``weight.full_tensor()``)."""
    alone = next((one for one in made if one.only == (HEAD,)), None)
    kind = plain.head_loss(plan).kind
    if alone is None or kind not in UNRUN:
        return False
    if kind != LOG_PROBABILITIES or plan.lora.rank is None or "head" in (plan.lora.modules_to_save or ()):
        raise plan.wrong(
            "fsdp.ends_apart",
            "must be false with a loss that takes the head's weight: the head is a unit without the norm here, and "
            "stays in shards where it does not run (--versions accelerate=1.13 has it in the model's own unit)",
        )
    return True


UNRUN = (LOG_PROBABILITIES, "liger", "cut")
"""Losses that take the head's weight and do not run the head."""


GATHERED_HEAD = "head.weight/gathered"


def holds_gathered_head(spans: Sequence[Span]) -> bool:
    return any(isinstance(one, Hold) and one.name == GATHERED_HEAD for one in spans[-1].module.first.forward)


def with_gathered_head(plan: ResolvedPlan, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """``spans`` whose head's weight is whole, in the dtype of its shards, from forward to the end of the head's own
    backward, for which it is saved. In another dtype than that of compute, a tile of it is cast at a time; backward
    has the tile before it in a variable still (``kernels``, ``ChunkedLogProbFunction``). That these are counted for
    all of the head's pass puts more beside what is made before and behind tiles."""
    *others, last = spans
    weight = next(one for one in last.module.parameters if one.name == "head.weight")
    compute, dtype, id = plan.precision.dtype, plan.fsdp.parameters, last.module.largest_id + 1
    rows, columns = weight.shape
    hold = Hold(id, rounded(weight.bytes(dtype)), GATHERED, GATHERED_HEAD, weight.shape, dtype)

    def tiles(count: int) -> list[Hold]:
        own = (min(rows, count * VOCABULARY), columns)
        return [] if dtype == compute else [cast_tiles(id + count, own, compute)]

    one, two = tiles(1), tiles(2)
    head = last.module.changed(
        lambda tape: behind(ahead(tape, (hold, *one)), drops(one)),
        lambda tape: behind(ahead(tape, tuple(two)), (*drops(two), hold.end)),
    )
    return (*others, replace(last, module=replace(head, evaluation=behind(head.evaluation, (hold.end,)))))


def cast_tiles(id: int, shape: tuple[int, int], dtype: str) -> Hold:
    size = rounded(shape[0] * shape[1] * ITEMSIZE[dtype])
    return Hold(id, size, GATHERED, "head.weight/tile", shape, dtype)


def finds_norm(plan: ResolvedPlan) -> bool:
    """Whether ``_find_final_norm`` finds one."""
    known = family(plan.model.family)
    assert known.modules is not None
    base, *inside = known.modules.norm[0].split(".")
    return len(inside) == 1 and not known.no_base and not (plan.lora.rank is not None and base == "model")


def _is_layer(span: Span) -> bool:
    return span.names[0].startswith("layer.")
