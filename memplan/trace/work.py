"""What the kernels of a traced step do, as polynomials in b and s.

Work is learnt beside memory and never decides whether a fit holds: where it is no polynomial, or entries of one kind do
not do the same, the piece has none, and nothing says how long it takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from .fit import NotPolynomialError, Piece, PieceWork, Point, Polynomial, Worked, fitted
from .recording import BACKWARD, FORWARD, Done, Traced

PASSES = ("forward", "first backward", "further backward", "forward again")
"""Those of one micro-batch; the last runs within backward, where layers are recomputed."""
_KEYS = ((0, FORWARD, False), (0, BACKWARD, False), (1, BACKWARD, False), (0, BACKWARD, True))

EntryWork = tuple[tuple[Done, ...], ...]
"""Of one entry, by pass."""


class NoWorkError(Exception):
    """Why work is not known; one line."""


def work_of(traced: Traced) -> dict[str, EntryWork]:
    """By entry."""
    names = {entry for _, _, entry, _ in traced.done}
    return {
        name: tuple(tuple(traced.done.get((batch, phase, name, again), ())) for batch, phase, again in _KEYS)
        for name in names
    }


def fit_work(piece: Piece, works: Mapping[Point, Mapping[str, EntryWork]]) -> PieceWork:
    """Through a grid of points, of which ``works`` has every entry's; ``NoWorkError`` where that is not possible."""
    numbers: dict[Polynomial, int] = {}
    known: dict[tuple[int, ...], int] = {}

    def number(values: tuple[int, ...]) -> int:
        if values not in known:
            try:
                polynomial = fitted(dict(zip(works, values, strict=True)))
            except NotPolynomialError as error:
                raise NoWorkError(f"a kernel's size is no polynomial: {error}") from None
            known[values] = numbers.setdefault(polynomial, len(numbers))
        return known[values]

    seen: set[str] = set()
    made: dict[int, tuple[tuple[Worked, ...], ...]] = {}
    base = next(iter(works.values()))
    for kind, names in piece.row:
        new = [name for name in names if name not in seen]  # what stands twice has done it all where it stands first
        seen.update(names)
        if len({base.get(name) for name in new}) > 1:
            raise NoWorkError(f"{new[0]} and entries like it do not do the same")
        alike = [[one.get(new[0], _NOTHING) for one in works.values()]] if new else []
        found = tuple(tuple(_counted(alike[0], at, number)) for at in range(len(PASSES))) if alike else _NOTHING
        if made.setdefault(kind, found) != found:
            raise NoWorkError(f"{names[0]} does not do what others of its kind do")
    kinds = tuple(made.get(kind, _NOTHING) for kind in range(len(piece.kinds)))
    return PieceWork(tuple(numbers), kinds)


_NOTHING: tuple[tuple[()], ...] = ((),) * len(PASSES)


def _counted(alike: Sequence[EntryWork], at: int, number: object) -> Iterator[Worked]:
    """One pass at all points: kernels that are alike everywhere together."""
    assert callable(number)
    if len({len(one[at]) for one in alike}) != 1:
        raise NoWorkError("another number of kernels runs at another size")
    counts: Counter[tuple[str, tuple[int, ...], tuple[int, ...]]] = Counter()
    for same in zip(*(one[at] for one in alike), strict=True):
        forms = {(one.what, one.how, len(one.sizes)) for one in same}
        if len(forms) != 1:
            raise NoWorkError("another kernel runs at another size")
        sizes = tuple(number(values) for values in zip(*(one.sizes for one in same), strict=True))
        counts[same[0].what, same[0].how, sizes] += 1
    for (what, how, sizes), times in counts.items():
        yield Worked(times, what, how, sizes)


def check_work(piece: Piece, point: Point, traced: Mapping[str, EntryWork]) -> None:
    """``NoWorkError`` unless entries do at ``point`` what the piece says."""
    work = piece.work
    assert work is not None
    sizes = [one(*point) for one in work.polynomials]
    seen: set[str] = set()
    for kind, names in piece.row:
        for name in names:
            if name in seen:
                continue
            seen.add(name)
            for said, done in zip(work.kinds[kind], traced.get(name, _NOTHING), strict=True):
                ours: Counter[tuple[str, tuple[int, ...], tuple[int, ...]]] = Counter()
                for one in said:
                    ours[one.what, one.how, tuple(sizes[size] for size in one.sizes)] += one.times
                if ours != Counter((one.what, one.how, one.sizes) for one in done):
                    raise NoWorkError(f"what {name} does at b = {point[0]}, s = {point[1]} is not what is said of it")
