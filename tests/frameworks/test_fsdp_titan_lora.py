"""torchtitan's LoRA under ``fully_shard``, against the same operators run on fake tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memplan.assumptions import of_tuning
from memplan.estimate import programs_of
from memplan.frameworks.fsdp import programs as fsdp
from memplan.frameworks.fsdp.programs import sharding_of
from memplan.frameworks.fsdp.torchtitan import ActivationCheckpointing, torchtitan_model
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category

from ..oracle import fsdp as oracle, titan_gpt_oss
from ..oracle.titan_muse import Decoder, builder
from ..oracle.titan_newest import DeepSeek, Llama, Qwen3, with_adapters
from .every_event import check_every_event
from .test_fsdp_muse import FEW, JOB, plan_of
from .test_fsdp_titan import LATENT, plan_of as mixture_of


def adapted_plan(model: str, chunks: int, targets: str) -> ResolvedPlan:
    lora = {"lora-rank": "8", "lora-targets": targets}
    return plan_of(FEW, 4, chunks, model=model, **{"fsdp-newest": "true"}, **lora)


@pytest.mark.parametrize(
    ("recompute", "chunks", "model", "decoder", "targets"),
    [
        ("op", 2, "llama-3-8b", Llama, "wqkv,wo"),
        pytest.param("none", 0, "llama-3-8b", Llama, "wqkv,w2", marks=pytest.mark.slow),
        pytest.param("full", 2, "qwen3-8b", Qwen3, "w1,w2,w3", marks=pytest.mark.slow),
        pytest.param("op", 0, "qwen3-8b", Qwen3, "wqkv,wo,w1,w2,w3", marks=pytest.mark.slow),
    ],
)
def test_every_event(recompute: str, chunks: int, model: str, decoder: type[Decoder], targets: str) -> None:
    plan = adapted_plan(model, chunks, targets)
    policy = ActivationCheckpointing(recompute)  # type: ignore[arg-type]
    made = torchtitan_model(plan, Options(accumulates_in_place=False), policy, ends_apart=True)
    program = fsdp.program(plan, made, sharding_of(plan, plan.fsdp))
    sharding = oracle.Sharding(4)
    build = builder(FEW, sharding, [recompute] * FEW.layers, chunks, with_adapters(decoder, 8, {*targets.split(",")}))
    check_every_event(program, oracle.traced(build, sharding))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "chunks", "ranks", "targets"), [("none", 2, 4, "wq,wo"), ("op", 0, 1, "wo,w1,w2,w3")]
)
def test_every_event_beside_experts(recompute: str, chunks: int, ranks: int, targets: str) -> None:
    """Of DeepSeek V3, whose experts are frozen; ``w1`` to ``w3`` are those of dense layers and of shared experts."""
    given = replace(LATENT, layers=2)
    plan = mixture_of(given)
    updates: dict[str, dict[str, object]] = {
        "fsdp": {"newest": True, "code": "torchtitan", "ends_apart": True, "parameters": "fp32"},
        "layout": {"ep": ranks, "dp": 8},
        "batch": {"gbs": 8 * given.b},
        "lora": {"rank": 8, "targets": tuple(targets.split(",")), "dtype": "fp32"},
    }
    if chunks:
        updates["loss"] = {"kind": "chunked", "chunks": chunks}
    fields = {name: getattr(plan, name).model_copy(update=one) for name, one in updates.items()}
    plan = plan.model_copy(update={**fields, "framework": "fsdp"})
    policy = ActivationCheckpointing(recompute)  # type: ignore[arg-type]
    made = torchtitan_model(plan, Options(accumulates_in_place=False), policy, ends_apart=True)
    program = fsdp.program(plan, made, sharding_of(plan, plan.fsdp))
    sharding = oracle.Sharding(8)
    decoder = with_adapters(DeepSeek, 8, {*targets.split(",")})
    build = titan_gpt_oss.builder(given, sharding, [recompute] * 2, chunks, ranks=ranks, decoder=decoder)
    meshes = (lambda _: titan_gpt_oss.expert_meshes(8, ranks)) if ranks > 1 else None
    check_every_event(program, oracle.traced(build, sharding, of=meshes))


def test_adapters_alone_are_trained() -> None:
    """Llama 3 8B, rank 16 on ``wqkv`` (4,096 to 6,144) and ``wo`` (4,096 to 4,096) of 2 layers: 2 · 16 · (10,240 +
    8,192) = 589,824 parameters, of which each of 16 ranks has a sixteenth, in two states of fp32."""
    job = {**JOB, "model": "llama-3-8b", "layers": "2", "fsdp-newest": "true"}
    plan = resolve(read_plan(None, {**job, "lora-rank": "16", "lora-targets": "wqkv,wo"}).plan)
    (program,) = programs_of(plan, Options())
    tensors = program.parameter_tensors()
    states = [one for one in program.states if one.category is Category.OPTIMIZER_STATES]
    moments = sum(state.size(one) for state in states for one in tensors if len(one.shape) > 1)
    assert sum(one.elements for one in tensors if one.trained) == 589_824
    assert moments == 2 * 4 * 589_824 // 16
    assert of_tuning(plan) == ("LoRA by torchtitan (August 2026) on wqkv, wo: 589,824 trained parameters in fp32",)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            {},
            "must not name lm_head with torchtitan's adapters: none is modelled on it (--lora-targets wqkv,wo,w1",
        ),
        ({"lora-targets": "wq"}, "lora.targets = wq: must be among wqkv, wo, w1, w2, w3, lm_head in llama-3-8b"),
        (
            {"lora-targets": "wo", "tp": "2", "loss": "plain"},
            "lora.rank = 16: must be left out, or with --fsdp-newest of Llama",
        ),
        ({"lora-targets": "wqkv", "fsdp-newest": "false"}, "lora.rank = 16: must be left out, or with --fsdp-newest"),
        ({"lora-targets": "wqkv", "quantisation": "nf4"}, "quantisation.kind = nf4: must be none with torchtitan's"),
        ({"lora-targets": "wo", "lora-dropout": "0.1"}, "lora.dropout = 0.1: must be 0 with torchtitan's adapters"),
        ({"lora-targets": "wo", "lora-dtype": "bf16"}, "lora.dtype = bf16: must be fp32"),
        (
            {"model": "qwen3-30b-a3b", "layers": "2", "lora-targets": "gate"},
            "must not name gate with torchtitan's adapters",
        ),
        ({"lora-targets": "wo", "cp": "2"}, "layout.cp = 2: must be 1 with torchtitan's adapters"),
    ],
)
def test_what_adapters_are_not_modelled_with(flags: dict[str, str], line: str) -> None:
    job = {**JOB, "model": "llama-3-8b", "layers": "2", "fsdp-newest": "true", "lora-rank": "16", **flags}
    with pytest.raises(PlanError) as caught:
        programs_of(resolve(read_plan(None, job).plan), Options())
    assert line in str(caught.value)


def test_layers_by_default_are_those_of_the_code_that_runs() -> None:
    """The newest code has one projection of queries, keys and values, whether or not the plan names what it needs
    besides: units apart at both ends, which torchtitan has by default."""
    job = {name: value for name, value in JOB.items() if name != "ends-apart"}
    job |= {"model": "llama-3-8b", "layers": "2", "fsdp-newest": "true", "lora-rank": "16"}
    with pytest.raises(PlanError, match=r"lora.targets = \[wqkv, wo, w1, w2, w3, lm_head\]: must not name lm_head"):
        programs_of(resolve(read_plan(None, job).plan), Options())


def test_layers_that_nobody_names_are_those_of_the_newest_code() -> None:
    """``--lora-rank`` with ``--fsdp-newest`` alone: one product for queries, keys and values, as torchtitan has it."""
    flags = {"model": "llama-3-8b", "framework": "fsdp", "fsdp-code": "torchtitan", "gpus": "8", "lora-rank": "16"}
    plan = resolve(read_plan(None, {**flags, "fsdp-newest": "true", "seq": "2048"}).plan)
    assert plan.lora.targets == ("wqkv", "wo", "w1", "w2", "w3", "lm_head")
