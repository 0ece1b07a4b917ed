"""The program of a plan whose architecture was learnt from traces: forward and backward from its polynomials, states
and step from the same rules as a recipe's, over the parameters that were traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from ...layers.module import Options, Parameter
from ...layers.tuning import FourBit
from ...layers.work import ITEMSIZE
from ...optimizers.base import full, optimizer_states
from ...optimizers.bitsandbytes import managed_bytes, quantisation_maps
from ...plan.errors import PlanError
from ...plan.plan import ResolvedPlan
from ...plan.traced_spec import TracedSpec
from ...schedules.one_chunk import OneChunk
from ...tape.events import Category, Hold, rounded
from ...tape.program import Chunk, Program, Span
from ...trace.fit import Born, Fit, Kind, Piece, Places
from ...trace.job import MOST_MICROBATCHES
from ...trace.tapes import FIRST, spans, whole
from ...values import replace
from . import trainer
from .trainer import optimizer_step, tensors_of, trainer_step
from .tuned import four_bit_of, shared_table, trained_only, tuned_states

PACKED = "uint8"
"""What a trace calls the dtype of 4-bit weights, which no other parameter has."""
TABLES = ("word.weight", "position.weight")
"""What tables of embeddings are called."""
WIDE = frozenset({"fp32"})
"""Dtypes in which a model may keep some parameters, such as routers' weights and biases, whatever the others'."""
MOST_REASONS = 3
"""That an error repeats."""


def program_of(
    plan: ResolvedPlan,
    fit: Fit,
    options: Options,
    front_of: Callable[[ResolvedPlan, Sequence[Hold]], tuple[Span, ...]],
    buckets_of: Callable[[ResolvedPlan, tuple[int, ...]], tuple[Hold, ...]],
) -> Program:
    """What ``fit`` comes to under ``plan``, with what its framework puts in front of the model and keeps of gradients
    (``PlainRunning.learnt_front``, ``learnt_buckets``)."""
    b, s = plan.batch.mbs, plan.batch.seq
    piece = piece_of(plan, fit, b, s)
    row = row_of(plan, fit, piece)
    dtype = plan.precision.stored
    check_dtype(plan, piece, dtype, others=WIDE)
    made = spans(piece, row, b, s)
    groups = tuple((span.module.parameters, len(span.names)) for span in made if span.module.parameters)
    parameters, kept = full("parameter", Category.PARAMETERS, dtype), plan.optimizer.embeddings_32bit
    states = (parameters, *optimizer_states(plan.optimizer, dtype, embeddings_32bit=kept))
    if not all(one.trained and one.dtype == dtype for own, _ in groups for one in own):
        states, groups = tuned_states(plan.optimizer, dtype), trained_only(groups)
    buffers = buffers_of(piece, row)
    extra = [*inputs_of(plan, piece), *buffers, *shared_table(plan), *quantisation_maps(plan.optimizer)]
    step, clipping = optimizer_step(groups, plan.optimizer, dtype), 0
    if trainer.runs(plan):
        norms = plan.lora.dtype or (dtype if trained_dtypes(piece) == {dtype} else "fp32")
        step, clipping = trainer_step(groups, plan.optimizer, norms, options.kernel_workspaces)
    broadcast = front_of(plan, buffers)
    ready = _ready(piece, row)
    unrolled = (*broadcast, *whole(piece, row, b, s, options.kernel_workspaces))
    chunk = Chunk((*broadcast, *made), unrolled=unrolled)
    return Program(
        stage=0,
        ranks=tuple(range(plan.layout.dp)),
        entries=tuple(dict.fromkeys(name for one in row for name in one.names)),
        order=OneChunk((chunk,), plan.microbatches),
        states=states,
        extra=(*extra, *buckets_of(plan, ready)),
        step=step,
        clipping=clipping,
        late_states=True,
        managed=managed_bytes(plan.optimizer, tensors_of(groups)),
    )


def piece_of(plan: ResolvedPlan, fit: Fit, b: int, s: int) -> Piece:
    """That of ``fit`` at the plan's sizes; ``PlanError`` where it holds for others alone."""
    piece = fit.piece_at(b, s)
    if piece is None:
        holds = "; ".join(str(one.domain) for one in fit.pieces)
        why = f" ({'; '.join(fit.refused[:MOST_REASONS])})" if fit.refused else ""
        alone = next((one for one in fit.pieces if b >= one.domain.b_from), None)
        field, value = ("batch.mbs", b) if alone is None else ("batch.seq", s)
        raise PlanError(field, value, f"is outside the verified range of this architecture's traces: {holds}{why}")
    four_bit = four_bit_of(plan)
    return piece if four_bit is None else _quantised(piece, four_bit)


@lru_cache(maxsize=256)
def _quantised(piece: Piece, four_bit: FourBit) -> Piece:
    """``piece`` with what it packs: two numbers a byte, of weights whose shape a trace does not tell."""

    def told(one: Parameter) -> Parameter:
        if one.dtype != PACKED:
            return one
        return replace(one, shape=(2 * one.elements, 1), dtype=four_bit.dtype, four_bit=four_bit)

    kinds = (replace(kind, parameters=tuple(map(told, kind.parameters))) for kind in piece.kinds)
    return replace(piece, kinds=tuple(kinds))


def row_of(plan: ResolvedPlan, fit: Fit, piece: Piece) -> tuple[Places, ...]:
    """The entries of ``piece`` with as many layers as the plan has."""
    spec = plan.model
    wanted = spec.layers if isinstance(spec, TracedSpec) and spec.counted else fit.layers
    if wanted == fit.layers and not (fit.extends and wanted):
        return piece.row
    least = min(fit.verified)
    if not fit.extends or wanted < least:
        problem = f"must be {fit.layers}" if not fit.extends else f"must be at least {least}"
        raise PlanError("model.layers", wanted, f"{problem}: other numbers of layers were not verified")
    return _grown(piece, wanted)


@lru_cache(maxsize=1024)
def _grown(piece: Piece, layers: int) -> tuple[Places, ...]:
    return piece.grown(layers)


def check_dtype(plan: ResolvedPlan, piece: Piece, dtype: str, *, others: frozenset[str] = frozenset()) -> None:
    """``PlanError`` unless all parameters were traced in ``dtype`` or one of ``others``, adapters in their own, and in
    fp32 what peft has cast that is not quantised."""
    found, prepared = _dtypes(piece), plan.quantisation.prepared
    found -= others - {dtype} if dtype in found else set()
    besides = {plan.lora.dtype, *(("fp32",) if prepared else ())}
    expected = {dtype} & found if prepared else {dtype}
    if found - besides != expected - besides:
        raise PlanError(
            "precision.dtype",
            dtype,
            f"must be the dtype of all parameters; the model keeps some as {', '.join(sorted(found))}",
        )


@lru_cache(maxsize=1024)
def trained_dtypes(piece: Piece) -> frozenset[str]:
    """Of parameters that have gradients."""
    return frozenset(one.dtype or "" for kind in piece.kinds for one in kind.parameters if one.trained)


@lru_cache(maxsize=1024)
def _dtypes(piece: Piece) -> frozenset[str]:
    return frozenset(one.dtype or "" for kind in piece.kinds for one in kind.parameters if one.four_bit is None)


def inputs_of(plan: ResolvedPlan, piece: Piece) -> list[Hold]:
    """A micro-batch's, kept throughout; those of all micro-batches where the Trainer runs the model, and its numbers.
    Traces of its loop have those of further micro-batches, too (``variables`` in ``trace/step.py``)."""
    b, s = plan.batch.mbs, plan.batch.seq
    traced = MOST_MICROBATCHES if trainer.converts_outputs(plan) else 1
    own = [
        Hold(0, rounded(piece.polynomials[one.size](b, s)), Category.INPUTS, one.operator, (), one.dtype)
        for one in piece.inputs[: len(piece.inputs) // traced]
    ]
    return [*own * plan.microbatches, *trainer.SCALARS] if trainer.runs(plan) else own


def buffers_of(piece: Piece, row: tuple[Places, ...]) -> list[Hold]:
    return [
        Hold(0, rounded(size), Category.BUFFERS, "buffer", (), dtype)
        for kind, names in row
        for _ in names
        for size, dtype in piece.kinds[kind].buffers
    ]


@lru_cache(maxsize=256)
def _ready(piece: Piece, row: tuple[Places, ...]) -> tuple[int, ...]:
    """Bytes of gradients, not rounded."""
    kinds = [piece.kinds[kind] for kind, names in row for _ in names]
    places = ready_at(piece, row)[::-1]
    return tuple(_gradient(kinds[home].parameters[number]) for place in places for home, number in place)


def _gradient(parameter: Parameter) -> int:
    return parameter.elements * ITEMSIZE[str(parameter.dtype)]


@lru_cache(maxsize=64)
def ready_at(piece: Piece, row: tuple[Places, ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Which gradients are ready in the backward pass of each entry of ``row``, in their order: the entry that owns the
    parameter, and its number there.

    Most are of the entry's own. Where an entry does not make what is as large as its own, another one does: that
    behind an encoder makes those of the norm in front of it, and the head its own where it is registered in front of
    the layers. A table that several modules read is ready in the first entry, which owns it, and the last in backward.
    """
    kinds = [piece.kinds[kind] for kind, names in row for _ in names]
    born = {kind: _born(piece, kind) for kind in dict.fromkeys(kinds)}
    own: list[list[tuple[int, int]]] = []
    elsewhere: list[list[tuple[int, int]]] = []
    for at, kind in enumerate(kinds):
        missing = Counter(_gradient(kind.parameters[number]) for number in kind.ready) - born[kind]
        own.append([])
        elsewhere.append([])
        for number in kind.ready:
            one = kind.parameters[number]
            is_elsewhere = missing[_gradient(one)] > 0 and not (at == 0 and one.name in TABLES)
            missing[_gradient(one)] -= is_elsewhere
            (elsewhere if is_elsewhere else own)[-1].append((at, number))
    if any(elsewhere):
        for at in range(len(kinds) - 1, -1, -1):
            left = born[kinds[at]] - Counter(_gradient(kinds[at].parameters[number]) for _, number in own[at])
            own[at] = [*_taken(kinds, elsewhere, left), *own[at]]
        own = [[*waiting, *found] for waiting, found in zip(elsewhere, own, strict=True)]
    return tuple(map(tuple, own))


def _born(piece: Piece, kind: Kind) -> Counter[int]:
    """How many gradients of so many bytes a first backward of ``kind`` makes."""
    size, made = piece.polynomials, (one for one in kind.passes[FIRST] if isinstance(one, Born))
    point = piece.domain.b_from, piece.domain.s_from
    return Counter(size[one.size](*point) for one in made if one.category == Category.GRADIENTS)


def _taken(
    kinds: Sequence[Kind], waiting: list[list[tuple[int, int]]], left: Counter[int]
) -> Iterator[tuple[int, int]]:
    """The first of each entry's that wait, as long as one of their size is ``left``."""
    for entry in waiting:
        while entry and left[size := _gradient(kinds[entry[0][0]].parameters[entry[0][1]])] > 0:
            left[size] -= 1
            yield entry.pop(0)
