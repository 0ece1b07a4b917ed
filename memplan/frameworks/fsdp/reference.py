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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...layers.module import Module, Options, Parameter
from ...plan.resolved import ResolvedPlan
from ...tape.events import INPUT, Category, Drop, Hold, Tape, insert, rounded
from ...tape.program import Span
from ...values import replace
from ..plain import preferences
from ..plain import programs as plain
from ..plain.buffers import buffers
from .hooks import Hooks, Role
from .modules import MODEL
from .passing import Around, Running
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
    return plain.reference(plan, plain.layer_shape(plan), plain.recipe_options(plan, options), "", seams=True)


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
