"""torchtitan's newest layers in pipeline stages, against PyTorch's own schedules run on fake tensors."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest

from memplan.estimate import programs_of
from memplan.frameworks.fsdp.stages import stage_programs
from memplan.frameworks.fsdp.titan_experts import cut_of_experts
from memplan.frameworks.fsdp.torchtitan import ActivationCheckpointing, Checkpointing
from memplan.frameworks.fsdp.units import Sharding
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.schedules.torch_schedules import Place
from memplan.tape.program import fold_program

from ..oracle import fsdp as oracle, titan_gpt_oss, titan_muse, titan_newest
from ..oracle.pipelining import Pipeline, traced_pipeline
from ..oracle.titan_qwen35 import Qwen35, Qwen35MoE
from ..oracle.torchtitan_tp import local
from . import test_fsdp_gpt_oss as gpt_oss, test_fsdp_muse as muse, test_fsdp_qwen35 as qwen35
from .test_fsdp_pipeline import marks_of

NEWEST = {"fsdp-newest": "true"}
DECODERS: dict[str, Any] = {
    "llama": titan_newest.Llama,
    "qwen3": titan_newest.Qwen3,
    "qwen3-moe": titan_newest.Qwen3Moe,
    "muse": titan_muse.Decoder,
    "gpt-oss": titan_gpt_oss.Decoder,
    "qwen3.5": Qwen35,
    "qwen3.5-moe": Qwen35MoE,
}


@dataclass(frozen=True)
class Case:
    model: str
    edges: tuple[int, ...]
    """First layers of the stages, and the number of layers."""
    microbatches: int
    schedule: str = "1f1b"
    recompute: Checkpointing = "none"
    rank: int = 0
    loss_chunks: int = 0
    context: bool = False
    """All ranks of a stage share sequences."""
    shards: int = 4
    together: int = 1
    """Ranks that share experts."""

    @property
    def sizes(self) -> Any:
        found: dict[str, Any] = {
            "llama": muse.FEW,
            "qwen3": muse.FEW,
            "muse": muse.FEW,
            "qwen3.5": qwen35.SMALL,
            "qwen3.5-moe": qwen35.MIXED,
        }
        return replace(found.get(self.model, gpt_oss.SMALL), layers=self.edges[-1])

    def plan(self) -> ResolvedPlan:
        sizes = replace(self.sizes, s=4 * self.sizes.s) if self.context else self.sizes
        if self.model == "muse":
            return muse.plan_of(sizes, 4, 0)
        if self.model in ("llama", "qwen3"):
            return muse.plan_of(sizes, 4, 0, model={"llama": "llama-3-8b"}.get(self.model, "qwen3-8b"), **NEWEST)
        if self.model.startswith("qwen3.5"):
            return qwen35.plan_of(sizes, 4, 0)
        return gpt_oss.plan_of(sizes, 4, newest=self.model == "qwen3-moe")

    @property
    def chunks(self) -> int:
        return (len(self.edges) - 1) // 2


CASES = {
    "llama-first": Case("llama", (0, 1, 3), 2),
    "llama-op": Case("llama", (0, 2, 3), 3, recompute="op", rank=1),
    "qwen3-interleaved-full": Case("qwen3", (0, 1, 2, 3, 4), 2, "interleaved", "full", 1),
    "qwen3-moe": Case("qwen3-moe", (0, 1, 2), 2, rank=1),
    "muse": Case("muse", (0, 1, 2), 2, rank=1),
    "gpt-oss-first-op": Case("gpt-oss", (0, 2, 3), 2, recompute="op"),
    "gpt-oss": Case("gpt-oss", (0, 1, 2), 3, rank=1),
    "gpt-oss-chunked": Case("gpt-oss", (0, 1, 2), 3, "1f1b", "full", 1, loss_chunks=4),
    "qwen3.5": Case("qwen3.5", (0, 1, 2), 2, rank=1),
    "gpt-oss-shared": Case("gpt-oss", (0, 1, 2), 2, rank=1, shards=8, together=4),
    "gpt-oss-first-shared-op": Case("gpt-oss", (0, 2, 3), 3, recompute="op", shards=8, together=2),
    "qwen3-moe-shared-interleaved": Case(
        "qwen3-moe", (0, 1, 2, 3, 4), 2, "interleaved", "full", 1, shards=8, together=4
    ),
    "qwen3.5-shared-chunked": Case("qwen3.5-moe", (0, 1, 2), 3, "1f1b", "op", 1, 4, shards=8, together=4),
    "llama-context": Case("llama", (0, 1, 2), 2, recompute="op", rank=1, context=True),
    "gpt-oss-first-context": Case("gpt-oss", (0, 1, 2), 2, context=True),
    "qwen3.5-first-full": Case("qwen3.5-moe", (0, 1, 2), 2, recompute="full"),
}


SLOW = CASES.keys() - {"llama-op", "gpt-oss", "qwen3.5"}


@pytest.mark.filterwarnings("ignore:.*_tensor. is deprecated:FutureWarning")  # as spmd_types calls them
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # hidden states for chunks are a view
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (name in SLOW), id=name) for name, case in CASES.items()]
)
def test_every_pass(case: Case) -> None:
    """Bytes held as each pass begins, the peak of each, and what is held between iterations."""
    entries = (0, *(edge + 1 for edge in case.edges[1:-1]), case.edges[-1] + 3)
    plan, sizes = case.plan(), case.sizes
    updates: dict[str, dict[str, object]] = {
        "batch": {"gbs": sizes.b * case.shards * case.microbatches},
        "layout": {"pp": 2, "vpp": case.chunks, "dp": case.shards, "ep": case.together},
        "pipeline": {"partition": entries},
        "loss": {"kind": "chunked", "chunks": case.loss_chunks} if case.loss_chunks else {"kind": "plain"},
        "fsdp": {"code": "torchtitan", "reshard_after_forward": False},
    }
    if case.context:
        updates["batch"] = {"gbs": sizes.b * case.microbatches}
        updates["layout"] |= {"dp": 1, "cp": 4}
    sections = {name: getattr(plan, name).model_copy(update=update) for name, update in updates.items()}
    plan = plan.model_copy(update=sections)
    recompute = ActivationCheckpointing(case.recompute)
    cut = cut_of_experts(plan) if case.together > 1 else None
    held = Sharding(case.shards, divides=case.together > 1, experts=cut)
    program = stage_programs(plan, Options(accumulates_in_place=False), recompute, held)[case.rank]
    pipeline = Pipeline(case.edges, 2, case.schedule, case.microbatches, chunks=case.loss_chunks, packed=True)
    pipeline = replace(pipeline, context=case.context)
    make = titan_newest.stage(DECODERS[case.model])
    with local() if case.context or case.together > 1 else nullcontext():
        traced = traced_pipeline(
            *(sizes, pipeline, case.rank, oracle.Sharding(case.shards), case.recompute),
            ends_apart=True,
            make=make,
            expert_ranks=case.together,
        )
    marks = marks_of(program, Place(case.rank, 2, case.chunks))
    if not case.loss_chunks:
        assert marks == traced
        assert fold_program(program).peak == max(traced.peaks)
        return
    assert (marks.before, marks.end, marks.names) == (traced.before, traced.end, traced.names)
    most = 3 * 512 * -(-sizes.hidden * 4 // 512)  # gradients of the norm
    head = (sizes.vocab // case.shards + 1) * sizes.hidden * 4
    for mine, real in ((marks.levels, traced.levels), (marks.peaks, traced.peaks)):
        over = [one - other for one, other in zip(mine, real, strict=True)]
        assert min(over) >= 0
        assert max(over) <= most + head


STAGED = {"framework": "fsdp", "fsdp-code": "torchtitan", "gpu": "h200", "gpus": "16", "seq": "2048", "mbs": "1"}
STAGED |= {"layers": "4", "pp": "2", "gbs": "64", "loss": "plain"}


def test_what_a_stage_has_of_every_micro_batch() -> None:
    """Of 8 micro-batches of 2,048 tokens their positions, and where documents begin."""
    plan = resolve(read_plan(None, {**STAGED, "model": "gpt-oss-20b"}).plan)
    for program in programs_of(plan, Options()):
        found = [one.bytes for one in program.extra if one.name in ("positions", "document_starts")]
        assert sorted(found) == [512] * 8 + [8 * 2048] * 8


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"model": "gpt-oss-20b", "gpus": "128", "gbs": "512"},
            "layout.dp = 64: must be at most 32 with pipeline stages of torchtitan's gpt_oss",
        ),
        ({"model": "qwen3.5-9b", "cp": "2"}, "layout.cp = 2: must be 1 with torchtitan's qwen3_5"),
    ],
)
def test_what_is_refused(flags: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        programs_of(resolve(read_plan(None, {**STAGED, **flags}).plan), Options())
