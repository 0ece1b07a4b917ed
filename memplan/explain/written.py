"""A plan's replay in the format of PyTorch's memory viewer (https://pytorch.org/memory_viz), one stage a device.

Each request is an ``alloc`` entry with the address of its block, as the allocator places it; its frames name the
tensor, its module, phase and micro-batch, where a run's name functions. ``torch.cuda._memory_viz`` and ``memplan
explain`` read it.
"""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from ..allocator.caching import AllocatorSettings
from ..allocator.recorded import Request, record
from ..tape.events import Category, Hold
from ..tape.program import Program

MOST_STAGES = 16
"""Devices of one file: each has its own trace. The viewer shows them one at a time."""


class _Writer:
    """Keeps what a device's snapshot says."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.trace: list[dict[str, Any]] = []
        self.live: dict[int, Request] = {}
        self.segments: dict[int, tuple[int, int]] = {}
        self.left: list[Request] = []
        """What is live at the end, by address."""
        self.known: dict[tuple[object, ...], list[dict[str, Any]]] = {}

    def begins(self, request: Request) -> None:
        self.live[request.address] = request
        self._entry("alloc", request.address, request.size, request.stream, self._frames(request))

    def ends(self, address: int, size: int, stream: int) -> None:
        del self.live[address]
        self._entry("free_requested", address, size, stream, [])
        self._entry("free_completed", address, size, stream, [])

    def reserves(self, address: int, size: int, stream: int) -> None:
        self.segments[address] = size, stream
        self._entry("segment_alloc", address, size, stream, [])

    def _entry(self, action: str, address: int, size: int, stream: int, frames: list[dict[str, Any]]) -> None:
        time = len(self.trace)
        entry = {"action": action, "addr": address, "size": size, "stream": stream, "time_us": time, "frames": frames}
        self.trace.append(entry)

    def _frames(self, request: Request) -> list[dict[str, Any]]:
        """Innermost first: the tensor, its module in its phase, its category."""
        tensor = request.tensor
        shape = "×".join(map(str, tensor.shape))
        microbatch = "" if request.microbatch is None else f" of micro-batch {request.microbatch}"
        names = (
            " ".join(part for part in (tensor.name, shape, tensor.dtype) if part),
            f"{tensor.phase or 'initialisation'}{microbatch}",
            Category(request.category).key,
        )
        module = tensor.module or "static"
        key = module, request.iteration, *names
        if key not in self.known:
            self.known[key] = [{"name": name, "filename": module, "line": request.iteration} for name in names]
        return self.known[key]

    def segments_at_end(self) -> list[dict[str, Any]]:
        """With the blocks that are left in them. Pages of an expandable segment that touch are one."""
        self.left = sorted(self.live.values(), key=_address)
        joined: list[tuple[int, int, int]] = []
        for start, (size, stream) in sorted(self.segments.items()):
            if joined and sum(joined[-1][:2]) == start:
                joined[-1] = joined[-1][0], joined[-1][1] + size, stream
            else:
                joined.append((start, size, stream))
        return [self._segment(*one) for one in joined]

    def _segment(self, start: int, size: int, stream: int) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        end = start
        at = bisect_left(self.left, start, key=_address)
        while at < len(self.left) and (request := self.left[at]).address < start + size:
            at += 1
            if request.address > end:
                blocks.append(_free(end, request.address - end))
            blocks.append(self._held(request))
            end = request.address + request.block
        if end < start + size:
            blocks.append(_free(end, start + size - end))
        held = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
        return {
            "device": self.device,
            "address": start,
            "total_size": size,
            "allocated_size": held,
            "active_size": held,
            "requested_size": sum(block["requested_size"] for block in blocks),
            "stream": stream,
            "segment_type": "small" if size <= SMALL else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }

    def _held(self, request: Request) -> dict[str, Any]:
        return {
            "address": request.address,
            "size": request.block,
            "requested_size": request.size,
            "state": "active_allocated",
            "frames": self._frames(request),
        }


SMALL = 2 << 20
"""``kSmallBuffer``."""


def _address(request: Request) -> int:
    return request.address


def _free(address: int, size: int) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}


def snapshot_of(programs: Sequence[Program], settings: AllocatorSettings, workspaces: Sequence[Hold]) -> bytes:
    """The pickle: ``programs`` as devices 0, 1, …, each through its first steps."""
    segments: list[dict[str, Any]] = []
    traces: list[list[dict[str, Any]]] = []
    for device, program in enumerate(programs):
        writer = _Writer(device)
        record(program, settings, workspaces, writer)
        segments += writer.segments_at_end()
        traces.append(writer.trace)
    whole = {"segments": segments, "device_traces": traces, "allocator_settings": _settings(settings)}
    return pickle.dumps(whole, protocol=4)


def _settings(settings: AllocatorSettings) -> dict[str, Any]:
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "expandable_segments": settings.expandable_segments,
        "max_split_size": settings.max_split_size or -1,
        "garbage_collection_threshold": settings.garbage_collection_threshold or 0.0,
    }
