"""A traced step without its sizes: which tensor begins and ends after which, in every pass of a micro-batch; and from
such structures at several points to polynomials, checked at others.

Two traces with one structure differ in sizes alone. A tensor is known by the pass that made it and its number
there; a run of drops in one place is sorted, since their order changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import NamedTuple

from ..tape.events import Category, Drop, Hold
from ..values import dataclass
from .fit import NotPolynomialError, Point, Polynomial, fitted
from .recording import BACKWARD, EVALUATION, FORWARD, Place, Traced

PASSES = ("forward", "first backward", "further backward", "evaluation")
"""Those of one micro-batch: backward that leaves gradients, backward that adds to them, forward without a graph."""

_PASS = {(0, FORWARD): 0, (0, BACKWARD): 1, (1, FORWARD): 0, (1, BACKWARD): 2, (0, EVALUATION): 3}


class UnfitError(Exception):
    """Why a traced architecture cannot be written as polynomials; one line."""


class Begin(NamedTuple):
    """A tensor comes to life."""

    entry: str
    """Of the layer list."""
    module: str
    operator: str
    dtype: str
    category: Category

    def __str__(self) -> str:
        return f"{self.operator} in {self.module or self.entry}"


class End(NamedTuple):
    """A tensor dies."""

    entry: str
    module: str
    made: int
    """The pass that made it, an index of ``PASSES``."""
    number: int
    """Of the tensor, among those that the pass made."""

    def __str__(self) -> str:
        return f"the end of tensor {self.number} of {PASSES[self.made]} in {self.module or self.entry}"


Change = Begin | End
Passes = tuple[tuple[Change, ...], ...]


@dataclass(frozen=True, slots=True)
class Structure:
    """One traced step."""

    passes: Passes
    """Changes of each of ``PASSES``."""
    sizes: tuple[tuple[int, ...], ...]
    """Bytes of each tensor's storage, not rounded, by pass and number."""
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    inputs: tuple[Begin, ...]
    input_sizes: tuple[int, ...]

    def begins(self) -> Iterator[tuple[int, int, Begin]]:
        """Pass, number and beginning of every tensor."""
        for at, changes in enumerate(self.passes):
            for number, begin in enumerate(one for one in changes if isinstance(one, Begin)):
                yield at, number, begin


def structure_of(traced: Traced) -> Structure:
    """That of a step of two micro-batches, followed by an evaluation."""
    reading = _Reading(traced)
    return reading.structure()


class _Reading:
    """Goes through a recording once."""

    def __init__(self, traced: Traced) -> None:
        self.recording = traced.recording
        self.entries = traced.entries
        self.made: dict[int, tuple[int, int, int]] = {}
        """Micro-batch, pass and number of each tensor, by its number in the recording."""
        self.begun: dict[tuple[int, int], list[Begin]] = {}
        self.sizes: dict[tuple[int, int], list[int]] = {}
        self.shapes: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        self.changes: dict[tuple[int, int], list[Change]] = {}

    def structure(self) -> Structure:
        inputs, sizes = [], []
        for event, place, entry in self._sorted():
            known = _PASS.get(place[:2])
            if known is not None:
                self._read(event, place, entry, (place.microbatch, known))
            elif not place.phase and isinstance(event, Hold) and event.category is Category.INPUTS:
                inputs.append(Begin("", "", event.name, event.dtype, event.category))
                sizes.append(self.recording.raw.get(event.tensor, event.bytes))
        self._check_repeats()
        self._check_ends()
        order = ((0, 0), (0, 1), (1, 2), (0, 3))
        return Structure(
            tuple(tuple(self.changes.get(one, ())) for one in order),
            tuple(tuple(self.sizes.get(one, ())) for one in order),
            tuple(tuple(self.shapes.get(one, ())) for one in order),
            tuple(inputs),
            tuple(sizes),
        )

    def _sorted(self) -> Iterator[tuple[Hold | Drop, Place, str]]:
        """All events; drops that follow one another in one place by the age of their tensors."""
        rows = zip(self.recording.events, self.recording.places, self.entries, strict=True)
        for (is_drop, _), group in groupby(rows, key=lambda row: (isinstance(row[0], Drop), row[1:])):
            alike = list(group)
            yield from sorted(alike, key=lambda row: row[0].tensor) if is_drop else alike

    def _read(self, event: Hold | Drop, place: Place, entry: str, key: tuple[int, int]) -> None:
        changes = self.changes.setdefault(key, [])
        if isinstance(event, Hold):
            begun = self.begun.setdefault(key, [])
            self.made[event.tensor] = (*key, len(begun))
            begun.append(Begin(entry, place.module, event.name, event.dtype, event.category))
            changes.append(begun[-1])
            self.sizes.setdefault(key, []).append(self.recording.raw.get(event.tensor, event.bytes))
            self.shapes.setdefault(key, []).append(event.shape)
            return
        microbatch, made, number = self.made.get(event.tensor, (-1, 0, 0))
        if microbatch < 0:
            raise UnfitError(
                f"{place.module or entry} ends a tensor of {event.bytes:,} bytes that is older than the step"
            )
        if microbatch != key[0]:
            begin = self.begun[microbatch, made][number]
            raise UnfitError(f"what {begin} makes outlives its micro-batch")
        changes.append(End(entry, place.module, made, number))

    def _check_repeats(self) -> None:
        """Both micro-batches run the same forward pass."""
        keys = ((0, 0), (1, 0))
        first, second = (self.changes.get(one, []) for one in keys)
        differs = difference((tuple(first),), (tuple(second),))
        sizes = zip(*(self.sizes.get(one, []) for one in keys), strict=False)
        apart = next((at for at, (one, other) in enumerate(sizes) if one != other), None)
        if not differs and apart is not None:
            differs = f"{self.begun[keys[0]][apart]} has another size"
        if differs:
            raise UnfitError(f"the second forward pass is not like the first: {differs}")

    def _check_ends(self) -> None:
        """What a micro-batch makes ends with it, but for gradients."""
        for microbatch, passes in ((0, (0, 1)), (1, (0, 2)), (0, (3,))):
            ended = {
                (one.made, one.number)
                for known in passes
                for one in self.changes.get((microbatch, known), ())
                if isinstance(one, End)
            }
            for known in passes:
                for number, begin in enumerate(self.begun.get((microbatch, known), ())):
                    is_gradient = known == 1 and begin.category is Category.GRADIENTS
                    if (known, number) not in ended and not is_gradient:
                        raise UnfitError(f"what {begin} makes outlives its micro-batch")


def difference(one: Passes, other: Passes) -> str:
    """Where two structures part, in words; nothing where they do not."""
    for at, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        if ours == theirs:
            continue
        for mine, yours in zip(ours, theirs, strict=False):
            if mine != yours:
                return f"{PASSES[at]} has {_told(mine, yours)} in one and {_told(yours, mine)} in the other"
        longer = max(ours, theirs, key=len)
        return f"{PASSES[at]} has {longer[min(len(ours), len(theirs))]} in one alone"
    return ""


def _told(change: Change, other: Change) -> str:
    """``change``, and what it is for where ``other`` is called the same."""
    return (
        f"{change} ({change.category.key})" if isinstance(change, Begin) and str(change) == str(other) else str(change)
    )


def same_at(point: Point, structure: Structure, base: Structure, base_point: Point) -> None:
    """``UnfitError`` where the structure at ``point`` is another than at ``base_point``."""
    differs = difference(base.passes, structure.passes)
    if not differs and base.inputs != structure.inputs:
        differs = "inputs differ"
    if differs:
        b, s = point
        raise UnfitError(
            f"the step at b = {b}, s = {s} is another than at b = {base_point[0]}, s = {base_point[1]}: {differs}"
        )


def runs(changes: Iterable[Change]) -> list[tuple[str, Sequence[Change]]]:
    """Changes that follow one another in one entry of the layer list, with its name."""
    return [(entry, tuple(group)) for entry, group in groupby(changes, key=lambda one: one.entry)]


Shape = tuple[Polynomial, ...]


@dataclass(frozen=True)
class Fitted:
    """A structure whose sizes are polynomials."""

    point: Point
    """Where the structure was traced."""
    structure: Structure
    sizes: tuple[tuple[Polynomial, ...], ...]
    """Of each tensor, by pass and number."""
    shapes: tuple[tuple[Shape, ...], ...]
    """Likewise; empty where a dimension is no polynomial."""
    inputs: tuple[Polynomial, ...]

    def check(self, point: Point, structure: Structure) -> None:
        """``UnfitError`` unless ``structure`` at ``point`` is what the polynomials say."""
        same_at(point, structure, self.structure, self.point)
        for at, number, begin in self.structure.begins():
            polynomial, size = self.sizes[at][number], structure.sizes[at][number]
            if polynomial(*point) != size:
                raise UnfitError(_apart(begin, polynomial, size, point))
        for begin, polynomial, size in zip(structure.inputs, self.inputs, structure.input_sizes, strict=True):
            if polynomial(*point) != size:
                raise UnfitError(_apart(begin, polynomial, size, point))


def _apart(begin: Begin, polynomial: Polynomial, size: int, point: Point) -> str:
    b, s = point
    return f"{begin} is {size:,} bytes at b = {b}, s = {s}, where {polynomial} is {polynomial(b, s):,}"


def fit_sizes(structures: Mapping[Point, Structure]) -> Fitted:
    """Through a grid of points; ``UnfitError`` where their structures differ or a size is no such polynomial."""
    point, base = next(iter(structures.items()))
    for other, structure in structures.items():
        same_at(other, structure, base, point)
    known: dict[tuple[int, ...], Polynomial] = {}

    def polynomial(values: Sequence[int]) -> Polynomial:
        key = tuple(values)
        if key not in known:
            known[key] = fitted(dict(zip(structures, key, strict=True)))
        return known[key]

    def size(begin: Begin, values: Sequence[int]) -> Polynomial:
        try:
            return polynomial(values)
        except NotPolynomialError as error:
            at = ", ".join(f"{value:,} at b = {b}, s = {s}" for (b, s), value in zip(structures, values, strict=True))
            raise UnfitError(f"the bytes of {begin} are no polynomial ({error}): {at}") from None

    sizes: list[list[Polynomial]] = [[] for _ in PASSES]
    shapes: list[list[Shape]] = [[] for _ in PASSES]
    for at, number, begin in base.begins():
        sizes[at].append(size(begin, [one.sizes[at][number] for one in structures.values()]))
        shapes[at].append(_shape(polynomial, [one.shapes[at][number] for one in structures.values()]))
    inputs = [
        size(begin, [one.input_sizes[number] for one in structures.values()])
        for number, begin in enumerate(base.inputs)
    ]
    return Fitted(point, base, tuple(map(tuple, sizes)), tuple(map(tuple, shapes)), tuple(inputs))


def _shape(polynomial: object, shapes: Sequence[tuple[int, ...]]) -> Shape:
    """Dimension by dimension; for people, so that none is better than a wrong one."""
    assert callable(polynomial)
    if len({len(shape) for shape in shapes}) != 1:
        return ()
    try:
        return tuple(polynomial(lengths) for lengths in zip(*shapes, strict=True))
    except NotPolynomialError:
        return ()


def as_traced(point: Point, structure: Structure) -> Fitted:
    """The sizes of one trace as they are."""
    return Fitted(
        point,
        structure,
        tuple(tuple(map(constant, sizes)) for sizes in structure.sizes),
        tuple(tuple(tuple(map(constant, shape)) for shape in shapes) for shapes in structure.shapes),
        tuple(map(constant, structure.input_sizes)),
    )


def constant(size: int) -> Polynomial:
    return Polynomial((size, 0, 0, 0, 0, 0))


def distinct(found: Fitted) -> Iterator[Polynomial]:
    """Every polynomial once, in order of appearance."""
    dimensions = (one for shapes in found.shapes for shape in shapes for one in shape)
    return iter(dict.fromkeys(chain(*found.sizes, dimensions, found.inputs)))
