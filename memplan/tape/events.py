"""Memory is a tape of events, and an excursion is its fold.

A *tape* is what happens to one rank's memory in order: tensors are held and dropped, and named
*seams* mark the places where schedules, prefetchers and hooks insert events of their own. The fold
of a stretch of tape is an *excursion*: a net change that stays, and a peak above where it began.
Excursions compose without looking at the events again::

    (net, peak) then (net', peak')  =  (net + net',  max(peak, net + peak'))      first peak wins ties
    the same one n times            =  (n net,  peak + (n - 1) max(net, 0))

so layers compose into stages, and stages into schedules. Composition is associative with a zero.
All sizes are bytes, each tensor rounded up to 512 B as PyTorch's CUDA allocator does
(``CUDACachingAllocator.cpp``, ``round_size``): the *requested* reading of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from enum import Enum, IntEnum
from functools import cached_property, reduce

from ..values import NamedTuple, dataclass

ROUND = 512
"""Bytes to which the allocator rounds every request."""


class Category(IntEnum):
    """What a tensor is for. The order is that of a report's breakdown."""

    PARAMETERS = 0
    MAIN_PARAMETERS = 1
    GRADIENTS = 2
    OPTIMIZER_STATES = 3
    BUFFERS = 4
    INPUTS = 5
    ACTIVATIONS = 6
    LOGITS = 7
    TEMPORARIES = 8
    GATHERED_PARAMETERS = 9
    COMMUNICATION_BUFFERS = 10
    WORKSPACES = 11
    BLOCK_ROUNDING = 12

    @property
    def key(self) -> str:
        """The category's name in JSON: ``main_parameters``."""
        return self.name.lower()


Bytes = tuple[int, ...]
"""One byte count per category, indexed by it."""

NOTHING: Bytes = (0,) * len(Category)


def rounded(size: int) -> int:
    """``size`` bytes as the allocator rounds a request: up to a multiple of 512, at least 512."""
    return -(-size // ROUND) * ROUND or ROUND


INPUT, GRAD_OUTPUT = -1, -2
"""Ids of a module's input and of the gradient of its output, which its neighbours made."""


class Scope(IntEnum):
    """Who gives ids to tensors that outlive the module that they begin in. No two scopes share an id.

    A module's own tensors have ids from 1 on, in every module anew. Ids of scopes are negative, below those of the few
    tensors that neighbours know by their role (``INPUT``; in ``layers.module``, what modules of a stage share).
    """

    CALLER = 1
    """Tensors left in the variables of a module's caller."""
    HOOKS = 2
    """Buffers of a framework's hooks."""
    GATHERED = 3
    """Gathered parameters."""
    GRADIENTS = 4
    """Gradients that wait for hooks of other modules, or for the step."""
    COPIES = 5
    """Their copies, in another dtype or for another stream."""
    PLACED = 6
    """Those that have been brought into their parameter's placement."""
    BUCKETS = 7
    """Buckets of gradients, and what their reduction takes."""
    MODULE = 8
    """What hooks hold within one module: they get ids behind the module's own."""
    KEPT = 9
    """As ``MODULE``, of tensors that outlive a micro-batch."""
    CONTEXTS = 10
    """Tensors in contexts of functions, which end with the graph."""

    def id(self, at: int = 0) -> int:
        """Of tensor number ``at`` < 2**24 of this scope."""
        return -(self << 24) - at

    @staticmethod
    def at(id: int) -> int:
        """The number within its scope of the tensor ``id``."""
        return -id & (1 << 24) - 1


class Hold(NamedTuple):
    """A tensor comes to life. ``bytes`` is rounded; ``shape`` and ``dtype`` are for people."""

    tensor: int
    bytes: int
    category: Category
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    stream: int = 0

    @property
    def end(self) -> Drop:
        """The tensor's."""
        return Drop(self.tensor, self.bytes, self.category)


OWN_POOL = 16
"""Streams from here on are memory pools of their own, whose static tensors stay for good."""


class Drop(NamedTuple):
    """A tensor's last reader is done with it. Repeats size and category, so that any stretch folds alone."""

    tensor: int
    bytes: int
    category: Category


def drops(holds: Iterable[Hold]) -> tuple[Drop, ...]:
    """The end of each of ``holds``."""
    return tuple([hold.end for hold in holds])


END_OF_GRADIENT = Scope.GRADIENTS.id((1 << 24) - 1)
"""In the tape of a step: a gradient of as many bytes ends, which passes have left behind."""


class Hook(Enum):
    """When a framework's hook runs."""

    BEFORE_FORWARD = "before a module's forward"
    AFTER_FORWARD = "behind a module's forward"
    BEFORE_BACKWARD = "before a module's backward"
    AFTER_BACKWARD = "behind a module's backward"
    GRADIENT = "a parameter's gradient has arrived, and is not yet added to another"
    PIECE = "a piece of a pass begins, beside which another micro-batch's may run"


class Seam(NamedTuple):
    """A place between events; holds nothing itself. Frameworks insert events of their own at those with a ``hook``."""

    name: str
    """The module's or parameter's; without a hook, what people call the place: ``layer.3/forward``."""
    hook: Hook | None = None
    tensor: int = 0
    """Id of the gradient that has arrived."""
    once: int = 0
    """Bytes that are held and given back there by the first pass that comes to a seam of this name."""


PRODUCT = "product"
"""Seam behind the result of a module's first product of matrices, of which the library takes its workspace."""

Event = Hold | Drop | Seam
Tape = tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Excursion:
    """The fold of a stretch of tape: a ``net`` change, and a ``peak`` above the start, both by category.

    ``peak`` ≥ max(0, ``net``) in total; ``place`` names the seam and tensor where it is reached, and
    is empty where the peak is the start itself.
    """

    net: int = 0
    peak: int = 0
    net_by: Bytes = NOTHING
    peak_by: Bytes = NOTHING
    place: str = ""

    def then(self, after: Excursion) -> Excursion:
        """This excursion followed by ``after``."""
        net_by = tuple(map(int.__add__, self.net_by, after.net_by))
        peak = self.net + after.peak
        if peak > self.peak:
            peak_by = tuple(map(int.__add__, self.net_by, after.peak_by))
            return Excursion(self.net + after.net, peak, net_by, peak_by, after.place)
        return Excursion(self.net + after.net, self.peak, net_by, self.peak_by, self.place)

    def times(self, n: int) -> Excursion:
        """This excursion ``n`` ≥ 0 times in a row."""
        if n <= 1:
            return self if n == 1 else ZERO
        net_by = tuple(n * size for size in self.net_by)
        if self.net <= 0:
            return Excursion(n * self.net, self.peak, net_by, self.peak_by, self.place)
        before = tuple((n - 1) * size for size in self.net_by)
        peak_by = tuple(map(int.__add__, before, self.peak_by))
        return Excursion(n * self.net, self.peak + (n - 1) * self.net, net_by, peak_by, self.place)

    def within(self, module: str) -> Excursion:
        """The same, its place prefixed by the module that it happened in."""
        if not self.place:
            return self
        return Excursion(self.net, self.peak, self.net_by, self.peak_by, f"{module}/{self.place}")


ZERO = Excursion()


def change(size: int, category: Category, place: str = "") -> Excursion:
    """The excursion of one change of ``size`` bytes (held if positive, dropped if negative)."""
    by = tuple(size if index == category else 0 for index in range(len(Category)))
    return Excursion(size, max(size, 0), by, by if size > 0 else NOTHING, place if size > 0 else "")


def compose(excursions: Iterable[Excursion]) -> Excursion:
    """All of ``excursions``, one after the other."""
    return reduce(Excursion.then, excursions, ZERO)


def fold(tape: Iterable[Event]) -> Excursion:
    """The excursion of ``tape``. Equal to composing its events' changes, in one pass."""
    net = peak = 0
    net_by, peak_by = list(NOTHING), NOTHING
    place = peak_place = ""
    for event in tape:
        if isinstance(event, Hold):
            net += event.bytes
            net_by[event.category] += event.bytes
            if net > peak:
                peak, peak_by = net, tuple(net_by)
                peak_place = f"{place}/{event.name}" if place else event.name
        elif isinstance(event, Drop):
            net -= event.bytes
            net_by[event.category] -= event.bytes
        elif event.hook is None:
            place = event.name
    return Excursion(net, peak, tuple(net_by), peak_by, peak_place)


class Stretch(tuple[Event, ...]):
    """A tape that is folded and cut once, for one that many plans or modules share."""

    @cached_property
    def excursion(self) -> Excursion:
        return fold(self)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return _runs(self)


def fold_once(tape: Tape) -> Excursion:
    """``fold(tape)``, remembered where the tape is a ``Stretch``."""
    return tape.excursion if isinstance(tape, Stretch) else fold(tape)


Run = tuple[Tape, Seam | None]
"""Events without a hook among them, and the hook's seam behind them; ``None`` behind a tape's last ones."""


def cut(tape: Tape) -> tuple[Run, ...]:
    """``tape`` cut where hooks run; remembered where the tape is a ``Stretch``."""
    return tape.runs if isinstance(tape, Stretch) else _runs(tape)


def _runs(tape: Tape) -> tuple[Run, ...]:
    places = [at for at, event in enumerate(tape) if _is_hook(event)]
    starts = [0, *(at + 1 for at in places)]
    runs = [(Stretch(tape[start:at]), tape[at]) for start, at in zip(starts, places, strict=False)]
    return (*runs, (Stretch(tape[starts[-1] :]), None))  # type: ignore[arg-type]


def insert(tape: Tape, at: Callable[[Seam], Iterable[Event]], taken: Container[int] = ()) -> Tape:
    """``tape`` with the events of hooks: what ``at`` returns in place of every seam with a hook.

    A framework that ends a tensor itself adds it to ``taken``, then or before: the tape's own end of it is left out.
    """
    (first, only), *others = runs = cut(tape)
    if not (others or only or taken):
        return first
    events: list[Event] = []
    for run, seam in runs:
        events += [one for one in run if not (isinstance(one, Drop) and one.tensor in taken)] if taken else run
        if seam is not None:
            events += at(seam)
    return tuple(events)


def behind(tape: Tape, events: Tape) -> Tape:
    """``tape`` followed by ``events``; hooks at its end run behind them."""
    own = len(tape) - sum(map(_is_hook, tape[-1:]))
    return (*tape[:own], *events, *tape[own:])


def ahead(tape: Tape, events: Tape) -> Tape:
    """``events`` followed by ``tape``; hooks at its start run before them."""
    hooks = sum(map(_is_hook, tape[:1]))
    return (*tape[:hooks], *events, *tape[hooks:])


def _is_hook(event: Event) -> bool:
    return isinstance(event, Seam) and event.hook is not None


def renamed(tape: Tape, ids: Mapping[int, int]) -> Tape:
    """``tape`` with other ids for the tensors in ``ids``."""
    if not ids:
        return tape
    return tuple(
        event._replace(tensor=ids[event.tensor]) if not isinstance(event, Seam) and event.tensor in ids else event
        for event in tape
    )
