"""Passes that take turns: their order against Megatron-Core's own, and folds against whole iterations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock
from warnings import catch_warnings, simplefilter

import pytest

from memplan.frameworks.megatron import programs
from memplan.layers.module import Options
from memplan.plan.errors import PlanError
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.schedules.megatron_beside_fold import EMBEDDED, BesideOrder
from memplan.schedules.megatron_fold import graphed_in_flight, most_in_flight
from memplan.schedules.megatron_schedule import schedule, trace
from memplan.tape.program import WHOLE, Program, fold_program

FLAGS = {
    "model": "qwen3-30b-a3b", "layers": "6", "framework": "megatron", "gpus": "4", "ep": "2", "mbs": "1", "seq": "256",
    "dtype": "bf16", "zero": "1", "moe-overlap-exchange": "true",
}  # fmt: skip
PIPELINE = {"pp": "2", "vpp": "3"}


def plan(**flags: str) -> ResolvedPlan:
    given = {**FLAGS, **{name.replace("_", "-"): value for name, value in flags.items()}}
    return resolve(read_plan(None, given).plan)


def made(**flags: str) -> tuple[Program, ...]:
    return programs.programs(plan(**flags), Options())


def order_of(program: Program) -> BesideOrder:
    assert isinstance(program.order, BesideOrder)
    return program.order


CASES = {
    "one stage": {"gbs": "32"},
    "one stage, delayed": {"gbs": "32", "moe_delay_wgrad": "true"},
    "interleaved": {"gbs": "24", **PIPELINE},
    "interleaved, no overlap of sends": {
        "gbs": "24", "gpus": "8", "pp": "4", "vpp": "2", "layers": "8", "overlap_p2p": "false",
    },
    "early release": {"gbs": "24", "moe_early_attention_release": "true", **PIPELINE},
    "flex, activations on the host": {
        "gbs": "24", "moe_dispatcher": "flex", "moe_flex_backend": "hybridep", "min_offloaded_tensor_size": "1",
        "offload_modules": "core_attn,attn_proj,mlp_norm,expert_fc1,moe_act", **PIPELINE,
    },
    "further tokens": {"gbs": "24", "model": "deepseek-v3", "layers": "6", **PIPELINE},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_short_schedule_peaks_as_the_whole_one(case: str) -> None:
    for program in made(**CASES[case]):
        order = order_of(program)
        whole = order._composed(order._in_turns(trace(order.schedule)))
        assert order.whole.peak == whole.peak
        reports = order.schedule.microbatches * order.sizes.report * order.schedule.last
        assert order.whole.net == whole.net == reports


@pytest.mark.parametrize("case", CASES)
def test_every_piece_runs_once(case: str) -> None:
    for program in made(**CASES[case]):
        order = order_of(program)
        ran: dict[tuple[str, int, int], int] = {}
        for action in order._in_turns(trace(order.schedule)):
            if action.what in WHOLE:
                key = WHOLE[action.what], action.chunk, action.microbatch
                ran[key] = ran.get(key, 0) + 1
        for (whole, chunk, _), count in ran.items():
            assert count == len(order.chunks[chunk].pieces[whole])  # type: ignore[index]
        both = 2 * (order.schedule.microbatches * order.schedule.chunks - order.schedule.warmup)
        assert both <= len(ran) <= both + order.schedule.warmup


def test_one_more_forward_pass_comes_first() -> None:
    """``get_pp_rank_microbatches``; without a pipeline the forward pass of one beside the backward pass before."""
    for stage in range(4):
        alone, beside = (schedule(stage, 4, 16, 2, 4, beside=one) for one in (False, True))
        assert beside.warmup == alone.warmup + 1
    assert most_in_flight(schedule(0, 1, 8, beside=True)) == (2,)
    assert most_in_flight(schedule(0, 1, 8)) == (1,)


# -- the real order -------------------------------------------------------------------------------------

NAMES = {"attn": "pre", "moe_dispatch": "dispatch", "mlp": "mlp", "moe_combine": "combine"}


class Node:
    """Says what it is asked to do."""

    def __init__(self, said: list[tuple[str, str]], name: str) -> None:
        self.said, self.name = said, name

    def forward(self, *_: Any) -> int:
        self.said.append(("forward", self.name))
        return 1

    def backward(self, *_: Any) -> int:
        self.said.append(("backward", self.name))
        return 1

    def backward_dw(self) -> None:
        self.said.append(("backward", f"{self.name}_dw"))


def of_megatron(forward: int, backward: int, *, early: bool) -> list[tuple[str, str]]:
    with catch_warnings():
        simplefilter("ignore")
        plans = pytest.importorskip("megatron.core.models.common.model_chunk_schedule_plan", exc_type=ImportError)
    said: list[tuple[str, str]] = []

    def layer() -> Any:
        parts = {real: Node(said, name) for real, name in NAMES.items()}
        parts["pre_dispatch_computation"] = parts["attn"]
        config = SimpleNamespace(ep_overlap_early_attn_memory_release=early, fp8=None)
        same = SimpleNamespace(forward=lambda x: x, backward=lambda x: x)
        context = mock.MagicMock()
        own = SimpleNamespace(config=config, mtp_post_process=same, get_fp8_context=lambda: context, **parts)
        own.release_state = lambda: None
        return own

    def chunk(count: int) -> Any:
        made = object.__new__(plans.TransformerModelChunkSchedulePlan)
        made._transformer_layers = [layer() for _ in range(count)]
        made._model_chunk_state = SimpleNamespace(model=None)
        made._event, made.vp_stage = mock.MagicMock(), None
        made.pre_process, made.post_process = Node(said, "front"), Node(said, "tail")
        made.record_current_stream = made.wait_current_stream = lambda: None
        return made

    with mock.patch.object(plans.torch.cuda.nvtx, "range_push"), mock.patch.object(plans.torch.cuda.nvtx, "range_pop"):
        plans.TransformerModelChunkSchedulePlan.run(chunk(forward), chunk(backward), b_grad=1)
    return said


@pytest.mark.parametrize("early", [False, True])
def test_two_passes_take_turns_as_in_megatron(early: bool) -> None:
    """On one stage of experts alone; what an end of the chunk runs has the name of the piece that it is in."""
    (program,) = made(gbs="32", moe_early_attention_release=str(early).lower())
    order = order_of(program)
    layers = 6
    actions = list(order._in_turns(trace(order.schedule)))
    first = next(at for at, one in enumerate(actions) if one.what in WHOLE)
    last = next(at for at, one in enumerate(actions) if at > first and one.tensor == EMBEDDED and one.what == "end")
    labels = {whole: iter([piece.label for piece in order.chunks[0].pieces[whole]]) for whole in order.chunks[0].pieces}
    ran = [(WHOLE[one.what], next(labels[WHOLE[one.what]])) for one in actions[first:last] if one.what in WHOLE]
    fronts = [at for at, one in enumerate(ran) if one == ("backward", "front")]
    ran = [one for at, one in enumerate(ran) if at not in fronts[:-1]]  # nothing is between two layers
    named = [(whole, label or ("front" if whole == "forward" else "tail")) for whole, label in ran]
    real = of_megatron(layers, layers, early=early)
    assert named[:-3] == real[:-3]
    assert named[-3:] == [("backward", "pre_dw"), ("forward", "tail"), ("backward", "front")] == real[-3:]


# -- plans ----------------------------------------------------------------------------------------------


def test_a_micro_batch_more_is_in_memory() -> None:
    """Without a pipeline the embedding's output of one micro-batch beside what another has saved, at least; the peak
    stays where it was, since layers of one begin as those of the other end."""
    (beside,), (alone,) = made(gbs="32"), made(gbs="32", moe_overlap_exchange="false")
    assert beside.order.in_flight == 2
    assert alone.order.in_flight == 1
    hidden = 256 * 2048 * 2
    assert fold_program(beside).peak - fold_program(alone).peak >= hidden
    assert fold_program(beside).static == fold_program(alone).static


def test_graphs_are_captured_a_layer_ahead() -> None:
    """In the order of ``get_overlap_moe_expert_parallel_comm_order`` for 3 micro-batches of 2 layers on one stage:
    1 2 | 1 -2 2 -1 | 1 -2 2 -1 | -2 -1, which has 3 layers in flight. Usually there are 2."""
    order = [1, 2, 1, -2, 2, -1, 1, -2, 2, -1, -2, -1]
    held = [sum(1 if one > 0 else -1 for one in order[: at + 1]) for at in range(len(order))]
    assert graphed_in_flight(schedule(0, 1, 3, beside=True), [2]) == max(held) == 3
    assert graphed_in_flight(schedule(0, 1, 3), [2]) == 2
    assert graphed_in_flight(schedule(0, 1, 1, beside=True), [2]) == 2


def test_delayed_products_keep_their_operands() -> None:
    """Of the experts' layers: rows of both products and their gradients until both have been multiplied."""
    (delayed,), (at_once,) = made(gbs="32", moe_delay_wgrad="true"), made(gbs="32")
    peaks = [
        max(piece.excursion.peak for piece in one.order.chunks[0].pieces["backward"] if piece.label == "mlp")
        for one in (delayed, at_once)
    ]
    assert peaks[0] > peaks[1]
    assert not any(
        piece.excursion.net for piece in at_once.order.chunks[0].pieces["backward"] if piece.label == "mlp_dw"
    )
    assert all(
        piece.excursion.net < 0 for piece in delayed.order.chunks[0].pieces["backward"] if piece.label == "mlp_dw"
    )


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"gbs": "32", "pp": "2"}, "interleaved"),
        ({"gbs": "32", "ep": "1"}, "expert parallelism"),
        ({"gbs": "32", "moe_dispatcher": "allgather"}, "allgather"),
        ({"gbs": "32", "recompute": "full"}, "full recompute"),
        ({"gbs": "32", "recompute": "selective", "recompute_modules": "moe"}, "experts are recomputed"),
        ({"gbs": "32", "moe_overlap_exchange": "false", "moe_delay_wgrad": "true"}, "without experts.overlap_exchange"),
        ({"gbs": "32", "moe_delay_wgrad": "true", "te_version": "2.2"}, "Transformer Engine 2."),
        (
            {"gbs": "32", "cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "attn,mlp"},
            "graphs of MLPs or experts",
        ),
        ({"gbs": "32", "cuda_graph_impl": "local", "cuda_graph_modules": "moe_router"}, "own graphs"),
        ({"gbs": "32", "moe_wgrad_beside_dispatch": "true"}, "overlap_exchange"),
    ],
)
def test_what_megatron_refuses(flags: dict[str, str], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        plan(**flags)
