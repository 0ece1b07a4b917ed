"""torchtitan's Llama in pipeline stages, against PyTorch's own schedules run on fake tensors, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from memplan.frameworks.fsdp.stages import stage_programs
from memplan.frameworks.fsdp.torchtitan import ActivationCheckpointing, Checkpointing
from memplan.frameworks.fsdp.units import Sharding
from memplan.layers.module import Options
from memplan.plan.plan import Plan
from memplan.schedules.torch_schedules import Pipelined, Place
from memplan.tape.program import Program, fold_program, static

from ..oracle import fsdp as oracle
from ..oracle.pipelining import Marks, Pipeline, traced_pipeline
from ..oracle.torchtitan import Sizes
from .test_fsdp_torchtitan import plan_of


@dataclass(frozen=True)
class Case:
    edges: tuple[int, ...]
    """First layers of the stages, and the number of layers."""
    ranks: int
    microbatches: int
    schedule: str = "1f1b"
    recompute: Checkpointing = "none"
    ends_apart: bool = False
    reduce: str = "fp32"
    replicas: int = 1
    outputs: bool = False
    shards: int = 4
    tensor: int = 1
    parallel_loss: bool = False
    only: tuple[int, ...] | None = None

    @property
    def sizes(self) -> Sizes:
        vocab = 1003 if self.tensor == 1 else 1002
        return Sizes(hidden=96, heads=6, kv_heads=2, ffn=224, vocab=vocab, layers=self.edges[-1], b=2, s=48)

    @property
    def dp(self) -> int:
        return self.shards * self.replicas

    @property
    def chunks(self) -> int:
        return (len(self.edges) - 1) // self.ranks


CASES = {
    "1f1b-more": Case((0, 2, 3), 2, 3),
    "1f1b-equal-op": Case((0, 1, 2, 3, 4), 4, 4, recompute="op", ends_apart=True, only=(1, 3)),
    "1f1b-bf16": Case((0, 1, 2), 2, 2, reduce="bf16", only=(0,)),
    "1f1b-replicated": Case((0, 1, 2), 2, 2, replicas=2, only=(0,)),
    "1f1b-replicated-bf16": Case((0, 1, 2), 2, 2, replicas=2, reduce="bf16", only=(1,)),
    "1f1b-outputs": Case((0, 1, 2), 2, 3, outputs=True, only=(1,)),
    "gpipe-fewer-full": Case((0, 1, 2, 3, 4), 4, 2, "gpipe", recompute="full", only=(2, 3)),
    "interleaved": Case((0, 1, 2, 3, 4), 2, 3, "interleaved", recompute="full", ends_apart=True),
    "interleaved-bf16": Case((0, 0, 1, 2, 2), 2, 2, "interleaved", reduce="bf16"),
    "1f1b-tp": Case((0, 2, 3), 2, 3, tensor=2, parallel_loss=True),
    "gpipe-tp-op": Case((0, 1, 2), 2, 2, "gpipe", recompute="op", tensor=2, outputs=True, only=(1,)),
    "interleaved-tp-bf16": Case((0, 0, 1, 2, 2), 2, 2, "interleaved", reduce="bf16", tensor=2, parallel_loss=True),
    "1f1b-one-shard": Case((0, 2, 3), 2, 2, shards=1, only=(0,)),
    "interleaved-one-shard": Case((0, 0, 1, 2, 2), 2, 2, "interleaved", shards=1, replicas=2, only=(1,)),
    "1f1b-tp-one-shard": Case((0, 1, 2), 2, 2, recompute="full", shards=1, tensor=2, parallel_loss=True),
    "interleaved-evicts": Case((0, 0, 1, 2, 3, 4, 5, 6, 6), 2, 2, "interleaved", only=(1,)),
}
RANKS = [
    pytest.param(case, rank, id=f"{name}-{rank}")
    for name, case in CASES.items()
    for rank in case.only or range(case.ranks)
]


def plan_for(case: Case) -> Plan:
    """Entries are embedding, layers, norm and head."""
    plan = plan_of(case.sizes)
    entries = (0, *(edge + 1 for edge in case.edges[1:-1]), case.edges[-1] + 3)
    updates = {
        "batch": {"gbs": case.sizes.b * case.dp * case.microbatches},
        "layout": {"pp": case.ranks, "vpp": case.chunks, "dp": case.dp, "tp": case.tensor},
        "loss": {"kind": "vocab-parallel" if case.parallel_loss else "plain"},
        "pipeline": {"schedule": "gpipe" if case.schedule == "gpipe" else "1f1b", "partition": entries},
        "fsdp": {
            "code": "torchtitan",
            "replicas": case.replicas,
            "return_outputs": case.outputs,
            "ends_apart": case.ends_apart,
            "reshard_after_forward": False,
        },
    }
    sections = {name: getattr(plan, name).model_copy(update=update) for name, update in updates.items()}
    return plan.model_copy(update=sections)


def programs(case: Case, *, in_place: bool = False) -> tuple[Program, ...]:
    recompute = ActivationCheckpointing(case.recompute)
    divides = case.shards == 1
    sharding = Sharding(case.shards, case.replicas, reduce=case.reduce, tensor=case.tensor, divides=divides)
    return stage_programs(plan_for(case), Options(accumulates_in_place=in_place), recompute, sharding)


def marks_of(program: Program, place: Place) -> Marks:
    """What the estimate says where the oracle looks."""
    assert isinstance(program.order, Pipelined)
    order, folded, held = program.order, fold_program(program), static(program).net
    marks = Marks(held, ["begin"], [held], [held])
    letters = {"forward": "F", "backward": "B", "reduce": "R"}
    for action, level in zip(order.actions, order.levels, strict=True):
        if action.what in letters:
            number = "" if action.what == "reduce" else action.microbatch
            marks.names.append(f"{letters[action.what]}{place.stage(action.chunk)}.{number}")
            marks.levels.append(held + level)
            marks.peaks.append(held + level)
        marks.peaks[-1] = max(marks.peaks[-1], held + level + order.excursion(action).peak)
    marks.names += ["step", "end"]
    marks.levels += [held + order.whole.net, folded.static]
    marks.peaks.append(folded.step_peak)
    marks.end = folded.static
    return marks


@pytest.mark.parametrize(("case", "rank"), RANKS)
def test_every_pass(case: Case, rank: int) -> None:
    """Bytes held as each pass begins, the peak of each, and what is held between iterations."""
    tensor = case.tensor, case.parallel_loss
    pipeline = Pipeline(case.edges, case.ranks, case.schedule, case.microbatches, case.outputs, *tensor)
    sharding = oracle.Sharding(case.shards, case.replicas, reduce_dtype=case.reduce)
    traced = traced_pipeline(case.sizes, pipeline, rank, sharding, case.recompute, ends_apart=case.ends_apart)
    program = programs(case)[rank]
    assert marks_of(program, Place(rank, case.ranks, case.chunks)) == traced
    assert fold_program(program).peak == max(traced.peaks)
