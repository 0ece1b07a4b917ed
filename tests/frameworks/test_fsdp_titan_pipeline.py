"""torchtitan's Qwen 3 and DeepSeek V3 in pipeline stages, against PyTorch's own schedules run on fake tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from memplan.estimate import estimate, programs_of
from memplan.frameworks.fsdp.stages import stage_programs
from memplan.frameworks.fsdp.torchtitan import (
    ActivationCheckpointing,
    Checkpointing,
    cut_of_experts,
    places,
    recipes,
)
from memplan.frameworks.fsdp.units import Sharding
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.schedules.torch_schedules import Place
from memplan.tape.events import Category
from memplan.tape.program import fold_program

from ..oracle import fsdp as oracle, titan_experts, titan_tp
from ..oracle.pipelining import Pipeline, traced_pipeline
from ..oracle.titan_models import Sizes, stage
from .test_fsdp_pipeline import marks_of
from .test_fsdp_titan import LATENT, MIXED, QWEN_3, QWEN_3_MOE, V3, plan_of


@dataclass(frozen=True)
class Case:
    sizes: Sizes
    edges: tuple[int, ...]
    """First layers of the stages, and the number of layers."""
    ranks: int
    microbatches: int
    schedule: str = "1f1b"
    recompute: Checkpointing = "none"
    rank: int = 0
    shards: int = 4
    together: int = 1
    """Ranks that share experts."""
    tp: int = 1
    loss_chunks: int = 0

    @property
    def chunks(self) -> int:
        return (len(self.edges) - 1) // self.ranks


CASES = {
    "qwen3": Case(QWEN_3, (0, 2, 3), 2, 3, rank=1),
    "qwen3-moe-first": Case(QWEN_3_MOE, (0, 2, 3), 2, 2),
    "deepseek-v2-op": Case(LATENT, (0, 1, 3), 2, 2, recompute="op", rank=1),
    "deepseek-v3-interleaved-full": Case(replace(V3, layers=4), (0, 0, 1, 3, 4), 2, 2, "interleaved", "full", 1),
    "experts-shared": Case(replace(QWEN_3_MOE, experts=96), (0, 2, 3), 2, 2, shards=8, together=4),
    "experts-shared-interleaved-full": Case(
        replace(V3, layers=4), (0, 1, 2, 3, 4), 2, 2, "interleaved", "full", 1, shards=8, together=4
    ),
    "tp": Case(replace(V3, layers=2, vocab=1008), (0, 1, 2), 2, 2, rank=1, together=4, tp=2),
    "tp-first-stage-op": Case(replace(MIXED, layers=2, vocab=1008), (0, 1, 2), 2, 2, recompute="op", together=4, tp=2),
    "tp-interleaved-full": Case(
        replace(V3, layers=4, vocab=1008), (0, 0, 1, 3, 4), 2, 2, "interleaved", "full", together=4, tp=2
    ),
    "chunked": Case(QWEN_3, (0, 2, 3), 2, 3, rank=1, loss_chunks=2),
    "chunked-interleaved": Case(
        replace(QWEN_3, layers=4), (0, 1, 2, 3, 4), 2, 4, "interleaved", "full", 1, loss_chunks=4
    ),
    "chunked-shared": Case(replace(QWEN_3_MOE, experts=96), (0, 2, 3), 2, 3, "1f1b", "op", 1, 8, 4, loss_chunks=4),
    "chunked-tp": Case(replace(V3, layers=2, vocab=1008), (0, 1, 2), 2, 3, rank=1, together=4, tp=2, loss_chunks=4),
    "qwen3-moe-gpipe": Case(QWEN_3_MOE, (0, 1, 3), 2, 2, "gpipe", rank=1, shards=2),
}


SLOW = ("tp-first-stage-op", "tp-interleaved-full", "chunked-interleaved", "chunked-tp", "chunked-shared")


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # hidden states for chunks are a view
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (name in SLOW), id=name) for name, case in CASES.items()]
)
def test_every_pass(case: Case) -> None:
    """Bytes held as each pass begins, the peak of each, and what is held between iterations."""
    entries = (0, *(edge + 1 for edge in case.edges[1:-1]), case.edges[-1] + 3)
    plan = plan_of(case.sizes)
    updates: dict[str, dict[str, object]] = {
        "batch": {"gbs": case.sizes.b * case.shards * case.microbatches},
        "layout": {"pp": case.ranks, "vpp": case.chunks, "dp": case.shards, "ep": case.together, "tp": case.tp},
        "pipeline": {"schedule": "gpipe" if case.schedule == "gpipe" else "1f1b", "partition": entries},
        "loss": {"kind": "chunked", "chunks": case.loss_chunks}
        if case.loss_chunks
        else {"kind": "vocab-parallel" if case.tp > 1 else "plain"},
        "fsdp": {"code": "torchtitan", "reshard_after_forward": False},
    }
    sections = {name: getattr(plan, name).model_copy(update=update) for name, update in updates.items()}
    plan = plan.model_copy(update=sections)
    recompute = ActivationCheckpointing(case.recompute)
    cut = cut_of_experts(plan) if case.together > 1 else None
    held = Sharding(case.shards, divides=case.together > 1, experts=cut, tensor=case.tp)
    program = stage_programs(plan, Options(accumulates_in_place=False), recompute, held)[case.rank]

    pipeline = Pipeline(
        *(case.edges, case.ranks, case.schedule, case.microbatches),
        tensor=case.tp,
        parallel_loss=case.tp > 1,
        chunks=case.loss_chunks,
    )
    sharding = oracle.Sharding(case.shards)
    if case.together > 1:
        make = titan_tp.traced_stages if case.tp > 1 else titan_experts.traced_stages
        traced = make(case.sizes, pipeline, case.rank, sharding, case.recompute, case.together)
    else:
        traced = traced_pipeline(case.sizes, pipeline, case.rank, sharding, case.recompute, ends_apart=True, make=stage)
    marks = marks_of(program, Place(case.rank, case.ranks, case.chunks))
    assert (marks.before, marks.end, marks.names) == (traced.before, traced.end, traced.names)
    made = recipes(plan)
    spare = places(made.shape, made.titan, range(case.sizes.layers)) if case.together > 1 else ()
    most = sum(one.bytes for one in spare)  # where passes are in flight, the module's places are one of them
    most += 3 * 512 * -(-case.sizes.hidden * 4 // 512) * (case.loss_chunks > 0)  # gradients of the norm
    head = (case.sizes.vocab // case.shards + 1) * case.sizes.hidden * 4
    for mine, real in ((marks.levels, traced.levels), (marks.peaks, traced.peaks)):
        over = [one - other for one, other in zip(mine, real, strict=True)]
        assert min(over) >= 0
        larger = [one for one in over if one > most]
        if case.loss_chunks:  # while the second micro-batch has not reduced
            assert len(larger) == 2
            assert max(larger) <= most + head
        else:
            assert not larger
    assert 0 <= fold_program(program).peak - max(traced.peaks) <= most


MIXTURE = {"model": "qwen3-30b-a3b", "framework": "fsdp", "fsdp-code": "torchtitan", "gpu": "h200", "gpus": "16"}
MIXTURE |= {"seq": "2048", "mbs": "1", "layers": "4", "pp": "2", "gbs": "32"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"ep": "16"}, "layout.ep = 16: must divide the 8 shards"),
        ({"tp": "2", "ep": "128"}, "must divide the 4 shards (dp / fsdp.replicas), 2 ranks of tensor parallelism each"),
        ({"gbs": "8"}, "gives 1 micro-batches; 1f1b needs at least as many as the 2 stages"),
        ({"reshard-after-forward": "true"}, "fsdp.reshard_after_forward = true: must be false with pipeline"),
        ({"fsdp-offload": "true"}, "fsdp.offload = true: must be false with pipeline parallelism"),
        ({"gradient-sync": "false"}, "fsdp.gradient_sync = false: must be true with pipeline parallelism"),
        ({"schedule": "gpipe", "loss": "chunked"}, "pipeline.schedule = gpipe: must be 1f1b with loss.kind chunked"),
        ({"fsdp-replicas": "2", "loss": "chunked"}, "fsdp.replicas = 2: must be 1 with loss.kind chunked in stages"),
        ({"vpp": "2", "schedule": "gpipe"}, "pipeline.schedule = gpipe: must be 1f1b with vpp > 1"),
        ({"pp": "8", "gbs": "16"}, "layout.pp = 8: makes 8 stages, which must be at most 6"),
        ({"gpu": "a100-80gb"}, "hardware.gpu = a100-80gb: must be of Hopper or later"),
        ({"dtype": "fp32"}, "precision.dtype = fp32: must be bf16"),
        ({"ep": "3"}, "layout.ep = 3: must divide the 128 experts"),
    ],
)
def test_what_is_refused(flags: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        programs_of(resolve(read_plan(None, {**MIXTURE, **flags}).plan), Options())


def test_experts_are_shared_in_stages() -> None:
    plan = resolve(read_plan(None, {**MIXTURE, "ep": "4"}).plan)
    for program in programs_of(plan, Options()):
        shapes = {one.name: one.shape for one in program.parameter_tensors() if one.expert}
        assert shapes["experts.w1"] == (32, 768, 2048)


def test_experts_are_counted_in_their_stage() -> None:
    """DeepSeek's first layer has none: the second stage has buffers of two mixtures more than the first's one."""
    plan = resolve(read_plan(None, {**MIXTURE, "model": "deepseek-v2-lite", "layers": "6"}).plan)
    first, second = programs_of(plan, Options())
    counted = [sum(one.name == "expert_bias" for one in program.extra) for program in (first, second)]
    assert counted == [2, 3]


def test_the_allocator_holds_what_tapes_request() -> None:
    """The input of the head's reduction ends with the next micro-batch's, and the weights of norm and head with the
    next one's forward: in the replay, too, however many there are."""
    plan = {**MIXTURE, "model": "llama-3-8b", "gpus": "4", "gbs": "12", "loss": "chunked"}
    for one in estimate(read_plan(None, plan).plan).stages:
        assert one.allocated is not None
        assert 0 <= one.allocated - one.requested < 100 << 20
        assert one.breakdown[Category.BLOCK_ROUNDING] < 1 << 20
        assert min(one.breakdown) >= 0
