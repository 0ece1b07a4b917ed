"""Plans with pipeline parallelism under FSDP: defaults, refusals, and what holds of every one of them."""

from __future__ import annotations

from itertools import takewhile

import pytest

from memplan.allocator.caching import AllocatorSettings
from memplan.allocator.recorded import Request, record
from memplan.allocator.replay import replay
from memplan.estimate import detail, estimate, programs_of
from memplan.frameworks.fsdp.hooks import REDUCING
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.schedules.torch_schedules import Pipelined
from memplan.tape.events import Category, compose
from memplan.tape.program import Program, fold_program, static

FLAGS = {
    "model": "llama-3-8b",
    "framework": "fsdp",
    "fsdp-code": "torchtitan",
    "layers": "8",
    "dp": "2",
    "pp": "4",
    "gbs": "16",
    "seq": "256",
}
INTERLEAVED = {**FLAGS, "pp": "2", "vpp": "4"}
PARTS = {**FLAGS, "tp": "2"}
OLD = {"ends-apart": "false"}
"""torchtitan before 28 July 2025."""


def plan_of(flags: dict[str, str]) -> Plan:
    return resolve(read_plan(None, flags).plan)


def programs(flags: dict[str, str]) -> tuple[Program, ...]:
    return programs_of(plan_of(flags), Options())


def pipelined(program: Program) -> Pipelined:
    assert isinstance(program.order, Pipelined)
    return program.order


def test_parameters_stay_whole_unless_somebody_says_otherwise() -> None:
    assert not plan_of(FLAGS).fsdp.reshard_after_forward
    assert resolve(plan_of(FLAGS)) == plan_of(FLAGS)
    assert plan_of({**FLAGS, "pp": "1"}).fsdp.reshard_after_forward


@pytest.mark.parametrize(
    ("flags", "apart", "outputs"),
    [
        ({}, True, False),
        ({"return-outputs": "true"}, True, True),
        (OLD, False, True),
        ({"pp": "1"}, False, False),
        ({"pp": "1", **OLD}, False, False),
        ({"tp": "2", "vpp": "2"}, True, False),
    ],
    ids=["0.2.1", "0.2.0", "0.1.0", "one-stage", "one-old-stage", "interleaved"],
)
def test_stages_are_those_of_a_release(flags: dict[str, str], apart: bool, outputs: bool) -> None:
    """``apply_fsdp`` and ``train.py`` (``pp_schedule.step``) of torchtitan's tags v0.1.0, v0.2.0, v0.2.1 and v0.2.2."""
    given = plan_of({**FLAGS, **flags}).fsdp
    assert (given.ends_apart, given.return_outputs) == (apart, outputs)


class Segments:
    """Bytes of the segments that the stream of reductions takes."""

    def __init__(self) -> None:
        self.taken = 0

    def begins(self, request: Request) -> None:
        pass

    def ends(self, address: int, size: int, stream: int) -> None:
        pass

    def reserves(self, address: int, size: int, stream: int) -> None:
        self.taken += size if stream == REDUCING else 0


@pytest.mark.parametrize(("old", "mebibytes"), [(False, 3 * 834 + 2 * 2006), (True, 2 * 2006 + 834)])
def test_the_allocator_reserves_more_where_the_ends_are_reduced_last(old: bool, mebibytes: int) -> None:
    """``perform_reduce_grad`` reduces units in the order of ``named_modules()``: norm and head as a unit of their own
    behind the layers, as a part of the root before them. With one shard a reduction has an output, which stays, and a
    copy that is divided: 832 MiB of each of two layers, 2,004 of norm and head, in segments of whole 2 MiB.

    Behind the layers: output and copy; the next output in the room of that copy, and a copy; output and copy of the
    ends. Before them: output and copy of the ends; output and copy of a layer in the room of that copy; the next
    output in the room of the layer's copy, and a copy."""
    flags = {**FLAGS, "layers": "4", "pp": "2", "dp": "1", "gbs": "2", "return-outputs": "false"}
    witness = Segments()
    record(programs({**flags, **OLD} if old else flags)[-1], AllocatorSettings(), (), witness)
    assert witness.taken == mebibytes << 20


def test_every_rank_says_what_it_holds() -> None:
    result = estimate(plan_of(INTERLEAVED))
    first, second = result.stages
    assert first.modules == ("embedding", *(f"layer.{at}" for at in (0, 3, 5, 7)))
    assert second.modules == (*(f"layer.{at}" for at in (1, 2, 4, 6)), "final_norm", "head", "loss")
    assert (first.ranks, second.ranks) == ((0, 1), (2, 3))
    assert first.moments["evaluation"] is None
    assert any("torch.distributed.pipelining" in line for line in result.assumptions)
    assert not any("Trainer" in line for line in result.assumptions)


def test_layers_are_split_by_the_age_of_torchtitan() -> None:
    flags = {**FLAGS, "layers": "7"}
    assert [len(program.entries) for program in programs({**flags, **OLD})] == [2, 2, 2, 5]
    assert [len(program.entries) for program in programs(flags)] == [3, 2, 2, 4]
    by_hand = programs({**FLAGS, "partition": "0,1,6,8,11"})
    assert [program.entries[0] for program in by_hand] == ["embedding", "layer.0", "layer.5", "layer.7"]


def test_every_second_layer_is_one_of_the_ranks_own() -> None:
    """``_apply_ac_to_transformer_block`` counts the blocks that a process builds, whichever stage they are in."""
    rank = programs({**INTERLEAVED, "recompute": "full", "recompute-every": "2"})[0]
    kept = {span.names[0]: span.module.steady.forward_fold.net for span in rank.spans}
    hidden = 256 * 4096 * 2
    assert kept["layer.3"] == kept["layer.7"] == hidden
    assert min(kept["layer.0"], kept["layer.5"]) > 10 * hidden


def test_receive_buffers_are_there_for_every_micro_batch() -> None:
    """Hidden states of (b, s, h) in bf16, received from the stage before and, as gradients, from the one behind."""
    hidden = 256 * 4096 * 2
    buffers = [static(program).net_by[Category.COMMUNICATION_BUFFERS] for program in programs(FLAGS)]
    assert buffers == [8 * hidden, 16 * hidden, 16 * hidden, 8 * hidden]


def test_a_part_of_the_sequence_crosses_stages() -> None:
    """(b, s / t, h): sequence parallelism's residual stream; logits are (b, s, v / t) with ``loss_parallel``."""
    whole, parts = (programs({**flags, "return-outputs": "true"}) for flags in (FLAGS, PARTS))
    for one, other in zip(whole, parts, strict=True):
        buffers = [static(program).net_by[Category.COMMUNICATION_BUFFERS] for program in (one, other)]
        assert buffers[0] == 2 * buffers[1] > 0
        assert (len(one.ranks), len(other.ranks)) == (2, 4)
    kept = [static(programs[-1]).net_by[Category.LOGITS] for programs in (whole, parts)]
    assert kept == [8 * 256 * 128_256 * 2, 8 * 256 * 64_128 * 2]


def test_the_embeddings_gradient_waits_whole() -> None:
    """``embedding_dense_backward`` has no table in parts, and the copy in fp32 that waits for the reduction has the
    placement that autograd left: 128256 × 4096 × 4 bytes on every rank, of which 1 / t is reduced."""
    first = programs(PARTS)[0]
    order = pipelined(first)
    before = takewhile(lambda action: action.what != "reduce", order.actions)
    held = compose(map(order.excursion, before)).net_by[Category.GRADIENTS]
    elements = sum(one.elements for one in first.parameter_tensors())
    assert held == 4 * (elements + 128_256 * 4096 // 2)
    assert order.whole.net_by[Category.GRADIENTS] == 4 * (first.elements or 0)


def test_one_shard_is_said() -> None:
    """torchtitan shards across one rank since April 2026 only."""
    said = [
        any("over one rank" in line for line in estimate(plan_of({**FLAGS, **flags})).assumptions)
        for flags in ({}, {"dp": "1"}, {"fsdp-replicas": "2"}, {"dp": "1", "tp": "2"})
    ]
    assert said == [False, True, True, True]


def test_gradients_are_whole_until_the_reduction() -> None:
    """In fp32, whatever the number of shards; parameters in bf16."""
    few, many = (programs({**FLAGS, "dp": dp, "gbs": gbs})[1] for dp, gbs in (("2", "16"), ("8", "64")))
    for program in (few, many):
        elements = sum(one.elements for one in program.parameter_tensors())
        order = pipelined(program)
        before = takewhile(lambda action: action.what != "reduce", order.actions)
        held = compose(map(order.excursion, before)).net_by
        assert held[Category.GRADIENTS] == 4 * elements
        assert held[Category.GATHERED_PARAMETERS] == 2 * elements
    assert few.elements == 4 * many.elements


@pytest.mark.parametrize("gbs", ["16", "80"])
@pytest.mark.parametrize(
    "flags",
    [
        FLAGS,
        {**FLAGS, "schedule": "gpipe"},
        INTERLEAVED,
        {**FLAGS, "return-outputs": "true"},
        PARTS,
        {**INTERLEAVED, "tp": "4", "partition": "0,1,2,3,4,5,6,8,11"},
        {**PARTS, "dp": "1", "gbs": "8"},
    ],
    ids=["1f1b", "gpipe", "vpp", "outputs", "tp", "vpp-tp", "tp-one-shard"],
)
def test_the_allocator_sees_what_is_requested(flags: dict[str, str], gbs: str) -> None:
    """But for what blocks are larger than requests both peaks are one, at every number of micro-batches."""
    made = programs({**flags, "gbs": gbs, "recompute": "full"})
    for program, replayed in zip(made, replay(made, AllocatorSettings(), ()), strict=True):
        folded = fold_program(program)
        rounding = replayed.breakdown[Category.BLOCK_ROUNDING]
        assert 0 <= replayed.static - folded.static <= rounding
        assert 0 <= replayed.allocated - folded.peak <= rounding + 1024
        assert replayed.reserved >= replayed.allocated


def test_kept_outputs_lie_there_between_iterations() -> None:
    """Logits (b, s, v) in bf16 of every micro-batch, on the last stage."""
    kept, dropped = (programs({**FLAGS, "return-outputs": value}) for value in ("true", "false"))
    more = [fold_program(one).static - fold_program(other).static for one, other in zip(kept, dropped, strict=True)]
    assert more == [0, 0, 0, 8 * 256 * 128_256 * 2]


@pytest.mark.parametrize("flags", [FLAGS, INTERLEAVED], ids=["1f1b", "vpp"])
def test_an_iteration_leaves_sharded_gradients_alone(flags: dict[str, str]) -> None:
    for program in programs(flags):
        left = program.order.whole.net_by
        assert left[Category.GRADIENTS] == sum(left) == 4 * (program.elements or 0)


def test_what_a_schedule_keeps_is_said() -> None:
    """Whole gradients in fp32, and 64 micro-batches' hidden states and gradients of four chunks."""
    flags = {**INTERLEAVED, "seq": "2048", "gbs": "128", "recompute": "full"}
    notices = {notice.code: notice.message for notice in estimate(plan_of(flags)).warnings}
    hidden = 2048 * 4096 * 2
    assert f"{64 * (4 + 3) * hidden:,} bytes" in notices["sends-kept"]
    assert "until then stage 1 holds unsharded gradients" in notices["gradients-whole"]
    assert "sends-kept" not in {notice.code for notice in estimate(plan_of(FLAGS)).warnings}


def test_the_reduction_is_among_the_details() -> None:
    phases = [(tape.module, tape.phase) for tape in detail(plan_of(FLAGS), 1)]
    assert ("layer.2", "reduce") in phases
    assert phases[-1] == ("optimizer", "step")


@pytest.mark.parametrize(
    ("flags", "field", "says"),
    [
        ({"fsdp-code": "transformers"}, "layout.pp", "must be 1 with transformers' models; only torchtitan's"),
        ({"vpp": "2", "schedule": "gpipe"}, "pipeline.schedule", "looped BFS"),
        ({"schedule": "zero-bubble"}, "pipeline.schedule", "must be one of 1f1b, gpipe"),
        ({"reshard-after-forward": "true"}, "fsdp.reshard_after_forward", "always"),
        ({"gradient-sync": "false"}, "fsdp.gradient_sync", "reduces gradients once"),
        ({"fsdp-offload": "true"}, "fsdp.offload", "offload in a pipeline is not modelled"),
        ({"gbs": "4"}, "batch.gbs", "gives 2 micro-batches; 1f1b needs at least as many as the 4 stages"),
        ({"pp": "2", "vpp": "2", "gbs": "10"}, "batch.gbs", "multiple of the 2 rounds"),
        ({"vpp": "3"}, "layout.vpp", "makes 12 stages, which must be at most 10: the 8 layers, embedding and head"),
        ({**OLD, "vpp": "3"}, "layout.vpp", "makes 12 stages, which must be at most 8: the 8 layers"),
        ({"pp": "16", "gbs": "64"}, "layout.pp", "makes 16 stages"),
        ({"pp": "1", "vpp": "2"}, "layout.vpp", "nothing to interleave"),
        ({"pp": "1", "schedule": "gpipe"}, "pipeline.schedule", "needs pipeline parallelism"),
        ({"partition": "uniform"}, "pipeline.partition", "torchtitan's own split"),
    ],
)
def test_refused(flags: dict[str, str], field: str, says: str) -> None:
    with pytest.raises(PlanError, match=says) as raised:
        programs({**FLAGS, **flags})
    assert raised.value.field == field
