"""PyTorch's FSDP2 around Megatron-Core's modules (``--use-torch-fsdp2``): its units, and what a rank keeps of them.

``megatron/core/distributed/torch_fully_sharded_data_parallel.py``: ``fully_shard`` is given every transformer layer,
the embedding, the table of rotary positions (which has no parameters), the output layer but for local layers, and then
the whole model, whose unit has what is left: the final norm. No dtypes are told, so gathered parameters, gradients and
their reduction have that of the parameters. Hooks are ``frameworks.fsdp.hooks``; every micro-batch reduces its
gradients (``schedules.py`` knows a ``no_sync`` of Megatron's own data parallelism alone).

``optimizer/optimizer.py`` (``Float16OptimizerWithFloat16Params``, ``FP32Optimizer``) makes main parameters of the
shards. There is no buffer of gradients: a step copies each shard's gradient to fp32 and lets it go, and the copies end
when the next iteration begins (``zero_grad``). A unit's gradients are views of what its reduce-scatter gave, which ends
with the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from ...layers.module import Options, Parameter
from ...plan.plan import ResolvedPlan
from ...tape.events import END_OF_GRADIENT, Category, Drop, Event, Hold, Stretch
from ...tape.program import Chunk, Kept, Span
from ...values import dataclass, replace
from ..fsdp.hooks import REDUCING
from ..fsdp.modules import MODEL, sharded, with_parameters, with_seams
from ..fsdp.units import Sharding, Unit, shard, size
from .modules import HEAD, LOSS
from .states import Piece, Rules, optimized

BUILDING = 3
"""The stream on which ``fully_shard`` is called (``training.py``, ``ddp_stream``)."""

LAYER = "layer."
"""Names of layers begin so."""


@dataclass(frozen=True, slots=True)
class TorchFsdp:
    """How the model is wrapped."""

    sharding: Sharding
    reshard: bool
    """``reshard_after_forward`` of every unit, the model's own included."""
    wraps_head: bool
    """The output layer is a unit."""
    follows: bool
    """Backward gathers ahead in the order of modules (``set_modules_to_backward_prefetch``), because parts run again
    in it."""
    rotary: bool
    """A table of rotary positions is wrapped between the embedding and the layers."""
    from_host: bool
    """The model was built in host memory."""
    scattered: bool
    """Norms' gradients are summed over tensor-parallel ranks (``_allreduce_non_tensor_model_parallel_grads``), into
    tensors of their own."""


def torch_fsdp_of(plan: ResolvedPlan) -> TorchFsdp:
    """As the plan has it."""
    given, dtype = plan.megatron, plan.precision.dtype
    return TorchFsdp(
        Sharding(plan.layout.dp * plan.layout.cp, parameters=dtype, compute=dtype, reduce=dtype),
        reshard=given.torch_fsdp == "reshard",
        wraps_head=given.transformer_impl != "local",
        follows=plan.recompute.mode != "none",
        rotary=plan.model.positions == "rotary",
        from_host=given.torch_fsdp_host_init,
        scattered=plan.layout.sequence_parallel and plan.layout.tp > 1,
    )


def options_of(options: Options) -> Options:
    """Of modules that hooks run around, and whose gradients they end."""
    return replace(with_seams(options), consumes_gradients=False)


def units_of(spans: Sequence[Span], given: TorchFsdp) -> tuple[Unit, ...]:
    """The model's own first, then in the order of ``modules()``. One that gathers itself ahead gathers nothing: the
    module before it in that order has no parameters."""
    names = [name for span in spans for name in span.names]
    units = [Unit(MODEL, (), 0, len(names) - 1, given.reshard, with_gradient=False)]
    before = ""
    for at, name in enumerate(names):
        wrapped = name == "embedding" or name.startswith(LAYER) or (name == HEAD and given.wraps_head)
        if not wrapped:
            continue
        if before == "embedding" and given.rotary:
            before = name
        ahead = (before,) if given.follows and before else ()
        units.append(Unit(name, (), at, at, given.reshard, name != "embedding", next_backward=ahead))
        before = name
    return with_parameters(spans, units, ())


def with_hooks(chunk: Chunk, given: TorchFsdp) -> tuple[Chunk, tuple[Unit, ...]]:
    """``chunk`` with the hooks of its units around the model's modules, and these units. A micro-batch's own inputs lie
    around all of them."""
    released, batch, *spans, ended = chunk.spans
    units = units_of(spans, given)
    own = sharded(tuple(spans), units, LOSS, given.sharding)
    return Chunk((released, batch, *own, ended), first_differs=True), units


# -- what is kept -------------------------------------------------------------------------------------


def keep(units: Sequence[Unit], rules: Rules, given: TorchFsdp) -> Kept:
    """All that rank 0 keeps, whose shards are as large as any."""
    ids = count(1)
    built = Stretch(_built(units, rules.dtype, given, ids))
    found = [(at, one) for at, unit in _by_place(units) for one in unit.parameters]
    own = [(at, one, shard(one, given.sharding.shards)) for at, one in found]
    parts = optimized([Piece(piece.elements, len(piece.shape) > 1) for _, _, piece in own], rules, ids)
    step, carried = _step(units, own, parts, given, ids)
    return Kept(Stretch([*built, *parts.construction]), parts.states, Stretch(step), Stretch(carried), Stretch())


def _by_place(units: Sequence[Unit]) -> list[tuple[int, Unit]]:
    """In the order in which the model names their parameters; the model's own are the final norm's, before the output
    layer's."""
    places = [(unit.first if at else unit.last - 1.5, at) for at, unit in enumerate(units)]
    return [(at, units[at]) for _, at in sorted(places)]


def _built(units: Sequence[Unit], dtype: str, given: TorchFsdp, ids: Iterator[int]) -> Iterator[Event]:
    """``fully_shard``: a unit's parameters end when all of them have been cut (``_init_sharded_param``). Those in host
    memory come to the device a unit at a time (``_move_states_to_device``)."""

    def whole(unit: Unit) -> list[Hold]:
        return [
            Hold(next(ids), size(one.elements, dtype), Category.PARAMETERS, one.name, one.shape, dtype)
            for one in unit.parameters
        ]

    made: dict[int, list[Hold]] = {}
    if not given.from_host:
        for at, unit in _by_place(units):
            made[at] = whole(unit)
            yield from made[at]
    for at in [*range(1, len(units)), 0]:
        originals = made[at] if at in made else whole(units[at])
        yield from originals if given.from_host else ()
        for one in units[at].parameters:
            piece = shard(one, given.sharding.shards)
            held = size(piece.elements, dtype)
            yield Hold(next(ids), held, Category.PARAMETERS, f"{one.name}/shard", piece.shape, dtype, BUILDING)
        yield from (hold.end for hold in originals)


Owned = Sequence[tuple[int, Parameter, Parameter]]
"""The number of a unit, one of its parameters, and this rank's piece of it."""


def _step(
    units: Sequence[Unit], own: Owned, parts: Kept, given: TorchFsdp, ids: Iterator[int]
) -> tuple[list[Event], list[Event]]:
    """What a step takes, and what of it is left until the next iteration begins: copies of gradients in fp32, made one
    by one while gradients end; of parameters in fp32 the gradients themselves."""
    ordered = sorted(own, key=lambda one: len(one[2].shape) <= 1)
    copies = [one for one in parts.carried if isinstance(one, Hold)]
    ends = {at: _end(unit, given) for at, unit in enumerate(units) if unit.parameters}
    if not copies:
        stay: list[Event] = []
        step: list[Event] = [*parts.step]
        for end in ends.values():
            held = Hold(next(ids), end.bytes, Category.GRADIENTS, "sharded_gradient", stream=REDUCING)
            step += [end, held]
            stay.append(held)
        return step, stay
    last = {at: place for place, (at, whole, _) in enumerate(ordered) if not (given.scattered and _summed(whole))}
    step = []
    for place, ((at, _, _), copy) in enumerate(zip(ordered, copies, strict=True)):
        step.append(copy)
        if last.get(at) == place:
            step.append(ends[at])
    step += [ends[at] for at in ends if at not in last]
    return [*step, *parts.step], list(copies)


def _end(unit: Unit, given: TorchFsdp) -> Drop:
    elements = unit.reduced(given.sharding.shards)
    return Drop(END_OF_GRADIENT, size(elements, given.sharding.reduce), Category.GRADIENTS)


def _summed(parameter: Parameter) -> bool:
    """Whether tensor-parallel ranks sum a parameter's gradient: norms, and biases behind row-parallel products
    (``sequence_parallel``), whose gradients are no views then."""
    return "norm" in parameter.name or parameter.name.endswith(("linear_proj.bias", "linear_fc2.bias"))
