"""What NCCL's communicators hold on a device, as a range: sizes from NCCL's source, channels from its logs.

A communicator cuts each collective among *channels*; in each, a rank has a buffer for every connection: to its
neighbours in a ring, in a tree, and to the peers that it exchanges tensors with. What a machine's links decide (how
many channels there are), what the tuner decides (which algorithms run) and what the network decides (whether buffers
lie on the device) makes the range. All sizes in bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..frameworks.base import Communicator
from ..values import NamedTuple
from .facts import NO_ENVIRONMENT, Version

SOURCE = (
    "NVIDIA/nccl src/init.cc (computeBuffSizes, initTransportsRank), src/channel.cc, src/transport/p2p.cc, net.cc, "
    "coll_net.cc, nvls.cc, src/graph/connect.cc, paths.cc; releases 2.7 to 2.30"
)
_KIB, _MIB = 1 << 10, 1 << 20
_STEPS = 8
_BUFFERS = {
    "NCCL_LL_BUFFSIZE": 8 * 512 * _STEPS * 16,
    "NCCL_LL128_BUFFSIZE": 120 * 640 * _STEPS * 8,
    "NCCL_BUFFSIZE": 4 * _MIB,
}
"""Of one connection (``computeBuffSizes``): lines x threads x steps x line for LL, elements x threads x steps x 8 B for
LL128, and Simple's."""
_CONTROL = 4096
"""``sizeof(ncclSendMem)``, and of ``ncclRecvMem``."""
_PAGE = 2 * _MIB
"""``CUDA_IPC_MIN``, and the granularity of ``cuMemCreate``."""
MOST_CHANNELS = 64
"""``MAXCHANNELS``; 32 before 2.26, which no machine of ``_FABRICS`` exceeds."""
_LEAST, _MOST = ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS"), ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")
_BLOCKS = ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS")
"""Variables that stand over what a communicator is configured with (``envConfigOverride``)."""
MOST_COLLNET_HEADS = 8
"""``NCCL_MAX_DIRECT_ARITY`` others, and the rank itself."""
MOST_HEADS = 32
"""``NCCL_MAX_NVLS_ARITY``."""
_SHARED_STEPS = 16
"""``NCCL_SHARED_STEPS`` of ``net.cc``: slots of a channel in the buffer that all sends (receives) over the network
share."""
_ON_CHANNEL = 3
"""Pages of a channel's own (``initChannel``): ``devPeers`` of the shared resources, of the communicator, and the ring's
ranks. With cuMem (from 2.19 on) each is a page of its own."""

RELEASES: tuple[tuple[Version, Version], ...] = (
    ((1, 0), (2, 7)),
    ((1, 10), (2, 10)),
    ((1, 13), (2, 14)),
    ((2, 1), (2, 18)),
    ((2, 2), (2, 19)),
    ((2, 3), (2, 20)),
    ((2, 5), (2, 21)),
    ((2, 7), (2, 26)),
    ((2, 8), (2, 27)),
    ((2, 11), (2, 28)),
    ((2, 12), (2, 29)),
)
"""From which PyTorch on its wheels have which NCCL (pytorch/pytorch RELEASE.md with pull request 190386;
``generate_binary_build_matrix.py`` before)."""
_CUMEM, _LAZY, _NVLS, _SMALL_NVLS, _SHARED_AT_INIT = (2, 19), (2, 22), (2, 17), (2, 21), (2, 12)
"""Releases from which on: buffers come from ``cuMemCreate``; algorithms are connected when they first run
(``NCCL_RUNTIME_CONNECT``); NVLink SHARP is used; with chunks of 128 KiB instead of ``NCCL_BUFFSIZE``; the buffer that
sends over the network share is made with the communicator, until ``_LAZY``."""


class Span(NamedTuple):
    """The least and the most bytes."""

    least: int
    most: int

    def plus(self, other: Span) -> Span:
        return Span(self.least + other.least, self.most + other.most)


NOTHING = Span(0, 0)


class Fabric(NamedTuple):
    """How the GPUs of a node are linked, as NCCL sees it."""

    channels: tuple[int, int]
    """For collectives within a node, least and most."""
    nvlink: bool
    nvls_channels: int = 0
    """``NVLS_NCHANNELS_SM90``, ``_SM100`` of ``nvls.cc``; 0: no NVLink SHARP."""


_FABRICS: Mapping[int, Fabric] = {
    7: Fabric((4, 12), True),
    8: Fabric((24, 24), True),
    9: Fabric((24, 24), True, 16),
    10: Fabric((32, 32), True, 32),
}
"""By the major compute capability of data-centre GPUs. Twice the rings that the links carry (``ncclTopoCompute``,
``ncclTopoPostset``): six links of a V100, of which a pair may share one; 12 x 20 GB/s of an A100 (NVIDIA/nccl issue
964), 12 x 30 of an H100 (issue 1259), 16 x 45 of a B200 (issue 1646)."""
_PCIE = Fabric((2, 4), False)
"""NVIDIA/nccl-tests issue 307: two on eight RTX 4090, in host memory."""
_WITHOUT_SWITCH = 8
"""Channels of four A100 that are linked pair by pair (NVIDIA/nccl issue 713: four rings, each twice)."""


def fabric(capability: tuple[int, int], gpus_per_node: int) -> Fabric:
    """Of a node with so many GPUs."""
    found = _FABRICS.get(capability[0], _PCIE) if capability[1] == 0 else _PCIE
    if found.nvlink and gpus_per_node <= 4:
        return found._replace(channels=(min(found.channels[0], _WITHOUT_SWITCH), found.channels[1]))
    return found


class Nccl(NamedTuple):
    """NCCL of a release, with its variables, on a kind of machine."""

    version: Version
    fabric: Fabric
    gpus_per_node: int
    environment: Mapping[str, str] = NO_ENVIRONMENT

    def holds(self, communicators: Sequence[Communicator]) -> Span:
        """Bytes of all ``communicators`` of a rank."""
        total = NOTHING
        for one in communicators:
            size = self.of(one)
            total = total.plus(Span(one.times * size.least * one.certain, one.times * size.most))
        return total

    def of(self, one: Communicator) -> Span:
        """Bytes of one communicator."""
        if one.ranks == 1:
            return NOTHING
        local = one.on_node(self.gpus_per_node)
        least, most = (self._at(one, local, channels, most=most) for most, channels in enumerate(self._channels(one)))
        return Span(least, most)

    # -- channels -----------------------------------------------------------------------------------

    def _channels(self, one: Communicator) -> tuple[int, int]:
        """Of collectives, least and most. Between nodes the network cards decide: at least one ring for three GPUs, as
        in nodes with four cards (NVIDIA/nccl issues 527, 1412), and with a fast card for each GPU four channels a GPU,
        up to 16 (issues 1189, 1538), of Blackwell 32."""
        least, most = self.fabric.channels
        local = one.on_node(self.gpus_per_node)
        if local < one.ranks and self.fabric.nvlink:
            least, most = 2 * min(local, 3), min(32 if most > 24 else 16, 4 * local)
        own = tuple(0 if key in self.environment else each for key, each in zip(_BLOCKS, one.blocks, strict=True))
        at_most = min(MOST_CHANNELS, own[1] or MOST_CHANNELS, *(self._number(key, MOST_CHANNELS) or 1 for key in _MOST))
        at_least = min(MOST_CHANNELS, max(own[0], *(self._number(key, 0) for key in _LEAST)))
        return max(min(least, at_most), at_least), max(min(most, at_most), at_least)

    def _exchanging(self, channels: int) -> int:
        """Of sends and receives: the next power of two (``ncclTopoComputeP2pChannels``)."""
        most = self._number("NCCL_MAX_P2P_NCHANNELS", MOST_CHANNELS)
        wanted = min(max(min(channels, most), self._number("NCCL_MIN_P2P_NCHANNELS", 1), 1), MOST_CHANNELS)
        return 1 << (wanted - 1).bit_length()

    # -- parts --------------------------------------------------------------------------------------

    def _at(self, one: Communicator, local: int, channels: int, *, most: int) -> int:
        """Bytes with so many ``channels``, at the least or at the most that else decides."""
        at_once = self.version < _LAZY or not self._number("NCCL_RUNTIME_CONNECT", 1)
        collective = one.reduces or one.gathers
        ring = self._ring(one, local, channels, most) if collective or at_once else 0
        tree = self._tree(one, local, channels, most) if at_once or (one.reduces and most) else 0
        nvls = self._nvls(one, local) if most and (at_once or (collective and not one.few_bytes)) else 0
        size = max(ring, tree) if one.few_bytes and not at_once else ring + tree + nvls
        size += self._switched(one, local, channels) if most else 0
        if one.peers:
            size += self._peers(one, local, channels, most)
        if at_once and self.version >= _SHARED_AT_INIT:
            size += self._shared(one, local, channels, most)
        return self._channel_pages(channels) + size

    def _channel_pages(self, channels: int) -> int:
        """``initChannel``, and three pages of the communicator's own (``devCommSetup``)."""
        if self.version < _CUMEM or not self._number("NCCL_CUMEM_ENABLE", 1):
            return _PAGE
        return _PAGE * (_ON_CHANNEL * self._exchanging(channels) + 3)

    def _ring(self, one: Communicator, local: int, channels: int, most: int) -> int:
        """In each channel a buffer from the previous rank and control words towards the next; where the ring enters or
        leaves a node, buffers of the network, with GPUDirect on the device, else in host memory."""
        if local == one.ranks:
            return channels * self._neighbour(most)
        crossing = -(-channels // local)
        return (channels - crossing) * self._neighbour(most) + most * crossing * self._network

    def _tree(self, one: Communicator, local: int, channels: int, most: int) -> int:
        """Trees run along a chain through the node, in both directions; one of them is the ring's. At the chain's end
        one neighbour is left out. Between nodes, two neighbours on average of both trees."""
        sizes = (
            channels * (self._neighbour(most) if most else self._control) if local > 2 or 1 < local < one.ranks else 0
        )
        if local == one.ranks:
            return sizes if most or self.fabric.nvlink else 0
        nodes = -(-one.ranks // local)
        return (sizes + -(-channels // local) * min(nodes - 1, 2) * self._network) if most else 0

    def _nvls(self, one: Communicator, local: int) -> int:
        """NVLink SHARP: two buffers for each channel and head (``ncclNvlsBufferSetup``), and a page for a channel."""
        channels = self.fabric.nvls_channels
        if local < 2 or not channels or self.version < _NVLS or not self._number("NCCL_NVLS_ENABLE", 2):
            return 0
        if local < one.ranks and not one.reduces and self.version >= _LAZY:
            return 0
        chunk = self._number("NCCL_NVLS_CHUNKSIZE", 128 * _KIB)
        buffer = _STEPS * chunk if self.version >= _SMALL_NVLS else self._number(*_SIMPLE)
        return _pages(channels * 2 * buffer * min(local, MOST_HEADS)) + channels * _PAGE

    def _switched(self, one: Communicator, local: int, channels: int) -> int:
        """CollNet (``coll_net.cc``): on a head two halves of Simple's buffer for each channel, which sends and receives
        share (``sharedBuffersInit``), and on a node a chain, and connections between up to eight heads, each way."""
        if not one.in_network or local == one.ranks or not self._direct:
            return 0
        shared = _pages(2 * channels * self._number(*_SIMPLE))
        heads = min(local, MOST_COLLNET_HEADS)
        return shared + channels * self._neighbour(1) * ((local > 1) + 2 * (heads - 1))

    def _peers(self, one: Communicator, local: int, channels: int, most: int) -> int:
        """Sends and receives have connections of their own: on a node, buffers for each peer and channel; over the
        network one buffer for all (``sharedNetBuffersInit``)."""
        near = min(one.peers, local - 1)
        size = near * self._channels_of_peer(one, local, channels, most) * self._neighbour(most)
        if local < one.ranks:
            size += most * self._direct * 2 * self._shared(one, local, channels, most)
        return size

    def _channels_of_peer(self, one: Communicator, local: int, channels: int, most: int) -> int:
        """``ncclTopoGetNchannels``: all where NVLink connects every two, else two; with a network up to four."""
        if local < one.ranks:
            return 4 if most else 1
        return self._exchanging(channels) if self.fabric.nvlink else 2

    def _shared(self, one: Communicator, local: int, channels: int, most: int) -> int:
        """The buffer that sends over the network share, as do receives. On one node, where it is never used, with the
        chunks of NVLink; between nodes, those of other GPUs that reach the network through this one's card (PXN)."""
        exchanging = self._exchanging(channels)
        simple = self._number(*_SIMPLE)
        if self.version < _SHARED_AT_INIT:
            return exchanging * _STEPS * simple // 4
        if local < one.ranks:
            chunk, key = 128 * _KIB, "NCCL_P2P_NET_CHUNKSIZE"
        elif self.fabric.nvlink:
            chunk, key = 512 * _KIB, "NCCL_P2P_NVL_CHUNKSIZE"
        else:
            chunk, key = 128 * _KIB, "NCCL_P2P_PCI_CHUNKSIZE"
        chunk = min(self._number(key, chunk), simple // _STEPS)
        others = local - 1 if most and local < one.ranks else 0
        return _pages(exchanging * _SHARED_STEPS * chunk) * (1 + others)

    # -- connections --------------------------------------------------------------------------------

    def _neighbour(self, most: int) -> int:
        """Of a channel, from a rank and to a rank on the same node: 10 and 2 MiB (NVIDIA/nccl issue 1685), or 6 and 6
        where Ampere reads. In host memory where GPUs cannot reach each other, as over PCIe."""
        if self._number("NCCL_P2P_DISABLE", 0) or not (most or self.fabric.nvlink):
            return 0
        return _pages(_CONTROL + sum(self._number(*item) for item in _BUFFERS.items())) + self._control

    @property
    def _control(self) -> int:
        return _pages(_CONTROL)

    @property
    def _direct(self) -> bool:
        """Whether the network reads and writes the device (GPUDirect). Sockets do not, and a variable turns it off."""
        net, level = (self.environment.get(key, "").upper() for key in ("NCCL_NET", "NCCL_NET_GDR_LEVEL"))
        return net != "SOCKET" and level not in ("0", "LOC") and not self._number("NCCL_IB_DISABLE", 0)

    @property
    def _network(self) -> int:
        """Of a channel, from a rank and to a rank on another node. What is sent by LL lies in host memory."""
        if not self._direct:
            return 0
        low, *others = (self._number(*item) for item in _BUFFERS.items())
        return _pages(low + sum(others)) + _pages(sum(others))

    def _number(self, key: str, default: int) -> int:
        """NCCL reads its numbers with ``strtoll``: decimal, or hexadecimal with 0x. An octal 0 in front is refused."""
        value = self.environment.get(key, "").strip()
        if not value:
            return default
        if not re.fullmatch(r"0|[1-9][0-9]{0,14}|0[xX][0-9a-fA-F]{1,12}|-2", value):
            raise ValueError(f"{key}={value} is not a number for NCCL; allowed is a whole number, such as {default}")
        number = int(value, 0)
        return default if number == -2 else number


_SIMPLE = ("NCCL_BUFFSIZE", _BUFFERS["NCCL_BUFFSIZE"])


def version_of(torch_version: Version) -> Version:
    """The NCCL of PyTorch's wheels."""
    return max(nccl for torch, nccl in RELEASES if torch <= torch_version)


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
