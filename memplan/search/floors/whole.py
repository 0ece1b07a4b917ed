"""``single``, ``ddp`` and ``device-map``: parameters, gradients and states are whole tensors."""

from __future__ import annotations

from ...estimate import programs_of
from ...layers.module import Options
from ...plan.plan import Plan
from ...program import Folded, Program, fold_program, passes, static
from ...tape import Category
from .parts import Kept, peaks


def kept(plan: Plan) -> Kept:
    """Of a resolved plan; inputs, which depend on the micro-batch, are left out."""
    program, folded = _folded(plan)
    inputs = static(program).net_by[Category.INPUTS]
    return Kept(folded.static - inputs, 0, folded.step_peak - folded.static)


def passing(plan: Plan, accumulates: bool) -> tuple[int, ...]:
    """What all micro-batches of a resolved plan take beside what is static, their gradients among it: until a layer has
    gone backward in the last one, and to the end. It has two of them where it ``accumulates``."""
    program, folded = _folded(plan)
    modules = [span.module for span in program.last or program.spans for _ in span.names]
    tapes = [one.steady if accumulates else one.first for one in modules]
    last = max(at for at, one in enumerate(modules) if one.name == "layer")
    forward = [one.forward_fold for one in tapes] + [one.end_fold for one in tapes]
    early, _ = peaks([*forward, *(one.backward_fold for one in reversed(tapes))], len(forward) + len(tapes) - last)
    gradients = passes(program).first.net_by[Category.GRADIENTS] if accumulates else 0
    return gradients + early, folded.backward_peak - folded.static


def _folded(plan: Plan) -> tuple[Program, Folded]:
    (program,) = programs_of(plan, Options())
    return program, fold_program(program)
