"""Learned models with LoRA that ship, beside traces of peft's adapters on transformers' own code: other ranks, sizes
and numbers of layers than they were learnt with."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache as once
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import main
from memplan.estimate import programs_of
from memplan.frameworks import framework as framework_of
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.library import LEARNED
from memplan.plan.lora import ALL_LINEAR
from memplan.plan.models import load_spec
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.plan.traced_spec import STAND_IN, TracedSpec
from memplan.tape.program import fold_program
from memplan.trace import cache, learned as lookup
from memplan.trace.comparison import compared
from memplan.trace.fit import Polynomial
from memplan.trace.framework import job_of_plan
from memplan.trace.job import Job
from memplan.trace.learned import fit_of
from memplan.trace.ranks import TRACED_RANK, _scaled, at_rank, lacks_rank, names_all
from memplan.trace.worker import evaluated_step

from .test_step import SCALARS

pytest.importorskip("peft", reason="peft is not installed (the extra dev has it)")

ADAPTED = {path.parent.name: path for path in sorted(LEARNED.glob(f"*/*{cache.TOGETHER}"))}
BESIDE = ("olmo-7b", "roberta-base")
"""Models that every run of the tests traces; the others do where all is run."""
MODELS = [name if name in BESIDE else pytest.param(name, marks=pytest.mark.slow) for name in ADAPTED]
LARGEST = 1_500_000
"""Bytes of all adapters that ship."""
RANK = 12


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    lookup.forget()


def plan_of(model: str, **flags: str) -> ResolvedPlan:
    given = {"model": model, "framework": "single", "lora-rank": str(RANK), **flags}
    return resolve(read_plan(None, given, traced=True).plan)


def peft_job(plan: ResolvedPlan) -> Job:
    """peft's own adapters of the plan's rank."""
    assert isinstance(plan.model, TracedSpec)
    return job_of_plan(plan.model_copy(update={"model": load_spec(STAND_IN)}), plan.model.config)


@once
def settings_of(name: str) -> dict[str, dict[str, Any]]:
    """Those of every fit that ships whole with the model, by digests. A file is a second to read and to check."""
    return {key: one["settings"] for key, one in cache.shipped_together(ADAPTED[name]).items()}


def targets_of(name: str) -> list[str]:
    """Those that ship with the model."""
    return sorted({",".join(one["tuned"]["targets"]) for one in settings_of(name).values()})


def sizes_of(name: str, b: int) -> dict[str, str]:
    """Some that nothing was learnt at, with few layers where any number of them is known."""
    learnt = fit_of(plan_of(name, **{"lora-targets": targets_of(name)[0]}))
    seq = "197" if name.startswith("vit-") else "416"
    return {"mbs": str(b), "seq": seq, "gbs": str(2 * b), **({"layers": "5"} if learnt.extends else {})}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_same_as_a_direct_trace(name: str, recompute: str) -> None:
    """To the byte, with adapters in fp32 and in bf16."""
    for targets in targets_of(name):
        for dtype, b in (("fp32", 4), ("bf16", 1)):
            flags = {"lora-targets": targets, "lora-dtype": dtype, "recompute": recompute}
            plan = plan_of(name, **flags, **sizes_of(name, b))
            (program,) = programs_of(plan, Options())
            found = evaluated_step(peft_job(plan))
            comparison = compared(found, program)
            assert comparison.furthest == 0
            for row in comparison.rows:
                assert row.estimated is not None
                assert (row.traced.net, row.traced.peak) == (row.estimated.net, row.estimated.peak), row
            assert fold_program(program).peak == found.whole.peak


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of outputs that are views
@pytest.mark.parametrize("framework", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", MODELS)
def test_same_as_a_direct_trace_on_several_gpus(name: str, framework: str) -> None:
    """PyTorch's own DistributedDataParallel and ``fully_shard`` around peft's model, on one of four ranks: all but the
    loss and its gradient, and a number's 512 bytes."""
    sizes = {**sizes_of(name, 2), "gbs": "16", "framework": framework, "dp": "4"}
    plan = plan_of(name, **{"lora-targets": targets_of(name)[-1]}, **sizes)
    try:
        (program,) = programs_of(plan, Options())
    except PlanError as error:
        pytest.skip(str(error))
    assert compared(evaluated_step(peft_job(plan)), program).furthest <= (SCALARS if framework == "fsdp" else 0)


def test_ranks() -> None:
    """A matrix (r, 5) in fp32 of rank 3 is 60 bytes; b s r in 16 bits 2 x 3 for each token; what has no r stays."""
    assert _scaled((20 * TRACED_RANK, 0, 0, 0, 0, 0), 3) == (60, 0, 0, 0, 0, 0)
    assert _scaled((0, 0, 0, 0, 2 * TRACED_RANK, 0), 3) == (0, 0, 0, 0, 6, 0)
    for coefficients in ((0, 0, 0, 0, 4096, 0), (TRACED_RANK, 1, 0, 0, 0, 0)):
        assert _scaled(coefficients, 3) == coefficients


@pytest.mark.parametrize("name", ADAPTED)
def test_no_length_is_a_multiple_of_the_traced_rank(name: str) -> None:
    """Of the model without adapters: else it would be taken for one of the rank."""
    for recompute in ("none", "full"):
        fit = fit_of(resolve(read_plan(None, {"model": name, "recompute": recompute}, traced=True).plan))
        assert not lacks_rank(fit)
        known = {one for piece in fit.pieces for one in piece.polynomials if any(one.coefficients)}
        known |= {one for piece in fit.pieces if piece.work is not None for one in piece.work.polynomials}
        assert all(Polynomial(_scaled(one.coefficients, 1)) == one for one in known)


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_every_layer(name: str) -> None:
    """r (k + n) elements for a frozen matrix of n by k, and nothing else is trained."""
    fit = fit_of(plan_of(name, **{"lora-targets": targets_of(name)[0]}))
    assert all(piece.work is not None for piece in fit.pieces)
    for kind in {kind for piece in fit.pieces for kind in piece.kinds}:
        shapes = {one.name: one.shape for one in kind.parameters}
        wrapped = {name.removesuffix(".base_layer.weight") for name in shapes if name.endswith(".base_layer.weight")}
        for layer in wrapped:
            n, k = shapes[f"{layer}.base_layer.weight"]
            assert shapes[f"{layer}.lora_A.default.weight"] == (RANK, k)
            assert shapes[f"{layer}.lora_B.default.weight"] == (n, RANK)
        assert {one.name for one in kind.parameters if one.trained} == {
            f"{layer}.lora_{of}.default.weight" for layer in wrapped for of in "AB"
        }


def test_alpha_and_scaling_change_nothing() -> None:
    fits = [
        fit_of(plan_of("olmo-7b", **{"lora-targets": "q_proj,v_proj"}, **more)) for more in ({}, {"lora-alpha": "64"})
    ]
    assert fits[0].pieces[0].kinds == fits[1].pieces[0].kinds
    (reverse,) = [fit_of(plan_of("olmo-7b", **{"lora-targets": "v_proj,q_proj", "use-rslora": "true"}))]
    assert reverse.pieces[0].kinds == fits[0].pieces[0].kinds


def test_all_layers_by_their_names() -> None:
    """As most configurations list them."""
    names = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    every, named = (fit_of(plan_of("olmo-7b", **{"lora-targets": one})) for one in (ALL_LINEAR, names))
    assert every.pieces[0].kinds == named.pieces[0].kinds
    assert names_all(every, ("self_attn.q_proj", *names.split(",")[1:]))
    assert not names_all(every, names.split(",")[1:])
    assert not names_all(every, [*names.split(","), "lm_head"])


def test_other_targets_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--model", "olmo-7b", "--lora-rank", "8", "--lora-targets", "q_proj,o_proj"]) == 2
    line = capsys.readouterr().err
    assert ", and with LoRA of any rank on all-linear or q_proj,v_proj; it is not known in bf16" in line
    assert line.count("\n") == 1


def test_one_learning_serves_every_rank() -> None:
    fit = fit_of(plan_of("olmo-7b", **{"lora-targets": ALL_LINEAR}))
    assert at_rank(fit, None) is fit
    elements = {rank: _adapters(rank) for rank in (1, 64)}
    assert elements[64] == 64 * elements[1]


@pytest.mark.usefixtures("here")
def test_learnt_with_one_rank_and_estimated_with_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside a trace of peft's adapters of that rank."""
    sizes: dict[str, Any] = {"vocab_size": 1003, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    sizes |= {"intermediate_size": 96, "max_position_embeddings": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "olmo", **sizes}))
    assert main(["trace", "--learn", "--model", str(path), "--lora-rank", "8", "--lora-targets", "q_proj", "-q"]) == 0
    assert not capsys.readouterr().err
    plan = plan_of(str(path), **{"lora-targets": "q_proj", "mbs": "2", "gbs": "4", "seq": "48"})
    (program,) = programs_of(plan, Options())
    assert compared(evaluated_step(peft_job(plan)), program).furthest == 0


def _adapters(rank: int) -> int:
    (program,) = programs_of(plan_of("olmo-7b", **{"lora-targets": ALL_LINEAR, "lora-rank": str(rank)}), Options())
    spans = (span for chunk in program.order.chunks for span in chunk.spans)
    return sum(one.elements * len(span.names) for span in spans for one in span.module.parameters if one.trained)


@pytest.mark.parametrize("name", ADAPTED)
def test_what_ships(name: str) -> None:
    """Every fit is of this tracer, of settings that a plan asks for, and whole."""
    path = ADAPTED[name]
    assert not cache.is_stale(path), f"python -m benchmarks.learned --adapters --again {name}"
    there = dict(settings_of(name))
    drops = any(one["tuned"]["dropout"] for one in there.values())
    for targets, recompute, dtype, dropout in product(
        targets_of(name), ("none", "full"), ("fp32", "bf16"), ("0", "0.05")[: 1 + drops]
    ):
        given = {"lora-targets": targets, "lora-dtype": dtype, "recompute": recompute, "lora-dropout": dropout}
        plan = plan_of(name, **given)
        job = lookup.job_of(plan)
        assert there.keys() & keys_of(job, plan)
        for one in (job, replace(job, casts=True), replace(job, gathers=True)):
            for key in keys_of(one, plan):
                there.pop(key, None)
    assert not there


def keys_of(job: Job, plan: ResolvedPlan) -> set[str]:
    return {cache.digest_of(lookup.settings_of(job, layers)) for layers in (None, plan.model.layers)}


def test_all_of_it_is_small() -> None:
    assert sum(path.stat().st_size for path in ADAPTED.values()) < LARGEST


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED)
def test_same_as_a_direct_trace_with_hooks(name: str) -> None:
    """ZeRO-3's linear function, and marks where its hooks run."""
    sizes = {**sizes_of(name, 2), "lora-targets": targets_of(name)[-1], "lora-dtype": "bf16"}
    gathers = plan_of(name, **{**sizes, "framework": "deepspeed", "zero": "3", "dp": "2", "gbs": "8"})
    try:
        fit = fit_of(gathers)
    except PlanError:
        pytest.skip("does not ship with what stage 3 needs")
    alone = plan_of(name, **sizes)
    program = framework_of("single").running.learnt_program(alone, fit, Options())
    assert compared(evaluated_step(replace(peft_job(alone), gathers=True)), program).furthest == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTED)
def test_same_as_a_direct_trace_with_dropout(name: str) -> None:
    plan = plan_of(name, **{"lora-targets": targets_of(name)[-1], "lora-dropout": "0.05"}, **sizes_of(name, 2))
    try:
        (program,) = programs_of(plan, Options())
    except PlanError:
        pytest.skip("does not ship with dropout")
    assert compared(evaluated_step(peft_job(plan)), program).furthest == 0
