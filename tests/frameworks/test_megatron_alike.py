"""Equal layers share modules, and what a stage keeps is made once for each kind: no answer depends on that."""

from __future__ import annotations

import pytest

from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.replay import replay
from memplan.frameworks.megatron.modules import is_layer, layer_shape_in, layers_module, module_shapes, recomputed
from memplan.frameworks.megatron.programs import programs, stages_of
from memplan.layers.module import Module, Options, Tapes
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Stretch
from memplan.tape.program import Chunk, Kept, Program, Span, fold_evaluation, fold_program
from memplan.values import replace

BASE = {"model": "llama-3-8b", "framework": "megatron", "gpus": "2", "tp": "2", "seq": "64", "gbs": "8", "layers": "6"}
PLANS = {
    "one stage": {"zero": "1"},
    "the ends of a pipeline": {"gpus": "4", "pp": "2"},
    "virtual stages": {"gpus": "4", "pp": "2", "vpp": "3"},
    "the first layers run again": {"recompute": "full", "recompute-method": "block", "recompute-layers": "2"},
    "groups of layers run again": {"recompute": "full", "recompute-method": "uniform", "recompute-layers": "4"},
    "the first layer has no experts": {"model": "moonlight-16b", "ep": "2", "etp": "1", "layers": "4"},
    "windows in every second layer": {"model": "gpt-oss-20b", "tp": "1", "layers": "4"},
    "the first and the last in 16 bits": {
        "fp4": "nvfp4",
        "gpu": "b200",
        "first-16bit-layers": "1",
        "last-16bit-layers": "2",
    },
    "state spaces, attention and MLPs": {"model": "mamba2-hybrid-8b", "layers": "56"},
    "other windows under context parallelism": {
        "model": "gpt-oss-20b",
        "tp": "1",
        "gpus": "2",
        "cp": "2",
        "layers": "4",
        "seq": "256",
    },
}


def resolved(case: str) -> ResolvedPlan:
    return resolve(read_plan(None, {**BASE, **PLANS[case]}).plan)


def twin(tapes: Tapes) -> Tapes:
    """Equal tapes, of new events."""
    parts = {
        name: tuple([event._replace() for event in getattr(tapes, name)]) for name in ("forward", "backward", "end")
    }
    return replace(tapes, **parts)


def alone(module: Module) -> Module:
    first = twin(module.first)
    steady = first if module.first is module.steady else twin(module.steady)
    return replace(module, first=first, steady=steady, evaluation=tuple(module.evaluation))


def each_alone(program: Program) -> Program:
    """``program``, with a module for every layer, and every tensor that stays with a number of its own."""

    def chunk(own: Chunk) -> Chunk:
        return Chunk(
            tuple([Span(alone(span.module), (name,)) for span in own.spans for name in span.names]),
            first_differs=own.first_differs,
        )

    def numbered(kept: Kept) -> Kept:
        ids = iter(range(1 << 42, 1 << 43))
        tapes = {
            name: Stretch([one._replace(tensor=next(ids)) if one.tensor == 0 else one for one in getattr(kept, name)])
            for name in ("construction", "states", "workspaces")
        }
        return replace(kept, **tapes)

    assert program.kept is not None
    order = replace(program.order, chunks=tuple(map(chunk, program.order.chunks)))
    return replace(program, order=order, kept=numbered(program.kept))


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_needs_what_it_needs_with_every_layer_built_alone(case: str) -> None:
    for program in programs(resolved(case), Options(kernel_workspaces=True)):
        other = each_alone(program)
        assert fold_program(other) == fold_program(program)
        assert fold_evaluation(other) == fold_evaluation(program)
        assert replay((other,), AllocatorSettings(), ()) == replay((program,), AllocatorSettings(), ())


@pytest.mark.parametrize("case", [name for name, flags in PLANS.items() if "pp" not in flags])
def test_every_layer_runs_what_its_own_shape_says(case: str) -> None:
    """Of stages that have both ends, so that no layer's input or output is another stage's; each layer is recorded
    anew, from its number in the model."""
    plan, options = resolved(case), Options(kernel_workspaces=True)
    job = stages_of(plan, options).job
    (program,) = programs(plan, options)
    again = recomputed(plan.recompute, program.entries)
    layers = [(span.module, name) for span in program.spans for name in span.names if is_layer(name)]
    assert sum(len(names_of(name)) for _, name in layers) == plan.model.layers
    for module, name in layers:
        names = names_of(name)
        shapes = tuple(layer_shape_in(module_shapes(job.shape)[0], one) for one in names)
        own = replace(job.options, keeps_input=False, drops_gradient=True)
        anew = layers_module.__wrapped__(shapes, own, recomputed=names[0] in again)
        assert anew is not module
        assert (anew.parameters, anew.evaluation) == (module.parameters, module.evaluation)
        for mine, shared in ((anew.first, module.first), (anew.steady, module.steady)):
            assert (mine.forward, mine.backward, mine.end) == (shared.forward, shared.backward, shared.end)


def names_of(name: str) -> list[str]:
    """``layer.0–3``, a group that runs again together, one by one."""
    first, _, last = name.removeprefix("layer.").partition("–")
    return [f"layer.{at}" for at in range(int(first), int(last or first) + 1)]
