"""Which request of a plan failed: all that have the size of the message, ranked.

The exact size decides who is considered: PyTorch names the segment that it asked for, and most requests have another.
Of those the moment that the frames of the traceback prove leaves only its own; among these the frames decide (kind of
tensor, dtype, names in the line of code), then the rank's stage, then how near the plan's own memory at that moment is
to what the message says.

What an explanation says: immutable values that reports print and JSON carries. All sizes in bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from math import prod

from ..allocator.blocks import LARGEST_SMALL, UNIT_BITS
from ..allocator.caching import AllocatorSettings
from ..allocator.named import Tensor
from ..allocator.recorded import Request, record
from ..layers.module import Parameter
from ..plan.plan import ResolvedPlan
from ..result import Estimate, Failure, Notice, StageEstimate
from ..tape.events import Bytes, Category, Drop, Hold, rounded
from ..tape.program import Program, static
from ..values import dataclass
from .clues import BEFORE_TRAINING, Clues, Guess
from .log import Reported
from .message import OutOfMemory


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request of the plan that may be the one that failed; equal ones of several layers and stages are one."""

    stages: tuple[int, ...]
    phase: str
    """``forward``, ``backward``, ``step``, ``evaluation``; ``initialisation`` for what is built before the first
    iteration, ``loading`` for the model moved to the GPU as it is."""
    modules: tuple[str, ...]
    tensor: str
    category: str
    size: int
    tried: int
    """The segment for which the allocator asks: the size in the message."""
    shape: tuple[int, ...]
    dtype: str
    allocated: tuple[int, int]
    """The least and the most that the plan's tensors take before it, in blocks."""
    held: Bytes
    """Of these the most, by category, as requested."""
    score: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What ran out of memory, why, and what ends it."""

    reported: Reported
    """The first message."""
    ranks: tuple[int, ...]
    """All ranks that reported one, where the log says which they are."""
    messages: int
    clues: Clues
    causes: tuple[Notice, ...]
    plan: ResolvedPlan | None = None
    candidates: tuple[Candidate, ...] = ()
    """The likeliest first; empty where no request of the plan has the size, or there is no plan."""
    nearest: tuple[Candidate, ...] = ()
    """Where none has the size: those nearest to it."""
    guesses: tuple[Guess, ...] = ()
    """What has this size in known models, where there is no candidate."""
    estimate: Estimate | None = None
    """The plan's, with its ways out where it does not fit."""
    wanted: tuple[str, ...] = ()
    """What would tell more."""


# -- requests ------------------------------------------------------------------------------------------


MOST_STAGES = 8
"""Different stages of which every request is looked at."""


@dataclass(slots=True)
class _Seen:
    """Equal requests so far."""

    first: Request
    modules: dict[str, None] = field(default_factory=dict)
    least: int = 1 << 62
    most: int = -1
    held_least: Bytes = ()
    held_most: Bytes = ()

    def held(self, allocated: int | None) -> Bytes:
        """What was in memory before the request whose moment is nearer to ``allocated``; before the last without."""
        is_early = allocated is not None and allocated - self.least < self.most - allocated
        return self.held_least if is_early else self.held_most


_Key = tuple[str, str, str, int, str]


class Collector:
    """Tells requests of a run apart by what they are, and what was live before each."""

    def __init__(self) -> None:
        self.live: dict[int, tuple[int, int]] = {}
        self.by = [0] * len(Category)
        self.seen: dict[_Key, _Seen] = {}

    def begins(self, request: Request) -> None:
        self.note(request)
        self.live[request.address] = request.size, request.category
        self.by[request.category] += request.size

    def ends(self, address: int, size: int, stream: int) -> None:
        held, category = self.live.pop(address)
        self.by[category] -= held

    def reserves(self, address: int, size: int, stream: int) -> None:
        """Which segments there are decides nothing here."""

    def note(self, request: Request) -> None:
        tensor = request.tensor
        phase = tensor.phase or "initialisation"
        key = phase, kind_of(tensor.module), tensor.name, request.size, tensor.dtype
        one = self.seen.get(key)
        if one is None:
            one = self.seen[key] = _Seen(request)
        one.modules[tensor.module] = None
        if request.allocated < one.least:
            one.least, one.held_least = request.allocated, tuple(self.by)
        if request.allocated > one.most:
            one.most, one.held_most = request.allocated, tuple(self.by)


def kind_of(module: str) -> str:
    """``layer`` of ``layer.3``."""
    kind, _, number = module.rpartition(".")
    return kind if number.isdecimal() else module


@dataclass(frozen=True, slots=True)
class Requests:
    """Every request of a plan, by the stages that have it."""

    stages: tuple[tuple[tuple[int, ...], tuple[int, ...], Mapping[_Key, _Seen]], ...]
    """Numbers of equal stages, their ranks, and their requests."""


def requests_of(
    programs: Sequence[Program],
    evaluated: Sequence[Program],
    settings: AllocatorSettings,
    workspaces: Sequence[Hold],
    dtype: str,
    rank: int | None,
) -> Requests:
    """All requests: building, first iteration, the next one, evaluation, and every parameter as it is loaded."""
    groups: dict[object, list[Program]] = {}
    for program in programs:
        groups.setdefault(tuple((id(span.module), len(span.names)) for span in program.spans), []).append(program)
    of_rank = [[one] for one in programs if rank in one.ranks]
    found = []
    for group in of_rank or list(groups.values())[:MOST_STAGES]:
        first = group[0]
        collector = Collector()
        record(first, settings, workspaces, collector)
        for request in (*_evaluation(evaluated[first.stage], settings), *_loading(first, settings, dtype)):
            collector.note(request)
        ranks = tuple(rank for one in group for rank in one.ranks)
        found.append((tuple(one.stage for one in group), ranks, collector.seen))
    return Requests(tuple(found))


def _evaluation(program: Program, settings: AllocatorSettings) -> Iterator[Request]:
    """A forward pass without a graph, over what is static."""
    live = static(program).net + program.evaluated[0]
    for span in program.spans:
        for name in span.names:
            for event in span.module.evaluation:
                if isinstance(event, Hold):
                    yield _alone(event, name, "evaluation", settings, live)
                    live += event.bytes
                elif isinstance(event, Drop):
                    live -= event.bytes


def _loading(program: Program, settings: AllocatorSettings, dtype: str) -> Iterator[Request]:
    """The model moved to the GPU as it is, parameter by parameter, before anything shards it."""
    live = 0
    for span in program.spans:
        for name in span.names:
            for parameter in span.module.parameters:
                size = _stored(parameter, dtype)
                hold = Hold(0, size, Category.PARAMETERS, parameter.name, parameter.shape, parameter.dtype or dtype)
                yield _alone(hold, name, "loading", settings, live)
                live += size


def _stored(parameter: Parameter, dtype: str) -> int:
    return (
        rounded(parameter.elements // 2)
        if parameter.four_bit is not None
        else parameter.bytes(parameter.dtype or dtype)
    )


def _alone(hold: Hold, module: str, phase: str, settings: AllocatorSettings, allocated: int) -> Request:
    units = settings.units(hold.bytes)
    tried = settings.pool(units <= LARGEST_SMALL).segment_size(units) << UNIT_BITS
    tensor = Tensor(hold.name, module, phase, hold.shape, hold.dtype)
    return Request(tensor, hold.category, None, 0, hold.bytes, 0, hold.bytes, tried, allocated, hold.stream)


# -- ranking -------------------------------------------------------------------------------------------------------

MOST_CANDIDATES = 5
CLOSE, NEAR = 0.05, 0.2
"""Parts by which the plan's memory may be off to be taken for the same moment's, and for one like it."""


def ranked(
    requests: Requests, reported: Reported, clues: Clues, failures: Iterable[tuple[StageEstimate, Failure]]
) -> tuple[list[Candidate], list[Candidate]]:
    """Those of the message's size, the likeliest first; and where there is none, those nearest to it."""
    tried = reported.message.tried
    if tried is None or clues.phase == "checkpoint":  # of which plans have nothing
        return [], []
    failed = {(kind_of(failure.module), failure.tensor) for _, failure in failures if failure.tensor}
    found: dict[_Key, Candidate] = {}
    others: dict[_Key, Candidate] = {}
    for stages, ranks, seen in requests.stages:
        for key, one in seen.items():
            exact = tried.is_printed_of(one.first.tried)
            if not exact and not 0.8 < one.first.tried / max(tried.middle, 1) < 1.25:
                continue
            made = _candidate(stages, ranks, key, one, reported, clues, failed)
            kept = found if exact else others
            before = kept.get(key)
            kept[key] = made if before is None else _joined(before, made)
    proven = [one for one in found.values() if is_then(one.phase, clues.phase)]
    best = sorted(proven or found.values(), key=lambda one: (-one.score, -one.allocated[1]))
    near = sorted(others.values(), key=lambda one: (abs(one.tried - tried.middle), -one.score))
    return best[:MOST_CANDIDATES], [] if best else near[:3]


def _joined(one: Candidate, other: Candidate) -> Candidate:
    """The better of both, for the stages of both."""
    best = max(one, other, key=lambda candidate: candidate.score)
    modules = tuple(dict.fromkeys(one.modules + other.modules))
    return replace(best, stages=tuple(sorted({*one.stages, *other.stages})), modules=modules)


def _candidate(
    stages: tuple[int, ...],
    ranks: tuple[int, ...],
    key: _Key,
    one: _Seen,
    reported: Reported,
    clues: Clues,
    failed: set[tuple[str, str]],
) -> Candidate:
    phase, kind, tensor, size, dtype = key
    category = Category(one.first.category).key
    text = f"{kind} {tensor} {category} {phase}"
    points = [
        *_by_phase(phase, clues),
        *_by_kind(text, clues),
        *_by_code(tensor, one.first.tensor.shape, dtype, clues),
        *_by_rank(ranks, reported.rank),
        *_by_memory(one, reported.message),
    ]
    if (kind, tensor) in failed:
        points.append((2, "the plan, replayed, runs out of memory at it"))
    return Candidate(
        stages=stages,
        phase=phase,
        modules=tuple(one.modules),
        tensor=tensor,
        category=category,
        size=size,
        tried=one.first.tried,
        shape=one.first.tensor.shape,
        dtype=dtype,
        allocated=(one.least, one.most),
        held=one.held(reported.message.allocated),
        score=sum(point for point, _ in points),
        reasons=tuple(reason for _, reason in points if reason),
    )


_Points = Iterator[tuple[int, str]]


def is_then(phase: str, proven: str) -> bool:
    """Whether ``phase`` may be the moment that frames have ``proven``. What is moved to the GPU while an engine is
    built is initialisation to one and loading to another."""
    return phase == proven or {phase, proven} <= set(BEFORE_TRAINING)


def _by_phase(phase: str, clues: Clues) -> _Points:
    if clues.phase:
        yield (
            (3 if phase == clues.phase else 0 if is_then(phase, clues.phase) else -3),
            (f"the traceback is in {clues.phase}" if phase == clues.phase else ""),
        )
    elif phase in ("evaluation", *BEFORE_TRAINING):
        yield -2, ""  # most jobs die in training


def _by_kind(text: str, clues: Clues) -> _Points:
    for points, about in zip((4, 2, 1), clues.about, strict=False):
        if about.tensor.search(text):
            yield points, f"the traceback names {about.name}"
            return


_LOSS = re.compile(r"functional\.cross_entropy\(|_nn\.cross_entropy_loss\(|log_softmax\(")
"""``torch.nn.functional.cross_entropy`` is a ``log_softmax`` and a sum over it: one tensor like the logits."""


def _by_code(tensor: str, shape: tuple[int, ...], dtype: str, clues: Clues) -> _Points:
    if clues.fp32:
        yield (1, "the line casts to fp32") if dtype == "fp32" else (-1, "")
    code = clues.frame.code.lower() if clues.frame is not None else ""
    words = set(re.findall(r"[a-z]{3,30}", code))
    same = [word for word in re.split(r"[^a-z]+", tensor) if word in words]
    if "log_prob" in tensor and _LOSS.search(code):
        yield 1, "the line makes log-probabilities"
    if shape and clues.shape[-1:] == shape[-1:] and prod(clues.shape) == prod(shape):
        yield 3, "the line allocates its shape"
    if re.search(rf"\b{re.escape(tensor.lower())}\b", code):
        yield 3, "the line names it"
    elif same:
        yield min(len(same), 2), ""


def _by_rank(ranks: tuple[int, ...], rank: int | None) -> _Points:
    if rank is not None:
        yield (3, f"rank {rank} has it") if rank in ranks else (-3, "")


def _by_memory(one: _Seen, message: OutOfMemory) -> _Points:
    """How near what the plan has allocated before it is to what the message says. What comes only when more is
    allocated than the GPU has, no run has come to."""
    if message.capacity is not None and one.least > message.capacity:
        yield -1, ""
    allocated = message.allocated
    if allocated is None:
        return
    off = max(one.least - allocated, allocated - one.most, 0) / max(allocated, 1)
    nearest = min(abs(one.least - allocated), abs(one.most - allocated)) / max(allocated, 1)
    if off <= NEAR:
        says = "as much allocated then as" if nearest <= NEAR else "less allocated then at first, and more later, than"
        yield (2 if off <= CLOSE else 1), f"the plan has {says} the message says"
