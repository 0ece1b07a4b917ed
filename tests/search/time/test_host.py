"""What the host takes, by hand and beside a layer of experts that Megatron-LM times itself."""

from __future__ import annotations

import pytest

from memplan.layers.work import NO_CALLS, Calls, Exchange, Product, Stream
from memplan.search.time import entry_times, kernels, shape_of
from memplan.search.time.host import (
    BACKWARD,
    GRACE,
    HOST_OPERATOR,
    PYTHON_MODULES,
    TE_EXPERT,
    TE_LINEAR,
    TRANSFORMER_ENGINE,
    TRANSFORMERS_BACKWARD,
    TRANSFORMERS_OPERATOR,
    Host,
    seconds,
)
from memplan.search.time.kernels import GAP, alone
from memplan.search.time.rates import rates_of

from .plans import plan

GROUP = Product(256, 4096, 2048, 16, rows="m")
WORK = ((Product(4096, 4096, 4096), 2), (Stream(1e6, 3), 4), (Exchange("all-to-all", 1e6, "ep"), 2), (GROUP, 2))

EXPERTS = {
    "model": "qwen3-30b-a3b", "framework": "megatron", "gpu": "b200", "gpus": 8, "ep": 8, "etp": 1, "mbs": 1,
    "gbs": 512, "seq": 4096, "dtype": "bf16", "fp8": "mxfp8", "zero": 1,
}  # fmt: skip


def test_a_pass_of_transformer_engine_by_hand() -> None:
    """Two linear layers, 14 other calls, and two groups of 16 experts; backward has two products for each layer."""
    forward = seconds(WORK, TRANSFORMER_ENGINE, 1.0, False, NO_CALLS)
    assert forward == pytest.approx(4 * TE_LINEAR + 14 * HOST_OPERATOR + 32 * TE_EXPERT)
    backward = seconds(WORK, TRANSFORMER_ENGINE, 1.0, True, NO_CALLS)
    assert backward == pytest.approx(2 * BACKWARD * TE_LINEAR + 14 * HOST_OPERATOR + 16 * BACKWARD * TE_EXPERT)


def test_a_grace_takes_a_te_linear_as_long_as_the_issue_says() -> None:
    found = seconds(((Product(8192, 2048, 2048), 1),), TRANSFORMER_ENGINE, GRACE, False, NO_CALLS)
    assert found == pytest.approx(99.66e-6)


def test_plain_pytorch_calls_a_group_once() -> None:
    assert seconds(WORK, Host(), 1.0, False, NO_CALLS) == pytest.approx(18 * HOST_OPERATOR)


def test_modules_in_python_call_forward_and_autograd_backward() -> None:
    assert seconds(WORK, PYTHON_MODULES, 1.0, False, NO_CALLS) == pytest.approx(18 * TRANSFORMERS_OPERATOR)
    assert seconds(WORK, PYTHON_MODULES, 1.0, True, NO_CALLS) == pytest.approx(18 * TRANSFORMERS_BACKWARD)


def test_short_sequences_wait_for_pythons_modules() -> None:
    """Through a layer of GPT-2 XL by 19 calls; torchtitan's modules are not transformers'."""
    layer = entry_times(plan(model="gpt2-xl", framework="single", gpu="h200", dtype="bf16", seq=64)).layer
    assert layer.forward == pytest.approx(19 * TRANSFORMERS_OPERATOR)
    titan = plan(model="llama-3-8b", framework="fsdp", fsdp_code="torchtitan", gpu="h200", gpus=8, dtype="bf16")
    assert shape_of(titan).host.operator == HOST_OPERATOR


def test_a_layer_in_four_bits_as_bitsandbytes_calls_it() -> None:
    """64.6 microseconds for a weight of 14,336 x 4,096 on an H200, and Python of 106 forward and 57 backward."""
    job = {"model": "llama-3-8b", "framework": "single", "gpu": "h200", "dtype": "bf16", "lora_rank": 16}
    packed = shape_of(plan(**job, quantisation="nf4")).entries.layer
    (unpacked,) = (one for one, _ in packed.forward if isinstance(one, Stream) and one.bytes == 2.5 * 14336 * 4096)
    assert alone(unpacked, rates_of(plan(**job))) == pytest.approx(64.6e-6 + GAP, rel=0.01)
    calls = [
        sum(times * one.launches for one, times in way if isinstance(one, Stream) and not one.bytes)
        for way in (packed.forward, packed.backward)
    ]
    assert calls[0] / 7 * TRANSFORMERS_OPERATOR == pytest.approx(106e-6, rel=0.15)
    assert calls[1] / 7 * TRANSFORMERS_BACKWARD == pytest.approx(57e-6, rel=0.15)


def test_graphs_call_in_the_hosts_place() -> None:
    rest = seconds(WORK, TRANSFORMER_ENGINE, 1.0, False, Calls(2, 12))
    assert rest == pytest.approx(2 * TE_LINEAR + 2 * HOST_OPERATOR + 32 * TE_EXPERT)


def test_small_experts_wait_for_the_host_unless_a_graph_holds_the_iteration() -> None:
    eager = entry_times(plan(**EXPERTS)).layer
    graphs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "attn,moe_router,moe_preprocess"}
    parts = entry_times(plan(**EXPERTS, **graphs)).layer
    counted_there = {"moe_dispatcher": "flex", "cuda_graph_impl": "full_iteration", "check_for_nan": "false"}
    every = entry_times(plan(**EXPERTS, **counted_there)).layer
    assert eager.forward + eager.backward >= 2 * 16 * TE_EXPERT * (1 + BACKWARD)
    assert every.forward + every.backward < 0.5 * (eager.forward + eager.backward)
    assert every.forward < parts.forward <= eager.forward


def test_a_graph_of_attention_replays_its_calls() -> None:
    """All of the calls of attention's block, forward: its part of a layer, which a hybrid has alone."""
    graphs = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "attn"}
    layer = shape_of(plan(**EXPERTS, **graphs)).entries.layer
    eager = shape_of(plan(**EXPERTS)).entries.layer
    assert eager.forward_replayed == eager.backward_replayed == NO_CALLS
    assert layer.forward_replayed.linear == 2  # query, key and value together, and the projection
    assert layer.backward_replayed.linear == 4
    assert layer.forward == eager.forward


MOE_LAYERS = {
    "alltoall": (4.327, 7.684),
    "deepep": (4.636, 7.854),
    "hybridep": (4.343, 7.741),
}
"""Milliseconds of a layer of Mixtral's experts on 8 H100, one expert each, 4,096 tokens a rank: forward and backward
(NVIDIA/Megatron-LM, tests/functional_tests/test_cases/common/moe_perf/baseline.json, bf16)."""


@pytest.mark.parametrize("kind", MOE_LAYERS)
def test_the_host_does_not_hold_up_large_experts(kind: str) -> None:
    """Megatron-LM's own benchmark of its layer of experts: what the host takes is less than what it measured."""
    way = {} if kind == "alltoall" else {"moe_dispatcher": "flex", "moe_flex_backend": kind}
    job = plan(
        model="mixtral-8x7b", framework="megatron", gpu="h100-80gb", gpus=8, ep=8, etp=1, mbs=1, gbs=8, seq=4096,
        dtype="bf16", zero=1, **way,
    )  # fmt: skip
    layer = shape_of(job).entries.layer
    forward, backward = MOE_LAYERS[kind]
    assert seconds(layer.forward, TRANSFORMER_ENGINE, 1.0, False, NO_CALLS) < 1e-3 * forward
    assert seconds(layer.backward, TRANSFORMER_ENGINE, 1.0, True, NO_CALLS) < 1e-3 * backward


def test_the_host_runs_ahead_where_experts_are_padded_to_capacity() -> None:
    """Megatron-Core fills the numbers of rows in on the host then, and reads none from the device: a pass takes what
    the slower of both does."""
    job = {"model": "deepseek-v2", "framework": "megatron", "gpu": "b200", "gpus": 8, "ep": 8, "seq": 4096, "mbs": 1}
    capacity = {"moe_capacity_factor": 1, "moe_dispatcher": "alltoall", "dtype": "bf16"}
    given = plan(**job, **capacity, moe_pad_to_capacity="true")
    shape, rates = shape_of(given), rates_of(given)
    layer = shape.entries.layer.forward
    spent = kernels.seconds(layer, rates, shape.ranks)
    called = seconds(layer, shape.host, rates.host_slower, False, shape.entries.layer.forward_replayed)
    assert entry_times(given).layer.forward == pytest.approx(max(spent.device + spent.exposed, called))
    assert not shape.host.reads
    assert shape_of(plan(**job, **capacity)).host.reads
