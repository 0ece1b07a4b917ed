"""The program of a plan whose architecture was learnt from traces: forward and backward from its polynomials, states
and step from the same rules as a recipe's, over the parameters that were traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..frameworks import ddp, trainer
from ..frameworks.plain_step import optimizer_step
from ..frameworks.states import full, optimizer_states, quantisation_maps
from ..frameworks.tuned import trained_only, tuned_states
from ..layers.module import Module, Options, Parameter, Tapes
from ..plan.errors import PlanError
from ..plan.plan import Plan
from ..plan.traced_spec import TracedSpec
from ..program import Program, Span, drop_all
from ..tape import Category, Hold, rounded
from .fit import Fit, Piece, Places
from .tapes import spans, whole

FRAMEWORKS = ("single", "ddp")
MOST_REASONS = 3
"""That an error repeats."""


def programs(plan: Plan, options: Options) -> tuple[Program, ...]:
    """The one program of a plan of a ``TracedSpec``; ``PlanError`` where nothing was learnt of it, or not this."""
    from .lookup import fit_of

    check(plan)
    return (program_of(plan, fit_of(plan), options),)


def program_of(plan: Plan, fit: Fit, options: Options) -> Program:
    """What ``fit`` comes to under ``plan``."""
    check(plan)
    b, s = plan.batch.mbs, plan.batch.seq
    assert s is not None
    piece = _piece(plan, fit, b, s)
    row = _row(plan, fit, piece)
    dtype = _dtype(plan, piece)
    made = spans(piece, row, b, s)
    groups = tuple((span.module.parameters, len(span.names)) for span in made if span.module.parameters)
    parameters, kept = full("parameter", Category.PARAMETERS, dtype), plan.optimizer.embeddings_32bit
    states = (parameters, *optimizer_states(plan.optimizer, dtype, embeddings_32bit=kept))
    if not all(one.trained for own, _ in groups for one in own):
        states, groups = tuned_states(plan.optimizer, dtype), trained_only(groups)
    buffers = _buffers(piece, row)
    extra = [*_inputs(piece, b, s), *buffers, *quantisation_maps(plan.optimizer)]
    broadcast = _broadcast(plan, buffers)
    assert plan.layout.dp is not None
    return Program(
        stage=0,
        ranks=tuple(range(plan.layout.dp)),
        entries=tuple(dict.fromkeys(name for one in row for name in one.names)),
        spans=(*broadcast, *made),
        states=states,
        extra=(*extra, *_buckets(plan, fit, piece, row)),
        step=optimizer_step(groups, plan.optimizer, dtype),
        microbatches=_microbatches(plan),
        late_states=True,
        unrolled=(*broadcast, *whole(piece, row, b, s, options.kernel_workspaces)),
    )


def check(plan: Plan) -> None:
    """Refuses what is not modelled of an architecture without a recipe, whatever was learnt of it."""
    if plan.framework not in FRAMEWORKS:
        problem = f"must be {' or '.join(FRAMEWORKS)}: under others this architecture has no recipe"
        raise PlanError("framework", plan.framework, problem)
    if trainer.runs(plan):
        raise PlanError("trainer.loop", plan.trainer.loop, "must be none: what the Trainer adds was not traced")
    if plan.layout.zero:
        problem = "must be 0: of an architecture without a recipe it is not modelled"
        raise PlanError("layout.zero", plan.layout.zero, problem)
    given = plan.ddp
    for name in ("gradient_as_bucket_view", "find_unused_parameters", "parameters_as_bucket_view"):
        if plan.framework == "ddp" and getattr(given, name):
            raise PlanError(
                f"ddp.{name}", True, "must be false: of an architecture without a recipe it is not modelled"
            )


def _piece(plan: Plan, fit: Fit, b: int, s: int) -> Piece:
    piece = fit.piece_at(b, s)
    if piece is None:
        holds = "; ".join(str(one.domain) for one in fit.pieces)
        why = f" ({'; '.join(fit.refused[:MOST_REASONS])})" if fit.refused else ""
        alone = next((one for one in fit.pieces if b >= one.domain.b_from), None)
        field, value = ("batch.mbs", b) if alone is None else ("batch.seq", s)
        raise PlanError(field, value, f"is outside of what was verified of this architecture's traces: {holds}{why}")
    return piece


def _row(plan: Plan, fit: Fit, piece: Piece) -> tuple[Places, ...]:
    spec = plan.model
    wanted = spec.layers if isinstance(spec, TracedSpec) and spec.counted else fit.layers
    if wanted == fit.layers and not (fit.extends and wanted):
        return piece.row
    least = min(fit.verified)
    if not fit.extends or wanted < least:
        problem = f"must be {fit.layers}" if not fit.extends else f"must be at least {least}"
        raise PlanError("model.layers", wanted, f"{problem}: of other numbers of layers nothing was verified")
    return _grown(piece, wanted)


@lru_cache(maxsize=1024)
def _grown(piece: Piece, layers: int) -> tuple[Places, ...]:
    return piece.grown(layers)


def _dtype(plan: Plan, piece: Piece) -> str:
    found = _dtypes(piece)
    if found != {plan.precision.stored}:
        problem = f"must be that of all parameters; the model keeps some as {', '.join(sorted(found))}"
        raise PlanError("precision.dtype", plan.precision.stored, problem)
    return plan.precision.stored


@lru_cache(maxsize=1024)
def _dtypes(piece: Piece) -> frozenset[str]:
    return frozenset(one.dtype or "" for kind in piece.kinds for one in kind.parameters)


def _microbatches(plan: Plan) -> int:
    """Forward passes of one rank before a step."""
    assert plan.batch.gbs is not None
    assert plan.layout.dp is not None
    return plan.batch.gbs // (plan.batch.mbs * plan.layout.dp)


def _inputs(piece: Piece, b: int, s: int) -> list[Hold]:
    return [
        Hold(0, rounded(piece.polynomials[one.size](b, s)), Category.INPUTS, one.operator, (), one.dtype)
        for one in piece.inputs
    ]


def _buffers(piece: Piece, row: tuple[Places, ...]) -> list[Hold]:
    return [
        Hold(0, rounded(size), Category.BUFFERS, "buffer", (), dtype)
        for kind, names in row
        for _ in names
        for size, dtype in piece.kinds[kind].buffers
    ]


def _broadcast(plan: Plan, buffers: Sequence[Hold]) -> tuple[Span, ...]:
    """DDP broadcasts buffers before every forward pass, through a flat copy of those of a dtype that has several."""
    if plan.framework != "ddp" or not plan.ddp.broadcast_buffers:
        return ()
    by_dtype = {one.dtype: [other.bytes for other in buffers if other.dtype == one.dtype] for one in buffers}
    flat = tuple(sum(sizes) for sizes in by_dtype.values() if len(sizes) > 1)
    return _through(flat) if flat else ()


@lru_cache(maxsize=64)
def _through(flat: tuple[int, ...]) -> tuple[Span, ...]:
    copies = [Hold(0, size, Category.COMMUNICATION_BUFFERS, "buffers_flat") for size in flat]
    tapes = Tapes(drop_all(copies, 1), (), 0, 0)
    return (Span(Module("broadcast", tapes, tapes, (), ()), ("broadcast",)),)


def _buckets(plan: Plan, fit: Fit, piece: Piece, row: tuple[Places, ...]) -> tuple[Hold, ...]:
    """DDP's second copy of gradients, in the order in which they are ready."""
    if plan.framework != "ddp":
        return ()
    if not fit.buckets:
        problem = "must be single: gradients of this architecture are not ready layer by layer, and buckets not known"
        raise PlanError("framework", plan.framework, problem)
    sizes = ddp.bucket_sizes(_ready(piece, row, plan.precision.stored), *ddp.limits(plan.ddp))
    return tuple(Hold(0, rounded(size), Category.COMMUNICATION_BUFFERS, "ddp_bucket") for size in sizes)


@lru_cache(maxsize=256)
def _ready(piece: Piece, row: tuple[Places, ...], dtype: str) -> tuple[int, ...]:
    """Bytes of gradients, not rounded."""

    def size(parameter: Parameter) -> int:
        return parameter.elements * (4 if dtype == "fp32" else 2)

    ready = []
    for kind_number, names in row[::-1]:
        kind = piece.kinds[kind_number]
        own = [size(kind.parameters[number]) for number in kind.ready]
        ready += own * len(names)
    return tuple(ready)
