"""A fitted step cut into the entries of a layer list: kinds that repeat, and the row that they stand in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import groupby

from ..layers.module import Parameter
from .fit import LAYER, Born, Changes, Domain, Gone, Kind, Piece, Places, Polynomial
from .recording import EMBEDDING, FINAL_NORM, HEAD, Outline, Registered, Traced
from .structure import Begin, Change, Fitted, distinct, runs

FORWARD_PASS = 0
_BACKWARDS = (1, 2)
NEAR = 1
"""Places away that a neighbour is."""


def piece_of(found: Fitted, traced: Traced, domain: Domain) -> Piece:
    """``found`` as a piece."""
    cut = _Cut(found)
    numbers = {one: number for number, one in enumerate(distinct(found))}
    owned = _owned(traced.outline, cut.names)
    ready = _ready(traced, owned)
    buffers = _buffers(traced.outline, cut.names)
    kinds: dict[Kind, int] = {}
    row: list[tuple[int, str]] = []
    for at, name in enumerate(cut.names):
        passes = tuple(cut.changes(known, at, numbers) for known in range(len(found.structure.passes)))
        kind = Kind(passes, tuple(one for _, one in owned[at]), ready[at], buffers[at])
        row.append((kinds.setdefault(kind, len(kinds)), name))
    grouped = tuple(
        Places(number, tuple(name for _, name in group))
        for (number, _), group in groupby(row, key=lambda one: (one[0], one[1].startswith(LAYER)))
    )
    inputs = tuple(
        Born(numbers[size], begin.category, begin.operator, begin.dtype, ())
        for begin, size in zip(found.structure.inputs, found.inputs, strict=True)
    )
    piece = Piece(domain, tuple(numbers), tuple(kinds), grouped, inputs, None)
    return _counted_from_the_end(piece)


def gradients_follow_rows(piece: Piece, traced: Traced) -> bool:
    """Gradients are ready entry by entry, from the last to the first."""
    order = [name for name, _ in groupby(_entry(traced.outline, path) for path in traced.ready)]
    row = [name for one in piece.row for name in one.names]
    return len(set(order)) == len(order) and order == [name for name in row[::-1] if name in set(order)]


# -- tensors ----------------------------------------------------------------------------------------


class _Cut:
    """Every change at its place in the row, and every tensor by the place that made it."""

    def __init__(self, found: Fitted) -> None:
        self.found = found
        cut = [runs(changes) for changes in found.structure.passes]
        ordered = [part[::-1] if known in _BACKWARDS else part for known, part in enumerate(cut)]
        names: list[str] = []
        for part in ordered:
            names = _merged(names, [name for name, _ in part])
        self.names = names
        self.parts: list[dict[int, Sequence[Change]]] = [_placed(names, part) for part in ordered]
        self.made: dict[tuple[int, int], tuple[int, int]] = {}
        """Place in the row and number there of each tensor, by pass and number."""
        self.numbers: dict[tuple[int, int, int], int] = {}
        for known, by_place in enumerate(self.parts):
            self._number(known, by_place)

    def _number(self, known: int, by_place: dict[int, Sequence[Change]]) -> None:
        number = 0
        for at in sorted(by_place, reverse=known in _BACKWARDS):
            begins = sum(isinstance(one, Begin) for one in by_place[at])
            for own in range(begins):
                self.made[known, number] = (at, own)
                self.numbers[known, at, own] = number
                number += 1

    def changes(self, known: int, at: int, numbers: Mapping[Polynomial, int]) -> Changes:
        """Those of the entry at ``at`` in one pass."""
        result: list[Born | Gone] = []
        own = 0
        for change in self.parts[known].get(at, ()):
            if isinstance(change, Begin):
                number = self.numbers[known, at, own]
                shape = tuple(numbers[one] for one in self.found.shapes[known][number])
                size = numbers[self.found.sizes[known][number]]
                result.append(Born(size, change.category, change.operator, change.dtype, shape))
                own += 1
                continue
            size = numbers[self.found.sizes[change.made][change.number]]
            begin = self._begin(change.made, change.number)
            place, number = self.made[change.made, change.number]
            far = abs(place - at) > NEAR
            from_forward = known != FORWARD_PASS and change.made == FORWARD_PASS
            result.append(Gone(size, begin.category, place if far else place - at, far, from_forward, number))
        return tuple(result)

    def _begin(self, made: int, number: int) -> Begin:
        place, own = self.made[made, number]
        return [one for one in self.parts[made][place] if isinstance(one, Begin)][own]


def _merged(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """A list that has both as parts of it, in their order."""
    result: list[str] = []
    for what, i, j, k, m in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        result += first[i:j]
        if what != "equal":
            result += second[k:m]
    return result


def _placed(names: Sequence[str], part: Sequence[tuple[str, Sequence[Change]]]) -> dict[int, Sequence[Change]]:
    """Changes by place in the row, which ``names`` are."""
    result: dict[int, Sequence[Change]] = {}
    at = -1
    for name, changes in part:
        at = names.index(name, at + 1)
        result[at] = changes
    return result


def _counted_from_the_end(piece: Piece) -> Piece:
    """With ``repeated``, and places nearer to the end of the layers that repeat counted from the end; as it is where
    none do."""
    runs_of_layers = [at for at, one in enumerate(piece.row) if one.names[0].startswith(LAYER) and len(one.names) > 1]
    if not runs_of_layers:
        return piece
    repeated = max(runs_of_layers, key=lambda at: len(piece.row[at].names))
    middle = sum(len(one.names) for one in piece.row[:repeated]) + len(piece.row[repeated].names) // 2
    total = sum(len(one.names) for one in piece.row)

    def moved(change: Born | Gone) -> Born | Gone:
        if isinstance(change, Born) or not change.far or change.entry < middle:
            return change
        return change._replace(entry=change.entry - total)

    kinds = tuple(
        replace(kind, passes=tuple(tuple(map(moved, changes)) for changes in kind.passes)) for kind in piece.kinds
    )
    return replace(piece, kinds=kinds, repeated=repeated)


# -- parameters and buffers -------------------------------------------------------------------------


def _entry(outline: Outline, path: str) -> str:
    """The entry of the layer list that owns what is registered under ``path``."""
    layer = outline.layer_of(path)
    if layer:
        return layer
    if outline.norm and path.startswith(f"{outline.norm}."):
        return FINAL_NORM
    first = next((at for at, one in enumerate(outline.tensors) if outline.layer_of(one.path)), 0)
    before = {one.path for one in outline.tensors[:first]}
    return EMBEDDING if path in before else HEAD


def _place(names: Sequence[str], entry: str) -> int:
    """Where ``entry`` stands, or else the end of the row that it belongs to."""
    return names.index(entry) if entry in names else (0 if entry == EMBEDDING else len(names) - 1)


def _owned(outline: Outline, names: Sequence[str]) -> list[list[tuple[str, Parameter]]]:
    """Parameters by place, with their paths."""
    result: list[list[tuple[str, Parameter]]] = [[] for _ in names]
    for one in outline.tensors:
        entry = _entry(outline, one.path)
        name = f"{one.role}.weight" if one.role else _within(outline, one, entry)
        result[_place(names, entry)].append((one.path, Parameter(name, one.shape, one.dtype, one.trained)))
    return result


def _within(outline: Outline, one: Registered, entry: str) -> str:
    """The path below the layer."""
    if not outline.layer_of(one.path):
        return one.path
    prefix = next(prefix for prefix in outline.blocks if one.path.startswith(f"{prefix}."))
    return one.path[len(prefix) + 1 :].partition(".")[2]


def _ready(traced: Traced, owned: list[list[tuple[str, Parameter]]]) -> list[tuple[int, ...]]:
    order = {path: at for at, path in enumerate(traced.ready)}
    result = []
    for place in owned:
        numbers = [number for number, (path, _) in enumerate(place) if path in order]
        result.append(tuple(sorted(numbers, key=lambda number: order[place[number][0]])))
    return result


def _buffers(outline: Outline, names: Sequence[str]) -> list[tuple[tuple[int, str], ...]]:
    """Bytes and dtypes by place. What no layer owns is the first entry's."""
    result: list[list[tuple[int, str]]] = [[] for _ in names]
    for one in outline.buffers:
        layer = outline.layer_of(one.path)
        result[_place(names, layer or EMBEDDING)].append((one.bytes, one.dtype))
    return [tuple(one) for one in result]


# -- one row as another -----------------------------------------------------------------------------


def laid_out(piece: Piece, row: Sequence[Places], b: int, s: int) -> Iterator[tuple[object, ...]]:
    """What stands where, with sizes in bytes and every place counted from the start: two rows that are equal so are
    the same step."""
    sizes = [one(b, s) for one in piece.polynomials]
    total = sum(len(one.names) for one in row)
    at = 0
    for kind_number, names in row:
        kind = piece.kinds[kind_number]
        for name in names:
            passes = tuple(tuple(_laid(one, sizes, at, total) for one in changes) for changes in kind.passes)
            yield name, passes, kind.parameters, kind.ready, kind.buffers
            at += 1


def place_of(change: Gone, at: int, total: int) -> int:
    """Where the entry stands that made what ``change`` at ``at`` ends."""
    if not change.far:
        return at + change.entry
    return change.entry if change.entry >= 0 else total + change.entry


def _laid(change: Born | Gone, sizes: Sequence[int], at: int, total: int) -> tuple[object, ...]:
    if isinstance(change, Born):
        return sizes[change.size], change.category, change.operator, change.dtype
    return sizes[change.size], change.category, place_of(change, at, total), change.forward, change.number
