"""What is trained of FSDP1's flat parameters on one rank, and the optimizer's states of it.

With ``use_orig_params``, as the Trainer has it (transformers 5.23, ``training_args.py``, ``_process_fsdp_args``), an
optimizer is given each parameter, of which a rank has the part that its shard of the flat one covers: all of it, a
piece, or nothing, and then no gradient (torch 2.13, ``_flat_param.py``, ``_use_sharded_views``). PyTorch's optimizers
take as much for the pieces as for the shard. bitsandbytes' do not: a piece of an embedding has states in fp32, as the
Trainer asks for (``register_module_override``), and so has a piece of fewer than 4,096 elements.

What FSDP1 allocates while it wraps a model: nothing of it stays, but the allocator keeps the segments.

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

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from ...families.base import place
from ...layers.module import Parameter
from ...layers.tuning import ADAPTERS
from ...optimizers.base import State, optimizer_states
from ...optimizers.bitsandbytes import managed_bytes
from ...plan.plan import Optimizer
from ...tape.events import Category, Event, Hold, Tape, rounded
from ...tape.program import Span
from ...values import NamedTuple, dataclass, replace
from ..plain.tuned import kept_beside
from .hooks import GATHERING
from .modules import MODEL


@dataclass(frozen=True, slots=True)
class Flat:
    """A unit: bytes on all ranks, with those of the modules that it spans by their place."""

    name: str
    first: int
    last: int
    whole: int
    """Of the gathered flat parameter, in the dtype of compute."""
    trained: int
    """Elements that are trained; 0 where the unit is frozen."""
    reshard: bool = True
    holder: str = ""
    """Its first parameter, which stands for the flat one where each parameter's states are counted."""
    inner: bool = False
    """It is in the middle of its module: none is."""
    narrow: bool = False
    """Its module does more than what it wraps: of none is that told."""
    parts: tuple[int, ...] = ()
    """Bytes of each parameter."""
    members: tuple[Parameter, ...] = ()
    """Its parameters, in the order in which they lie in the flat one."""
    sent: int = 0
    """Buffers that rank 0 sends, too, while the unit is wrapped."""
    kept: tuple[int, int] = (0, 0)
    """Bytes of input and of the output's gradient, which a frozen unit's hook keeps."""

    @property
    def with_gradient(self) -> bool:
        """The root's end is that of backward."""
        return self.name != MODEL

    @property
    def key(self) -> str:
        """What its holder is called among those of all units."""
        return f"{self.name}/{self.holder}"


Units = tuple[Flat, ...]
"""Those that are no adapters'."""


def units_held(
    spans: Sequence[Span], units: Sequence[Flat], registered: tuple[str, ...] = ()
) -> tuple[tuple[Span, ...], Units]:
    """``spans``, one for each module, in which each unit's holder is called by its ``key``: layers may be of several
    kinds whose parameters have the same names. And the units that are no adapters', with their parameters in the order
    in which modules are ``registered``."""

    def ordered(unit: Flat) -> Flat:
        return replace(unit, members=tuple(sorted(unit.members, key=lambda one: place(one.name, registered))))

    own = tuple(ordered(unit) for unit in units if not is_adapter(unit.holder))
    holders = {unit.first: unit for unit in own if unit.name != MODEL}
    root = next((unit for unit in own if unit.name == MODEL), None)
    made = []
    for at, span in enumerate(spans):
        unit = holders.get(at, root)
        names = [one.name for one in span.module.parameters]
        if unit is not None and unit.holder in names:
            number = names.index(unit.holder)
            parameters = list(span.module.parameters)
            parameters[number] = replace(parameters[number], name=unit.key)
            span = Span(replace(span.module, parameters=tuple(parameters)), span.names)
            root = None if unit is root else root
        made.append(span)
    return tuple(made), own


def is_adapter(name: str) -> bool:
    """Whatever peft calls the adapter, which it registers as ``default``."""
    return name.replace(".default", "").endswith(ADAPTERS)


def piece(parameter: Parameter, ranks: int, dtype: str) -> Parameter:
    """Rank 0's part of a trained parameter that is a unit, as large as that of any other rank together."""
    return Parameter(parameter.name, (-(-parameter.elements // ranks),), dtype)


def covered(unit: Flat, ranks: int, rank: int, dtype: str) -> tuple[Parameter, ...]:
    """The pieces of a trained unit's parameters that ``rank`` has."""
    share = -(-unit.trained // ranks)
    first, last, at = rank * share, (rank + 1) * share, 0
    found = []
    for one in unit.members:
        size = min(last, at + one.elements) - max(first, at)
        if size > 0:
            found.append(Parameter(one.name, (size,), dtype))
        at += one.elements
    return tuple(found)


def fullest(states: Sequence[State], units: Units, ranks: int, dtype: str) -> int:
    """The rank whose pieces of all ``units`` have the most states."""
    sizes, of_members = [0] * ranks, dict[tuple[Parameter, ...], list[int]]()
    for unit in units:
        if unit.members not in of_members:
            made = (covered(unit, ranks, rank, dtype) for rank in range(ranks))
            of_members[unit.members] = [sum(state.size(one) for one in own for state in states) for own in made]
        sizes = [size + more for size, more in zip(sizes, of_members[unit.members], strict=True)]
    return sizes.index(max(sizes))


@lru_cache(maxsize=64)
def trained_of(optimizer: Optimizer, ranks: int, units: Units, dtype: str) -> Mapping[str, tuple[Parameter, ...]]:
    """By ``key`` of a trained unit what the optimizer is given of it, on the rank that needs most."""
    trained = tuple(unit for unit in units if unit.trained)
    if not optimizer.of_bitsandbytes:
        return {unit.key: (Parameter(unit.holder, (-(-unit.trained // ranks),), dtype),) for unit in trained}
    states = optimizer_states(optimizer, dtype, embeddings_32bit=optimizer.embeddings_32bit)
    rank = fullest(states, trained, ranks, dtype)
    return {unit.key: covered(unit, ranks, rank, dtype) for unit in trained}


def managed_states(
    optimizer: Optimizer, tensors: Sequence[Parameter], ranks: int, of_adapters: int, units: Units, dtype: str
) -> int:
    """Bytes of paged states in unified memory, of a rank on average: those of embeddings are the first ranks'."""
    if not optimizer.paged:
        return 0
    adapters = [piece(one, of_adapters, dtype) for one in tensors if one.trained and is_adapter(one.name)]
    kinds = Counter(replace(unit, name="", first=0, last=0) for unit in units if unit.trained)
    made = {unit: [one for rank in range(ranks) for one in covered(unit, ranks, rank, dtype)] for unit in kinds}
    together = sum(count * managed_bytes(optimizer, made[unit]) for unit, count in kinds.items())
    return managed_bytes(optimizer, adapters) + -(-together // ranks)


def pieces_of(
    optimizer: Optimizer, tensors: Sequence[Parameter], ranks: int, of_adapters: int, units: Units, dtype: str
) -> tuple[Parameter, ...]:
    """What the optimizer updates here: of each adapter's weight, which ``of_adapters`` ranks share, and of each trained
    unit."""
    own = trained_of(optimizer, ranks, units, dtype)
    parts = ((piece(one, of_adapters, dtype),) if is_adapter(one.name) else own.get(one.name, ()) for one in tensors)
    return tuple(part for one, made in zip(tensors, parts, strict=True) if one.trained for part in made)


@lru_cache(maxsize=64)
def flat_states(optimizer: Optimizer, ranks: int, of_adapters: int, units: Units, trained: str) -> tuple[State, ...]:
    """Shards, what 4-bit weights keep beside them, whole, and the optimizer's states on shards. A unit is one tensor,
    which its first parameter stands for (``units_held``); ``of_adapters`` ranks share an adapter's weight."""
    own = trained_of(optimizer, ranks, units, trained)
    shares = {unit.key: _share(unit, ranks, trained) for unit in units}

    def sharded(parameter: Parameter) -> int:
        if is_adapter(parameter.name):
            return piece(parameter, of_adapters, trained).bytes(trained)
        return shares.get(parameter.name, 0)

    def of(state: State) -> State:
        def size(parameter: Parameter) -> int:
            if is_adapter(parameter.name):
                return state.size(piece(parameter, of_adapters, trained))
            return sum(map(state.size, own.get(parameter.name, ())))

        return State(state.name, state.category, size)

    kept = optimizer_states(optimizer, trained, embeddings_32bit=optimizer.embeddings_32bit)
    return (State("parameter", Category.PARAMETERS, sharded), *kept_beside(), *map(of, kept))


def _share(unit: Flat, ranks: int, trained: str) -> int:
    """Bytes of a rank's shard."""
    if unit.trained:
        return Parameter(unit.holder, (-(-unit.trained // ranks),)).bytes(trained)
    return rounded(-(-unit.whole // ranks))


# -- what wrapping allocates -----------------------------------------------------------------------------


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
