"""Pieces of a traced architecture at one point: modules whose tapes are made when they are asked for.

A search folds and never looks at events, so that a fold goes over numbers alone; events are made for reports, and
in one row, with a slot for each tensor, for the allocator's replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

from ..layers.module import Module, Tapes
from ..tape.events import NOTHING, PRODUCT, Category, Drop, Event, Excursion, Hold, Seam, Tape, rounded
from ..tape.program import Span
from ..values import dataclass
from .fit import Born, Changes, Gone, Kind, Piece, Places
from .rows import place_of

FLASH_BACKWARD = "aten._scaled_dot_product_flash_attention_backward.default"
FORWARD, FIRST, FURTHER, EVALUATION = range(4)
"""Indices of ``structure.PASSES``."""


@dataclass(frozen=True, eq=False)
class Sizes:
    """A piece's polynomials at one point."""

    exact: tuple[int, ...]
    rounded: tuple[int, ...]

    @staticmethod
    def of(piece: Piece, b: int, s: int) -> Sizes:
        exact = tuple([one(b, s) for one in piece.polynomials])
        return Sizes(exact, tuple([rounded(size) for size in exact]))


def folded(changes: Changes, sizes: Sequence[int]) -> Excursion:
    """``tape.events.fold`` without events."""
    net = peak = 0
    at = -1
    for number, change in enumerate(changes):
        if len(change) == BORN:
            net += sizes[change[0]]
            if net > peak:
                peak, at = net, number
        else:
            net -= sizes[change[0]]
    if at < 0:
        return Excursion(net, 0, _by_category(changes, sizes, NOTHING), NOTHING, "")
    peak_by = _by_category(changes[: at + 1], sizes, NOTHING)
    highest = changes[at]
    assert isinstance(highest, Born)
    return Excursion(net, peak, _by_category(changes[at + 1 :], sizes, peak_by), peak_by, highest.operator)


BORN = len(Born._fields)


def _by_category(changes: Sequence[Born | Gone], sizes: Sequence[int], before: tuple[int, ...]) -> tuple[int, ...]:
    by = list(before)
    for change in changes:
        if len(change) == BORN:
            by[change[1]] += sizes[change[0]]
        else:
            by[change[1]] -= sizes[change[0]]
    return tuple(by)


# -- modules ----------------------------------------------------------------------------------------


def _set(value: object, **fields: object) -> None:
    """Sets fields as the ``__init__`` of a frozen dataclass does. Those that are left out are properties here:
    tapes that are made when they are asked for."""
    for name, field in fields.items():
        object.__setattr__(value, name, field)


class TracedTapes(Tapes):
    """Those of one kind at one point; ``known`` is the pass of its backward."""

    def __init__(self, kind: Kind, known: int, sizes: Sizes) -> None:
        _set(self, kind=kind, known=known, sizes=sizes, output=0, grad_input=0, end=())

    kind: Kind
    known: int
    sizes: Sizes

    @cached_property
    def forward(self) -> Tape:
        return _alone(self.kind, FORWARD, self.sizes)

    @cached_property
    def backward(self) -> Tape:
        return _alone(self.kind, self.known, self.sizes)

    @cached_property
    def forward_fold(self) -> Excursion:
        return folded(self.kind.passes[FORWARD], self.sizes.rounded)

    @cached_property
    def backward_fold(self) -> Excursion:
        return folded(self.kind.passes[self.known], self.sizes.rounded)


class TracedModule(Module):
    """A kind at one point."""

    def __init__(self, name: str, kind: Kind, sizes: Sizes) -> None:
        first, steady = TracedTapes(kind, FIRST, sizes), TracedTapes(kind, FURTHER, sizes)
        own = {"parameters": kind.parameters, "left": (), "shares": (), "saved_shared": frozenset(), "slot": 0}
        _set(self, kind=kind, sizes=sizes, name=name, first=first, steady=steady, **own)

    kind: Kind
    sizes: Sizes

    @cached_property
    def evaluation(self) -> Tape:
        return _alone(self.kind, EVALUATION, self.sizes)

    @cached_property
    def evaluation_fold(self) -> Excursion:
        return folded(self.kind.passes[EVALUATION], self.sizes.rounded)


@lru_cache(maxsize=4096)
def modules(piece: Piece, b: int, s: int) -> tuple[TracedModule, ...]:
    """One for each kind."""
    sizes = Sizes.of(piece, b, s)
    return tuple([TracedModule("traced", kind, sizes) for kind in piece.kinds])


@lru_cache(maxsize=4096)
def spans(piece: Piece, row: tuple[Places, ...], b: int, s: int) -> tuple[Span, ...]:
    found = modules(piece, b, s)
    return tuple([Span(found[kind], names) for kind, names in row])


def hold(change: Born, tensor: int, sizes: Sizes) -> Hold:
    shape = tuple(sizes.exact[number] for number in change.shape)
    category = Category(change.category)
    return Hold(tensor, sizes.rounded[change.size], category, change.operator, shape, change.dtype)


def _alone(kind: Kind, known: int, sizes: Sizes) -> Tape:
    """The events of one module by itself: numbers of its own tensors count on from pass to pass, and what others
    made has a negative number that no two share."""
    own = sum(isinstance(one, Born) for one in kind.passes[FORWARD]) if known in (FIRST, FURTHER) else 0
    result: list[Event] = []
    born = own
    for at, change in enumerate(kind.passes[known]):
        if isinstance(change, Born):
            born += 1
            result.append(hold(change, born, sizes))
            continue
        is_own = not change.far and change.entry == 0
        tensor = 1 + change.number + (0 if change.forward else own) if is_own else -1 - at
        result.append(Drop(tensor, sizes.rounded[change.size], Category(change.category)))
    return tuple(result)


# -- one row ----------------------------------------------------------------------------------------


class _RowTapes(Tapes):
    """Of the whole model."""

    def __init__(self, row: Row, known: int) -> None:
        _set(self, row=row, known=known, output=0, grad_input=0, end=())

    row: Row
    known: int

    @cached_property
    def forward(self) -> Tape:
        return tuple(self.row.events(FORWARD))

    @cached_property
    def backward(self) -> Tape:
        return tuple(self.row.events(self.known))


@lru_cache(maxsize=16)
def whole(piece: Piece, row: tuple[Places, ...], b: int, s: int, kernel_workspaces: bool) -> tuple[Span, ...]:
    """All of a model's modules as one, in which every tensor has a number of its own."""
    made = Row(piece, row, b, s, kernel_workspaces)
    model = Module("model", _RowTapes(made, FIRST), _RowTapes(made, FURTHER), (), ())
    return (Span(model, ("model",)),)


class Row:
    """Numbers of tensors of a model whose modules stand in a row: those of forward, then those of a backward pass."""

    def __init__(self, piece: Piece, row: tuple[Places, ...], b: int, s: int, kernel_workspaces: bool) -> None:
        self.piece = piece
        self.row = row
        self.point = b, s
        self.kernel_workspaces = kernel_workspaces

    @cached_property
    def kinds(self) -> list[Kind]:
        return [self.piece.kinds[kind] for kind, names in self.row for _ in names]

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes.of(self.piece, *self.point)

    @cached_property
    def starts(self) -> dict[int, list[int]]:
        """The first number of each module's tensors, and one more than the last of all, by pass."""
        forward = self._starts(FORWARD, 1)
        return {FORWARD: forward, **{known: self._starts(known, forward[-1]) for known in (FIRST, FURTHER)}}

    def _starts(self, known: int, at: int) -> list[int]:
        result = [at]
        for kind, names in self.row:
            born = sum(isinstance(one, Born) for one in self.piece.kinds[kind].passes[known])
            for _ in names:
                result.append(result[-1] + born)
        return result

    @property
    def last_number(self) -> int:
        """No tensor has a higher one; behind each module's own are those of its kernels' workspaces."""
        return max(starts[-1] for starts in self.starts.values()) + MOST_WORKSPACES

    def number_of(self, at: int, tensor: int) -> int:
        """Of a tensor that the module at ``at`` makes in its first backward, where it is called ``tensor``."""
        own = sum(isinstance(one, Born) for one in self.kinds[at].passes[FORWARD])
        return self.starts[FIRST][at] + tensor - own - 1

    def events(self, known: int) -> Iterator[Event]:
        places = range(len(self.kinds))
        for at in places if known == FORWARD else reversed(places):
            yield from self.of(at, known)

    def of(self, at: int, known: int) -> Iterator[Event]:
        """Events of one module."""
        inside, number = self.starts[known][-1], self.starts[known][at]
        total = len(self.kinds)
        workspaces, multiplied = _Workspaces(self.sizes) if self.kernel_workspaces else None, False
        for change, alike in self._alike(self.kinds[at], known):
            if isinstance(change, Gone):
                starts = self.starts[FORWARD if change.forward else known]
                yield Drop(starts[place_of(change, at, total)] + change.number, *alike)
                continue
            yield Hold(number, *alike)
            number += 1
            if self.kernel_workspaces and not multiplied and change.operator in PRODUCTS:
                multiplied = True
                yield Seam(PRODUCT)
            if workspaces is not None:
                taken = workspaces.behind(change)
                yield from (one._replace(tensor=inside + i) for i, one in enumerate(taken))
                yield from (Drop(inside + i, one.bytes, one.category) for i, one in enumerate(taken))

    def _alike(self, kind: Kind, known: int) -> list[tuple[Born | Gone, Any]]:
        """Changes of a kind's pass, with what their events have besides the tensor wherever the kind stands."""
        found = self._made.get((id(kind), known))
        if found is None:
            rounded = self.sizes.rounded
            found = self._made[id(kind), known] = [
                (one, (rounded[one.size], Category(one.category)))
                if isinstance(one, Gone)
                else (one, hold(one, 0, self.sizes)[1:])
                for one in kind.passes[known]
            ]
        return found

    @cached_property
    def _made(self) -> dict[tuple[int, int], list[tuple[Born | Gone, Any]]]:
        return {}


PRODUCTS = frozenset(f"aten.{name}.default" for name in ("addmm", "baddbmm", "bmm", "mm"))
"""Operators for which cuBLAS takes its workspace."""

MOST_WORKSPACES = 4
"""That one kernel takes."""


class _Workspaces:
    """What flash attention's backward allocates inside, behind its three outputs
    (``layers.fused_attention.flash_attention``)."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.outputs: list[Hold] = []

    def behind(self, change: Born) -> Sequence[Hold]:
        if change.operator != FLASH_BACKWARD:
            return ()
        self.outputs.append(hold(change, 0, self.sizes))
        if len(self.outputs) < 3:
            return ()
        query, key, _ = self.outputs
        self.outputs = []
        return flash_workspaces(query, key)


def flash_workspaces(query: Hold, key: Hold) -> Sequence[Hold]:
    """Those of gradients of queries and keys, (b, a, s, d) each."""
    b, a, s, d = query.shape
    rows, columns = -(-s // 128) * 128, -(-d // 32) * 32

    def inside(name: str, size: int) -> Hold:
        return Hold(0, rounded(size), Category.WORKSPACES, name)

    found = [inside("softmax_d", 4 * b * a * rows), inside("dq_accum", 4 * b * a * rows * columns)]
    if key.shape[1] < a:
        found += [inside(name, 2 * b * a * s * d) for name in ("dk_expanded", "dv_expanded")]
    return found
