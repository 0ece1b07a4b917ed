"""A trace as a snapshot that PyTorch's own memory viewer opens (``torch.cuda._memory_viz``, pytorch.org/memory_viz).

The format is that of ``torch.cuda.memory._snapshot()``: segments with their blocks as they are at the end, and
the history of one device. Addresses are given in order and never twice; a frame is the module and the operator.
"""

from __future__ import annotations

from typing import Any

from ..tape import Hold
from .recording import Place, Recording

STREAM = 0


def snapshot(recording: Recording) -> dict[str, Any]:
    """What ``pickle`` writes and the viewer reads."""
    addresses: dict[int, int] = {}
    alive: dict[int, tuple[Hold, Place]] = {}
    history: list[dict[str, Any]] = []
    end = 0
    for time, (event, place) in enumerate(zip(recording.events, recording.places, strict=True)):
        if isinstance(event, Hold):
            addresses[event.tensor], end = end, end + event.bytes
            alive[event.tensor] = event, place
            history.append(_entry("alloc", addresses[event.tensor], event, place, time))
            continue
        hold, born = alive.pop(event.tensor)
        address = addresses[event.tensor]
        history += [_entry(action, address, hold, born, time) for action in ("free_requested", "free_completed")]
    blocks, at = [], 0
    for number, (hold, place) in alive.items():
        blocks += _gap(at, addresses[number])
        at = addresses[number] + hold.bytes
        block = {"state": "active_allocated", "requested_size": hold.bytes, "frames": _frames(hold, place)}
        blocks.append({**block, "address": addresses[number], "size": hold.bytes})
    blocks += _gap(at, end)
    live = sum(hold.bytes for hold, _ in alive.values())
    segment = {
        "device": 0,
        "address": 0,
        "total_size": end,
        "allocated_size": live,
        "active_size": live,
        "requested_size": live,
        "stream": STREAM,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
    return {"segments": [segment] if end else [], "device_traces": [history], "allocator_settings": {}}


def _gap(start: int, end: int) -> list[dict[str, Any]]:
    if start == end:
        return []
    return [{"address": start, "size": end - start, "requested_size": 0, "state": "inactive", "frames": []}]


def _entry(action: str, address: int, hold: Hold, place: Place, time: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": hold.bytes,
        "stream": STREAM,
        "time_us": time,
        "device": 0,
        "frames": _frames(hold, place),
    }


def _frames(hold: Hold, place: Place) -> list[dict[str, Any]]:
    phase = "recompute" if place.recompute else place.phase or "setup"
    shape = "×".join(map(str, hold.shape))
    return [
        {"name": f"{hold.name} {shape} {hold.dtype} ({hold.category.key})", "filename": place.module, "line": 0},
        {"name": f"{phase} of micro-batch {place.microbatch}", "filename": "memplan trace", "line": 0},
    ]
