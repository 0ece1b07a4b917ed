"""What is kept of a traced architecture: the tapes of its layers, each kind once, with sizes as polynomials.

Polynomials are in b (micro-batch) and s (sequence), and recovered exactly: integers and fractions, no floats.

A tensor of a training step is a product of lengths, of which b occurs at most once and s at most twice (scores), so its
bytes are a polynomial of degree 1 in b and 2 in s. Bytes are those of the storage, before the allocator rounds them.

A *piece* holds for some b and s; it has the kinds of entries of the layer list and the row that they stand in.
Sizes are numbers of polynomials, which many tensors share. A tensor that another entry made is known by where
that stands: so many places away where it is the entry itself or a neighbour, else by its place in the row, counted
from the end where it stands behind the layers that repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from ..layers.module import Parameter
from ..values import dataclass

Point = tuple[int, int]
"""Micro-batch size and sequence length."""

Coefficients = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Polynomial:
    """Coefficients of 1, s, s², b, bs and bs²."""

    coefficients: Coefficients

    def __call__(self, b: int, s: int) -> int:
        one, s1, s2, b1, bs1, bs2 = self.coefficients
        return one + s * (s1 + s * s2) + b * (b1 + s * (bs1 + s * bs2))

    def __str__(self) -> str:
        letters = ("", "s", "s²", "b", "bs", "bs²")
        terms = [f"{n:,} {letter}".strip() for n, letter in zip(self.coefficients, letters, strict=True) if n]
        return " + ".join(terms) or "0"


class NotPolynomialError(ValueError):
    """No polynomial of these degrees with whole coefficients has the values."""


def fitted(values: Mapping[Point, int]) -> Polynomial:
    """The polynomial with ``values`` at points that are a grid: two values of b, or one, by three of s.

    With one value of b alone the polynomial is in s. ``NotPolynomialError`` where a coefficient is no integer.
    """
    bs, ss = sorted({b for b, _ in values}), sorted({s for _, s in values})
    if len(ss) != 3 or len(bs) > 2 or len(values) != len(bs) * 3:
        raise ValueError(f"{len(values)} points are no grid of two by three")
    rows = [_in_s(ss, [values[b, s] for s in ss]) for b in bs]
    if len(rows) == 1:
        return _whole((*rows[0], *(Fraction(0),) * 3))
    low, high = rows
    slopes = [(after - before) / (bs[1] - bs[0]) for before, after in zip(low, high, strict=True)]
    constants = [before - bs[0] * slope for before, slope in zip(low, slopes, strict=True)]
    return _whole((*constants, *slopes))


def _in_s(points: Sequence[int], values: Sequence[int]) -> tuple[Fraction, Fraction, Fraction]:
    """Coefficients of 1, s and s² through three points: Newton's divided differences, multiplied out."""
    (x, y, z), (p, q, r) = points, values
    first = Fraction(q - p, y - x)
    second = (Fraction(r - q, z - y) - first) / (z - x)
    return p - first * x + second * x * y, first - second * (x + y), second


def _whole(found: Sequence[Fraction]) -> Polynomial:
    broken = next((one for one in found if one.denominator != 1), None)
    if broken is not None:
        raise NotPolynomialError(f"a coefficient is {broken}, not a whole number")
    one, s1, s2, b1, bs1, bs2 = map(int, found)
    return Polynomial((one, s1, s2, b1, bs1, bs2))


LAYER = "layer."
"""What names of layers begin with where a model has one list of them."""


class Born(NamedTuple):
    """A tensor comes to life."""

    size: int
    """Number of a polynomial."""
    category: int
    operator: str
    dtype: str
    shape: tuple[int, ...]
    """Numbers of polynomials, one a dimension."""


class Gone(NamedTuple):
    """A tensor dies."""

    size: int
    category: int
    entry: int
    """Where the entry stands that made it: places away, or in the row if ``far``."""
    far: bool
    forward: bool
    """Made by a forward pass, else by the same pass that ends it."""
    number: int
    """Among the tensors that this entry makes in that pass."""


Changes = tuple[Born | Gone, ...]


@dataclass(frozen=True)
class Kind:
    """Entries of the layer list that do the same: the changes of each pass (``structure.PASSES``)."""

    passes: tuple[Changes, ...]
    parameters: tuple[Parameter, ...]
    ready: tuple[int, ...]
    """Numbers of those that have a gradient, in the order in which it is ready."""
    buffers: tuple[tuple[int, str], ...]
    """Bytes and dtype of each."""


class Worked(NamedTuple):
    """Kernels of one size (``recording.Done``)."""

    times: int
    what: str
    how: tuple[int, ...]
    sizes: tuple[int, ...]
    """Numbers of polynomials."""


@dataclass(frozen=True, eq=False)
class PieceWork:
    """What the kernels of a piece do, by kind and pass (``work.PASSES``)."""

    polynomials: tuple[Polynomial, ...]
    kinds: tuple[tuple[tuple[Worked, ...], ...], ...]


class Places(NamedTuple):
    """Entries of one kind that follow one another."""

    kind: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Domain:
    """The sizes that a piece was verified for."""

    b_from: int
    b_to: int | None
    s_from: int
    s_to: int
    multiple: int
    """``s`` is a multiple of this."""

    def __contains__(self, point: Point) -> bool:
        b, s = point
        in_b = self.b_from <= b and (self.b_to is None or b <= self.b_to)
        return in_b and self.s_from <= s <= self.s_to and s % self.multiple == 0

    def __str__(self) -> str:
        b = f"b = {self.b_from}" if self.b_to == self.b_from else f"b ≥ {self.b_from}"
        step = f" in steps of {self.multiple}" if self.multiple > 1 else ""
        return f"{b}, s {self.s_from} to {self.s_to}{step}"


@dataclass(frozen=True, eq=False)
class Piece:
    """The step at every point of a domain."""

    domain: Domain
    polynomials: tuple[Polynomial, ...]
    kinds: tuple[Kind, ...]
    row: tuple[Places, ...]
    inputs: tuple[Born, ...]
    repeated: int | None
    """Which of ``row`` grows with the number of layers; ``None`` where no other number was verified."""
    work: PieceWork | None = None
    """``None`` where it is not known, so that nothing says how long the piece takes."""

    def grown(self, layers: int) -> tuple[Places, ...]:
        """The row of a model of so many layers; ``ValueError`` where it cannot be."""
        have = sum(len(one.names) for one in self.row if one.names[0].startswith(LAYER))
        if layers == have:
            return self.row
        more = layers - have
        if self.repeated is None or len(self.row[self.repeated].names) + more < 1:
            raise ValueError(f"a row of {have} layers cannot have {layers}")
        numbers = iter(range(layers))
        result = []
        for at, (kind, names) in enumerate(self.row):
            count = len(names) + (more if at == self.repeated else 0)
            is_layer = names[0].startswith(LAYER)
            result.append(Places(kind, tuple(f"{LAYER}{next(numbers)}" for _ in range(count)) if is_layer else names))
        return tuple(result)


@dataclass(frozen=True, eq=False)
class Fit:
    """A traced architecture under one set of settings."""

    torch: str
    transformers: str
    layers: int
    """Of the configuration that was traced; 0 where nothing says how many it has."""
    verified: tuple[int, ...]
    """Numbers of layers that were traced."""
    pieces: tuple[Piece, ...]
    refused: tuple[str, ...] = ()
    """Why it holds nowhere else."""
    buckets: bool = True
    """Gradients are ready entry by entry, from the last to the first."""
    casts: bool = False
    """Layers cast what they are handed (``Job.casts``); part of the settings."""

    @property
    def extends(self) -> bool:
        """Other numbers of layers were verified, too."""
        return all(one.repeated is not None for one in self.pieces)

    def piece_at(self, b: int, s: int) -> Piece | None:
        return next((one for one in self.pieces if (b, s) in one.domain), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "torch": self.torch,
            "transformers": self.transformers,
            "layers": self.layers,
            "verified": self.verified,
            "pieces": [_piece_to_json(one) for one in self.pieces],
            "refused": self.refused,
            "buckets": self.buckets,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Fit:
        return Fit(
            str(data["torch"]),
            str(data["transformers"]),
            int(data["layers"]),
            tuple(map(int, data["verified"])),
            tuple(map(_piece_from_json, data["pieces"])),
            tuple(map(str, data["refused"])),
            bool(data["buckets"]),
        )


def _piece_to_json(piece: Piece) -> dict[str, Any]:
    domain = piece.domain
    return {
        "domain": [domain.b_from, domain.b_to, domain.s_from, domain.s_to, domain.multiple],
        "polynomials": [one.coefficients for one in piece.polynomials],
        "kinds": [
            {
                "passes": kind.passes,
                "parameters": [[one.name, one.shape, one.dtype, one.trained] for one in kind.parameters],
                "ready": kind.ready,
                "buffers": kind.buffers,
            }
            for kind in piece.kinds
        ],
        "row": piece.row,
        "inputs": piece.inputs,
        "repeated": piece.repeated,
        **({"work": _work_to_json(piece.work)} if piece.work is not None else {}),
    }


def _work_to_json(work: PieceWork) -> dict[str, Any]:
    return {"polynomials": [one.coefficients for one in work.polynomials], "kinds": work.kinds}


def _work_from_json(data: Mapping[str, Any] | None) -> PieceWork | None:
    """Fits of earlier releases have none."""
    if data is None:
        return None
    return PieceWork(
        tuple(Polynomial(tuple(one)) for one in data["polynomials"]),
        tuple(
            tuple(
                tuple(Worked(times, what, tuple(how), tuple(sizes)) for times, what, how, sizes in one) for one in kind
            )
            for kind in data["kinds"]
        ),
    )


def _piece_from_json(data: Mapping[str, Any]) -> Piece:
    return Piece(
        Domain(*data["domain"]),
        tuple(Polynomial(tuple(one)) for one in data["polynomials"]),
        tuple(
            Kind(
                tuple(tuple(map(_change, changes)) for changes in kind["passes"]),
                tuple(
                    Parameter(name, tuple(shape), dtype, trained) for name, shape, dtype, trained in kind["parameters"]
                ),
                tuple(kind["ready"]),
                tuple((size, dtype) for size, dtype in kind["buffers"]),
            )
            for kind in data["kinds"]
        ),
        tuple(Places(kind, tuple(names)) for kind, names in data["row"]),
        tuple(_born(one) for one in data["inputs"]),
        data["repeated"],
        _work_from_json(data.get("work")),
    )


def _change(row: Sequence[Any]) -> Born | Gone:
    return _born(row) if len(row) == len(Born._fields) else Gone(*row)


def _born(row: Sequence[Any]) -> Born:
    size, category, operator, dtype, shape = row
    return Born(size, category, operator, dtype, tuple(shape))
