"""A program of torchtitan's layers under ``fully_shard`` beside what its code does on fake ranks."""

from __future__ import annotations

from memplan.tape.events import ROUND
from memplan.tape.program import Program, fold_program

from ..layers.test_against_transformers import drops_sorted, named, sizes, without_grad_loss, without_scalars
from ..oracle.fsdp import Steps


def check_every_event(program: Program, steps: Steps) -> None:
    """Events of forward and backward in order, and what they come to; but for scalars of the loss."""
    modules = [span.module for span in program.spans for _ in span.names]
    forward = [event for module in modules for event in named(module, module.steady.forward)]
    backward = [event for module in modules[::-1] for event in named(module, module.first.backward)]
    traced_forward, traced_backward, _ = steps.stretches
    assert drops_sorted(sizes(forward)) == drops_sorted(sizes(traced_forward))
    assert drops_sorted(sizes(without_scalars(backward))) == drops_sorted(sizes(without_grad_loss(traced_backward)))

    folded = fold_program(program)
    assert folded.static == steps.before
    assert folded.after_forward == steps.levels()[0]
    assert 0 <= max(steps.peaks()[:2]) - folded.backward_peak <= 2 * ROUND
    assert folded.step_peak == steps.peaks()[2]
