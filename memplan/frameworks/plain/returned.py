"""What a model returns beside its logits, which a caller holds until its loss begins: hidden states of all layers, or
the cache of keys and values.

transformers appends what each layer is given (``output_hidden_states``; ``all_hidden_states`` of a decoder's forward,
from 4.56 on hooks of ``check_model_inputs``), and the final norm's output at the end. Autograd has most of them in fp32
copies alone, so that without recompute they are tensors of their own; a checkpoint keeps them anyway. The cache is
there unless a caller asks for none (``use_cache``), or the model is trained with checkpoints: keys and values of each
layer's own heads (``cache_utils.py``, ``DynamicCache.update``), of which sdpa saves copies where it repeats heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...layers.module import Module, Tapes
from ...layers.whole_logits import FIRST_OF_LOSS, LOSS
from ...tape.events import INPUT, Drop, Event, Hold, Scope, Tape, renamed
from ...tape.program import Span
from ...values import dataclass, replace

CACHED = ("key_rotary", "value")
"""Tensors of a layer that its cache has."""

LAYER = "layer."


@dataclass(frozen=True, slots=True)
class Returned:
    """What is returned."""

    hidden_states: bool = False
    cache: bool = False
    cache_of_training: bool = False
    """Also while the model is trained."""
    until: tuple[str, ...] = (LOSS,)
    """All of it ends before the head's first tensor that is called so."""

    def __bool__(self) -> bool:
        return self.hidden_states or self.cache


NOTHING = Returned()

UNTIL_LOGITS = FIRST_OF_LOSS
"""Only the logits of what is returned are kept."""


def kept(spans: Sequence[Span], what: Returned, embedded: int) -> tuple[Span, ...]:
    """``spans``, of which the last is the head, with what layers return until that ends in the head.
    ``embedded``: the id of a first layer's input that ``model.forward`` keeps in a variable, too."""
    apart = [replace(span, names=(own,)) for span in spans for own in span.names]
    modules = [span.module for span in apart]
    ended: list[Drop] = []
    evaluated: list[Drop] = []
    first = Scope.CALLER.id(len(modules))
    for at, span in enumerate(apart[:-1]):
        layer = span.names[0].startswith(LAYER)
        if layer and what.hidden_states:
            evaluated += ends(modules[at].evaluation, {INPUT})
            if ends(modules[at].first.forward, {INPUT}):
                own = modules[at - 1].first.output
                modules[at - 1], given = _named(modules[at - 1], {own: first - len(ended)})
                ended += given
            modules[at] = modules[at].changed(_without({INPUT}))
        elif span.names == ("return",) and what.hidden_states:
            ended += ends(modules[at].first.forward, {embedded})
            evaluated += ends(modules[at].evaluation, {embedded})
            modules[at] = modules[at].changed(_without({embedded}))
        if layer and what.cache:
            cached = ids(modules[at].evaluation, CACHED)
            evaluated += ends(modules[at].evaluation, cached)
            made = replace(modules[at], evaluation=_without(cached)(modules[at].evaluation))
            own_ids = sorted(one.tensor for one in ends(made.first.forward, ids(made.first.forward, CACHED)))
            if what.cache_of_training and own_ids:
                made, given = _named(made, {id: first - len(ended) - k for k, id in enumerate(own_ids)})
                drop = _without({one.tensor for one in given})
                tapes = (replace(one, forward=drop(one.forward)) for one in (made.first, made.steady))
                made = replace(made, first=next(tapes), steady=next(tapes))
                ended += given
            modules[at] = made
    head = modules[-1]
    onward = (replace(one, forward=before(one.forward, ended, what.until)) for one in (head.first, head.steady))
    evaluation = before(head.evaluation, evaluated, what.until)
    modules[-1] = replace(head, first=next(onward), steady=next(onward), evaluation=evaluation)
    return tuple(replace(span, module=module) for span, module in zip(apart, modules, strict=True))


def ids(tape: Sequence[Event], names: Sequence[str]) -> set[int]:
    """Of the tensors of ``tape`` that are called so."""
    return {one.tensor for one in tape if isinstance(one, Hold) and one.name in names}


def ends(tape: Tape, tensors: set[int]) -> list[Drop]:
    return [one for one in tape if isinstance(one, Drop) and one.tensor in tensors]


def _without(tensors: set[int]) -> Callable[[Tape], Tape]:
    return lambda tape: tuple(one for one in tape if not (isinstance(one, Drop) and one.tensor in tensors))


def _named(module: Module, own: dict[int, int]) -> tuple[Module, list[Drop]]:
    """``module`` with other ids for its tensors ``own``, and their ends."""
    given = [one.end for one in module.first.forward if isinstance(one, Hold) and one.tensor in own]
    made = replace(module, first=_renamed(module.first, own), steady=_renamed(module.steady, own))
    return made, [one._replace(tensor=own[one.tensor]) for one in given]


def _renamed(tapes: Tapes, own: dict[int, int]) -> Tapes:
    forward, backward = renamed(tapes.forward, own), renamed(tapes.backward, own)
    return replace(tapes, forward=forward, backward=backward, output=own.get(tapes.output, tapes.output))


def before(tape: Sequence[Event], ended: Iterable[Drop], names: Sequence[str]) -> Tape:
    """``tape`` with ``ended`` before its first tensor that is called as one of ``names``."""
    at = next(place for place, one in enumerate(tape) if isinstance(one, Hold) and one.name in names)
    return (*tape[:at], *ended, *tape[at:])
