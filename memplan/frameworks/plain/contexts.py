"""Tensors in attributes of functions' contexts, which end with the graph: when the loss does, behind all of backward.

Autograd lets go of what a function saved by ``save_for_backward`` once its backward has run; its context, and what else
is in it, lives as long as a node that follows it, and the loss is held until ``backward`` has returned.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...layers.module import Module, Tapes
from ...plan.plan import ResolvedPlan
from ...tape.events import INPUT, Drop, Hold, Scope, behind, renamed
from ...tape.program import Span
from ...values import replace


def check_contexts(plan: ResolvedPlan, spans: tuple[Span, ...]) -> None:
    """Refuses contexts that hold what a module is given, as where no norm comes before a layer's first linear ones."""
    plan.refuse(
        (
            "quantisation.kind",
            any(INPUT in span.module.first.contexts for span in spans),
            f"must be nf4 or fp4 for family {plan.model.family}: its layers hand linear ones their own input, which "
            "8-bit ones keep until backward has ended; that is modelled of tensors that a layer makes",
        ),
    )


def outlived(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """``spans`` of which each module's tensors in contexts have ids of their own, and end behind the backward of the
    first module."""
    if not any(span.module.first.contexts for span in spans):
        return spans
    foremost, *rest = [one for span in spans for one in _apart(span)]
    made: list[Span] = []
    ended: list[Drop] = []
    for span in rest:
        module, drops = _named(span.module, len(ended))
        made.append(replace(span, module=module))
        ended += drops
    module = foremost.module.changed(backward=lambda tape: behind(tape, tuple(ended)))
    return (replace(foremost, module=module), *made)


def _apart(span: Span) -> Iterator[Span]:
    """One by one, where they have such tensors."""
    names = [(name,) for name in span.names] if span.module.first.contexts else [span.names]
    return (replace(span, names=own) for own in names)


def _named(module: Module, count: int) -> tuple[Module, list[Drop]]:
    """``module`` with ids from ``count`` on for what is in its contexts, and the ends of these."""
    first, steady = module.first, module.steady
    if not first.contexts:
        return module, []
    holds = {event.tensor: event for event in first.forward if isinstance(event, Hold)}
    ids = [Scope.CONTEXTS.id(count + at) for at in range(len(first.contexts))]
    drops = [Drop(id, holds[own].bytes, holds[own].category) for own, id in zip(first.contexts, ids, strict=True)]
    return replace(module, first=_renamed(first, ids), steady=_renamed(steady, ids)), drops


def _renamed(tapes: Tapes, ids: list[int]) -> Tapes:
    own = dict(zip(tapes.contexts, ids, strict=True))
    return replace(tapes, forward=renamed(tapes.forward, own), backward=renamed(tapes.backward, own))
