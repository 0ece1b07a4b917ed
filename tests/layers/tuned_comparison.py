"""A plan that freezes parameters, and the events of the step that it describes, as plan and trace tell them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from memplan.frameworks.plain import programs as plain
from memplan.layers.module import Options
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import rounded
from memplan.tape.program import Program, fold_program

from ..oracle.tracer import Change
from ..oracle.training_step import Step
from .test_against_transformers import (
    Event,
    config_of,
    drops_sorted,
    named,
    peak,
    sizes,
    without_grad_loss,
    without_scalars,
    without_sum_of_tied,
    word_shape,
)


@dataclass(frozen=True)
class Witness:
    """A real step: signed bytes of what begins and ends."""

    parameters: int
    before: int
    forward: Sequence[int]
    backward: Sequence[int]
    optimizer: Sequence[int]


def program_of(model: str, folder: Path, flags: Mapping[str, str]) -> Program:
    config_of(model).to_json_file(folder / "config.json", use_diff=False)
    return planned(folder, flags)


def planned(folder: Path, flags: Mapping[str, str]) -> Program:
    """Of the model whose configuration is in ``folder``."""
    settings = {"model": str(folder), "framework": "single", "optimizer": "adamw", **flags}
    (program,) = plain.programs(resolve(read_plan(None, settings).plan), Options(accumulates_in_place=False))
    return program


def events(program: Program, backward: bool) -> list[Event]:
    spans = reversed(program.spans) if backward else program.spans
    modules = [span.module for span in spans for _ in span.names]
    return [
        event
        for module in modules
        for event in named(module, module.first.backward if backward else module.steady.forward)
    ]


def traced_backward(changes: Sequence[Change], word: tuple[int, ...]) -> list[int]:
    """A trace's backward without the ends of the loss and of its gradient, and a tied weight's gradients summed in
    place."""
    kept = without_sum_of_tied(without_grad_loss(changes), word)
    losses = [change for change in kept if change.sign < 0 and change.op.startswith("aten.nll_loss_forward")]
    return sizes(change for change in kept if change is not losses[-1])


def witness_of(step: Step, program: Program) -> Witness:
    """A traced ``step`` of what ``program`` is of."""
    backward = traced_backward(step.backward, word_shape(program))
    return Witness(step.parameters, step.before, sizes(step.forward), backward, sizes(step.optimizer))


def recorded(step: Step, model: str, flags: Mapping[str, str]) -> dict[str, object]:
    """A traced ``step`` as a ``Witness`` in JSON."""
    with TemporaryDirectory() as folder:
        return asdict(witness_of(step, program_of(model, Path(folder), flags)))


def write_steps(path: Path, versions: str, steps: Mapping[str, object]) -> None:
    """One line each, with the releases that they are of."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(step, separators=(',', ':'))}" for name, step in steps.items())
    path.write_text(f'{{"versions": {json.dumps(versions)}, "steps": {{\n{lines}\n}}}}\n', encoding="utf-8")


def assert_equal(program: Program, witness: Witness, ids: int, *, pooled: bool = False) -> None:
    """Parameters, what is held and when, every event of forward and backward, and the optimizer's peak. ``ids``: bytes
    of the labels, which the trace does not hold. ``pooled``: of BERT's classifier, whose model returns, and lets go of
    the embedding, behind its pooler: the order of forward is another then."""
    folded = fold_program(program)
    assert program.parameters() == witness.parameters
    assert folded.static == witness.before + ids
    forward, backward = sizes(events(program, False)), sizes(without_scalars(events(program, True)))
    in_order = sorted if pooled else drops_sorted
    assert in_order(forward) == in_order(witness.forward)
    assert drops_sorted(backward) == drops_sorted(witness.backward)
    assert peak(folded.static, forward + backward) == ids + peak(witness.before, [*witness.forward, *witness.backward])
    scalars = 2 * rounded(4)  # the loss and its gradient
    after = witness.before + sum(witness.forward) + sum(witness.backward) - scalars
    assert folded.step_peak == ids + peak(after, witness.optimizer)
    assert after + sum(witness.optimizer) == witness.before


__all__ = [
    "Witness",
    "assert_equal",
    "config_of",
    "program_of",
    "recorded",
    "traced_backward",
    "witness_of",
    "word_shape",
    "write_steps",
]
