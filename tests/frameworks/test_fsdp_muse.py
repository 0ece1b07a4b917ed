"""torchtitan's newest dense layers (Muse Glimmer, Llama, Qwen 3) under ``fully_shard``, against the same operators run
on fake tensors."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest

from memplan.assumptions import assumptions
from memplan.estimate import programs_of
from memplan.frameworks.fsdp import programs as fsdp
from memplan.frameworks.fsdp.programs import sharding_of
from memplan.frameworks.fsdp.torchtitan import ActivationCheckpointing, torchtitan_model
from memplan.frameworks.fsdp.units import Sharding
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.program import fold_program
from memplan.trace.framework import job_of_plan

from ..oracle import fsdp as oracle
from ..oracle.titan_muse import Decoder, Sizes, builder
from ..oracle.titan_newest import Llama, Qwen3
from ..oracle.torchtitan_tp import local
from .every_event import check_every_event

SMALL = Sizes(hidden=192, heads=6, kv_heads=2, head_dim=64, ffn=448, vocab=1003, layers=4, b=2, s=64)
FEW = replace(SMALL, layers=2, interval=2)
JOB = {"model": "muse-glimmer-30b", "framework": "fsdp", "fsdp-code": "torchtitan", "gpu": "h200", "gpus": "16"}
JOB |= {"seq": "4096", "mbs": "1", "layers": "4", "ends-apart": "true", "loss": "chunked"}


def plan_of(given: Sizes, shards: int, chunks: int, **others: str) -> ResolvedPlan:
    flags = {"mbs": str(given.b), "seq": str(given.s), "gpus": str(shards), "vocab": str(given.vocab)}
    flags |= {"hidden": str(given.hidden), "heads": str(given.heads), "kv-heads": str(given.kv_heads)}
    flags |= {"head-dim": str(given.head_dim), "ffn": str(given.ffn), "layers": str(given.layers)}
    flags |= {"loss": "chunked", "loss-chunks": str(chunks)} if chunks else {"loss": "plain"}
    flags |= others or {"nope-interval": str(given.interval)}
    return resolve(read_plan(None, {**JOB, **flags}).plan)


@pytest.mark.parametrize(
    ("recompute", "chunks", "given"),
    [
        ("none", 2, FEW),
        pytest.param("none", 4, SMALL, marks=pytest.mark.slow),
        pytest.param("op", 2, SMALL, marks=pytest.mark.slow),
        pytest.param("full", 0, SMALL, marks=pytest.mark.slow),
    ],
)
def test_every_event(recompute: str, chunks: int, given: Sizes) -> None:
    compared(plan_of(given, 4, chunks), recompute, chunks, given, Decoder)


@pytest.mark.parametrize(("model", "decoder"), [("llama-3-8b", Llama), ("qwen3-8b", Qwen3)], ids=["llama", "qwen3"])
@pytest.mark.parametrize(
    ("recompute", "chunks"),
    [
        pytest.param("none", 0, marks=pytest.mark.slow),
        ("op", 2),
        pytest.param("full", 2, marks=pytest.mark.slow),
    ],
)
def test_every_event_of_the_newest(recompute: str, chunks: int, model: str, decoder: type[Decoder]) -> None:
    plan = plan_of(FEW, 4, chunks, model=model, **{"fsdp-newest": "true"})
    compared(plan, recompute, chunks, FEW, decoder)


@pytest.mark.filterwarnings("ignore:.*_tensor. is deprecated:FutureWarning")  # as spmd_types calls them
@pytest.mark.parametrize(
    ("recompute", "model", "decoder"),
    [
        ("op", "llama-3-8b", Llama),
        pytest.param("none", "qwen3-8b", Qwen3, marks=pytest.mark.slow),
        pytest.param("full", "llama-3-8b", Llama, marks=pytest.mark.slow),
        pytest.param("op", "muse-glimmer-30b", Decoder, marks=pytest.mark.slow),
    ],
)
def test_every_event_with_context_parallelism(recompute: str, model: str, decoder: type[Decoder]) -> None:
    whole = replace(FEW, s=4 * FEW.s)
    flags = {"nope-interval": "2"} if model.startswith("muse") else {"model": model, "fsdp-newest": "true"}
    plan = plan_of(whole, 4, 2, cp="4", **flags)
    compared(plan, recompute, 2, FEW, decoder)


def test_what_a_rank_has_of_a_sequence() -> None:
    """Tokens, labels and positions, whole and its own; every table of positions is as long as the sequence."""
    flags = {**JOB, "model": "llama-3-8b", "fsdp-newest": "true", "seq": "8192", "cp": "4"}
    plan = resolve(read_plan(None, flags).plan)
    assert (plan.layout.dp, sharding_of(plan, plan.fsdp).shards) == (4, 16)
    assert any("asks for FlexAttention" in one for one in assumptions(plan))
    (program,) = programs_of(plan, Options())
    shapes = [one.shape for one in program.extra if one.name in ("input_ids", "labels", "positions")]
    assert sorted(shapes) == [(1, 2048), (1, 2048), (1, 8192), (1, 8192), (2048,)]
    tables = {one.shape for one in program.extra if one.name == "freqs_cis"}
    assert tables == {(8192, 64)}


@pytest.mark.parametrize("flags", [{"tp": "2"}, {"compile": "true"}, {"fsdp-newest": "false"}])
def test_context_parallelism_elsewhere_is_refused(flags: dict[str, str]) -> None:
    job = {**JOB, "model": "llama-3-8b", "layers": "2", "fsdp-newest": "true", "cp": "2", **flags}
    with pytest.raises(
        PlanError, match=r"layout.cp = 2: must be 1 with torchtitan's .*, which is modelled without context parallelism"
    ):
        programs_of(resolve(read_plan(None, job).plan), Options())


def compared(plan: ResolvedPlan, recompute: str, chunks: int, given: Sizes, decoder: type[Decoder]) -> None:
    policy = ActivationCheckpointing(recompute)  # type: ignore[arg-type]
    model = torchtitan_model(plan, Options(accumulates_in_place=False), policy, ends_apart=True)
    program = fsdp.program(plan, model, Sharding(4))
    sharding = oracle.Sharding(4)
    shares = plan.layout.cp > 1
    build = builder(given, sharding, [recompute] * given.layers, chunks, decoder, context=shares)
    with local() if shares else nullcontext():
        steps = oracle.traced(build, sharding)
    check_every_event(program, steps)


def test_the_newest_does_not_run_here() -> None:
    plan = plan_of(FEW, 4, 0, model="llama-3-8b", **{"fsdp-newest": "true"})
    with pytest.raises(PlanError, match=r"fsdp.newest = true: must be false \(--no-fsdp-newest\)"):
        job_of_plan(plan)


@pytest.mark.parametrize("flags", [{"tp": "2"}, {"fp8": "tensorwise"}])
def test_where_the_newest_has_no_recipe_it_is_the_older(flags: dict[str, str]) -> None:
    """Figures are those of the same plan without the field."""
    job = {**JOB, "model": "llama-3-8b", "layers": "2", "seq": "1024", "loss": "plain", **flags}
    one, other = (
        fold_program(programs_of(resolve(read_plan(None, {**job, "fsdp-newest": newest}).plan), Options())[-1])
        for newest in ("true", "false")
    )
    assert one == other


def test_parameters_are_those_of_its_code() -> None:
    """Embedding and head, and of each layer queries, gate and output, keys and values, MLP and four norms."""
    plan = resolve(read_plan(None, {**JOB, "layers": "52"}).plan)
    (program,) = programs_of(plan, Options())
    layer = 6656 * (3 * 4096 + 2 * 256) + 3 * 6656 * 19968 + 4 * 6656
    assert sum(one.elements for one in program.parameter_tensors()) == 2 * 202048 * 6656 + 52 * layer + 6656
    small = sum(one.numel() for one in Decoder(SMALL).parameters())
    (program,) = programs_of(plan_of(SMALL, 4, 2), Options())
    assert sum(one.elements for one in program.parameter_tensors()) == small


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"tp": "2"}, "layout.tp = 2: must be 1 with torchtitan's muse_glimmer"),
        ({"dtype": "fp32"}, "precision.dtype = fp32: must be bf16"),
        ({"compile-loss": "true"}, "fsdp.compile_loss = true: must be false with torchtitan's muse_glimmer"),
        ({"attention-gate": "false"}, "model.attention_gate = false: must be true in torchtitan's muse_glimmer"),
        (
            {"fsdp-code": "transformers", "loss": "plain"},
            "model.family = muse_glimmer: cannot be trained in fsdp: only torchtitan",
        ),
    ],
)
def test_what_is_refused(flags: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)) as caught:
        programs_of(resolve(read_plan(None, {**JOB, **flags}).plan), Options())
    assert "\n" not in str(caught.value)
