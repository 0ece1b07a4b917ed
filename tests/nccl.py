"""NCCL's buffers of one ring by its source: nothing that an estimate uses, since how many channels there are depends on
the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from memplan.device.facts import NO_ENVIRONMENT, Fact

_MIB = 1 << 20
_NCCL_SOURCE = "NVIDIA/nccl src/init.cc (computeBuffSizes), src/include/device.h, src/transport/p2p.cc; 2.10 to 2.30"
_NCCL_STEPS = 8
_NCCL_BUFFERS = MappingProxyType(
    {
        "NCCL_LL_BUFFSIZE": 8 * 512 * _NCCL_STEPS * 16,
        "NCCL_LL128_BUFFSIZE": 120 * 640 * _NCCL_STEPS * 8,
        "NCCL_BUFFSIZE": 4 * _MIB,
    }
)
"""Bytes per channel: lines x threads x steps x line for LL, elements x threads x steps x 8 B for LL128."""
_NCCL_CONTROL = 4096
"""``sizeof(ncclSendMem)``, and of ``ncclRecvMem``."""
_NCCL_PAGE = 2 * _MIB
"""``CUDA_IPC_MIN``: peers map whole pages of this size."""
_NCCL_DEFAULT = -2
"""What NCCL reads as: not set."""


def nccl_buffers(environment: Mapping[str, str] = NO_ENVIRONMENT, channels: int | None = None) -> Fact | None:
    """Device memory of a communicator for one ring inside a node, over NVLink or PCIe peer access.

    Per channel a buffer for what the previous rank sends and a page of control words towards the next:
    10 MiB and 2 MiB by default, the sizes that NCCL logs (NVIDIA/nccl issue 1685). Trees, NVLS, networks
    and point-to-point channels add to it, and NCCL's own kernels to the CUDA context.

    The number of channels depends on the machine: ``None`` unless it is given, or
    ``NCCL_MIN_NCHANNELS`` and ``NCCL_MAX_NCHANNELS`` pin it.
    """
    buffers = sum(_nccl_number(environment, key, default) for key, default in _NCCL_BUFFERS.items())
    channels = _pinned_channels(environment) if channels is None else channels
    if channels is None:
        return None
    receive, send = _pages(_NCCL_CONTROL + buffers), _pages(_NCCL_CONTROL)
    return Fact("nccl_ring", channels * (receive + send), _NCCL_SOURCE, f"{channels} channels of one ring, in a node")


def _pinned_channels(environment: Mapping[str, str]) -> int | None:
    least = _nccl_number(environment, "NCCL_MIN_NCHANNELS", 0)
    most = _nccl_number(environment, "NCCL_MAX_NCHANNELS", 0)
    return least if least and least == most else None


def _pages(size: int) -> int:
    return -(-size // _NCCL_PAGE) * _NCCL_PAGE


def _nccl_number(environment: Mapping[str, str], key: str, default: int) -> int:
    """NCCL reads its numbers with ``strtoll``: decimal, or hexadecimal with 0x. An octal 0 in front is refused."""
    value = environment.get(key, "").strip()
    if not value:
        return default
    if not re.fullmatch(r"0|[1-9][0-9]*|0[xX][0-9a-fA-F]+|-2", value):
        raise ValueError(f"{key}={value} is not a number for NCCL; allowed is a whole number, such as {default}")
    number = int(value, 0)
    return default if number == _NCCL_DEFAULT else number
