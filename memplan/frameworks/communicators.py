"""NCCL's communicators as one rank has them: what a framework declares, and the device's memory is counted from.

Process groups of gloo hold nothing on a device. PyTorch makes a group's communicator with its first collective
(``ProcessGroupNCCL::initNCCLComm``), so a group that nothing runs in costs nothing, either.
"""

from __future__ import annotations

from typing import NamedTuple


class Communicator(NamedTuple):
    """Ranks that communicate, and for what."""

    name: str
    ranks: int
    block: int = 1
    """So many of them follow each other in the order of all ranks;"""
    stride: int = 1
    """and this is the distance from one such block to the next."""
    reduces: bool = False
    """All-reduce: over rings, trees or NVLink SHARP."""
    gathers: bool = False
    """All-gather, reduce-scatter or broadcast: over rings, on one node over NVLink SHARP, too."""
    peers: int = 0
    """Ranks with which it exchanges tensors by send and receive."""
    few_bytes: bool = False
    """What it reduces are scalars: one algorithm runs, not one for each size of message."""
    certain: bool = True
    """Every run makes it; otherwise some do, and it counts in what is needed at most."""
    times: int = 1
    """So many alike."""

    def on_node(self, gpus_per_node: int) -> int:
        """How many of its ranks share a node."""
        if self.stride >= gpus_per_node:
            return min(self.block, gpus_per_node, self.ranks)
        return min(self.block * (gpus_per_node // self.stride), self.ranks, gpus_per_node)


def world(ranks: int, *, certain: bool = True) -> Communicator:
    """PyTorch's default group: barriers, clocks, and the losses that are logged."""
    return Communicator("all ranks", ranks, ranks, ranks, reduces=True, few_bytes=True, certain=certain)
