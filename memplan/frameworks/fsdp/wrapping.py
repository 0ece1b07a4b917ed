"""What FSDP1 allocates while it wraps a model: nothing of it stays, but the allocator keeps the segments.

torch 2.4 to 2.13, ``distributed/fsdp/_init_utils.py`` (``_init_param_handle_from_module``) and ``_flat_param.py``
(``flatten_tensors``, ``shard``), as Accelerate calls them (``accelerator.py``, ``prepare_model``: ``device_id`` and
``sync_module_states``). Units are wrapped from the inside out, so the root comes last. Of each

1. every parameter is moved to the GPU, or made there on ranks whose model is on the meta device;
2. rank 0's are sent to all ranks in buckets, of which at most two are on their way (``broadcast_coalesced`` of
   ``torch/csrc/distributed/c10d/comm.cpp``); a bucket of one parameter is that parameter;
3. the flat tensor is put together, this rank's piece of it is copied, and all else ends.

With mixed precision Accelerate casts pieces that are trained to fp32 once the model is wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...tape.events import Category, Drop, Event, Hold, Tape, rounded
from .hooks import GATHERING

BUCKET = 250 << 20
"""Bytes with which a bucket is full (``PARAM_BROADCAST_BUCKET_SIZE``)."""
IN_FLIGHT = 2
"""``max_in_flight`` of ``broadcast_coalesced``."""


class _Wrapping:
    """Events of one rank, with ids that count up from 1."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ids = 0

    def hold(self, size: int, name: str, stream: int = 0) -> Hold:
        self.ids += 1
        hold = Hold(self.ids, rounded(size), Category.PARAMETERS, name, stream=stream)
        self.events.append(hold)
        return hold

    def drop(self, holds: Iterable[Hold]) -> None:
        self.events += [Drop(one.tensor, one.bytes, one.category) for one in holds]

    def send(self, parts: Sequence[int]) -> None:
        """The broadcast of parameters of these bytes."""
        in_flight: list[Hold | None] = []
        for bucket in buckets(parts):
            if len(in_flight) >= IN_FLIGHT:
                self.drop([one for one in (in_flight.pop(0),) if one is not None])
            in_flight.append(self.hold(sum(bucket), "bucket") if len(bucket) > 1 else None)
        self.drop([one for one in in_flight if one is not None])

    def wrap(self, parts: Sequence[int], ranks: int) -> Hold:
        """One unit; this rank's piece of it."""
        parameters = [self.hold(size, "parameter") for size in parts]
        if ranks > 1:
            self.send(parts)
        flat = self.hold(sum(parts), "flat_parameter")
        piece = self.hold(-(-sum(parts) // ranks), "piece")
        self.drop((flat, *parameters))
        return piece


def buckets(parts: Sequence[int]) -> Iterator[list[int]]:
    """Parameters of these bytes, in order, cut behind the one with which a bucket is full."""
    bucket: list[int] = []
    for size in parts:
        bucket.append(size)
        if sum(bucket) >= BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def wrapping(units: Sequence[tuple[Sequence[int], int]], ranks: int, gathered: int) -> Tape:
    """The wrapping of ``units``, the root's last: bytes of each one's parameters, and of its piece once that has been
    cast, 0 where it is not. The last events drop all pieces, for which what is kept then takes their blocks.

    So many units besides the root are ``gathered`` at once, and one more has a block: what is freed waits for the
    compute stream (``_free_unsharded_flat_param`` records it), which is not there yet when the next unit is gathered,
    for the host runs ahead by as much as the limiter of gathers lets it (``_FreeEventQueue``)."""
    w = _Wrapping()
    pieces = [w.wrap(parts, ranks) for parts, _ in units]
    for at, (_, cast) in enumerate(units):
        if cast:
            wide = w.hold(cast, "piece_in_fp32")
            w.drop((pieces[at],))
            pieces[at] = wide
    w.drop(pieces)
    *inner, root = [sum(parts) for parts, _ in units]
    blocks = [root, *sorted(inner, reverse=True)[: gathered + 1]]
    w.drop([w.hold(size, "flat_parameter", GATHERING) for size in blocks])
    return tuple(w.events)
