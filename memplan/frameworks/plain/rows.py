"""Layers in a row, of which some are trained and some are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import groupby

from ...layers.module import Module, Options
from ...plan.plan import ResolvedPlan
from ...tape.events import Drop, Event, Tape, behind
from ...tape.program import Span
from ...values import NamedTuple, replace
from .recipes import EMBEDDED, seen_by_all, unseen
from .tuned import frozen_layer


class LayerKind(NamedTuple):
    """Layers that do the same."""

    options: Options
    requires_grad: bool
    """Their input requires a gradient."""
    dtype: str = ""
    """Of their input, if not as the embedding gives it."""
    mixture: bool = False
    """They have experts."""
    turns: bool = True
    """They have positions."""
    linear: bool = False
    """They have gated delta nets."""
    window: bool = True
    """They have a mask, where some layers' attention has one."""


Kinds = list[tuple[LayerKind, int]]
"""Kinds of layers in a row, and how many of a kind follow one another."""

Row = list[tuple[Module, int]]
"""Modules in a row, and how many equal ones follow one another."""

Make = Callable[[LayerKind, frozenset[int]], Module]
"""A layer of a kind, and the shared tensors that it ends."""


def kinds_of(
    plan: ResolvedPlan,
    options: Options,
    from_start: bool,
    numbers: Iterable[int],
    trains: Callable[[LayerKind], bool],
    later: str = "",
) -> Kinds:
    """Those of the layers ``numbers``.

    Nothing before the first layer that is trained requires a gradient, unless the embedding's output does:
    ``from_start``. ``trains``: a layer of that kind has parameters that are trained; adapters of attention leave out
    layers without any. ``later``: dtype of what a layer leaves to the next one, if not as the embedding gives it.
    """
    numbers = tuple(numbers)
    tuning, ahead = options.tuning, plan.frozen.layers
    frozen = replace(options, tuning=frozen_layer(tuning)) if tuning is not None else options
    masked = plan.masks_windows

    def kind(i: int, requires_grad: bool) -> LayerKind:
        own = frozen if i < ahead else options
        spec = plan.model
        window = not (masked and spec.sees_all(i))
        of_layer = spec.has_experts(i), spec.has_positions(i), spec.is_linear(i), window
        return LayerKind(own, requires_grad, later if i else "", *of_layer)

    needed, layers = -1, plan.model.layers
    if tuning is not None and not from_start:
        needed = next((i for i in range(ahead, layers) if trains(kind(i, False))), layers)
    return [(same, len(tuple(equal))) for same, equal in groupby(kind(i, i > needed) for i in numbers)]


def layer_row(
    make: Make, kinds: Kinds, everything: frozenset[int], recompute: bool, see_all: Sequence[bool]
) -> tuple[Row, frozenset[int]]:
    """Modules of layers of these ``kinds``, and those of the shared tensors ``everything`` that they keep. ``see_all``:
    of each layer, whether it is of the second of two kinds (``ModelSpec.sees_all``).

    Each is ended by the first layer that reads and keeps it; with ``recompute`` a layer that has a backward keeps all.
    """
    row: Row = []
    ended: frozenset[int] = frozenset()
    number = 0
    for kind, count in kinds:
        inner = make(kind, frozenset())
        all_kept = recompute and inner.first.backward
        keeps = everything if all_kept else everything & seen_by_all(inner.saved_shared)
        behind = number + count
        while number < behind and keeps - ended:
            fresh = keeps - ended - unseen(everything, sees_all=see_all[number])
            row.append((make(kind, fresh) if fresh else inner, 1))
            ended |= fresh
            number += 1
        row.append((inner, behind - number))
        number = behind
    equal = groupby(row, key=lambda one: one[0])
    return [(module, count) for module, same in equal if (count := sum(one[1] for one in same))], ended


def layers(row: Row, names: tuple[str, ...]) -> tuple[Span, ...]:
    """The modules of ``row`` under ``names``."""
    spans = []
    for module, count in row:
        spans.append(Span(module, names[:count]))
        names = names[count:]
    return tuple(spans)


@lru_cache(maxsize=1024)
def with_leaf(embedding: Module, layer: Module) -> tuple[Module, Module]:
    """An embedding whose output requires a gradient without having a node, and the first layer, which has it as its
    input under the id ``EMBEDDED``: it ends with the graph, behind the embedding's backward."""
    (output,) = (hold for hold in embedding.shares if hold.tensor == EMBEDDED)

    def is_drop(event: Event) -> bool:
        return isinstance(event, Drop) and event.tensor == EMBEDDED

    def ended(tape: Tape) -> Tape:
        return behind(tape, (Drop(EMBEDDED, output.bytes, output.category),))

    def kept(tape: Tape) -> Tape:
        return tuple(event for event in tape if not is_drop(event))

    return embedding.changed(backward=ended), layer.changed(backward=kept)
