"""Seconds of a collective: latency and bandwidth of the slowest level that it crosses.

The model is NCCL's own, by which it chooses algorithm and protocol (``src/graph/tuning.cc``: ``baseLatencies``,
``hwLatencies``, ``ncclTopoTuneModel``, ``ncclTopoGetAlgoTime``): rings with the protocols LL128 and Simple, and trees
for all-reduce between nodes. Sums inside switches (NVLink SHARP, network SHARP) are not modelled.
https://github.com/NVIDIA/nccl
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, comb, log2
from typing import Literal

from ...plan.errors import PlanError
from ...values import NamedTuple
from .rates import Rates

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]


class Group(NamedTuple):
    """Ranks that take part in a collective, as they lie on nodes."""

    ranks: int
    local: int
    """Those of them on one node."""
    stride: int = 1
    """Groups of the same kind that share the node's network adapters at the same time."""

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.local)


def group(ranks: int, stride: int, node: int) -> Group:
    """``ranks`` that are ``stride`` apart, on nodes of ``node`` GPUs."""
    return Group(ranks, max(1, min(ranks, node // stride)), stride)


class _Protocol(NamedTuple):
    """Microseconds, from the tables named above."""

    base: float
    link: float
    """A step of a ring over NVLink."""
    host: float
    """Over PCIe."""
    network: float
    """Over the network."""
    tree: float
    """A step of a tree over the network."""
    share: float
    """Of the bandwidth that carries data."""


_LL128 = _Protocol(14.0, 1.9, 2.5, 4.0, 8.5, 0.92)
_SIMPLE = _Protocol(8.4, 3.4, 5.7, 14.0, 14.0, 1.0)
_TREE_SHARE = 0.92
_MICRO = 1e-6


FABRIC = (1.0, 0.98, 0.94, 0.89, 0.85, 0.84)
"""What remains of the network's bandwidth for rings through 2, 4, 8, … 64 nodes and more, beside their latencies:
reduce-scatters of H100s reach 360, 345, 320, 300, 280 and 260 GB/s through 4, 8, 16, 32, 64 and 128 nodes of eight
(https://github.com/NVIDIA/nccl/issues/1229, whose size is taken to be 8 GiB). So have NCCL's all-to-alls: of 16 B300 to
256 their largest reach 96, 90, 92, 79 and 72 of 100 GB/s
(https://github.com/awslabs/awsome-distributed-ai/tree/main/micro-benchmarks/expert-parallelism)."""

OWN = {"all-gather": 0.45, "reduce-scatter": 0.45, "all-reduce": 0.25}
"""What a rank's own part, which it copies or sums last, costs in a ring over NVLink, as a part of another's. NVIDIA's
sweeps of NCCL (https://github.com/ai-dynamo/aiconfigurator, aic-core/src/aiconfigurator_core/systems/data,
``nccl_perf``; NCCL 2.27.3 on A100, 2.29.2 on later GPUs) gather 512 MiB among 2, 4 and 8 in 1,790, 2,102 and 2,288
microseconds on A100, 1,039, 1,267 and 1,402 on H100, 612, 711 and 761 on B200, as if it cost 0.46, 0.36 and 0.51.
Medians of these and of the same sums."""

SHORT = 1 << 20
"""Bytes of a rank's part up to which Blackwell's collectives have protocol LL128: their times jump beyond (8 MiB to 16
among 8 GPUs from 44 to 104 microseconds, 4 MiB to 8 among 4 from 25 to 58; the same sweeps, B200)."""

ALL_TO_ALL = 154e-6
"""Seconds that NCCL's takes between nodes besides its bytes: 8 MiB of 64 H800, whose adapters are assumed to be of 400
Gb/s, take 338 and 296 microseconds (https://github.com/NVIDIA/nccl/issues/1531)."""


@lru_cache(maxsize=1 << 16)
def collective(rates: Rates, kind: Kind, size: float, of: Group, choices: tuple[int, int] = (0, 0)) -> float:
    """Seconds; ``size`` in bytes of the whole tensor: what an all-gather gives and a reduce-scatter takes. ``choices``:
    as of ``Exchange``."""
    n = of.ranks
    if n == 1 or not size:
        return 0.0
    if kind == "all-to-all":
        return _all_to_all(rates, size, of, choices)
    steps = 2 * (n - 1) if kind == "all-reduce" else n - 1
    bandwidth, linked = _bandwidth(rates, of)
    if of.nodes == 1 and linked and rates.collective is not None and rates.hop is not None and size > n * SHORT:
        return rates.collective + steps * rates.hop + steps / n * size / bandwidth
    moved = (steps + OWN[kind] if of.nodes == 1 and linked else steps) / n * size
    hops = 2 * (of.nodes - 1) if kind == "all-reduce" else of.nodes - 1
    times = []
    for protocol in (_LL128, _SIMPLE):
        inside = protocol.link if linked else protocol.host
        latency = protocol.base + (steps - hops) * inside + hops * protocol.network
        times.append(latency * _MICRO + moved / (bandwidth * protocol.share))
    if kind == "all-reduce" and of.nodes > 1:
        depth = ceil(log2(of.nodes))
        latency = _SIMPLE.base + 2 * ((of.local - 1) * _SIMPLE.link + depth * _SIMPLE.tree)
        times.append(latency * _MICRO + 2 * size / (bandwidth * _TREE_SHARE))
    return min(times)


def _all_to_all(rates: Rates, size: float, of: Group, choices: tuple[int, int]) -> float:
    """Every rank sends each other one its part of ``size`` bytes, all at once (``ncclSend`` and ``ncclRecv`` grouped,
    with the Simple protocol): over links to those of its node, meanwhile to others through its own network adapter.
    ``choices``: a row crosses the network once for each node."""
    linked = _linked(rates, of)
    inside = (of.local - 1) / of.ranks * size / (rates.exchange if linked else rates.host)
    latency = _SIMPLE.link if linked else _SIMPLE.host
    if of.nodes == 1:
        base = rates.collective if linked and rates.collective is not None else (_SIMPLE.base + latency) * _MICRO
        return base + inside
    copies, base = 1.0, ALL_TO_ALL
    if choices[0]:  # by kernels that are not NCCL's
        copies = _reached(of.nodes, choices) / _reached(of.ranks, choices)
        base = (_SIMPLE.base + _SIMPLE.network) * _MICRO
    outside = (of.ranks - of.local) / of.ranks * copies * size / (between_nodes(rates) * _fabric(of))
    return base + max(inside, outside)


def _reached(parts: int, choices: tuple[int, int]) -> float:
    """How many of so many equal parts of the experts a token reaches that chooses some at random."""
    chosen, experts = choices
    return parts * (1 - comb(experts - experts // parts, chosen) / comb(experts, chosen))


def _linked(rates: Rates, of: Group) -> bool:
    """Whether NVLink joins the ranks of a node."""
    return bool(rates.link) and (of.local * of.stride <= rates.link_gpus or of.local == 1)


def _bandwidth(rates: Rates, of: Group) -> tuple[float, bool]:
    """Bytes/s that a ring carries past its slowest hop, and whether NVLink joins the ranks of a node."""
    linked = _linked(rates, of)
    inside = rates.link if linked else rates.host
    if of.nodes == 1:
        return inside, linked
    across, fabric = between_nodes(rates) * of.local, _fabric(of)
    return fabric * (across if of.local == 1 else min(inside, across)), linked


def _fabric(of: Group) -> float:
    """Of several nodes."""
    return FABRIC[min(ceil(log2(of.nodes)) - 1, len(FABRIC) - 1)]


def between_nodes(rates: Rates) -> float:
    """Bytes/s of one GPU's share of its node's network adapters."""
    if rates.network is None:
        raise PlanError(
            "hardware.network",
            None,
            "is missing: nobody has published a system with this GPU and its network adapters (GB/s of each GPU)",
        )
    return rates.network


def send(rates: Rates, size: float, across_nodes: bool) -> float:
    """Seconds from one rank to another."""
    if not size:
        return 0.0
    if across_nodes:
        return (_SIMPLE.base + _SIMPLE.network) * _MICRO + size / between_nodes(rates)
    latency, bandwidth = (_SIMPLE.link, rates.link) if rates.link else (_SIMPLE.host, rates.host)
    return (_SIMPLE.base + latency) * _MICRO + size / bandwidth
