"""``fsdp``: hand calculations, measured rows, and what holds for every plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st

from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.replay import replay
from memplan.device.measured import cublas_workspaces
from memplan.estimate import check, estimate
from memplan.frameworks.fsdp import modules, programs as fsdp
from memplan.frameworks.fsdp.programs import programs
from memplan.frameworks.fsdp.torchtitan import ActivationCheckpointing, torchtitan_model
from memplan.frameworks.fsdp.units import Sharding, Unit, shard, size
from memplan.layers.module import Options, Parameter, Tapes
from memplan.plan.errors import PlanError
from memplan.plan.framework_sections import Fsdp
from memplan.plan.plan import Plan, ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category, Drop, Hold, compose, fold
from memplan.tape.program import Folded, Program, fold_program, static

MEASURED = Path(__file__).parents[2].parent / "shared" / "measured"


def plan_of(ranks: int = 8, microbatches: int = 1, **flags: object) -> Plan:
    merged = {"model": "llama-3-8b", "framework": "single", "dtype": "bf16", "attention": "flash", **flags}
    plan = resolve(read_plan(None, {name: str(value) for name, value in merged.items()}).plan)
    batch = plan.batch.model_copy(update={"gbs": plan.batch.mbs * ranks * microbatches})
    return plan.model_copy(update={"batch": batch, "layout": plan.layout.model_copy(update={"dp": ranks})})


def transformers_program(plan: Plan, sharding: Sharding, **model: Any) -> Program:
    return fsdp.program(plan, fsdp.transformers_model(plan, Options(), **model), sharding)


# -- by hand ----------------------------------------------------------------------------------------


def test_buffers_of_a_layer_by_hand() -> None:
    """A layer of Llama 3 8B has 218,112,000 parameters: 4 × 4096² × (1 + ¼)/2 for attention, 3 × 4096 × 14336,
    and two norms. Over 8 ranks: a cast of 54,528,000 B, gathered 436,224,000 B, reduced from 872,448,000 B
    of fp32 into 109,056,000 B."""
    program = transformers_program(plan_of(seq=512, layers=2), Sharding(8))
    layer = next(span.module for span in program.spans if span.names == ("layer.1",))
    assert sum(parameter.elements for parameter in layer.parameters) == 218_112_000
    holds = {event.name: event.bytes for event in layer.first.backward if isinstance(event, Hold)}
    assert holds["all_gather_input"] == 54_528_000
    assert holds["all_gather_output"] == 436_224_000
    assert holds["reduce_scatter_input"] == 872_448_000
    assert holds["reduce_scatter_output"] == 109_056_000


def test_uneven_shards_are_padded() -> None:
    """10 rows over 4 ranks: 3 each, 12 gathered."""
    unit = Unit("layer.0", (Parameter("weight", (10, 7)), Parameter("bias", (3,))), 0, 0)
    assert shard(Parameter("weight", (10, 7)), 4).shape == (3, 7)
    assert unit.flat(4) == 3 * 7 + 1
    assert size(unit.flat(4) * 4, "bf16") == 512


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"gpus": "16"},
            "8 experts: 16 shards get 1 each, 8 of them get none, and gathers are padded to 16 experts; --fsdp-",
        ),
        (
            {"gpus": "12"},
            "8 experts: 12 shards get 1 each, 4 of them get none, and gathers are padded to 12 experts; --fsdp-",
        ),
        ({"gpus": "32", "fsdp-replicas": "2"}, "replicas 4 cuts them into 8, without padding"),
        ({"gpus": "8"}, ""),
        ({"gpus": "16", "fsdp-replicas": "2"}, ""),
        ({"gpus": "16", "fsdp-version": "1"}, ""),
        ({"gpus": "16", "model": "llama-3.2-1b"}, ""),
    ],
)
def test_experts_that_are_padded_are_told(flags: dict[str, str], says: str) -> None:
    """Twice the shards hold as much of two experts of eight as before, and gather twice as much."""
    plan = resolve(read_plan(None, {"model": "mixtral-8x7b", "layers": "2", "framework": "fsdp", **flags}).plan)
    told = [one.message for one in estimate(plan).warnings if one.code == "experts-padded"]
    assert len(told) == bool(says)
    assert says in "".join(told)


def test_width_after_forward() -> None:
    """Of 8 shards: whole, cut in 8, cut in 2."""
    eight = Sharding(8)
    assert [eight.width(given) for given in (False, True, 1, 2, 8)] == [None, 8, None, 2, 8]


def test_one_rank_after_forward_is_not_every_rank() -> None:
    """``1 == True``: whichever of the two plans is estimated first, the other's layers are its own."""
    plan = plan_of(microbatches=2, seq=1024, layers=4)
    peaks = [
        fold_program(transformers_program(plan, Sharding(8), reshard=reshard)).peak for reshard in (True, 1, False)
    ]
    assert peaks[0] < peaks[1] <= peaks[2]


def test_offload_leaves_nothing_but_activations_on_the_device() -> None:
    plan = plan_of(seq=512, layers=2)
    program = transformers_program(plan, Sharding(8, offload=True))
    kept = static(program)
    assert kept.net == kept.net_by[Category.INPUTS] + kept.net_by[Category.BUFFERS]
    tensors = program.parameter_tensors()
    shards = sum(shard(one, 8).bytes("fp32") for one in tensors)
    assert fsdp.host_bytes(tensors, plan.optimizer, Sharding(8, offload=True)) == 4 * shards
    assert not program.step


# -- measured ---------------------------------------------------------------------------------------


def rows(file: str) -> list[dict[str, Any]]:
    path = MEASURED / file
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("id", ["traced/llama3-8b-fsdp8-b1-s8192", "traced/llama3-8b-fsdp8-ckpt-b1-s8192"])
def test_traced_rows(id: str) -> None:
    """To the byte, but for step counters on the host (512 B a tensor), labels (one tensor with the ids there),
    two scalars of the loss, and one norm's weight after forward."""
    row = next(row for row in rows("traced_transformers_5_23.jsonl") if row["id"] == id)
    plan = plan_of(mbs=row["b"], seq=row["s"], recompute="full" if row["ckpt"] else "none", optimizer="adamw")
    program = fsdp.program(
        plan, fsdp.transformers_model(plan, Options(accumulates_in_place=False)), Sharding(row["fsdp"])
    )
    folded = fold_program(program)
    named = 8 * row["b"] * row["s"] - 512 * len(program.parameter_tensors())
    assert folded.static == row["end"] + named
    assert abs(folded.after_forward - row["after_forward"] - named) <= 8192
    assert abs(folded.backward_peak - row["peak_fwd_bwd"] - named) <= 1024
    assert folded.step_peak == row["peak_step"] + named


@pytest.mark.parametrize(("ranks", "gib"), [(8, 82.4), (128, 67.0)])
def test_torchtitan_rows(ranks: int, gib: float) -> None:
    """Tables 1 and 3 of torchtitan's ``benchmarks/llama3_h100_202412_torchtitan.md``: Llama 3.1 8B, two sequences
    of 8192 a rank, recompute per operator, peak reserved. A third of a percent below, a fifth above."""
    sharding = Sharding(ranks)
    plan = on_ranks(plan_of(gpu="h100-96gb", mbs=2, seq=8192, optimizer="adamw"), sharding, 1)
    model = torchtitan_model(plan, Options(kernel_workspaces=True), ActivationCheckpointing("op"))
    program = fsdp.program(plan, model, sharding)
    reserved = replay((program,), AllocatorSettings(), cublas_workspaces(plan))[0].reserved
    assert reserved == pytest.approx(gib * 2**30, rel=0.005)


# -- for every plan ---------------------------------------------------------------------------------

CODES = ("transformers", "torchtitan")
SHARDINGS = st.builds(
    Sharding,
    st.integers(1, 64),
    st.integers(1, 3),
    st.sampled_from(["fp32", "bf16"]),
    st.just("bf16"),
    st.sampled_from(["fp32", "bf16"]),
    st.booleans(),
)
RESHARDS = st.sampled_from([True, False])


def on_ranks(plan: Plan, sharding: Sharding, microbatches: int) -> Plan:
    ranks = sharding.shards * sharding.replicas
    batch = plan.batch.model_copy(update={"gbs": plan.batch.mbs * ranks * microbatches})
    return plan.model_copy(update={"batch": batch, "layout": plan.layout.model_copy(update={"dp": ranks})})


def made(code: str, plan: Plan, sharding: Sharding, reshard: bool) -> Program:
    assert plan.batch.gbs is not None
    plan = on_ranks(plan, sharding, plan.batch.gbs // (64 * plan.batch.mbs))
    if code == "torchtitan":
        recompute = ActivationCheckpointing("op" if plan.recompute.mode == "full" else "none")
        return fsdp.program(plan, torchtitan_model(plan, Options(), recompute, reshard=reshard), sharding)
    return transformers_program(plan, sharding, reshard=reshard)


def folded(code: str, plan: Plan, sharding: Sharding, reshard: bool) -> Folded:
    return fold_program(made(code, plan, sharding, reshard))


PLANS = st.builds(
    lambda layers, mbs, seq, recompute, microbatches: plan_of(
        64, microbatches, layers=layers, mbs=mbs, seq=seq, recompute=recompute
    ),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([64, 250, 1024]),
    st.sampled_from(["none", "full"]),
    st.integers(1, 3),
)
few = settings(max_examples=25, deadline=None)


@few
@given(st.sampled_from(CODES), PLANS, SHARDINGS, RESHARDS)
def test_every_hold_ends_once(code: str, plan: Plan, sharding: Sharding, reshard: bool) -> None:
    """Sharded gradients apart, which end with the step; and categories sum."""
    program = made(code, plan, sharding, reshard)
    modules = [span.module for span in program.spans for _ in span.names]
    for role in ("first", "steady"):
        tapes = [getattr(module, role) for module in modules]
        held = 0
        kept = 0
        for tape in (*(tapes.forward for tapes in tapes), *(tapes.backward for tapes in tapes[::-1])):
            for event in tape:
                if isinstance(event, Hold):
                    held += event.bytes
                    named = event.name in ("reduce_scatter_output", "sharded_gradient")
                    kept += event.bytes if event.category is Category.GRADIENTS and named else 0
                elif isinstance(event, Drop):
                    held -= event.bytes
        assert held == (kept if role == "first" else 0)
    result = fold_program(program)
    assert sum(result.peak_by) == result.peak


@few
@given(st.sampled_from(CODES), PLANS, SHARDINGS, RESHARDS)
def test_replay_follows_the_fold(code: str, plan: Plan, sharding: Sharding, reshard: bool) -> None:
    """Every drop finds its tensor, and blocks are no smaller than requests."""
    program = made(code, plan, sharding, reshard)
    (replayed,) = replay((program,), AllocatorSettings(expandable_segments=True), ())
    assert replayed.allocated == fold_program(program).peak
    assert replayed.reserved >= replayed.allocated


@few
@given(st.sampled_from(CODES), PLANS, SHARDINGS)
def test_more_ranks_keep_no_more(code: str, plan: Plan, sharding: Sharding) -> None:
    twice = Sharding(2 * sharding.shards, 1, sharding.parameters, sharding.compute, sharding.reduce)
    once = Sharding(sharding.shards, 1, sharding.parameters, sharding.compute, sharding.reduce)
    assert folded(code, plan, twice, True).static <= folded(code, plan, once, True).static


@few
@given(st.sampled_from(CODES), PLANS, SHARDINGS)
def test_whole_parameters_after_forward_need_no_less(code: str, plan: Plan, sharding: Sharding) -> None:
    """After forward always, and at the peak where there are layers enough to outweigh gathering ahead."""
    resharded, whole = (folded(code, plan, sharding, reshard) for reshard in (True, False))
    assert whole.after_forward >= resharded.after_forward
    assume(plan.model.layers >= 3)
    assert whole.peak >= resharded.peak


@few
@given(PLANS, SHARDINGS)
def test_gradients_reduced_once(plan: Plan, sharding: Sharding) -> None:
    """What two or more micro-batches leave are the sharded gradients, as where each reduces its own."""
    plan = on_ranks(plan, sharding, 3)
    model = fsdp.transformers_model(plan, Options())
    program = fsdp.unsynced_program(plan, model, sharding)
    total = static(program).then(program.order.whole)
    left = total.net - static(program).net
    synced = fsdp.program(plan, model, sharding)
    once = compose(span.backward(True) for span in reversed(synced.spans))
    assert left == total.net_by[Category.GRADIENTS] == once.net_by[Category.GRADIENTS]
    assert sum(total.peak_by) == total.peak
    (replayed,) = replay((program,), AllocatorSettings(expandable_segments=True), ())
    step = total.net + fold(program.step).peak
    assert replayed.allocated == max(total.peak, step)
    assert replayed.static == static(program).net


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"fsdp-code": "torchtitan", "fsdp-replicas": "2"},
        {"fsdp-code": "torchtitan", "fsdp-reduce": "bf16", "fsdp-replicas": "2"},
        {"fsdp-code": "torchtitan", "ends-apart": "true", "loss": "chunked"},
        {"fsdp-code": "torchtitan", "ends-apart": "true", "loss": "chunked", "fsdp-replicas": "2"},
        {"fsdp-code": "torchtitan", "ends-apart": "true", "loss": "chunked", "fsdp-replicas": "2", "gbs": "8"},
    ],
    ids="-".join,
)
def test_what_is_recorded_beside_the_first_micro_batch_is_what_a_steady_one_does(flags: dict[str, str]) -> None:
    """Hooks that run once for both leave the tapes of hooks that run for steady micro-batches alone."""
    job = {"model": "llama-3-8b", "layers": "2", "seq": "256", "gpus": "8", "gbs": "32", "framework": "fsdp"}
    plan = resolve(read_plan(None, job | {"attention": "flash"} | flags).plan)
    model = fsdp.model_of(plan, Options(), plan.fsdp)
    both = (model.spans, model.units, model.end, fsdp.sharding_of(plan, plan.fsdp))
    beside, alone = modules.sharded(*both), modules.sharded(*both, adds=True)
    for one, other in zip(beside, alone, strict=True):
        assert one.names == other.names
        for ours, theirs in zip(tapes_of(one.module.steady), tapes_of(other.module.steady), strict=True):
            assert ours == theirs


def tapes_of(tapes: Tapes) -> list[list[tuple[object, ...]]]:
    """Forward and backward, whatever numbers their tensors have."""
    held = [[one for one in tape if isinstance(one, Hold | Drop)] for tape in (tapes.forward, tapes.backward)]
    return [[(type(one), one.bytes, one.category) for one in tape] for tape in held]


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "given", "says"),
    [
        ({}, Fsdp(replicas=3), "must divide dp"),
        ({}, Fsdp(reshard_to=3), "a divisor of the 8 shards"),
        ({}, Fsdp(reshard_to=8, replicas=4), "a divisor of the 2 shards"),
        ({"optimizer": "adam8bit"}, Fsdp(), "optimizer.name"),
        ({"model": "gpt2", "code": "2020", "dtype": "fp32", "attention": "eager"}, Fsdp(), "must be current"),
        ({}, Fsdp(code="torchtitan", reshard_to=4), "torchtitan's reshard_after_forward is true or false"),
        ({}, Fsdp(reshard_to=4, reshard_after_forward=False), "must be left out where"),
        ({}, Fsdp(per_operator=True), "fsdp.code"),
        ({}, Fsdp(compile=True), "fsdp.compile = true: must be false: it is torchtitan's setting"),
        (
            {"recompute": "selective"},
            Fsdp(code="torchtitan"),
            "needs --recompute-per-operator, or fsdp.recompute_every",
        ),
        ({"recompute": "full"}, Fsdp(code="torchtitan", per_operator=True), "must be selective with fsdp.per_operator"),
        ({}, Fsdp(code="torchtitan", per_operator=True, recompute_every=2), "must be 1 with fsdp.per_operator"),
        ({}, Fsdp(code="torchtitan", recompute_every=2), "must be 1 where recompute.mode is none"),
    ],
)
def test_contradictions_are_refused_in_one_line(flags: dict[str, str], given: Fsdp, says: str) -> None:
    job = {"model": "llama-3-8b", "layers": "2", "seq": "128", "framework": "fsdp", "gpus": "8", "gbs": "24"}
    plan = read_plan(None, job | flags).plan.model_copy(update={"fsdp": given})
    with pytest.raises(PlanError, match=says) as caught:
        check(plan)
    assert "\n" not in str(caught.value)


def sharded_plan(given: Fsdp, **flags: object) -> Plan:
    plan = plan_of(8, 3, seq=128, layers=2, **flags)
    return plan.model_copy(update={"layout": plan.layout.model_copy(update={"dp": 8}), "fsdp": given})


def test_selective_recompute_of_torchtitan() -> None:
    """Per operator, or every n-th layer, which full recompute says as well."""

    def left(given: Fsdp, mode: str) -> int:
        (program,) = programs(sharded_plan(given, recompute=mode), Options())
        return fold_program(program).after_forward

    every = Fsdp(code="torchtitan", recompute_every=2)
    assert left(every, "selective") == left(every, "full")
    per_operator = left(Fsdp(code="torchtitan", per_operator=True), "selective")
    assert left(Fsdp(code="torchtitan"), "full") < per_operator < left(Fsdp(code="torchtitan"), "none")
    resolved = read_plan(None, {**TORCHTITAN, "recompute-per-operator": "true"}).plan
    assert resolve(resolved).recompute.mode == "selective"


TORCHTITAN = {"model": "llama-3-8b", "framework": "fsdp", "fsdp-code": "torchtitan", "gpus": "8"}


def test_gradients_that_wait_need_modules_of_their_own() -> None:
    (synced,) = programs(sharded_plan(Fsdp()), Options())
    (waiting,) = programs(sharded_plan(Fsdp(gradient_sync=False)), Options())
    assert not synced.last
    assert waiting.last


def test_the_framework_is_estimated_from_a_plan() -> None:
    """Llama 3 8B over 8 ranks: an eighth of its 8,030,261,248 parameters, in fp32 with both of Adam's states."""
    plan = read_plan(None, {"model": "llama-3-8b", "framework": "fsdp", "gpus": "8", "seq": "512", "gpu": "h100-80gb"})
    (stage,) = estimate(plan.plan).stages
    assert stage.parameters == 8_030_261_248 // 8
    assert stage.of(Category.PARAMETERS) >= 4 * stage.parameters
    assert stage.of(Category.OPTIMIZER_STATES) >= 8 * stage.parameters
    assert stage.static >= 12 * stage.parameters
    assert sum(stage.breakdown) == stage.allocated


def test_offloaded_states_are_on_the_host() -> None:
    flags = {"model": "llama-3-8b", "framework": "fsdp", "gpus": "16", "seq": "512", "fsdp-offload": "true"}
    (stage,) = estimate(read_plan(None, flags).plan).stages
    assert stage.host == pytest.approx(8 * 16 * stage.parameters, rel=0.001)  # 8 of the 16 ranks share a node
    (alone,) = estimate(read_plan(None, {**flags, "gpus-per-node": "1"}).plan).stages
    assert stage.host == 8 * alone.host


# -- embedding and head apart -------------------------------------------------------------------------


def accelerated(**flags: str) -> ResolvedPlan:
    """As Accelerate's file says it."""
    own = {"model": "llama-3-8b", "framework": "fsdp", "gpus": "8", "seq": "1024", "reshard-root": "true"}
    return resolve(read_plan(None, own | flags).plan)


@pytest.mark.parametrize(("release", "apart"), [("1.13", False), ("1.14", True), ("1.15.2", True), ("", True)])
def test_accelerate_shards_embedding_and_head_apart_from_a_release_on(release: str, apart: bool) -> None:
    given = accelerated(**({"versions": f"accelerate={release}"} if release else {})).fsdp
    assert (given.ends_apart, given.reshard_root) == (apart, not apart)


def test_what_is_said_of_the_ends_stays() -> None:
    given = accelerated(**{"ends-apart": "false"}).fsdp
    assert (given.ends_apart, given.reshard_root) == (False, True)
    assert not resolve(read_plan(None, {"model": "llama-3-8b", "framework": "fsdp", "gpus": "8"}).plan).fsdp.ends_apart


@pytest.mark.parametrize(
    ("flags", "units"),
    [
        ({}, {"embedding": "word.weight", "ends": "final_norm.weight head.weight"}),
        ({"model": "qwen3-8b", "tied-embeddings": "true"}, {"ends": "final_norm.weight word.weight"}),
        (
            {"model": "gpt2"},
            {"model": "position.weight", "ends": "final_norm.weight final_norm.bias word.weight"},
        ),
        (
            {"model": "opt-6.7b", "attention": "eager"},
            {"model": "position.weight final_norm.weight final_norm.bias", "ends": "word.weight"},
        ),
        ({"lora-rank": "8"}, {"model": "final_norm.weight", "embedding": "word.weight", "ends": "head.weight"}),
        (
            {"model": "gpt2", "lora-rank": "8"},
            {"model": "position.weight", "ends": "final_norm.weight final_norm.bias word.weight"},
        ),
        (
            {"trainer": "reward"},
            {"model": "head.weight", "embedding": "word.weight", "ends": "final_norm.weight"},
        ),
    ],
    ids=lambda one: "-".join(one.values()) if "model" in one or "trainer" in one or "lora-rank" in one else "",
)
def test_units_of_the_ends(flags: dict[str, str], units: dict[str, str]) -> None:
    """As ``_find_final_norm`` and the two ``get_..._embeddings`` of real models have them: below peft's wrapper no norm
    is found of models that are called ``model``, nor of OPT; a classifier has no output embedding."""
    plan = accelerated(**flags)
    made = fsdp.model_of(plan, Options(), plan.fsdp)
    found = {one.name: " ".join(p.name for p in one.parameters) for one in made.units if "layer." not in one.name}
    assert found == units


def test_a_head_that_accelerate_leaves_out_of_its_unit() -> None:
    """``fully_shard`` of torch 2.13 on units with the same parameter: "is shared with a parameter already managed"."""
    with pytest.raises(PlanError, match=r"versions.accelerate = 1.14: must be before 1.14, or 1.15 or later"):
        accelerated(model="gpt2", versions="accelerate=1.14")


def test_a_head_that_nobody_gathers() -> None:
    """Below peft's wrapper the head is a unit without the norm: Liger's loss does not run it, trl's gathers it."""
    with pytest.raises(PlanError, match=r"ends_apart = true: must be false with a loss that takes the head's weight"):
        programs(accelerated(**{"lora-rank": "8", "loss": "liger"}), Options())
    plan = accelerated(**{"lora-rank": "8", "trainer": "sft"})
    (program,) = programs(plan, Options())
    head = program.spans[-1].module.first.forward
    held = [one for one in head if isinstance(one, Hold) and one.name.startswith("head.weight")]
    assert [one.bytes for one in held] == [2 * 128256 * 4096]


@pytest.mark.parametrize("torch", ["2.1", "2.3.1"])
def test_fully_shard_is_in_pytorch_from_2_4_on(torch: str) -> None:
    """``torch.distributed._composable.fsdp.fully_shard`` came with PyTorch 2.4: before, FSDP1 runs, and says so. Who
    asks for FSDP2, or for dtypes that it has alone, is refused."""
    flags = {"model": "llama-3.2-1b", "framework": "fsdp", "gpus": "4", "torch": torch}
    for asked in ({"fsdp-version": "2"}, {"fsdp-reduce": "fp32"}):
        with pytest.raises(PlanError, match=rf"torch = {torch}: must be 2.4 or later, which has fully_shard"):
            estimate(read_plan(None, {**flags, **asked}).plan)
    alone = estimate(read_plan(None, flags).plan)
    assert alone.peak == estimate(read_plan(None, {**flags, "fsdp-version": "1"}).plan).peak
    assert any("so that FSDP1 runs" in one for one in alone.assumptions)
    later = estimate(read_plan(None, {**flags, "torch": "2.4"}).plan)
    assert not any("so that FSDP1 runs" in one for one in later.assumptions)
