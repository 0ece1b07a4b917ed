"""torchtitan's gpt-oss under ``fully_shard``, against the same operators run on fake tensors."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest

from memplan import estimate
from memplan.estimate import programs_of
from memplan.frameworks.fsdp import programs as fsdp
from memplan.frameworks.fsdp.titan_experts import cut_of_experts
from memplan.frameworks.fsdp.torchtitan import ActivationCheckpointing, torchtitan_model
from memplan.frameworks.fsdp.units import Sharding
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import ROUND, Category, Hold
from memplan.tape.program import fold_program

from ..layers.test_against_transformers import drops_sorted, named, sizes, without_grad_loss, without_scalars
from ..oracle import fsdp as oracle
from ..oracle.titan_gpt_oss import Decoder, Sizes, builder, expert_meshes
from ..oracle.titan_newest import Qwen3Moe
from ..oracle.torchtitan_tp import local
from .every_event import check_every_event

MIB = 2**20
SMALL = Sizes(
    hidden=192, heads=6, kv_heads=2, head_dim=64, vocab=1003, layers=2, b=2, s=64, experts=8, top_k=3, expert_ffn=96
)
MULTI_HEAD = replace(
    SMALL, hidden=136, heads=4, kv_heads=4, head_dim=32, vocab=515, layers=3, b=3, s=40, experts=12, top_k=4
)
WIDE = replace(SMALL, b=1, s=200, heads=8, kv_heads=1, experts=32, top_k=2, expert_ffn=40)


@dataclass(frozen=True)
class Case:
    recompute: str
    sizes: Sizes
    shards: int = 4
    chunks: int = 0
    """Of the loss, if it has some."""
    compiled: bool = False
    """The loss is."""
    ranks: int = 1
    """That share experts."""
    newest: bool = False
    """It is Qwen 3's mixture."""
    context: bool = False
    """All ranks share sequences."""


CASES = {
    "none": Case("none", SMALL),
    "op": Case("op", SMALL),
    "full": Case("full", replace(MULTI_HEAD, layers=2)),
    "multi-head-op": Case("op", MULTI_HEAD, 3),
    "chunked": Case("op", SMALL, chunks=4),
    "shared": Case("none", SMALL, 8, ranks=4),
    "shared-op-chunked": Case("op", WIDE, 8, chunks=2, ranks=2),
    "shared-across-full": Case("full", SMALL, 16, ranks=4),
    "shared-whole": Case("none", MULTI_HEAD, 4, ranks=4),
    "chunked-compiled": Case("none", WIDE, chunks=2, compiled=True),
    "chunked-across-full": Case("full", SMALL, 16, chunks=2),
    "across": Case("none", SMALL, 16),
    "wide-full": Case("full", WIDE, 8),
    "qwen3": Case("none", SMALL, newest=True),
    "qwen3-op-chunked": Case("op", SMALL, chunks=2, newest=True),
    "qwen3-full": Case("full", MULTI_HEAD, 3, newest=True),
    "qwen3-shared": Case("none", SMALL, 8, ranks=4, newest=True),
    "qwen3-shared-op-chunked": Case("op", WIDE, 8, chunks=2, ranks=2, newest=True),
    "qwen3-shared-full": Case("full", WIDE, 8, ranks=4, newest=True),
    "qwen3-shared-across": Case("op", SMALL, 16, ranks=4, newest=True),
    "context": Case("op", SMALL, chunks=2, context=True),
    "context-shared": Case("none", SMALL, 8, ranks=4, context=True),
    "context-across-full": Case("full", SMALL, 16, chunks=2, context=True),
    "qwen3-context": Case("none", SMALL, chunks=2, newest=True, context=True),
    "qwen3-context-shared": Case("op", WIDE, 8, ranks=2, newest=True, context=True),
}


def plan_of(given: Sizes, shards: int, chunks: int = 0, *, newest: bool = False) -> ResolvedPlan:
    model = "qwen3-30b-a3b" if newest else "gpt-oss-20b"
    base = {"model": model, "framework": "single", "dtype": "bf16", "mbs": str(given.b), "seq": str(given.s)}
    base |= {"layers": str(given.layers), "attention": "eager", "optimizer": "adamw", "gpu": "h100-80gb"}
    plan = resolve(read_plan(None, base).plan)
    changed: dict[str, object] = {"hidden": given.hidden, "heads": given.heads, "kv_heads": given.kv_heads}
    changed |= {"head_dim": given.head_dim, "vocab": given.vocab}
    changed |= {"experts": given.experts, "expert_top_k": given.top_k, "expert_ffn": given.expert_ffn}
    parts = {
        "attention": "flash",
        "fsdp": plan.fsdp.model_copy(update={"ends_apart": True, "newest": newest}),
        "model": plan.model.model_copy(update=changed),
        "batch": plan.batch.model_copy(update={"gbs": given.b * shards}),
        "layout": plan.layout.model_copy(update={"dp": shards}),
    }
    if chunks:
        parts["loss"] = plan.loss.model_copy(update={"kind": "chunked", "chunks": chunks})
    return plan.model_copy(update=parts)


SLOW = tuple(CASES.keys() - {"across", "chunked", "full", "shared", "qwen3-shared", "context-shared"})


@pytest.mark.filterwarnings("ignore:.*_tensor. is deprecated:FutureWarning")  # as spmd_types calls them
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (name in SLOW)) for name, case in CASES.items()],
    ids=list(CASES),
)
def test_every_event(case: Case) -> None:
    whole = replace(case.sizes, s=case.shards * case.sizes.s) if case.context else case.sizes
    plan = plan_of(whole, case.shards, case.chunks, newest=case.newest)
    updates: dict[str, dict[str, object]] = {"fsdp": {"compile_loss": case.compiled}, "layout": {"ep": case.ranks}}
    if case.context:
        updates |= {"layout": {"ep": case.ranks, "dp": 1, "cp": case.shards}, "batch": {"gbs": case.sizes.b}}
    plan = plan.model_copy(update={name: getattr(plan, name).model_copy(update=one) for name, one in updates.items()})
    recompute = ActivationCheckpointing(case.recompute)  # type: ignore[arg-type]
    model = torchtitan_model(plan, Options(accumulates_in_place=False), recompute, ends_apart=True)
    shares = case.ranks > 1
    cut = cut_of_experts(plan) if shares or case.shards > case.sizes.experts else None
    program = fsdp.program(plan, model, Sharding(case.shards, divides=shares, experts=cut))
    sharding = oracle.Sharding(case.shards)
    modes = [case.recompute] * case.sizes.layers
    decoder = Qwen3Moe if case.newest else Decoder
    build = builder(
        *(case.sizes, sharding, modes, case.chunks),
        compiles_loss=case.compiled,
        ranks=case.ranks,
        decoder=decoder,
        context=case.context,
    )
    meshes = (lambda _: expert_meshes(case.shards, case.ranks)) if shares else None
    with local() if case.context else nullcontext():
        steps = oracle.traced(build, sharding, of=meshes)
    check_every_event(program, steps)


@pytest.mark.parametrize("chunks", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_what_a_cuda_graph_captures(chunks: int) -> None:
    """Every backward adds to gradients that are there, and what passes hold lies in pools of their own."""
    plan = plan_of(SMALL, 4, chunks)
    plan = plan.model_copy(update={"fsdp": plan.fsdp.model_copy(update={"cuda_graphs": True})})
    model = torchtitan_model(plan, Options(accumulates_in_place=False), ActivationCheckpointing(), ends_apart=True)
    program = fsdp.program(plan, model, Sharding(4))
    sharding = oracle.Sharding(4)
    steps = oracle.traced(builder(SMALL, sharding, ["op"] * 2, chunks), sharding, keeps_gradients=True)

    modules = [span.module for span in program.spans for _ in span.names]
    forward = [event for module in modules for event in named(module, module.first.forward)]
    backward = [event for module in modules[::-1] for event in named(module, module.first.backward)]
    assert drops_sorted(sizes(forward)) == drops_sorted(sizes(steps.stretches[0]))
    traced_backward = without_grad_loss(steps.stretches[1])
    assert drops_sorted(sizes(without_scalars(backward))) == drops_sorted(sizes(traced_backward))
    held = {event.stream for module in modules for event in module.first.backward if isinstance(event, Hold)}
    assert held <= {8, 9, 10}
    captured = sum(one.bytes for one in program.extra if one.category is Category.INPUTS) // 2
    folded = fold_program(program)
    assert folded.static - captured == steps.before == steps.end
    assert 0 <= max(steps.peaks()[:2]) + captured - folded.backward_peak <= 2 * ROUND


JOB = {"model": "gpt-oss-20b", "framework": "fsdp", "fsdp-code": "torchtitan", "gpu": "h200", "gpus": "16"}
JOB |= {"seq": "4096", "mbs": "1", "layers": "2", "ends-apart": "true"}


def test_what_the_sum_of_rows_allocates_inside() -> None:
    """4 experts of 4096 tokens: an index of every row, sorted, each in int64, and nothing of the size of features."""
    (program,) = programs_of(resolve(read_plan(None, JOB).plan), Options(kernel_workspaces=True))
    layer = next(span.module for span in program.spans if span.module.name == "layer")
    inside = [one for one in layer.steady.forward if isinstance(one, Hold) and one.name.startswith("scatter_")]
    assert {one.category for one in inside} == {Category.WORKSPACES}
    assert [one.bytes for one in inside] == [8 * 4 * 4096] * 4


def test_parameters_are_those_that_are_published() -> None:
    """As ``published_parameters`` of the spec."""
    plan = resolve(read_plan(None, {**JOB, "layers": "24"}).plan)
    (program,) = programs_of(plan, Options())
    assert sum(one.elements for one in program.parameter_tensors()) == 20_914_757_184


def test_what_is_cut_crosswise_has_ids_of_its_own() -> None:
    """Experts are the last parameters of a layer's unit. Had a copy of one of them the id of a gradient, then that
    gradient (34.5 MiB) would stay behind in every iteration. The allocator keeps what is static, rounded to its blocks,
    and cuBLAS's workspaces of two streams."""
    plan = read_plan(None, {**JOB, "gpus": "64", "layers": "4", "seq": "2048"}).plan
    (program,) = programs_of(resolve(plan), Options(kernel_workspaces=True))
    kept = estimate(plan).to_dict()["stages"][0]["static_bytes"]
    assert 0 <= kept - fold_program(program).static - 2 * 32 * MIB < 8 * MIB


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"ep": "2"}, ""),
        ({"ep": "3"}, "layout.ep = 3: must divide the 32 experts"),
        ({"ep": "2", "fsdp-cuda-graphs": "true"}, "layout.ep = 2: must be 1 with CUDA graphs, as torchtitan itself"),
        ({"tp": "2"}, "layout.tp = 2: must be 1 with torchtitan's gpt_oss"),
        ({"gpus": "77", "gpus-per-node": "77"}, "model.expert_ffn = 2880: must be a multiple of 77"),
        ({"gpus": "64"}, ""),
        ({"gpus": "64", "fsdp-replicas": "2"}, ""),
        ({"gpu": "a100-80gb"}, "hardware.gpu = a100-80gb: must be of Hopper or later"),
        ({"dtype": "fp32"}, "precision.dtype = fp32: must be bf16"),
        ({"ends-apart": "false"}, "fsdp.ends_apart = false: must be true"),
        ({"attention": "eager"}, "attention = eager: must be flash"),
        ({"attention-bias": "false"}, "model.attention_bias = false: must be true in torchtitan's gpt_oss"),
        ({"sliding-window": "256"}, "model.sliding_window = 256: must be 128 in torchtitan's gpt_oss"),
        ({"tied-embeddings": "true"}, "model.tied_embeddings = true: must be false in torchtitan's gpt_oss"),
        ({"lora-rank": "8"}, "lora.rank = 8: must be left out"),
        ({"fsdp-cuda-graphs": "true"}, ""),
        ({"fsdp-cuda-graphs": "true", "fsdp-offload": "true"}, "fsdp.offload = true: must be false with CUDA graphs"),
        ({"fsdp-cuda-graphs": "true", "pp": "2"}, "layout.pp = 2: must be 1 with CUDA graphs, as torchtitan itself"),
        ({"loss": "chunked", "loss-chunks": "1"}, "loss.chunks = 1: must be 2 or more under fsdp"),
        ({"loss": "chunked", "fsdp-offload": "true"}, "fsdp.offload = true: must be false with loss.kind chunked"),
        ({"loss": "chunked", "fsdp-code": "transformers"}, "loss.kind = chunked: must be another with transformers"),
    ],
)
def test_what_is_refused(flags: dict[str, str], says: str) -> None:
    if not says:
        assert len(programs_of(resolve(read_plan(None, {**JOB, **flags}).plan), Options())) == 1
        return
    with pytest.raises(PlanError, match=re.escape(says)) as caught:
        programs_of(resolve(read_plan(None, {**JOB, **flags}).plan), Options())
    assert "\n" not in str(caught.value)
