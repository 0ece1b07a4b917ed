"""From structures at several points to polynomials, checked at others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from .polynomials import NotPolynomialError, Point, Polynomial, fitted
from .structure import PASSES, Begin, Structure, UnfitError, same_at

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
