"""What the kernels of a piece do at one point, as recipes say it, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ..layers.module import Counted, Passes, joined
from ..layers.work import ITEMSIZE, Alone, Product, Stream, fused
from ..values import dataclass
from .fit import Piece, PieceWork, Places, Worked
from .recording import EMBEDDING, FINAL_NORM, HEAD

FORWARD, FIRST, FURTHER, AGAIN = range(4)
"""Indices of ``work.PASSES``."""
ENDS = (EMBEDDING, FINAL_NORM, HEAD)


@dataclass(frozen=True, eq=False)
class Alike:
    """Entries that do the same, as they run without recompute and with it."""

    names: tuple[str, ...]
    once: Passes
    again: Passes

    @property
    def is_layer(self) -> bool:
        """Not one of a model's ends."""
        return self.names[0] not in ENDS


@lru_cache(maxsize=1024)
def alike(piece: Piece, row: tuple[Places, ...], b: int, s: int, accumulates: bool) -> tuple[Alike, ...]:
    """The entries of ``row``, those that do the same together, of one micro-batch in which gradients appear, or are
    added to those that do (``accumulates``)."""
    work = piece.work or PieceWork((), (((),) * (AGAIN + 1),) * len(piece.kinds))
    sizes = tuple(one(b, s) for one in work.polynomials)
    groups: dict[object, tuple[list[str], int]] = {}
    for kind, names in row:
        key = (work.kinds[kind], piece.kinds[kind].parameters, names[0] if names[0] in ENDS else "")
        groups.setdefault(key, ([], kind))[0].extend(names)
    return tuple(_alike(piece, work, tuple(names), kind, sizes, accumulates) for names, kind in groups.values())


def _alike(
    piece: Piece, work: PieceWork, names: tuple[str, ...], kind: int, sizes: tuple[int, ...], accumulates: bool
) -> Alike:
    parameters = piece.kinds[kind].parameters
    if names[0] in ENDS:  # whose parameters are counted once each, by their names
        parameters = tuple(replace(one, name=f"{kind}/{at}") for at, one in enumerate(parameters))

    def counted(at: int) -> Counted:
        return tuple((_kernel(one, sizes), one.times) for one in work.kinds[kind][at])

    forward, backward, again = counted(FORWARD), counted(FURTHER if accumulates else FIRST), counted(AGAIN)
    once = Passes(forward, backward, parameters)
    return Alike(names, once, Passes(forward, again + backward, parameters) if again else once)


def _kernel(one: Worked, numbers: Sequence[int]) -> Alone:
    sizes = [numbers[size] for size in one.sizes]
    if one.what == "attention":
        element, causal, backward = one.how
        b, s, a, d, kv, keys, values = sizes
        dtype = next(name for name, size in ITEMSIZE.items() if size == element)
        both = fused((b, s, a, d), kv, keys, dtype, causal=bool(causal), values=values)
        return both[1 if backward else 0]
    if one.what in ("stream", "loss"):
        return Stream(sizes[0], one.how[0], one.what == "loss")
    m, n, k, times = sizes
    element = one.how[0]
    if one.what == "grouped rows":
        return Product(max(1, m // times), n, k, times, element, rows="m")
    if one.what == "grouped sums":
        return Product(m, n, max(1, k // times), times, element, rows="k")
    return Product(m, n, k, times, element)


def joined_of(found: Sequence[Alike], name: str) -> Passes:
    """The end called ``name``; nothing where there is none."""
    return joined(*(one.once for one in found if one.names[0] == name))
