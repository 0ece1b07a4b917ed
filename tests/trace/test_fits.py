"""Programs from polynomials beside direct traces at sizes that none was fitted at, and beside recipes."""

from __future__ import annotations

import gc
import gzip
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.replay import replay
from memplan.estimate import programs_of
from memplan.families import family as family_of
from memplan.frameworks import framework
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan, ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category, Hold
from memplan.tape.program import Program, fold_evaluation, fold_program
from memplan.trace.comparison import compared
from memplan.trace.fit import Fit
from memplan.trace.framework import job_of_plan
from memplan.trace.job import MOST_MICROBATCHES, Job
from memplan.trace.learned import job_of
from memplan.trace.learning import learn
from memplan.trace.recording import EVALUATION, Traced
from memplan.trace.structure import UnfitError
from memplan.trace.worker import asked_of_cuda, evaluated_step

from .test_step import SCALARS, WITHOUT_RECIPE, model_flags, targets_of

LONGEST = 256
CASES: dict[str, dict[str, str]] = {
    "llama": {"recompute": "full", "attention": "flash"},
    "bert": {"dtype": "fp32", "attention": "eager"},
}
AUTOCAST = {"dtype": "bf16", "autocast": "true", "autocast-parameters": "bf16", "trainer": "transformers"}
AUTOCAST |= {"lora-rank": "8", "lora-targets": "q_proj,down_proj"}
"""As the Trainer runs adapters with ``bf16``, of ``llama``: learnt as ``AUTOCAST_OF``."""
AUTOCAST_OF = "llama-adapters-autocast"
RECORDED = Path(__file__).with_name("small_fits.json.gz")
"""Of each family: ``python -m tests.trace.test_fits`` learns them anew. Every run learns others: a model without a
recipe here, adapters in ``test_fits_tuned``."""
POINTS = ((4, 200), (7, 33), (1, 150))
"""None of them is among those that are traced to learn."""


def program_of(plan: Plan, fit: Fit, options: Options) -> Program:
    running = framework(plan.framework).running
    running.check_learnt(plan)
    return running.learnt_program(plan, fit, options)


def traced(job: Job) -> Traced:
    gc.collect()
    gc.freeze()
    return evaluated_step(job)


def plan_of(family: str, b: int, s: int, **flags: str) -> ResolvedPlan:
    sizes = {"framework": "single", "layers": "7", "mbs": str(b), "seq": str(s), "gbs": str(2 * b)}
    return resolve(read_plan(None, {**model_flags(family), **CASES[family], **sizes, **flags}).plan)


def learnt(family: str) -> Any:
    """JSON of the fit."""
    if family == AUTOCAST_OF:
        job = replace(job_of_plan(plan_of("llama", 1, 64, **AUTOCAST)), trainer=MOST_MICROBATCHES)
    else:
        job = job_of_plan(plan_of(family, 1, 64))
    fit, _, _ = learn(job, traced, LONGEST)
    return fit.to_json()


@lru_cache(maxsize=8)
def fit_of(family: str) -> Fit:
    return Fit.from_json(json.loads(gzip.decompress(RECORDED.read_bytes()))[family])


@pytest.mark.parametrize(
    ("family", "point"),
    [(family, point) for at, family in enumerate(CASES) for turn, point in enumerate(POINTS) if turn != at],
)
def test_same_as_a_direct_trace(family: str, point: tuple[int, int]) -> None:
    """To the byte: every named point, every entry in every pass, the peak by category and its place."""
    plan = plan_of(family, *point)
    found, program = traced(job_of_plan(plan)), program_of(plan, fit_of(family), Options())
    comparison = compared(found, program)
    assert comparison.furthest == 0
    for row in comparison.rows:
        assert row.estimated is not None
        assert (row.traced.net, row.traced.peak) == (row.estimated.net, row.estimated.peak), row
    folded, whole = fold_program(program), found.whole
    assert (folded.peak, folded.peak_by) == (whole.peak, whole.peak_by)
    assert folded.place.rpartition("/")[2] == whole.place.rpartition("/")[2]
    evaluated = found.recording.of(0, EVALUATION)
    assert fold_evaluation(program) == folded.static + evaluated.peak


@pytest.mark.slow
@pytest.mark.parametrize("family", [*CASES, AUTOCAST_OF])
def test_what_is_on_file_is_what_is_learnt(family: str) -> None:
    assert json.dumps(learnt(family)) == json.dumps(fit_of(family).to_json())


@pytest.mark.parametrize("family", CASES)
def test_same_as_the_recipe(family: str) -> None:
    """But for the loss and its gradient, which end in a caller's frame; with other numbers of layers, too."""
    for layers, (b, s) in (("7", (3, 224)), ("12", (2, 77))):
        plan = plan_of(family, b, s, layers=layers)
        (recipe,) = programs_of(plan, Options())
        theirs = fold_program(recipe)
        ours = fold_program(grown(plan, fit_of(family), int(layers)))
        for name in ("static", "after_forward", "backward_peak", "step_peak", "peak"):
            assert abs(getattr(ours, name) - getattr(theirs, name)) <= SCALARS, name
        assert ours.place.split("/")[:3] == theirs.place.split("/")[:3]
        assert ours.peak_by[Category.PARAMETERS] == theirs.peak_by[Category.PARAMETERS]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", [*CASES, AUTOCAST_OF])
def test_same_as_the_recipe_in_the_trainer(name: str, micro_batches: int) -> None:
    """Whose inputs, numbers, clipping and step by groups are compared with transformers' own, with what Accelerate
    does to outputs of autocast (``test_trainer``)."""
    family, flags = ("llama", AUTOCAST) if name == AUTOCAST_OF else (name, {"trainer": "transformers"})
    plan = plan_of(family, 2, 77, **flags, gbs=str(2 * micro_batches))
    (recipe,) = programs_of(plan, Options())
    ours, theirs = fold_program(program_of(plan, fit_of(name), Options())), fold_program(recipe)
    for point in ("static", "after_forward", "backward_peak", "step_peak", "peak"):
        assert abs(getattr(ours, point) - getattr(theirs, point)) <= SCALARS, point
    assert ours.static == theirs.static


def test_autocast_is_asked_of_cuda() -> None:
    """Which is how peft's layers of quantised weights learn that autocast is on."""
    with asked_of_cuda("cpu"), torch.autocast("cpu", torch.bfloat16):
        assert torch.is_autocast_enabled()
    assert not torch.is_autocast_enabled()


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("zero", ["0", "1", "2"])
@pytest.mark.parametrize("accumulated", [1, 3])
def test_same_as_the_recipe_under_deepspeed(family: str, zero: str, accumulated: int) -> None:
    """Whose programs are compared with DeepSpeed's own engine: gradients and buckets of any size, on three ranks."""
    sizes = {"framework": "deepspeed", "dp": "3", "gbs": str(6 * accumulated), "reduce-bucket-size": "30000"}
    plan = plan_of(family, 2, 77, zero=zero, **sizes)
    (recipe,) = programs_of(plan, Options())
    ours, theirs = fold_program(program_of(plan, fit_of(family), Options())), fold_program(recipe)
    for name in ("static", "after_forward", "backward_peak", "step_peak", "peak"):
        assert abs(getattr(ours, name) - getattr(theirs, name)) <= SCALARS, name


@pytest.mark.parametrize("family", [name for name in CASES if family_of(name).shards])
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("apart", ["false", "true"])
def test_same_as_the_recipe_under_fully_shard(family: str, accumulated: int, apart: str) -> None:
    """Whose programs are compared with ``fully_shard`` itself; embedding and head in units of their own, too."""
    sizes = {"framework": "fsdp", "dp": "3", "gbs": str(6 * accumulated), "fsdp-parameters": "bf16"}
    plan = plan_of(family, 2, 77, **sizes, **{"ends-apart": apart})
    (recipe,) = programs_of(plan, Options())
    ours, theirs = fold_program(program_of(plan, fit_of(family), Options())), fold_program(recipe)
    for name in ("static", "after_forward", "backward_peak", "step_peak", "peak"):
        assert abs(getattr(ours, name) - getattr(theirs, name)) <= SCALARS, name


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("prefetch", ["pre", "post"])
def test_same_as_the_recipe_under_fsdp1(family: str, accumulated: int, prefetch: str) -> None:
    """Flat parameters of three ranks, through the allocator, too."""
    sizes = {"framework": "fsdp", "fsdp-version": "1", "dp": "3", "gbs": str(6 * accumulated)}
    plan, options = (
        plan_of(family, 2, 77, **sizes, **{"fsdp-backward-prefetch": prefetch}),
        Options(kernel_workspaces=True),
    )
    (recipe,), ours = programs_of(plan, Options()), program_of(plan, fit_of(family), Options())
    assert (ours.elements, ours.saving) == (recipe.elements, recipe.saving)
    for name in ("static", "after_forward", "backward_peak", "step_peak", "peak"):
        assert abs(getattr(fold_program(ours), name) - getattr(fold_program(recipe), name)) <= SCALARS, name
    made = (programs_of(plan, options)[0], program_of(plan, fit_of(family), options))
    (expected,), (found,) = (replay([one], AllocatorSettings(), ()) for one in made)
    assert abs(found.allocated - expected.allocated) <= SCALARS
    assert found.static == expected.static


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_adapters_as_the_recipe(family: str) -> None:
    """Learnt with peft's adapters in place: what a frozen layer does not keep, and what a norm before it does; one
    device, and replicas that sum adapters alone. Sharded ones, which learn the same, are tried each time
    (``test_fits_tuned``)."""
    pytest.importorskip("peft", reason="peft is not installed (the extra dev has it)")
    flags = {"lora-rank": "8", "lora-targets": "all-linear", "lora-dropout": "0.1", **targets_of(family)}
    job = job_of_plan(plan_of(family, 1, 64, **flags))
    fit, _, _ = learn(job, traced, LONGEST)
    for b, s, more in ((3, 224, {}), (1, 77, {"framework": "ddp", "gpus": "4", "gbs": "4"})):
        plan = plan_of(family, b, s, **flags, **more)
        (recipe,) = programs_of(plan, Options())
        ours, theirs = fold_program(program_of(plan, fit, Options())), fold_program(recipe)
        for name in ("static", "after_forward", "backward_peak", "step_peak", "peak"):
            assert abs(getattr(ours, name) - getattr(theirs, name)) <= SCALARS, name


def grown(plan: Plan, fit: Fit, layers: int) -> Program:
    """As if the configuration had so many layers; the fit was made with seven."""
    pieces = tuple(replace(one, row=one.grown(layers)) for one in fit.pieces)
    return program_of(plan, replace(fit, layers=layers, pieces=pieces), Options())


@pytest.mark.parametrize(
    "optimizer",
    [
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": "0.9"},
        {"optimizer": "adam", "optimizer-implementation": "for-loop"},
        {"optimizer": "adamw", "optimizer-implementation": "fused"},
    ],
)
def test_one_fit_serves_every_optimizer(optimizer: dict[str, str]) -> None:
    plan = plan_of("bert", 2, 100, **optimizer)
    assert compared(traced(job_of_plan(plan)), program_of(plan, fit_of("bert"), Options())).furthest == 0


def test_replayed_as_the_recipe() -> None:
    """Through the allocator, kernels' workspaces included."""
    plan, options = plan_of("bert", 2, 200), Options(kernel_workspaces=True)
    recipe, ours = programs_of(plan, options)[0], program_of(plan, fit_of("bert"), options)
    (expected,), (found,) = (replay([one], AllocatorSettings(), ()) for one in (recipe, ours))
    assert sum(found.breakdown) == found.allocated
    assert found.breakdown[Category.WORKSPACES] == expected.breakdown[Category.WORKSPACES]
    assert abs(found.allocated - expected.allocated) <= 2**20
    assert abs(found.static - expected.static) <= 2**16


def test_what_was_not_verified_is_refused() -> None:
    fit = fit_of("bert")
    with pytest.raises(PlanError, match=r"batch\.seq = 512: is outside the verified range"):
        program_of(plan_of("bert", 2, 512), fit, Options())


# -- without a recipe -------------------------------------------------------------------------------


def without_recipe(kind: str, folder: Path, b: int, s: int, **settings: Any) -> tuple[Plan, Job]:
    config = transformers.AutoConfig.for_model(
        kind, **{**WITHOUT_RECIPE.get(kind, WITHOUT_RECIPE["flex_olmo"]), **settings}
    )
    config.to_json_file(folder / "config.json", use_diff=False)
    flags = {"framework": "single", "model": str(folder), "mbs": str(b), "seq": str(s), "gbs": str(2 * b)}
    plan = resolve(read_plan(None, flags, traced=True).plan)
    return plan, job_of(plan)


@pytest.mark.parametrize("kind", ["flex_olmo", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("t5", "vit"))])
def test_models_without_a_recipe(kind: str, tmp_path: Path) -> None:
    _, job = without_recipe(kind, tmp_path, 1, 32)
    fit, _, _ = learn(job, traced, LONGEST)
    assert {one.domain.multiple for one in fit.pieces} == {32 if kind == "t5" else 1}, "scores' sums are padded to 32"
    for b, s in ((4, 96), (1, 160)):
        plan, _ = without_recipe(kind, tmp_path, b, s)
        found = traced(replace(job, b=b, s=s))
        assert compared(found, program_of(plan, fit, Options())).furthest == 0


def test_a_window_makes_two_pieces(tmp_path: Path) -> None:
    """Below it there is no mask and the flash kernel runs; from it on there is one. No step is traced twice, though
    sequences of another unit were tried first, and one of each unit with the job's own optimizer."""
    sized = {"num_hidden_layers": 1, "max_position_embeddings": 512, "sliding_window": 256}
    _, job = without_recipe("mistral", tmp_path, 1, 32, **sized)
    jobs: list[Job] = []

    def noted(one: Job) -> Traced:
        jobs.append(one)
        return traced(one)

    fit, _, _ = learn(job, noted, 512)
    assert len({(one.b, one.s, one.optimizer) for one in jobs}) == len(jobs)
    assert [one.s for one in jobs if one.optimizer == job.optimizer] == [256, 64]
    domains = [(one.domain.b_from, one.domain.s_from, one.domain.s_to) for one in fit.pieces]
    assert domains == [(2, 16, 224), (2, 256, 512), (1, 16, 224), (1, 256, 512)]
    assert fit.piece_at(4, 240) is None, "between the last length below and the first above nothing was traced"


def test_size_that_is_no_polynomial(tmp_path: Path) -> None:
    """The reason names operator, module and points."""
    _, job = without_recipe("olmo", tmp_path, 1, 32)

    def padded(one: Job) -> Traced:
        found = traced(one)
        raw, events = found.recording.raw, found.recording.events
        for event in events:
            if isinstance(event, Hold) and event.name == "aten.silu.default":
                raw[event.tensor] += 512 * (one.s // 48)
        return found

    with pytest.raises(
        UnfitError, match=r"aten\.silu\.default in model\.layers\.0\.mlp\.act_fn is .* at b = 5, s = 128, where"
    ):
        learn(job, padded, LONGEST)


def test_structure_that_changes(tmp_path: Path) -> None:
    _, job = without_recipe("olmo", tmp_path, 1, 32)

    def routed(one: Job) -> Traced:
        return traced(replace(one, attention="eager" if one.s == 96 else one.attention))

    with pytest.raises(UnfitError, match=r"the step at b = 2, s = 96 is another than at b = 2, s = 32: forward has"):
        learn(job, routed, LONGEST)


def test_ddp_as_the_recipe() -> None:
    """Buckets in the order in which gradients are ready, and buffers that are broadcast."""
    for flags in ({}, {"bucket-cap-mb": "0.05"}):
        plan = plan_of("bert", 2, 64, framework="ddp", gpus="4", gbs="16", **flags)
        (recipe,) = programs_of(plan, Options())
        ours = program_of(plan, fit_of("bert"), Options())
        expected, found = ([h.bytes for h in one.extra if h.name == "ddp_bucket"] for one in (recipe, ours))
        assert found == expected
        assert abs(fold_program(ours).peak - fold_program(recipe).peak) <= SCALARS


if __name__ == "__main__":
    found = {family: learnt(family) for family in (*CASES, AUTOCAST_OF)}
    RECORDED.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))
