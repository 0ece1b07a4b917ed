from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from memplan.frameworks.fsdp.timing import is_flat
from memplan.layers.work import Exchange as Exchanged
from memplan.plan.errors import PlanError
from memplan.search.time import EntryTimes, Replicas, StageWork, entry_times, rates_of, shape_of, work_of
from memplan.search.time.collectives import Group, collective, group, send
from memplan.search.time.kernels import PERSISTENT, Ranks, exchanged, overlapped
from memplan.search.time.layer import NO_TIME
from memplan.search.time.shape import elements
from memplan.search.time.sharding import sharded
from memplan.search.time.updates import Exchange

from .plans import plan

A100 = rates_of(plan(model="gpt2", gpu="a100-80gb", dtype="bf16"))
H100 = rates_of(plan(model="gpt2", gpu="h100-80gb", dtype="bf16"))
L40S = rates_of(plan(model="gpt2", gpu="l40s", dtype="bf16"))
NODE = Group(8, 8)
KINDS = ("all-reduce", "all-gather", "reduce-scatter")


def test_a_large_ring_moves_its_bytes_at_the_links_rate() -> None:
    """2 (n - 1) / n of them for all-reduce; 221 GB/s of an A100's links, 208 without what a rank's own part takes."""
    size = 8e9
    assert collective(A100, "all-reduce", size, NODE) == pytest.approx((2 * 7 + 0.25) / 8 * size / 221e9, rel=0.01)
    assert collective(A100, "all-gather", size, NODE) == pytest.approx(7 / 8 * size / 208e9, rel=0.01)


SWEPT = {  # microseconds of 64 and of 512 MiB among 2, 4 and 8 GPUs of a node
    ("a100-80gb", "all-gather"): ((266, 1790), (325, 2102), (352, 2288)),
    ("a100-80gb", "reduce-scatter"): ((230, 1612), (303, 1982), (327, 2207)),
    ("a100-80gb", "all-reduce"): ((392, 2781), (544, 3716), (595, 4226)),
    ("h100-80gb", "all-gather"): ((159, 1039), (195, 1267), (208, 1402)),
    ("h100-80gb", "reduce-scatter"): ((169, 1078), (195, 1300), (201, 1399)),
    ("h100-80gb", "all-reduce"): ((255, 1686), (330, 2300)),
    ("b300", "all-gather"): ((94, 604), (107, 703), (136, 757)),
    ("b300", "reduce-scatter"): ((99, 645), (106, 722), (135, 765)),
    ("b300", "all-reduce"): ((146, 988), (180, 1261)),
}


@pytest.mark.parametrize(("gpu", "kind"), SWEPT)
def test_collectives_of_a_node_as_nvidia_swept_them(gpu: str, kind: str) -> None:
    """aiconfigurator's ``nccl_perf`` (NCCL 2.27.3 and 2.29.2); 8 GPUs from Hopper on sum in their switch, which is not
    modelled."""
    rates = rates_of(plan(model="gpt2", gpu=gpu, dtype="bf16"))
    for ranks, measured in zip((2, 4, 8), SWEPT[gpu, kind], strict=False):
        for mebibytes, microseconds in zip((64, 512), measured, strict=True):
            predicted = collective(rates, kind, float(mebibytes << 20), group(ranks, 1, 8))
            assert predicted * 1e6 == pytest.approx(microseconds, rel=0.16)


def test_short_messages_on_b200_have_no_latency_of_long_ones() -> None:
    """8 MiB among 8 GPUs take 44 microseconds, 16 take 104 (the same sweep)."""
    rates = rates_of(plan(model="gpt2", gpu="b200", dtype="bf16"))
    short, long = (collective(rates, "all-gather", float(size << 20), NODE) for size in (8, 16))
    assert short == pytest.approx(44e-6, rel=0.15)
    assert long == pytest.approx(104e-6, rel=0.15)


def test_nothing_to_do() -> None:
    assert collective(A100, "all-reduce", 1e9, Group(1, 1)) == 0.0
    assert collective(A100, "all-reduce", 0.0, NODE) == 0.0


def test_groups_lie_on_nodes() -> None:
    assert group(8, 1, 8) == Group(8, 8, 1)
    assert group(16, 8, 8) == Group(16, 1, 8)
    assert group(16, 2, 8) == Group(16, 4, 2)
    assert group(16, 2, 8).nodes == 4


def test_replicas_of_tensor_parallel_ranks_share_the_adapters() -> None:
    """With a whole node a tensor-parallel group every rank's ring has one adapter's rate: 25 GB/s of a DGX A100."""
    size, across = 1e10, group(2, 8, 8)
    assert collective(A100, "reduce-scatter", size, across) == pytest.approx(1 / 2 * size / (25e9 * 0.96), rel=0.01)
    whole = group(16, 1, 8)
    assert collective(A100, "reduce-scatter", size, whole) < collective(A100, "reduce-scatter", size, across) / 4


@given(size=st.floats(1e3, 1e11), more=st.floats(1.0, 10.0), n=st.sampled_from([2, 4, 8]))
def test_more_bytes_take_longer(size: float, more: float, n: int) -> None:
    for kind in KINDS:
        assert collective(A100, kind, size * more, Group(n, n)) >= collective(A100, kind, size, Group(n, n))


@given(size=st.floats(1e3, 1e10))
def test_crossing_nodes_takes_longer(size: float) -> None:
    for kind in KINDS:
        assert collective(A100, kind, size, Group(8, 1, 8)) > collective(A100, kind, size, NODE)


def test_without_links_gpus_talk_through_the_host() -> None:
    assert collective(L40S, "all-reduce", 1e9, Group(4, 4)) == pytest.approx(2 * 3 / 4 * 1e9 / (32e9 * 0.75), rel=0.01)


def test_an_unknown_network_is_asked_for() -> None:
    with pytest.raises(PlanError, match=r"hardware\.network.*is missing"):
        send(L40S, 1e6, True)


def test_communication_beside_work() -> None:
    """A collective of 2 s beside 10 s of products takes channels of them meanwhile: 24 of an A100's 108
    multiprocessors, 33 of 80 hundredths of an H100's rate; one of 12 s outlasts them."""
    a100, h100 = (rates_of(plan(model="gpt2", gpu=gpu, dtype="bf16")) for gpu in ("a100-80gb", "h100-80gb"))
    assert overlapped(a100, 2.0, 10.0) == pytest.approx(2 * 24 / 108)
    assert overlapped(h100, 2.0, 10.0) == pytest.approx(2 * 33 / 80)
    assert overlapped(h100, 20.0, 10.0) == pytest.approx(10.0)


def test_all_to_all_of_a_node_and_of_several() -> None:
    """8 ranks on a node keep an eighth and send seven over links. Of 32 ranks on 4 nodes each sends 24 parts over its
    network adapter, while 7 go over links; DGX H100 has 400 Gb/s a GPU, 0.96 of which NCCL reaches."""
    rates = rates_of(plan(model="llama-3-8b", framework="megatron", gpu="h100-80gb", gpus=32, mbs=1, gbs=32, seq=4096))
    size = 1 << 30
    inside = collective(rates, "all-to-all", size, group(8, 1, 8))
    assert inside == pytest.approx(7 / 8 * size / rates.exchange + 11.8e-6)
    outside = collective(rates, "all-to-all", size, group(32, 1, 8))
    assert outside == pytest.approx(24 / 32 * size / (0.98 * 0.96 * 50e9) + 154e-6)


@pytest.mark.parametrize(
    ("network", "nodes", "small", "largest"),
    [
        (100, 2, 104.9, 179.6), (100, 4, 94.0, 116.9), (100, 8, 74.0, 103.2), (100, 16, 73.8, 84.0),
        (100, 32, 54.7, 74.4), (50, 4, 45.1, 53.9), (50, 8, 40.4, 51.1),
    ],
)  # fmt: skip
def test_all_to_alls_of_several_nodes_as_nccl_tests_measured_them(
    network: float, nodes: int, small: float, largest: float
) -> None:
    """B300 (``p6-b300.48xlarge``, 6,400 Gb/s a node) and H100 (``p5.48xlarge``, 3,200 Gb/s): bus bandwidth in GB/s of
    64 MiB and of the largest that was run, taken to be 16 GiB
    (awslabs/awsome-distributed-ai, ``ep-backend-comparison/RESULTS.md`` and ``RESULTS-p5.md``)."""
    rates = replace(H100, network=0.96 * network * 1e9)
    ranks = 8 * nodes
    for size, bus, off in ((64 << 20, small, 0.3), (16 << 30, largest, 0.15)):
        spent = collective(rates, "all-to-all", size, group(ranks, 1, 8))
        assert size * (ranks - 1) / ranks / spent == pytest.approx(bus * 1e9, rel=off)


def test_tokens_that_cross_the_network_once_for_each_node() -> None:
    """8 of 32 experts, one a rank, on 4 nodes of 8 ranks: a token reaches 8 ranks, and all nodes but those that have
    none of its experts, 4 (1 - C(24, 8) / C(32, 8)) = 3.72 of them; three quarters of these are others than its own."""
    rates = rates_of(plan(model="llama-3-8b", framework="megatron", gpu="h100-80gb", gpus=32, mbs=1, gbs=32, seq=4096))
    size, nodes = 1 << 30, 4 * (1 - 735471 / 10518300)
    found = collective(rates, "all-to-all", size, group(32, 1, 8), (8, 32))
    assert found == pytest.approx(3 / 4 * nodes / 8 * size / (0.98 * 0.96 * 50e9) + 22.4e-6)


def test_probabilities_go_along_for_the_experts_of_a_node() -> None:
    """Beside a row's 2,048 bytes 4 for each of 32 experts where 8 ranks of one node have them all; where 32 ranks on 4
    nodes have one each, for the 8 of the node that it is sent to."""
    rates = rates_of(plan(model="llama-3-8b", framework="megatron", gpu="h100-80gb", gpus=32, mbs=1, gbs=32, seq=4096))
    rows = 100_000
    sent = Exchanged("all-to-all", 2048.0 * rows, "ep", choices=(8, 32), scores=4.0 * rows)
    for ranks, size in ((8, 2048 + 4 * 32), (32, 2048 + 4 * 8)):
        alone = collective(rates, "all-to-all", size * rows, group(ranks, 1, 8), (8, 32))
        assert exchanged(sent, rates, Ranks(1, ep=ranks)) == pytest.approx(alone)


def test_sharded_parameters_are_copied() -> None:
    """Without any time in links: 16-bit parameters that forward and backward gather are read and written, and 16-bit
    gradients are read and written in fp32, once a micro-batch; the ends are gathered once."""
    job = plan(model="llama-3-8b", framework="fsdp", gpu="h100-80gb", gpus=8, mbs=1, gbs=16, seq=4096)
    rates = replace(rates_of(job), link=float("inf"), collective=0.0, hop=0.0)
    shape, times = shape_of(job), entry_times(job)
    (work,) = work_of(job)
    held, trained, _ = elements(shape.entries, work)
    layers = 32 * elements(shape.entries, (StageWork(1),))[0]
    found = sharded(Replicas(job, shape, rates), Exchange(work, times, held, trained, 2))
    assert found == pytest.approx(2 * (layers * (4 + 4 + 6) + (held - layers) * (4 + 6)) / rates.memory, rel=0.02)


def test_shards_of_layers_without_experts_are_gathered_by_their_own_size() -> None:
    """Of 8 ranks each takes 7 / 8 of a layer's bytes through links, twice, and of its gradients once; of the embedding
    and the head, 129,280 rows of 7,168 each, once. Three of DeepSeek V3's first four layers have an MLP, a tenth of the
    parameters of the one with experts."""
    flags = {"model": "deepseek-v3", "layers": 4, "framework": "deepspeed", "zero": 3, "gpu": "h200", "gpus": 8}
    job = plan(**flags, seq=1024)
    rates = replace(rates_of(job), memory=float("inf"), collective=0.0, hop=0.0)
    shape, (work,) = shape_of(job), work_of(job)
    times = EntryTimes(*[NO_TIME] * 4, 0.0)
    held, trained, _ = elements(shape.entries, work)
    assert work[0].counts == ((3, 0), (1, 0))
    found = sharded(Replicas(job, shape, rates), Exchange(work, times, held, trained, 1))
    ends = (2 * 129_280 + 1) * 7168
    assert found == pytest.approx(7 / 8 * (3 * 2 * held - 2 * ends) / rates.link, rel=0.01)


def test_flat_parameters_are_gathered_in_place_and_their_gradients_divided() -> None:
    """FSDP1, as above: nothing is copied that was gathered. Gradients are read and written in 16 bits where they come
    together, cast to fp32, and read and written when they are divided: 4 + 6 + 8 bytes. Behind the gradients a layer
    is gathered alone: 8 ranks take 7 / 8 of its bytes through links, which ``pre`` hides but for its channels."""
    job = plan(
        model="llama-3-8b",
        framework="fsdp",
        gpu="h100-80gb",
        gpus=8,
        mbs=1,
        gbs=16,
        seq=4096,
        torch="2.1",
        fsdp_reduce="fp32",
    )
    rates = replace(rates_of(job), link=float("inf"), collective=0.0, hop=0.0)
    shape, times = shape_of(job), entry_times(job)
    (work,) = work_of(job)
    held, trained, _ = elements(shape.entries, work)
    rank = Exchange(work, times, held, trained, 2)
    assert is_flat(job)
    found = sharded(Replicas(job, shape, rates), rank, flat=True)
    assert found == pytest.approx(2 * held * (4 + 6 + 8) / rates.memory, rel=0.02)
    rates = rates_of(job)
    layer = elements(shape.entries, (StageWork(1),))[0]
    ahead, behind = (sharded(Replicas(job, shape, rates), rank, flat=True, ahead=one) for one in (True, False))
    alone = collective(rates, "all-gather", 2 * layer, group(8, 1, 8))
    assert alone == pytest.approx(7 / 8 * 2 * layer / rates.link, rel=0.1)
    assert behind - ahead == pytest.approx(2 * 32 * alone * (1 - PERSISTENT))


@pytest.mark.parametrize(("nodes", "measured"), [(4, 360), (8, 345), (16, 320), (32, 300), (64, 280), (128, 260)])
def test_reduce_scatters_through_more_nodes(nodes: int, measured: float) -> None:
    """GB/s of the bus, H100 (https://github.com/NVIDIA/nccl/issues/1229)."""
    ranks, size = 8 * nodes, float(8 << 30)
    seconds = collective(H100, "reduce-scatter", size, group(ranks, 1, 8))
    assert (ranks - 1) / ranks * size / seconds == pytest.approx(1e9 * measured, rel=0.03)
