"""What NCCL's communicators hold (``memplan/device/nccl.py``), beside readings and sums by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from memplan.device.nccl import Nccl, Span, fabric, version_of
from memplan.frameworks.base import Communicator, world

MIB = 1 << 20
AMPERE, HOPPER, BLACKWELL, ADA = (8, 0), (9, 0), (10, 0), (8, 9)
EAGER, LAZY = (2, 18), (2, 29)


def nccl(capability: tuple[int, int], version: tuple[int, int], node: int = 8, **environment: str) -> Nccl:
    return Nccl(version, fabric(capability, node), node, environment)


def mebibytes(span: Span) -> tuple[float, float]:
    return span.least / MIB, span.most / MIB


def test_two_a100_as_nvidia_nccl_issue_964_read_them() -> None:
    """544 MB: 24 channels of 12 MiB, and 32 channels x 16 steps x 512 KiB that sends share; 2 MiB for what is small."""
    pair = nccl(AMPERE, EAGER).of(Communicator("all ranks", 2, 2, 2, reduces=True))
    assert mebibytes(pair) == (544 + 2, 544 + 2)


def test_four_a100_as_nvidia_nccl_issue_964_read_them() -> None:
    """688 MB: at the end of the trees' chain 6 MiB a channel more, 24 x 6 = 144; in its middle 24 x 12."""
    least, most = mebibytes(nccl(AMPERE, EAGER).of(Communicator("all ranks", 4, 4, 4, reduces=True)))
    assert least < 688 < most == 544 + 2 + 24 * 12


def test_all_to_all_of_eight_h100_as_nvidia_nccl_issue_1685_read_it() -> None:
    """32 channels to each of 7 peers, of 10 and 2 MiB; from 1.06 to 4.34 GB, with kernels that are loaded."""
    exchanged = nccl(HOPPER, LAZY).of(Communicator("experts", 8, 8, 8, peers=7))
    pages = 32 * 3 + 3
    assert mebibytes(exchanged) == (7 * 32 * 12 + 2 * pages, 7 * 32 * 12 + 2 * pages)
    assert 0 < 3_280 - exchanged.most / 1e6 < 300


def test_two_a100_of_torchrec_fit_into_the_range() -> None:
    """meta-pytorch/torchrec pull request 3580: 6,753 MiB used, 5,964 reserved, of two A100: 789 beside PyTorch."""
    from memplan.device.contexts import context_causes

    context = context_causes("a100-80gb")
    least, most = mebibytes(nccl(AMPERE, LAZY).of(world(2)))
    assert least + sum(one.least for one in context) / MIB < 789 + 350
    assert most + sum(one.most for one in context) / MIB > 789


def test_nvlink_sharp_took_a_gibibyte_before_its_chunks_were_small() -> None:
    """16 channels x 2 buffers x 8 heads, of 4 MiB until 2.20 and of 1 MiB from 2.21 on."""
    eight = Communicator("tensor parallel", 8, 8, 8, reduces=True)
    off = {"NCCL_NVLS_ENABLE": "0"}
    for version, size in (((2, 20), 1024), ((2, 21), 256), (LAZY, 256)):
        more = nccl(HOPPER, version).of(eight).most - nccl(HOPPER, version, **off).of(eight).most
        assert more == (size + 16 * 2) * MIB


def test_gathers_need_no_tree_and_scalars_one_algorithm() -> None:
    eight = Communicator("", 8, 8, 8, gathers=True)
    sharp = nccl(HOPPER, LAZY, NCCL_NVLS_ENABLE="0")
    ring = sharp.of(eight).most
    assert sharp.of(eight._replace(reduces=True)).most == ring + 24 * 12 * MIB
    assert sharp.of(eight._replace(reduces=True, few_bytes=True)).most == ring


def test_on_pcie_buffers_may_lie_in_host_memory() -> None:
    """NVIDIA/nccl-tests issue 307: 8 RTX 4090 with 2 channels, via SHM."""
    least, most = mebibytes(nccl(ADA, LAZY).of(world(8)))
    assert least == 2 * (3 * 2 + 3)
    assert most < 100


@pytest.mark.parametrize("said", [{"NCCL_NET": "Socket"}, {"NCCL_NET_GDR_LEVEL": "LOC"}, {"NCCL_IB_DISABLE": "1"}])
def test_without_gpudirect_what_crosses_the_network_lies_in_host_memory(said: dict[str, str]) -> None:
    apart = Communicator("data parallel", 8, 1, 8, reduces=True, gathers=True, peers=2)
    with_it, without = nccl(HOPPER, LAZY).of(apart), nccl(HOPPER, LAZY, **said).of(apart)
    assert without.least == with_it.least
    assert without.most == 2 * (3 * 4 + 3) * MIB < with_it.most, "pages of four channels alone"


def test_a_rank_alone_has_no_communicator() -> None:
    assert nccl(HOPPER, LAZY).of(world(1)) == Span(0, 0)


@pytest.mark.parametrize(
    ("environment", "mebibytes_of_a_channel"),
    [
        ({}, 12),
        ({"NCCL_BUFFSIZE": "1048576"}, 8 + 2),
        ({"NCCL_BUFFSIZE": "0x100000"}, 8 + 2),
        ({"NCCL_BUFFSIZE": "8388608"}, 14 + 2),
        ({"NCCL_BUFFSIZE": "-2"}, 10 + 2),
        ({"NCCL_LL128_BUFFSIZE": "122880"}, 6 + 2),
        ({"NCCL_LL_BUFFSIZE": "122880", "NCCL_LL128_BUFFSIZE": "122880", "NCCL_BUFFSIZE": "122880"}, 2 + 2),
    ],
)
def test_variables_of_buffers(environment: dict[str, str], mebibytes_of_a_channel: int) -> None:
    """LL 512 KiB + LL128 4800 KiB + Simple 4096 KiB + 4 KiB = 9412 KiB, in pages of 2 MiB: 10 MiB; and 2 MiB."""
    pair = nccl(AMPERE, LAZY, NCCL_CUMEM_ENABLE="0", **environment).of(Communicator("", 2, 2, 2, gathers=True))
    assert pair.least == pair.most == (24 * mebibytes_of_a_channel + 2) * MIB


def test_variables_of_channels() -> None:
    pinned = nccl(AMPERE, LAZY, NCCL_CUMEM_ENABLE="0", NCCL_MIN_NCHANNELS="4", NCCL_MAX_NCHANNELS="4")
    assert pinned.of(Communicator("", 2, 2, 2, gathers=True)).most == (4 * 12 + 2) * MIB
    assert pinned.of(Communicator("", 2, 2, 2, peers=1)).most == (4 * 12 + 2) * MIB


def test_channels_of_one_communicator_are_configured() -> None:
    """As variables do it for all, which stand over it (``envConfigOverride``)."""
    pair = Communicator("", 2, 2, 2, gathers=True, blocks=(4, 4))
    assert nccl(AMPERE, LAZY, NCCL_CUMEM_ENABLE="0").of(pair).most == (4 * 12 + 2) * MIB
    assert nccl(AMPERE, LAZY, NCCL_CUMEM_ENABLE="0", NCCL_MAX_CTAS="8").of(pair).most == (8 * 12 + 2) * MIB


def test_switches_that_reduce_add_to_the_most() -> None:
    """On two nodes of 8 GPUs: two halves of 4 MiB for each channel, a chain, and connections with 7 other heads, twice;
    on one node there is no switch between them."""
    across = Communicator("", 16, 16, 16, reduces=True)
    given, without = (nccl(AMPERE, LAZY).of(across._replace(in_network=one)) for one in (True, False))
    assert given.least == without.least
    channels = 16
    assert given.most - without.most == channels * (2 * 4 + 12 * (1 + 2 * 7)) * MIB
    near = Communicator("", 8, 8, 8, reduces=True)
    assert nccl(AMPERE, LAZY).of(near._replace(in_network=True)) == nccl(AMPERE, LAZY).of(near)


def test_more_channels_than_nccl_has_are_its_most() -> None:
    most = nccl(AMPERE, LAZY, NCCL_MIN_NCHANNELS="1000000", NCCL_MIN_P2P_NCHANNELS="1000000").of(world(8)).most
    assert most == nccl(AMPERE, LAZY, NCCL_MIN_NCHANNELS="64").of(world(8)).most


@pytest.mark.parametrize("value", ["4M", "1e6", "-1", "010", "0x", "9" * 5000])
def test_malformed_variables_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match=f"^NCCL_BUFFSIZE={value} is not a number for NCCL; allowed [^\n]+$"):
        nccl(HOPPER, LAZY, NCCL_BUFFSIZE=value).of(world(8))


@pytest.mark.parametrize(
    ("torch", "expected"),
    [((1, 8), (2, 7)), ((1, 10), (2, 10)), ((2, 0), (2, 14)), ((2, 4), (2, 20)), ((2, 6), (2, 21)), ((2, 13), (2, 29))],
)
def test_releases_of_pytorchs_wheels(torch: tuple[int, int], expected: tuple[int, int]) -> None:
    assert version_of(torch) == expected


@pytest.mark.parametrize(
    ("block", "stride", "ranks", "node", "expected"),
    [(8, 8, 8, 8, 8), (1, 8, 12, 8, 1), (1, 2, 16, 8, 4), (4, 32, 16, 8, 4), (64, 64, 64, 8, 8), (1, 3, 4, 8, 2)],
)
def test_ranks_that_share_a_node(block: int, stride: int, ranks: int, node: int, expected: int) -> None:
    assert Communicator("", ranks, block, stride).on_node(node) == expected


COMMUNICATORS = st.builds(
    Communicator,
    name=st.just(""),
    ranks=st.integers(2, 512),
    block=st.sampled_from([1, 2, 8, 512]),
    stride=st.sampled_from([1, 2, 4, 8, 64, 512]),
    reduces=st.booleans(),
    gathers=st.booleans(),
    peers=st.integers(0, 1),
    few_bytes=st.booleans(),
    certain=st.just(True),
    times=st.just(1),
)
RELEASES = st.sampled_from([(2, 7), (2, 10), (2, 14), EAGER, (2, 20), (2, 21), (2, 26), LAZY])


@given(one=COMMUNICATORS, version=RELEASES, capability=st.sampled_from([(7, 0), AMPERE, HOPPER, BLACKWELL, ADA]))
def test_a_range_is_in_order_and_more_use_needs_no_less(
    one: Communicator, version: tuple[int, int], capability: tuple[int, int]
) -> None:
    library = nccl(capability, version)
    least, most = library.of(one)
    assert 0 < least <= most
    for more in (one._replace(reduces=True), one._replace(gathers=True), one._replace(few_bytes=False)):
        assert library.of(more).least >= least
        assert library.of(more).most >= most
    assert library.holds([one._replace(certain=False)]) == Span(0, most)
    assert library.holds([one._replace(times=3)]) == Span(3 * least, 3 * most)
