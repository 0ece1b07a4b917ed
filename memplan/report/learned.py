"""``memplan trace --learn``: what was learnt of an architecture, and where it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from .. import __version__
from ..plan.plan import Plan
from ..trace.learned import Learned
from .json import SCHEMA
from .output import put, put_line
from .palette import CAUTION, FAINT, GOOD


def print_learned(plan: Plan, learned: Learned, console: Console, *, quiet: bool) -> None:
    verdict = Text.assemble(("Learnt", f"bold {GOOD}"), f": {plan.model.name}, from {learned.traces} traces")
    if quiet:
        put_line(console, verdict)
    else:
        put(console, verdict, *_body(learned))


def _body(learned: Learned) -> Iterator[Text]:
    fit = learned.fit
    yield Text(f"torch {fit.torch}, transformers {fit.transformers}; kept in {learned.path}", FAINT)
    yield Text()
    for piece in fit.pieces:
        kinds, sizes = len(piece.kinds), len(piece.polynomials)
        yield Text(f"{piece.domain}: {kinds} kinds of entries, {sizes} polynomials")
    if fit.layers:
        text = ", ".join(map(str, fit.verified))
        yield Text(f"layers: {'any number from ' if fit.extends else ''}{min(fit.verified)} (traced: {text})")
    for reason in fit.refused:
        yield Text(f"not beyond: {reason}", CAUTION)


def learned_to_json(plan: Plan, learned: Learned) -> dict[str, Any]:
    """What ``memplan trace --learn --json`` prints."""
    fit = learned.fit
    return {
        "schema": SCHEMA,
        "memplan": __version__,
        "torch": fit.torch,
        "transformers": fit.transformers,
        "model": plan.model.source,
        "file": str(learned.path),
        "traces": learned.traces,
        "layers": {"verified": list(fit.verified), "any": fit.extends} if fit.layers else None,
        "pieces": [
            {
                "mbs": [one.domain.b_from, one.domain.b_to],
                "seq": [one.domain.s_from, one.domain.s_to],
                "seq_multiple": one.domain.multiple,
                "polynomials": len(one.polynomials),
            }
            for one in fit.pieces
        ],
        "not_beyond": list(fit.refused),
    }
