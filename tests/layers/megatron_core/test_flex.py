"""Tokens on their way through DeepEP and HybridEP: how many arrive, what is kept, and buffers outside of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from math import ceil

import pytest

from benchmarks.arguments import plan_of_arguments
from memplan.estimate import estimate
from memplan.frameworks.megatron.from_plan import core_shape
from memplan.frameworks.megatron.modules import layer_shape_of, layers_module, module_shapes
from memplan.layers.megatron_core import flex, moe
from memplan.layers.megatron_core.shape import CoreShape
from memplan.layers.module import Options
from memplan.layers.work import Attention, Exchange, Product, Stream, Together
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.search.time.shape import Entries, shape_of
from memplan.tape.events import Drop, Hold

T, H, E, K, EP = 512, 2048, 128, 8, 8
"""Of Qwen3-30B-A3B with sequences of 512 tokens: 64 rows for every token that is sent to all."""


def shaped(backend: str, imbalance: str = "balanced", beside: str = "false", **more: str) -> CoreShape:
    """The shape of a layer."""
    flags = {
        "model": "qwen3-30b-a3b", "framework": "megatron", "gpus": "8", "ep": "8", "seq": "512",
        "moe-dispatcher": "flex", "moe-flex-backend": backend, "router-dtype": "fp32", "experts-imbalance": imbalance,
        "moe-overlap-exchange": beside, **more,
    }  # fmt: skip
    return layer_shape_of(module_shapes(core_shape(resolve(read_plan(None, flags).plan)))[0], 0)


def kept(backend: str, imbalance: str = "balanced", beside: str = "false", **more: str) -> tuple[dict[str, int], int]:
    """Bytes by name of what a layer keeps for backward, and N."""
    shape = shaped(backend, imbalance, beside, **more)
    tape = layers_module((shape,), Options()).first.forward
    holds = {event.tensor: event for event in tape if isinstance(event, Hold)}
    for event in tape:
        if isinstance(event, Drop):
            holds.pop(event.tensor, None)
    return {one.name: one.bytes for one in holds.values()}, flex.arriving(shape)


def test_tokens_that_arrive_are_counted_once_for_each_rank() -> None:
    """Of 4 experts on 2 ranks, 2 of a token: it comes to a rank in 5 of 6 choices."""
    here = sum(any(one < 2 for one in chosen) for chosen in combinations(range(4), 2))
    assert here == 5
    _, n = kept("deepep")
    mean = 1 - 1.0 * _choose(E - E // EP, K) / _choose(E, K)
    assert n == ceil(T * EP * mean)
    assert T * EP * 0.6 < n < T * EP, "most tokens, not one for each row"
    assert kept("deepep", "worst")[1] == T * EP


def _choose(n: int, k: int) -> int:
    return 1 if k == 0 else _choose(n - 1, k - 1) * n // k


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_rows_are_kept_once_and_tokens_that_arrive_are_not(backend: str) -> None:
    """P = k T rows (h in bf16) enter the first product; tokens as they came end with the layer's forward pass."""
    names, n = kept(backend)
    rows = T * K
    entered = {"deepep": "permuted_tokens", "hybridep": "rows_received"}[backend]
    assert names[entered] == rows * H * 2
    assert names["experts_linear_fc1"] == rows * 2 * 768 * 2
    assert not {"tokens_received", "tokens_combined"} & names.keys()
    if backend == "deepep":
        assert names["tokens_in_ranks"] == T * EP
        assert names["send_head"] == T * EP * 4
        assert names["received_indices"] == -(-4 * n // 512) * 512
        assert names["row_id_map"] == -(-n * (2 * E // EP + 1) * 4 // 512) * 512
    else:
        assert names["dense_to_expert_map"] == T * EP * E // EP * 4


def test_hybrid_ep_pads_every_expert_to_its_capacity() -> None:
    """``setup_metadata`` with ``drop_and_pad``: 1.25 k T / E = 40 rows of each rank for each of 16 experts here, on 8
    ranks; DeepEP marks dropped tokens instead, which is not modelled."""
    padded = {"moe-capacity-factor": "1.25", "moe-pad-to-capacity": "true"}
    names, _ = kept("hybridep", **padded)
    assert names["rows_received"] == 40 * 16 * 8 * H * 2
    assert not any("capacity" in one for one in moe.uncovered(shaped("hybridep", **padded)))
    for backend, given in (("deepep", padded), ("hybridep", {"moe-capacity-factor": "1.25"})):
        assert any("flex dispatcher with a capacity" in one for one in moe.uncovered(shaped(backend, **given)))


@pytest.mark.parametrize(
    ("backend", "stays"),
    [
        ("deepep", lambda n: {"token_probabilities": T * K * 4, "received_probabilities": -(-n * K * 4 // 512) * 512}),
        ("hybridep", lambda n: {"router_probabilities_spread": T * E * 4}),
    ],
)
def test_what_parts_of_a_layer_keep_besides(backend: str, stays: Callable[[int], dict[str, int]]) -> None:
    """Inputs of the exchange, which backward reads (``should_free_input``), and the probabilities that its part hands
    to the experts' detached. Their input ends, once DeepEP's has been sorted."""
    (alone, n), (beside, _) = kept(backend), kept(backend, beside="true")
    assert {name: size for name, size in beside.items() if name not in alone} == stays(n)
    assert beside == alone | stays(n)


def test_deep_eps_buffer() -> None:
    """10 channels of 8 peers, 256 tokens each: 4,096 bytes of features, 8 of their source, and as many as 128 indices,
    weights and scales."""
    within = 10 * 8 * (5 * 4 + 256 * (4096 + 8 + 128 * 16))
    assert flex.deep_ep_buffers(8, 2048) == padded(within)
    nodes = 8
    across = 10 * 8 * ((2 * nodes + 3) * 4 + 288 * (4096 + 8 + 128 * 16))
    rdma = 10 * nodes * (18 * 2 * 4 + 2 * 128 * (4096 + 8 + 128 * 16 + 16))
    assert flex.deep_ep_buffers(64, 2048) == padded(across) + padded(rdma)


def padded(size: int) -> int:
    return -(-size // 128) * 128


def test_the_report_counts_the_buffer() -> None:
    flags = {"model": "qwen3-30b-a3b", "framework": "megatron", "gpus": "8", "ep": "8", "gpu": "h200", "seq": "512",
             "moe-dispatcher": "flex", "moe-flex-backend": "hybridep", "layers": "2"}  # fmt: skip
    (stage,) = estimate(resolve(read_plan(None, flags).plan)).stages
    assert stage.beyond.other == 512 * 8 * (2 * 2048 + 4 * 128 + 4 * 16)


def test_megatrons_arguments() -> None:
    arguments = {
        "--num-layers": 2, "--hidden-size": 256, "--num-attention-heads": 4, "--seq-length": 128, "--bf16": True,
        "--max-position-embeddings": 128, "--micro-batch-size": 1, "--num-experts": 8,
        "--expert-model-parallel-size": 8, "--moe-grouped-gemm": True, "--moe-permute-fusion": True,
        "--disable-bias-linear": True, "--swiglu": True,
        "--moe-token-dispatcher-type": "flex", "--moe-flex-dispatcher-backend": "hybridep",
    }  # fmt: skip
    read = plan_of_arguments(arguments, {}, gpus=8, family="gpt", vocabulary=1000, flags={})
    assert read.plan.experts.flex_backend == "hybridep"
    changed = {**arguments, "--moe-flex-dispatcher-backend": "ncclep"}
    with pytest.raises(PlanError, match="ncclep: is not modelled yet; deepep and hybridep are"):
        plan_of_arguments(changed, {}, gpus=8, family="gpt", vocabulary=1000, flags={})
    paged = {**arguments, "--moe-expert-rank-capacity-factor": 1.5, "--moe-paged-stash": True}
    with pytest.raises(PlanError, match="moe-paged-stash: must be left out: pages that hold"):
        plan_of_arguments(paged, {}, gpus=8, family="gpt", vocabulary=1000, flags={})


def hybrid(**more: str) -> Entries:
    flags = {
        "model": "qwen3-30b-a3b", "framework": "megatron", "gpus": "8", "ep": "8", "seq": "512", "gpu": "h100-80gb",
        "moe-dispatcher": "flex", "moe-flex-backend": "hybridep", **more,
    }  # fmt: skip
    return shape_of(resolve(read_plan(None, flags).plan)).entries


def test_hybrid_ep_copies_rows_out_of_its_buffer() -> None:
    """A kernel that reads the N tokens that arrived and writes k T rows, or the other way, beside each exchange."""
    n, work = kept("hybridep")[1], hybrid().layer
    for of in (work.forward, work.backward):
        sent = [(kernel, times) for kernel, times in of if isinstance(kernel, Exchange) and kernel.choices[0]]
        assert sum(times for _, times in sent) == 2
        assert sum(times for kernel, times in of if kernel == Stream((n + T * K) * H * 2)) == 2


def test_hybrid_ep_sends_probabilities_with_tokens_and_gradients_of_them_back() -> None:
    """An fp32 for every expert of the domain with each of N tokens, forward to the experts, in backward from them."""
    n, work = kept("hybridep")[1], hybrid().layer
    forward, backward = (
        [one for one, _ in of if isinstance(one, Exchange) and one.choices[0]] for of in (work.forward, work.backward)
    )
    assert [one.scores for one in forward] == [4 * n, 0]
    assert [one.scores for one in backward] == [0, 4 * n]
    assert {one.bytes for one in (*forward, *backward)} == {n * H * 2}


def test_hybrid_ep_tells_every_rank_where_all_tokens_go() -> None:
    """A byte of each token and expert from every rank, read twice; written are an int32 of the rank's tokens for each
    rank, and of every token a byte and an int32 for each of the rank's experts. Backward has all this by then."""
    work = hybrid().layer
    maps = [one for one, _ in work.forward if isinstance(one, Exchange) and not one.choices[0]]
    assert maps == [Exchange("all-to-all", T * EP * E, "ep")]
    assert (Stream(2 * T * EP * E + 4 * T * EP + 5 * T * EP * E // EP, 2), 1) in work.forward
    assert not any(isinstance(one, Exchange) and not one.choices[0] for one, _ in work.backward)


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_exchanges_beside_another_micro_batch(backend: str) -> None:
    """Tokens go to experts while the other micro-batch's experts compute, and come back beside its attention, whose
    kernels and no grouped product run then (``TransformerLayerSchedulePlan.run``)."""
    work = hybrid(**{"moe-flex-backend": backend, "moe-overlap-exchange": "true"}).layer
    for of in (work.forward, work.backward):
        beside = [one.beside for one, _ in of if isinstance(one, Exchange) and one.choices[0]]
        there, back = (one.kernels for one in beside if isinstance(one, Together))
        assert any(isinstance(one, Product) and one.rows for one, _ in there)
        assert not any(isinstance(one, Product) and one.rows for one, _ in back)
        assert any(isinstance(one, Attention) for one, _ in back)
