"""What FSDP1 allocates while it wraps a model: nothing of it stays, but the allocator keeps the segments.

torch 2.4 to 2.13, ``distributed/fsdp/_init_utils.py`` (``_init_param_handle_from_module``) and ``_flat_param.py``
(``flatten_tensors``, ``shard``), as Accelerate calls them (``accelerator.py``, ``prepare_model``: ``device_id`` and
``sync_module_states``). Units are wrapped from the inside out, so the root comes last. Of each

1. every parameter is moved to the GPU, or made there on ranks whose model is on the meta device;
2. rank 0's are sent to all ranks in buckets, of which at most two are on their way (``broadcast_coalesced`` of
   ``torch/csrc/distributed/c10d/comm.cpp``); a bucket of one parameter is that parameter;
3. the flat tensor is put together, this rank's piece of it is copied, and all else ends.

With mixed precision Accelerate casts pieces that are trained to fp32 once the model is wrapped.

Ranks whose model is on the meta device copy nothing, so their host runs ahead of rank 0, whose copies from the host's
memory end one after the other (``_move_states_to_device``: ``param.to``). A bucket is NCCL's, too
(``ProcessGroupNCCL``, ``recordStream``), and its block comes free when rank 0 has sent it: until then every unit takes
new ones. How far a rank gets depends on how fast it is, but for two limits: the time that rank 0 needs at least, and
how much of its work can wait in a stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from ...tape.events import Category, Event, Hold, Tape, rounded
from ...values import NamedTuple
from .hooks import GATHERING

BUCKET = 250 << 20
"""Bytes with which a bucket is full (``PARAM_BROADCAST_BUCKET_SIZE``)."""
IN_FLIGHT = 2
"""``max_in_flight`` of ``broadcast_coalesced``."""
QUEUE = 1024
"""Kernels and copies that wait in a stream before the host has to: "about 1000" (NVIDIA's developer forum, topic 68937,
"CUDA stream are blocked when launch lots of kernels")."""
OF_UNIT, OF_PARAMETER = 1e-3, 0.2e-3
"""Seconds of the host for a unit, and for each of its parameters. FSDP's own code (torch 2.13, one core of an EPYC,
without collectives and launches) takes 2.8 ms for a layer of 9 parameters, 5.4 for one of 31, and 0.5 for an adapter's
weight."""
FASTEST = 1 / 31.5e9
"""Seconds for a byte from the host at least: PCIe 4.0 with 16 lanes. Memory that is not pinned takes longer."""
SLOWEST = 1.0
"""As though rank 0 copied while the others do not wait for anything but their streams."""


class Unit(NamedTuple):
    """What is wrapped as one, in bytes, on all ranks but for ``cast``."""

    parts: Sequence[int]
    """Of each parameter."""
    cast: int = 0
    """Of this rank's piece once that has been cast; 0 where it is not."""
    sent: int = 0
    """Tensors that rank 0 sends besides parameters: buffers."""
    wraps: int = 1
    """As how many it is wrapped in truth."""


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
        self.events += [one.end for one in holds]

    def send(self, parts: Sequence[int]) -> None:
        """The broadcast of parameters of these bytes."""
        in_flight: list[Hold | None] = []
        for bucket in buckets(parts):
            if len(in_flight) >= IN_FLIGHT:
                self.drop([one for one in (in_flight.pop(0),) if one is not None])
            in_flight.append(self.hold(sum(bucket), "bucket") if len(bucket) > 1 else None)
        self.drop([one for one in in_flight if one is not None])

    def wrap(self, unit: Unit, ranks: int) -> Hold:
        """One unit; this rank's piece of it."""
        parts = unit.parts
        parameters = [self.hold(size, "parameter") for size in parts]
        if ranks > 1:
            self.send(parts)
        flat = self.hold(sum(parts), "flat_parameter")
        piece = self.hold(-(-sum(parts) // ranks), "piece")
        self.drop((flat, *parameters))
        return piece

    def end(self) -> None:
        """Every unit is wrapped."""


class _Ahead(_Wrapping):
    """A rank whose model is on the meta device; rank 0 needs ``copying`` seconds for a byte."""

    def __init__(self, copying: float) -> None:
        super().__init__()
        self.copying = copying
        self.now = 0.0
        """Of this rank's host,"""
        self.sent = 0.0
        """and when rank 0 has sent all so far, in seconds."""
        self.launched = 0
        self.queue: deque[tuple[int, float]] = deque()
        """What waits for rank 0: up to which launch, and until when."""
        self.waiting: deque[tuple[Hold, float]] = deque()
        """Buckets, likewise."""

    def wrap(self, unit: Unit, ranks: int) -> Hold:
        host = unit.wraps * OF_UNIT + len(unit.parts) * OF_PARAMETER
        self.now += host
        self.sent += host + sum(unit.parts) * self.copying
        self.launched += launches(unit)
        while self.queue and self.queue[0][0] <= self.launched - QUEUE:
            self.now = max(self.now, self.queue.popleft()[1])
        self.queue.append((self.launched, self.sent))
        while self.waiting and self.waiting[0][1] <= self.now:
            self.drop((self.waiting.popleft()[0],))
        return super().wrap(unit, ranks)

    def send(self, parts: Sequence[int]) -> None:
        holds = [self.hold(sum(bucket), "bucket") for bucket in buckets(parts) if len(bucket) > 1]
        self.waiting += [(one, self.sent) for one in holds]

    def end(self) -> None:
        self.drop([one for one, _ in self.waiting])
        self.waiting.clear()


def launches(unit: Unit) -> int:
    """Kernels and copies on the compute stream while ``unit`` is wrapped: each bucket is put together and taken apart
    again, and each flat tensor is put together and its piece copied."""
    whole = [len(bucket) for bucket in buckets(unit.parts) if len(bucket) > 1] if unit.wraps == 1 else []
    return len(whole) + sum(whole) + unit.sent + 2 * unit.wraps


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


def wrapping(units: Sequence[Unit], ranks: int, gathered: int, copying: float | None = None) -> Tape:
    """The wrapping of ``units``, the root's last. The last events drop all pieces, for which what is kept then takes
    their blocks. ``copying``: on a rank whose model is on the meta device, where rank 0 needs so many seconds for a
    byte (``FASTEST`` to ``SLOWEST``).

    So many units besides the root are ``gathered`` at once, and one more has a block: what is freed waits for the
    compute stream (``_free_unsharded_flat_param`` records it), which is not there yet when the next unit is gathered,
    for the host runs ahead by as much as the limiter of gathers lets it (``_FreeEventQueue``)."""
    w = _Wrapping() if copying is None else _Ahead(copying)
    pieces = [w.wrap(unit, ranks) for unit in units]
    w.end()
    for at, unit in enumerate(units):
        if unit.cast:
            wide = w.hold(unit.cast, "piece_in_fp32")
            w.drop((pieces[at],))
            pieces[at] = wide
    w.drop(pieces)
    *inner, root = [sum(unit.parts) for unit in units]
    blocks = [root, *sorted(inner, reverse=True)[: gathered + 1]]
    w.drop([w.hold(size, "flat_parameter", GATHERING) for size in blocks])
    return tuple(w.events)
