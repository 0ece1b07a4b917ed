"""torchtitan's Llama with tensor parallelism under ``fully_shard``, against ``DTensor`` run on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
from hypothesis import given, settings, strategies as st

from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.replay import replay
from memplan.estimate import estimate
from memplan.frameworks.fsdp import programs as fsdp
from memplan.frameworks.fsdp.programs import model_of, programs, sharding_of
from memplan.layers import ops, tensor_parallel
from memplan.layers.autograd import Recorder
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import ROUND, Category, Hold
from memplan.tape.program import Program, fold_program

from ..layers.test_against_transformers import drops_sorted, named, sizes, without_grad_loss, without_scalars
from ..oracle import torchtitan_tp as oracle
from ..oracle.fsdp import Sharding, Steps
from ..oracle.torchtitan import Sizes

SIZES = Sizes(hidden=192, heads=8, kv_heads=4, ffn=448, vocab=1008, layers=3, b=2, s=64)
TWO_LAYERS = replace(SIZES, layers=2)
ONE_SEQUENCE = replace(TWO_LAYERS, kv_heads=8, b=1)
FOUR = Sharding(4)


@dataclass(frozen=True)
class Case:
    tp: int
    recompute: str
    parallel_loss: bool
    sharding: Sharding = FOUR
    ends_apart: bool = False
    sizes: Sizes = SIZES
    every: int = 1
    """With full recompute: which layers."""
    chunks: int = 0
    """Of the loss, if it has some."""

    def modes(self) -> list[str]:
        """Of each layer."""
        layers = range(1, self.sizes.layers + 1)
        return [self.recompute if self.recompute != "full" or not at % self.every else "none" for at in layers]


SIXTEEN_BIT = Sharding(4, original="bf16", param_dtype=None, reduce_dtype=None)
IN_FP32 = Sharding(2, param_dtype=None, reduce_dtype=None)
ALONE_IN_FP32 = Sharding(1, param_dtype=None, reduce_dtype=None)
REPLICATED = Sharding(3, 2, reduce_dtype="bf16")
TWICE = Sharding(4, synced=(True, True))
CASES = {
    "tp2-none": Case(2, "none", True),
    "tp2-full-logits-gathered": Case(2, "full", False, REPLICATED),
    "tp2-op-two-microbatches": Case(2, "op", True, TWICE, ends_apart=True, sizes=TWO_LAYERS),
    "tp2-op-fp32": Case(2, "op", False, IN_FP32, sizes=TWO_LAYERS),
    "tp4-none-logits-gathered": Case(4, "none", False, ends_apart=True, sizes=TWO_LAYERS),
    "tp4-every-second-layer-bf16": Case(4, "full", True, SIXTEEN_BIT, every=2),
    "tp4-op": Case(4, "op", True),
    "tp4-none-fp32-one-shard": Case(4, "none", True, ALONE_IN_FP32, sizes=TWO_LAYERS),
    "tp8-none-one-sequence": Case(8, "none", True, Sharding(2), sizes=ONE_SEQUENCE),
    "tp4-full-one-sequence": Case(4, "full", False, Sharding(2), sizes=ONE_SEQUENCE),
    "tp2-chunked": Case(2, "none", True, ends_apart=True, sizes=TWO_LAYERS, chunks=4),
    "tp4-full-chunked": Case(4, "full", True, ends_apart=True, sizes=ONE_SEQUENCE, chunks=2),
    "tp8-op-one-sequence": Case(8, "op", False, Sharding(2), sizes=ONE_SEQUENCE),
}


def flags_of(case: Case) -> dict[str, str]:
    given, sharding = case.sizes, case.sharding
    compute = sharding.param_dtype or sharding.original
    microbatches = len(sharding.synced)
    return {
        "tp": str(case.tp),
        "dp": str(sharding.shards * sharding.replicas),
        "mbs": str(given.b),
        "gbs": str(given.b * sharding.shards * sharding.replicas * microbatches),
        "seq": str(given.s),
        "layers": str(given.layers),
        "dtype": compute,
        "attention": "flash",
        "loss": "vocab-parallel" if case.parallel_loss else "plain",
        "recompute": "full" if case.recompute == "full" else "none",
        "recompute-every": str(case.every),
        "recompute-per-operator": str(case.recompute == "op").lower(),
        "fsdp-replicas": str(sharding.replicas),
        "fsdp-parameters": sharding.original,
        "fsdp-reduce": sharding.reduce_dtype or compute,
        "ends-apart": str(case.ends_apart).lower(),
        **({"loss": "chunked", "loss-chunks": str(case.chunks)} if case.chunks else {}),
    }


def plan_of(**flags: str) -> Plan:
    named = {"model": "llama-3-8b", "framework": "fsdp", "fsdp-code": "torchtitan", "optimizer": "adamw", **flags}
    return resolve(read_plan(None, named).plan)


def shrunk(plan: Plan, given: Sizes) -> Plan:
    """``plan`` with a model as small as ``given``."""
    changed = {"hidden": given.hidden, "heads": given.heads, "kv_heads": given.kv_heads, "ffn": given.ffn}
    spec = plan.model.model_copy(update={**changed, "head_dim": given.head_dim, "vocab": given.vocab})
    return plan.model_copy(update={"model": spec})


@dataclass(frozen=True)
class Compared:
    case: Case
    program: Program
    steps: Steps


@pytest.fixture(
    params=[
        pytest.param(case, marks=[pytest.mark.slow] * (name == "tp4-full-chunked")) for name, case in CASES.items()
    ],
    ids=list(CASES),
    scope="module",
)
def compared(request: pytest.FixtureRequest) -> Compared:
    case = request.param
    assert isinstance(case, Case)
    return Compared(case, made(case), traced(case))


def made(case: Case) -> Program:
    plan = shrunk(plan_of(**flags_of(case)), case.sizes)
    model = model_of(plan, Options(accumulates_in_place=False), plan.fsdp)
    return fsdp.program(plan, model, sharding_of(plan, plan.fsdp))


def traced(case: Case, *, evaluates: bool = False) -> Steps:
    return oracle.traced(
        case.sizes,
        case.sharding,
        case.tp,
        case.modes(),
        parallel_loss=case.parallel_loss,
        ends_apart=case.ends_apart,
        evaluates=evaluates,
        chunks=case.chunks,
    )


def test_every_event(compared: Compared) -> None:
    modules = [span.module for span in compared.program.spans]
    forward = [event for module in modules for event in named(module, module.steady.forward)]
    for microbatch in range(len(compared.case.sharding.synced)):
        tapes = [(module, module.steady if microbatch else module.first) for module in modules[::-1]]
        backward = [event for module, tape in tapes for event in named(module, tape.backward)]
        traced_forward, traced_backward = compared.steps.stretches[2 * microbatch : 2 * microbatch + 2]
        if microbatch:  # the loss before ends where its variable takes the next one
            traced_forward = [change for change in traced_forward if change.op != "aten.div.Tensor"]
            forward = [event for event in forward if event.name != "loss"]
        assert drops_sorted(sizes(forward)) == drops_sorted(sizes(traced_forward))
        assert drops_sorted(sizes(without_scalars(backward))) == drops_sorted(sizes(without_grad_loss(traced_backward)))


@pytest.mark.slow
def test_chunks_without_a_cast() -> None:
    """The first chunk's gradient of the head is that to which the others are added."""
    case = Case(2, "none", True, SIXTEEN_BIT, ends_apart=True, sizes=ONE_SEQUENCE, chunks=4)
    folded, steps = fold_program(made(case)), traced(case)
    assert folded.static == steps.before == steps.end
    assert folded.after_forward == steps.levels()[0]
    assert 0 <= max(steps.peaks()[:-1]) - folded.backward_peak <= 2 * ROUND


@pytest.mark.slow
def test_chunks_of_two_microbatches() -> None:
    """The gradient of the head's weight is there from the first backward pass on, and nothing else differs."""
    case = Case(4, "full", True, TWICE, ends_apart=True, sizes=ONE_SEQUENCE, chunks=2)
    program, steps = made(case), traced(case)
    modules = [span.module for span in program.spans]
    forward = [event for module in modules for event in named(module, module.steady.forward)]
    backward = [event for module in modules[::-1] for event in named(module, module.steady.backward)]
    assert drops_sorted(sizes(forward)) == drops_sorted(sizes(steps.stretches[2]))
    traced_backward = without_grad_loss(steps.stretches[3])
    assert drops_sorted(sizes(without_scalars(backward))) == drops_sorted(sizes(traced_backward))
    folded = fold_program(program)
    assert folded.static == steps.before == steps.end
    assert 0 <= max(steps.peaks()[:4]) - folded.backward_peak <= 3 * ROUND  # scalars of both losses
    assert folded.step_peak == steps.peaks()[4]


def test_readings(compared: Compared) -> None:
    """Between iterations, after forward, at the peak of both passes and of the step."""
    folded, steps = fold_program(compared.program), compared.steps
    assert folded.static == steps.before == steps.end
    assert folded.after_forward == steps.levels()[0]
    assert 0 <= max(steps.peaks()[:-1]) - folded.backward_peak <= 2 * ROUND  # the loss and its gradient end later
    assert folded.step_peak == steps.peaks()[-1]
    held = [change.bytes for change in steps.stretches[-1] if change.sign > 0]
    assert sorted(held) == sorted(event.bytes for event in compared.program.step if isinstance(event, Hold))


def test_evaluation() -> None:
    """Nothing is kept for backward, and the embedding's collective is waited for by the first block here, too."""
    case = replace(CASES["tp8-op-one-sequence"], tp=4, parallel_loss=True)
    spans = made(case).spans
    events = [event for span in spans for event in named(span.module, span.module.evaluation) if event.name != "loss"]
    changes = [change for change in traced(case, evaluates=True).stretches[0] if change.op != "aten.div.Tensor"]
    assert drops_sorted(sizes(events)) == drops_sorted(sizes(changes))


# -- what holds for every plan ----------------------------------------------------------------------


@lru_cache(maxsize=256)
def program_of(tp: int, dp: int, loss: str, recompute: str, mbs: int = 1) -> Program:
    flags = {"tp": str(tp), "dp": str(dp), "loss": loss if tp > 1 else "plain", "recompute": recompute}
    return programs(plan_of(**flags, mbs=str(mbs), seq="512", layers="2"), Options())[0]


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from((2, 4, 8)),
    st.sampled_from((1, 2, 3, 8)),
    st.sampled_from(("plain", "vocab-parallel")),
    st.sampled_from(("none", "full")),
    st.integers(1, 2),
)
def test_more_ranks_hold_less_each(tp: int, dp: int, loss: str, recompute: str, mbs: int) -> None:
    """More tensor parallelism never costs static memory, nor more after forward; all its ranks together have every
    parameter once, but for the norms, which each has."""
    fewer, more = (program_of(t, dp, loss, recompute, mbs) for t in (tp // 2, tp))
    one, of_fewer, of_more = program_of(1, dp, "plain", recompute, mbs), fold_program(fewer), fold_program(more)
    assert of_more.static <= of_fewer.static
    assert of_more.after_forward <= of_fewer.after_forward
    whole, parts = one.parameter_tensors(), more.parameter_tensors()
    norms = sum(parameter.elements for parameter in whole if len(parameter.shape) == 1)
    assert tp * sum(p.elements for p in parts) == sum(p.elements for p in whole) + (tp - 1) * norms
    (replayed,) = replay((more,), AllocatorSettings(expandable_segments=True), ())
    assert (replayed.static, replayed.allocated) == (of_more.static, of_more.peak)
    assert more.ranks == tuple(range(tp * dp))
    assert more.microbatches == one.microbatches


def test_loss_parallel_keeps_logits_in_parts() -> None:
    """(1, 512, 128256) logits in fp32 are 262,668,288 B; among 4 ranks each has 65,667,072 B, and never more."""
    part, whole = (program_of(4, 2, loss, "none") for loss in ("vocab-parallel", "plain"))
    sizes = [_largest_logits(program) for program in (part, whole)]
    assert sizes == [65_667_072, 262_668_288]


def _largest_logits(program: Program) -> int:
    tapes = [tape for span in program.spans for tape in (span.module.first.forward, span.module.first.backward)]
    logits = Category.LOGITS
    return max(event.bytes for tape in tapes for event in tape if isinstance(event, Hold) and event.category is logits)


def test_embedding_gradient_is_whole_on_every_rank() -> None:
    """``embedding_dense_backward`` has no table in parts: 128256 × 4096 in bf16, whatever tp is."""
    for tp in (2, 8):
        embedding = program_of(tp, 2, "vocab-parallel", "none").spans[0].module
        holds = {event.name: event.bytes for event in embedding.first.backward if isinstance(event, Hold)}
        assert holds[f"grad_word_embeddings_weight/{tensor_parallel.REPLICATED}"] == 128_256 * 4096 * 2


def test_gradients_of_dtensors_are_not_added_in_place() -> None:
    """On devices, too, where plain tensors' are: ``can_accumulate_inplace`` refuses subclasses."""

    def sums(wrap: bool) -> int:
        r = Recorder()
        weight = r.parameter("weight", (256,), "bf16")
        x = r.empty((4, 256), "bf16", "x")
        x = tensor_parallel.weighted(r, x, weight, "first")
        x = tensor_parallel.apart(x) if wrap else x
        out = tensor_parallel.weighted(r, x, weight, "second")
        other = tensor_parallel.weighted(r, x, weight, "third")
        r.backward([ops.add(r, out, other)], [r.empty((4, 256), "bf16", "gradient")])
        return sum(isinstance(event, Hold) and event.name == "gradient_sum" for event in r.events)

    assert (sums(False), sums(True)) == (0, 1)


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"fsdp-code": "transformers"}, "layout.tp = 2: must be 1 with framework fsdp and transformers' code"),
        ({"tp": "3", "seq": "510"}, "layout.tp = 3: must divide the 32 attention heads"),
        ({"tp": "16"}, "layout.tp = 16: must divide the 8 key/value heads"),
        ({"seq": "511"}, "batch.seq = 511: must be a multiple of cp x tp = 2"),
        ({"gradient-sync": "false", "gbs": "4"}, "fsdp.gradient_sync = false: must be true"),
        ({"sequence-parallel": "false"}, "layout.sequence_parallel = false: must be true"),
        ({"tp": "1", "loss": "vocab-parallel"}, "loss.kind = vocab-parallel: must be plain with tp 1"),
        ({"tp": "1", "sequence-parallel": "true"}, "layout.sequence_parallel = true: must be false with tp = 1"),
        ({"cp": "2"}, "layout.cp = 2: must be 1"),
        ({"attention": "eager"}, "must be flash"),
        ({"dtype": "fp32", "head-dim": "30"}, "model.head_dim = 30: must be a multiple of 4 in fp32"),
    ],
)
def test_what_is_not_modelled_is_refused(flags: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError) as refused:
        programs(plan_of(**{"tp": "2", "seq": "512", "layers": "1", **flags}), Options())
    assert says in str(refused.value)


@pytest.mark.parametrize(("dtype", "says"), [("fp32", "memory-efficient kernel"), ("bf16", "flash attention")])
def test_which_kernel_is_said(dtype: str, says: str) -> None:
    plan = plan_of(tp="2", dp="2", seq="512", layers="1", dtype=dtype)
    assert plan.attention == "flash"
    assert any(says in line for line in estimate(plan).assumptions)


def test_estimate_of_a_plan() -> None:
    """Sequence parallelism and the parallel loss are what torchtitan does unless told otherwise."""
    plan = plan_of(tp="2", gpus="8", gpu="h100-80gb", seq="512", layers="2")
    assert (plan.layout.dp, plan.layout.sequence_parallel, plan.loss.kind) == (4, True, "vocab-parallel")
    report = estimate(plan)
    (stage,) = report.stages
    assert stage.ranks == tuple(range(8))
    assert any("DTensor" in line for line in report.assumptions)
