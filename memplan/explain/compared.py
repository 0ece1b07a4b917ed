"""A run's memory snapshot beside a plan: what both hold at their peaks, what only one of them holds, and the first
request at which they part.

Tensors are matched by their size, which is exact: of each size as many as both have. Those of the plan have categories;
those that only the run has are sorted by what their frames say.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..allocator.caching import AllocatorSettings
from ..allocator.recorded import Request, record
from ..tape.events import Bytes, Category, Hold
from ..tape.program import Program
from ..values import dataclass
from .clues import clues
from .log import Frame
from .snapshot import LARGE, Asked, Run, frames_of


class Same(NamedTuple):
    """Tensors of one size that only one side holds."""

    what: str
    """The plan's tensor and module; of a run what its frames say."""
    category: str
    """The plan's; empty of a run's."""
    size: int
    times: int

    @property
    def total(self) -> int:
        return self.size * self.times


@dataclass(frozen=True, slots=True)
class Parting:
    """The first request that is another one."""

    same: int
    """Requests of ``LARGE`` bytes or more before it that are the same, from the iteration's beginning."""
    planned: Request | None
    """``None`` where the plan's iteration has ended,"""
    ran: Asked | None
    """or the trace."""
    frame: Frame | None


@dataclass(frozen=True, slots=True)
class Compared:
    """One device's run beside one stage of a plan. Sizes in bytes as asked for, each rounded up to 512."""

    run: Run
    stage: int | None = None
    """``None`` without a plan, as all that follows."""
    planned: int = 0
    """What the plan holds at its peak,"""
    by: Bytes = ()
    """by category;"""
    matched: Bytes = ()
    """and what of it the run holds at its own."""
    only_planned: tuple[Same, ...] = ()
    only_ran: tuple[Same, ...] = ()
    parting: Parting | None = None


class _Peak:
    """What a replay holds when it holds most, and every large request of its last iteration."""

    def __init__(self, stop: int = -1) -> None:
        self.stop = stop
        self.live: dict[int, Request] = {}
        self.total = self.most = 0
        self.count = 0
        self.place = 0
        self.held: list[Request] = []
        self.requests: list[Request] = []

    def begins(self, request: Request) -> None:
        self.live[request.address] = request
        self.total += request.size
        if request.iteration and request.size >= LARGE:
            self.requests.append(request)
        if self.total > self.most:
            self.most, self.place = self.total, self.count
        if self.count == self.stop:
            self.held = list(self.live.values())
        self.count += 1

    def ends(self, address: int, size: int, stream: int) -> None:
        self.total -= self.live.pop(address).size

    def reserves(self, address: int, size: int, stream: int) -> None:
        """Segments hold tensors, and are none."""


MOST_STAGES = 8


def compared(
    run: Run,
    programs: Sequence[Program],
    settings: AllocatorSettings,
    workspaces: Sequence[Hold],
    stage: int | None = None,
) -> Compared:
    """``run`` beside the ``stage`` of the plan, or beside the one with which it has most in common."""
    chosen = [one for one in programs if one.stage == stage] or _different(programs)
    return max((_beside(run, one, settings, workspaces) for one in chosen), key=lambda one: sum(one.matched))


def _different(programs: Sequence[Program]) -> list[Program]:
    """Stages with other modules or other micro-batches in flight, the first and the last among them."""
    if len(programs) <= MOST_STAGES:
        return list(programs)
    step = (len(programs) - 1) / (MOST_STAGES - 1)
    return [programs[round(at * step)] for at in range(MOST_STAGES)]


def _beside(run: Run, program: Program, settings: AllocatorSettings, workspaces: Sequence[Hold]) -> Compared:
    first = _Peak()
    record(program, settings, workspaces, first)
    second = _Peak(first.place)
    record(program, settings, workspaces, second)
    ran = Counter(block.size for block in run.held)
    by, matched = [0] * len(Category), [0] * len(Category)
    missing: Counter[tuple[str, str, int]] = Counter()
    for request in sorted(second.held, key=lambda one: one.category):
        by[request.category] += request.size
        if ran[request.size] > 0:
            ran[request.size] -= 1
            matched[request.category] += request.size
        else:
            module = f" in {_kind(request.tensor.module)}" if request.tensor.module else ""
            missing[f"{request.tensor.name}{module}", Category(request.category).key, request.size] += 1
    return Compared(
        run=run,
        stage=program.stage,
        planned=first.most,
        by=tuple(by),
        matched=tuple(matched),
        only_planned=_sorted(Same(*key, count) for key, count in missing.items()),
        only_ran=_only_ran(run, ran),
        parting=_parting(first.requests, run.requests),
    )


def alone(run: Run) -> Compared:
    """A run without a plan: all that it holds."""
    return Compared(run, only_ran=_only_ran(run, Counter(block.size for block in run.held)))


def _kind(module: str) -> str:
    kind, _, number = module.rpartition(".")
    return f"{kind}s" if number.isdecimal() else module


MOST_TOLD = 12


def _sorted(found: Iterable[Same]) -> tuple[Same, ...]:
    return tuple(sorted(found, key=lambda one: (-one.total, one.what))[:MOST_TOLD])


def _only_ran(run: Run, left: Counter[int]) -> tuple[Same, ...]:
    """What of the run's blocks no tensor of the plan has matched, by what frames say."""
    found: defaultdict[tuple[str, int], int] = defaultdict(int)
    for block in run.held:
        if left[block.size] > 0:
            left[block.size] -= 1
            found[_told(block.frames), block.size] += 1
    return _sorted(Same(what, "", size, count) for (what, size), count in found.items())


def _told(frames: Sequence[object]) -> str:
    """What a block's frames say: the innermost one of a program's own, or of a library's Python."""
    found = frames_of(frames)
    if not found:
        return "no frames (there before the trace)"
    told = clues(found)
    frame = told.frame or _own(found)
    about = f"{told.about[0].name}: " if told.about else ""
    return f"{about}{_kind(frame.file.rpartition('/')[2])}:{frame.line} {frame.function}"


def _own(frames: Sequence[Frame]) -> Frame:
    """The innermost frame that is not PyTorch's."""
    return next((one for one in reversed(frames) if "/torch/" not in one.file), frames[-1])


MOST_STARTS = 4000


def _parting(planned: Sequence[Request], ran: Sequence[Asked]) -> Parting | None:
    """Where the plan's last iteration and the run's requests part, from the beginning that goes on longest."""
    if not planned or not ran:
        return None
    last = planned[-1].iteration
    wanted = [request for request in planned if request.iteration == last and request.tensor.phase != "step"]
    sizes, found = [one.size for one in wanted], [one.size for one in ran]
    best, begin = 0, 0
    starts = [at for at, size in enumerate(found) if sizes and size == sizes[0]][:MOST_STARTS]
    for start in starts:
        same = _same(sizes, found, start)
        if same > best:
            best, begin = same, start
    if not best:
        return None
    at = begin + best
    asked = ran[at] if at < len(ran) else None
    frames = frames_of(asked.frames) if asked is not None else ()
    frame = clues(frames).frame or (_own(frames) if frames else None)
    return Parting(best, wanted[best] if best < len(wanted) else None, asked, frame)


def _same(sizes: Sequence[int], found: Sequence[int], start: int) -> int:
    same = 0
    while same < len(sizes) and start + same < len(found) and sizes[same] == found[start + same]:
        same += 1
    return same
