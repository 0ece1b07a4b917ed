"""PyTorch's ``fully_shard`` (FSDP2) over a model of Hugging Face transformers.

Every layer is a unit, and so is the whole model, which manages what no layer does: embedding, final norm
and head. Loss and logits are made inside the model's forward, as transformers does with labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..layers.module import Options, Parameter
from ..plan.plan import Optimizer, Plan
from ..program import Program, Span, drop_all
from ..tape import Category, Hold, Stretch
from . import plain
from .fsdp_modules import managed_parameters, sharded, transposed, unsynced
from .fsdp_units import Sharding, Unit, shard
from .plain_buffers import buffers, inputs
from .registration import place
from .states import State, full, optimizer_states, step_temporaries

MODEL = "model"
"""The root unit's name."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model as one device runs it, and what of it is sharded together."""

    spans: tuple[Span, ...]
    units: tuple[Unit, ...]
    """The root first."""
    end: str
    """The last module of the model itself: a loss may follow."""
    buffers: tuple[Hold, ...]


def transformers_model(
    plan: Plan, options: Options, *, reshard: bool | int = True, reshard_root: bool = False
) -> Model:
    """``fully_shard`` on every layer, then on the model. ``plan.precision.dtype`` is the dtype of compute.

    ``reshard``: ``reshard_after_forward`` of the layers; ``reshard_root`` that of the root, which PyTorch
    by itself keeps (``_lazy_init``).
    """
    spans = model_spans(plan, options)
    names = [name for span in spans for name in span.names]
    units = [Unit(MODEL, (), 0, len(names) - 1, reshard_root, False)]
    units += [Unit(name, (), at, at, reshard) for at, name in enumerate(names) if name.startswith("layer.")]
    return Model(spans, with_parameters(spans, units, plan.model.family), names[-1], tuple(buffers(plan, 0)))


def with_parameters(spans: Sequence[Span], units: Sequence[Unit], family: str) -> tuple[Unit, ...]:
    """``units`` with the parameters that they manage, in the order in which the model registers them."""

    def ordered(own: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
        return tuple(sorted(own, key=lambda one: place(one.name, family)))

    managed = managed_parameters(spans, units)
    return tuple(replace(unit, parameters=ordered(own)) for unit, own in zip(units, managed, strict=True))


def program(plan: Plan, model: Model, sharding: Sharding) -> Program:
    """What every rank runs, each micro-batch reducing its gradients."""
    return _program(plan, model, sharded(model.spans, model.units, model.end, sharding), sharding)


def unsynced_program(plan: Plan, model: Model, sharding: Sharding) -> tuple[Program, tuple[Span, ...]]:
    """What every rank runs where gradients are reduced once (``set_requires_gradient_sync``, ``no_sync`` of
    Accelerate): all micro-batches but the last, and the last one's modules. With one micro-batch see ``program``."""
    spans, last = unsynced(model.spans, model.units, model.end, sharding)
    return _program(plan, model, spans, sharding), last


def _program(plan: Plan, model: Model, spans: tuple[Span, ...], sharding: Sharding) -> Program:
    assert plan.batch.gbs is not None
    ranks = sharding.shards * sharding.replicas
    shape = plain.layer_shape(plan)
    tensors = tuple(one for span in spans for _ in span.names for one in span.module.parameters)
    return Program(
        stage=0,
        ranks=tuple(range(ranks * sharding.tensor)),
        entries=tuple(name for span in spans if span.module.name not in plain.EDGES for name in span.names),
        spans=spans,
        states=() if sharding.offload else sharded_states(plan.optimizer, sharding),
        extra=(*inputs(shape, 0), *model.buffers),
        step=Stretch() if sharding.offload else sharded_step(tensors, plan.optimizer, sharding),
        microbatches=plan.batch.gbs // (shape.b * ranks),
        late_states=True,
    )


@lru_cache(maxsize=256)
def sharded_states(optimizer: Optimizer, sharding: Sharding) -> tuple[State, ...]:
    """Parameters and the optimizer's states, each as rank 0's shard (``DTensor``'s local tensor)."""
    whole = (
        full("parameter", Category.PARAMETERS, sharding.parameters),
        *optimizer_states(optimizer, sharding.parameters, embeddings_32bit=optimizer.embeddings_32bit),
    )
    return tuple(_of_shard(state, sharding.shards) for state in whole)


def _of_shard(state: State, shards: int) -> State:
    return State(state.name, state.category, lambda parameter: state.size(shard(parameter, shards)))


@lru_cache(maxsize=256)
def sharded_step(tensors: tuple[Parameter, ...], optimizer: Optimizer, sharding: Sharding) -> Stretch:
    """The optimizer's step on shards: foreach lists are of local tensors (``DTensor`` dispatches each)."""
    pieces = [shard(one, sharding.shards) for one in tensors]
    return Stretch(drop_all(step_temporaries(optimizer, pieces, sharding.parameters), 1))


def host_bytes(tensors: Sequence[Parameter], optimizer: Optimizer, sharding: Sharding) -> int:
    """Bytes of host memory that one rank's offloaded states take: shards and their gradients (pinned), and
    what the optimizer keeps."""
    if not sharding.offload:
        return 0
    states = sharded_states(optimizer, sharding)
    gradients = sum(shard(one, sharding.shards).bytes(sharding.parameters) for one in tensors)
    return gradients + sum(state.size(one) for state in states for one in tensors)


def model_spans(plan: Plan, options: Options) -> tuple[Span, ...]:
    """The model as one device runs it, in the dtype of compute; buffers have that of the shards."""
    precision = plan.precision.model_copy(update={"gradients": plan.precision.dtype})
    (single,) = plain.programs(plan.model_copy(update={"framework": "fsdp", "precision": precision}), options)
    if plan.model.family not in ("gpt2", "gpt"):
        return single.spans
    return tuple(
        Span(transposed(span.module), span.names) if span.module.name == "layer" else span for span in single.spans
    )
