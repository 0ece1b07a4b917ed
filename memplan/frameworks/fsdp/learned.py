"""``fully_shard`` around an architecture that was learnt from traces of one device: its hooks go in around each traced
layer, whose own events they leave as they are.

``fully_shard`` casts what a layer is handed in another dtype than that of compute, before the layer is gathered
(``FSDPState._cast_forward_inputs``). A fit whose traces did so has it; another one serves where nothing is cast.

FSDP1 around an architecture that was learnt from traces of one device, in one dtype but for adapters': every layer
is a unit with a flat parameter, and so is each adapter's weight; the root has what is left (``flat``).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count, islice

from ...layers.autograd import ITEMSIZE
from ...layers.module import Module, Options, Tapes
from ...optimizers.base import step_temporaries
from ...optimizers.bitsandbytes import quantisation_maps
from ...plan.plan import ResolvedPlan
from ...schedules.one_chunk import OneChunk
from ...tape.events import Drop, Event, Hold, Hook, Seam, Stretch, Tape, renamed as with_ids
from ...tape.program import Chunk, Program, Span, drop_all
from ...trace.fit import LAYER, Born, Fit, Gone, Piece, Places
from ...trace.framework import in_compute
from ...trace.learned import advised
from ...trace.recording import EMBEDDING, FINAL_NORM, HEAD
from ...trace.rows import place_of
from ...trace.tapes import FIRST, FORWARD, FURTHER, Row, TracedModule, spans
from ...values import replace
from ..plain.learned import buffers_of, check_dtype, inputs_of, piece_of, row_of
from ..plain.tuned import shared_table
from . import flat
from .chunked import ENDS as ENDS_UNIT
from .flat_states import Flat, flat_states, managed_states, pieces_of, units_held
from .hooks import Role
from .modules import MODEL, Ids, Model, compact_ids, owned, passes_of, sharded, with_parameters, with_stored
from .passing import OWN, Around
from .programs import check_settings, leaves_4bit, sharding_of
from .units import Sharding, Unit, host_bytes, shard, sharded_states, sharded_step

FLOATS = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""What a trace calls dtypes that ``fully_shard`` casts."""
ENDS = frozenset({EMBEDDING, FINAL_NORM, HEAD})
"""Entries besides layers, of a model with one list of them."""
COPY, NARROW = "aten._to_copy.default", ("bfloat16", "float16")


def program_of(plan: ResolvedPlan, fit: Fit, options: Options) -> Program:
    """What ``fit`` comes to on every rank of ``plan``."""
    given = plan.fsdp
    check_settings(plan, given)
    b, s = plan.batch.mbs, plan.batch.seq
    piece = piece_of(plan, fit, b, s)
    row = told_apart(row_of(plan, fit, piece))
    check_dtype(in_compute(plan), piece, plan.precision.dtype)
    sharding, model = sharding_of(plan, given), model_of(plan, piece, row)
    hooked = sharded(model.spans, model.units, model.end, sharding)
    unrolled = _unrolled(piece, row, b, s, options.kernel_workspaces, plan.microbatches > 1, model, sharding)
    tensors = [one for span in model.spans for one in span.module.parameters]
    return Program(
        stage=0,
        ranks=tuple(range(plan.layout.dp)),
        entries=tuple(dict.fromkeys(name for one in row for name in one.names)),
        order=OneChunk((Chunk(hooked, unrolled=unrolled),), plan.microbatches),
        states=() if sharding.offload else sharded_states(plan.optimizer, sharding),
        extra=(*inputs_of(plan, piece), *model.buffers),
        step=Stretch() if sharding.offload else sharded_step(tuple(tensors), plan.optimizer, sharding),
        late_states=True,
        elements=sum(shard(one, sharding.shards).elements for one in tensors),
        host=host_bytes(tensors, plan.optimizer, sharding),
    )


# -- what is refused --------------------------------------------------------------------------------


def lacks(plan: ResolvedPlan, fit: Fit) -> str:
    """Why ``fully_shard`` around what was learnt is not known; nothing where it is."""
    piece = fit.piece_at(plan.batch.mbs, plan.batch.seq or 1) or fit.pieces[0]
    if plan.lora.rank is None and any(not one.trained for kind in piece.kinds for one in kind.parameters):
        return "it has parameters that are not trained, whose shards no optimizer has: not modelled"
    if plan.fsdp.version == "1":  # one dtype, in which nothing is cast
        return ""
    if plan.fsdp.parameters != plan.precision.dtype and any(
        bytes > ITEMSIZE[dtype] for bytes, dtype in _follow(plan, piece)
    ):
        return f"it has buffers in {plan.precision.dtype}, which are in the dtype of the shards there"
    cast = "" if fit.casts else cast_of(piece, told_apart(piece.row), plan.precision.dtype)
    if not cast:
        return ""
    learn = " ".join(["memplan trace --learn --model", shlex.quote(plan.model.source), *advised(plan)])
    why = f"its layers are handed tensors in {cast}, which fully_shard casts, and what was learnt has not"
    return f"{why} (`{learn} --framework fsdp --dp 2` learns it)"


def _follow(plan: ResolvedPlan, piece: Piece) -> list[tuple[int, str]]:
    """Buffers that are in the dtype of parameters, bytes and dtype: in that of the shards here."""
    return [one for kind in piece.kinds for one in kind.buffers if one[1] == plan.precision.dtype]


def assumptions_of(plan: ResolvedPlan, fit: Fit) -> tuple[str, ...]:
    """What is taken for granted of the fit's layers under ``fully_shard``."""
    piece = fit.piece_at(plan.batch.mbs, plan.batch.seq or 1) or fit.pieces[0]
    why = without_ends(piece, told_apart(piece.row)) if plan.fsdp.ends_apart else ""
    apart = (f"the model's own unit has embedding and head, as up to accelerate 1.13: it {why}",) if why else ()
    if plan.fsdp.parameters == plan.precision.dtype or not any(_follow(plan, one) for one in fit.pieces):
        return apart
    dtype = plan.fsdp.parameters
    return (
        *apart,
        f"a buffer of one element is a number in {dtype}, which casts no tensor; its own copy is not counted",
    )


@lru_cache(maxsize=1024)
def cast_of(piece: Piece, row: tuple[Places, ...], compute: str) -> str:
    """The dtype other than ``compute`` of a tensor of forward that is there while another unit than its own runs, if
    there is one: a layer may be handed it."""
    places = [(kind, name) for kind, names in row for name in names]
    last = max((at for at, (_, name) in enumerate(places) if name.startswith(LAYER)), default=-1)
    for at, (kind, _) in enumerate(places):
        ended = [one for one in piece.kinds[kind].passes[FORWARD] if isinstance(one, Gone)]
        ended += [one for one in piece.kinds[kind].passes[FIRST] if isinstance(one, Gone) and one.forward]
        for change in ended:
            place = place_of(change, at, len(places))
            low, high = sorted((place, at))
            between = any(name.startswith(LAYER) for _, name in places[low : high + 1])
            if low == high or place > last or not between:  # what is made behind the last layer is handed to none
                continue
            made = [one for one in piece.kinds[places[place][0]].passes[FORWARD] if isinstance(one, Born)]
            dtype = FLOATS.get(made[change.number].dtype, compute)
            if dtype != compute:
                return dtype
    return ""


@lru_cache(maxsize=1024)
def told_apart(row: tuple[Places, ...]) -> tuple[Places, ...]:
    """``row`` with a name for each entry: layers of several lists are counted on, and what stands between two lists is
    told from what stands around them. A row with one list is as it was."""
    names = [name for one in row for name in one.names]
    layers = count()
    last = {name: at for at, name in enumerate(names)}

    def named(at: int, name: str) -> str:
        if name not in ENDS:
            return f"{LAYER}{next(layers)}"
        keeps = at == 0 or (at == last[name] and names[0] != name)
        return name if keeps else f"{name}.{at}"

    found = iter([named(at, name) for at, name in enumerate(names)])
    return tuple(Places(one.kind, tuple(islice(found, len(one.names)))) for one in row)


# -- the model --------------------------------------------------------------------------------------


def model_of(plan: ResolvedPlan, piece: Piece, row: tuple[Places, ...]) -> Model:
    """Every layer is a unit, and so is the model (``programs.transformers_model``)."""
    given, b, s = plan.fsdp, plan.batch.mbs, plan.batch.seq
    made, adapters = seamed(piece, row, b, s), plan.lora.dtype
    if adapters is not None:
        made = tuple(replace(one, module=with_stored(one.module, given.parameters, adapters)) for one in made)
    names = [span.names[0] for span in made]
    layers = [at for at, name in enumerate(names) if name.startswith(LAYER)]
    has_ends = given.ends_apart and not without_ends(piece, row)
    root = given.reshard_root or (given.ends_apart and not has_ends)
    units = [Unit(MODEL, (), 0, len(names) - 1, root, False)]
    lowest = next(at for at, span in enumerate(made) if span.module.first.backward)
    resharded, among = given.reshard_after_forward, given.reshard_to
    units += [Unit(names[at], (), at, at, resharded, at > lowest, among=among) for at in layers]
    if has_ends:
        units = with_ends(plan, made, units)
    storage = "" if leaves_4bit(plan) else plan.precision.dtype
    beside = (*buffers_of(piece, row), *shared_table(plan))
    return Model(made, with_parameters(made, units, (), storage), names[-1], beside)


def without_ends(piece: Piece, row: tuple[Places, ...]) -> str:
    """Why embedding and head are not modelled as units of their own; nothing where they are: of a decoder whose
    embedding is one table."""
    names = [name for one in row for name in one.names]
    if (names[0], *names[-2:]) != (EMBEDDING, FINAL_NORM, HEAD) or len(piece.kinds[row[0].kind].parameters) != 1:
        return "has other parts than a table, layers, a norm and a head"
    return ""


def with_ends(plan: ResolvedPlan, made: Sequence[Span], units: Sequence[Unit]) -> list[Unit]:
    """``units`` of model and layers with those of the ends (``ends.py``). Those that are tied have the norm with them,
    which stays as long in the model's own unit."""
    root, *layers = units
    norm, head = len(made) - 2, len(made) - 1
    if not made[head].module.parameters:  # the head's weight is the embedding's
        return [Unit(ENDS_UNIT, (), 0, head, False, False, narrow=True), *layers]
    table = Unit(EMBEDDING, (), 0, 0, plan.fsdp.reshard_after_forward, False, narrow=True, among=plan.fsdp.reshard_to)
    base, *inside = next((one.name.split(".") for one in made[norm].module.parameters), [""])
    found = len(inside) == 2 and not (plan.lora.rank is not None and base == "model")
    own = Unit(ENDS_UNIT, (), norm if found else head, head, False, narrow=True)
    return [*([] if found else [root]), table, *layers, own]


@lru_cache(maxsize=4096)
def seamed(piece: Piece, row: tuple[Places, ...], b: int, s: int) -> tuple[Span, ...]:
    """One span for each module, with seams around its passes."""
    return tuple(
        Span(_with_seams(one.module, name if name in ENDS else ""), (name,))
        for one in spans(piece, row, b, s)
        for name in one.names
    )


@lru_cache(maxsize=4096)
def _with_seams(module: TracedModule, name: str) -> Module:
    """``name``: of a module that may be a unit besides the layers."""

    def tapes(inner: Tapes) -> Tapes:
        before, after = Seam("traced", Hook.BEFORE_BACKWARD), Seam("traced", Hook.AFTER_BACKWARD)
        one, two = _own_backward(inner.backward, name)
        own = (Seam(OWN, Hook.BEFORE_BACKWARD),) if name else ()
        backward = (before, *one, *own, *two, after) if inner.backward else ()
        return Tapes(forward(inner.forward), backward, 0, 0)

    def forward(tape: Tape) -> Tape:
        cast, rest = _behind_casts(tape)
        one, two = _own_forward(rest, name)
        rest = (*one, Seam(OWN, Hook.AFTER_FORWARD), *two) if name else rest
        return (*cast, Seam("traced", Hook.BEFORE_FORWARD), *rest, Seam("traced", Hook.AFTER_FORWARD))

    evaluation = forward(module.evaluation)
    return Module(module.name, tapes(module.first), tapes(module.steady), evaluation, module.parameters)


def _behind_casts(tape: Tape) -> tuple[Tape, Tape]:
    """The copies in 16 bits that a forward pass begins with, which come before its parameters are gathered; the rest.
    What is in 16 bits already is not copied."""
    number = next((at for at, one in enumerate(tape) if not (isinstance(one, Hold) and _is_cast(one))), len(tape))
    return tape[:number], tape[number:]


def _own_forward(tape: Tape, name: str) -> tuple[Tape, Tape]:
    """The look-up that the forward of an embedding begins with, and the rest; of other modules all of it."""
    looked_up = [at for at, one in enumerate(tape) if isinstance(one, Hold) and one.name == "aten.embedding.default"]
    number = looked_up[0] + 1 if name == EMBEDDING and looked_up else len(tape)
    return tape[:number], tape[number:]


def _own_backward(tape: Tape, name: str) -> tuple[Tape, Tape]:
    """What runs before the gradient of an embedding's look-up has come, or that of a head's logits; the rest. What is
    looked up in a frozen table may be a leaf, which ends with its gradient, behind all else."""
    first = {EMBEDDING: ("aten.embedding_dense_backward",), HEAD: ("aten.mm", "aten.addmm")}.get(name, ())
    found = [at for at, one in enumerate(tape) if first and isinstance(one, Hold) and one.name.startswith(first)]
    drops = [at for at, one in enumerate(tape) if isinstance(one, Drop)]
    number = found[0] if found else drops[-2] if name == EMBEDDING and len(drops) > 1 else 0
    return tape[:number], tape[number:]


def _is_cast(hold: Hold) -> bool:
    return hold.name == COPY and hold.dtype in NARROW


# -- one row, for the allocator's replay ------------------------------------------------------------


@lru_cache(maxsize=16)
def _unrolled(
    piece: Piece,
    row: tuple[Places, ...],
    b: int,
    s: int,
    workspaces: bool,
    several: bool,
    model: Model,
    sharding: Sharding,
) -> tuple[Span, ...]:
    """All modules as one, in which every tensor has a number of its own, with the hooks' events."""
    own = owned(model.spans, model.units, sharding)
    passes = passes_of(own, model.units, own.place(model.end), sharding, (Role.FIRST, Role.STEADY))
    return joined_row(Row(piece, row, b, s, workspaces), own.modules, own.renamed, passes, several)


def joined_row(
    row: Row,
    modules: Sequence[tuple[Module, str]],
    renamed: Sequence[Ids],
    passes: Sequence[Sequence[Around]],
    several: bool,
) -> tuple[Span, ...]:
    """``row`` with what hooks do around its ``modules`` in the first micro-batch and, if there are ``several``, in
    others (``passes``)."""
    made = _HookedRow(row, modules, renamed, passes)
    first = made.tapes(FIRST)
    whole = Module("model", first, made.tapes(FURTHER) if several else first, (), ())
    return (Span(whole, ("model",)),)


class _HookedRow:
    """Events of a row and of hooks. What hooks hold of one module has numbers behind the row's own. Every micro-batch
    reduces its gradients, so that those of each are made as the first one's are."""

    def __init__(
        self,
        row: Row,
        modules: Sequence[tuple[Module, str]],
        renamed: Sequence[Ids],
        passes: Sequence[Sequence[Around]],
    ) -> None:
        self.row = row
        self.names = [name for _, name in modules]
        self.arounds: dict[int, list[Around]] = {FIRST: [], FURTHER: []}
        self.gradients: list[dict[int, int]] = []
        """By module, of gradients: the number in the row, and that in the hooks."""
        number = row.last_number
        for at, ((module, _), ids) in enumerate(zip(modules, renamed, strict=True)):
            around = passes[0][at], passes[1][at]
            known = {}
            for id, _ in compact_ids(module, ids, around):
                number += 1
                known[id] = number
            for key, one in zip(self.arounds, around, strict=True):
                self.arounds[key].append(Around(*(with_ids(tape, known) for tape in one)))
            self.gradients.append({row.number_of(at, old): known.get(new, new) for old, new in ids})

    def tapes(self, known: int) -> Tapes:
        return Tapes(tuple(self._forward(known)), tuple(self._backward(known)), 0, 0)

    def _forward(self, known: int) -> Iterator[Event]:
        for at, around in enumerate(self.arounds[known]):
            cast, rest = _behind_casts(tuple(self.row.of(at, FORWARD)))
            one, two = _own_forward(rest, self.names[at])
            yield from (*cast, *around.before_forward, *one, *around.after_inner, *two)
            yield from around.after_forward

    def _backward(self, known: int) -> Iterator[Event]:
        for at, around in reversed([*enumerate(self.arounds[known])]):
            yield from around.before_backward
            one, two = _own_backward(with_ids(tuple(self.row.of(at, FIRST)), self.gradients[at]), self.names[at])
            yield from (*one, *around.before_inner_backward, *two)
            yield from around.after_backward


# -- learned flat --------------------------------------------------------------------------------------


def flat_program_of(plan: ResolvedPlan, fit: Fit, options: Options) -> Program:
    """What ``fit`` comes to on every rank of ``plan``, whose shards and gradients are in the dtype of compute, those
    of adapters in their own."""
    given, ranks = plan.fsdp, plan.layout.dp
    flat.check(plan, given)
    b, s = plan.batch.mbs, plan.batch.seq
    piece = piece_of(plan, fit, b, s)
    row = told_apart(row_of(plan, fit, piece))
    compute, trained = plan.precision.dtype, plan.lora.dtype or plan.precision.dtype
    check_dtype(plan, piece, compute)
    made = seamed(piece, row, b, s)
    ahead = given.backward_prefetch == "pre" and not plan.recompute.reentrant
    units = flat.units_of(made, compute, given.reshard_after_forward, False, False)
    how = (units, made[-1].names[0], ranks, compute, False, ahead)
    unrolled = _unrolled_flat(piece, row, b, s, options.kernel_workspaces, plan.microbatches > 1, *how)
    maps = quantisation_maps(plan.optimizer)
    hooked, flats = units_held(flat.with_hooks(made, *how), units)
    tensors = [one for span in hooked for one in span.module.parameters]
    pieces = pieces_of(plan.optimizer, tensors, ranks, ranks, flats, trained)
    return Program(
        stage=0,
        ranks=tuple(range(ranks)),
        entries=tuple(dict.fromkeys(name for one in row for name in one.names)),
        order=OneChunk((Chunk(hooked, unrolled=unrolled),), plan.microbatches),
        states=flat_states(plan.optimizer, ranks, ranks, flats, trained),
        extra=(*inputs_of(plan, piece), *buffers_of(piece, row), *shared_table(plan), *maps),
        step=Stretch(drop_all(step_temporaries(plan.optimizer, pieces, trained), 1)),
        saving=flat.saving_of(units, trained, ranks),
        late_states=True,
        managed=managed_states(plan.optimizer, tensors, ranks, ranks, flats, trained),
        **flat.wrapping_of(plan, units, ahead),
        elements=sum(-(-one.elements // ranks) for one in tensors),
    )


@lru_cache(maxsize=16)
def _unrolled_flat(
    piece: Piece,
    row: tuple[Places, ...],
    b: int,
    s: int,
    workspaces: bool,
    several: bool,
    units: tuple[Flat, ...],
    end: str,
    ranks: int,
    compute: str,
    mixed: bool,
    ahead: bool,
) -> tuple[Span, ...]:
    """All modules as one, in which every tensor has a number of its own, with the hooks' events."""
    around = flat.around_modules(seamed(piece, row, b, s), units, end, ranks, compute, mixed, ahead)
    made = Row(piece, row, b, s, workspaces)
    return joined_row(made, around.modules, around.renamed, (around.first, around.steady), several)
