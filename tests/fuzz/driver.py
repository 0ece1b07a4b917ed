"""Runs cases of targets, and says of each what went wrong: nothing, mostly."""

from __future__ import annotations

import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import FrameType
from typing import Any

from memplan.plan.errors import LackingError, PlanError

SECONDS = 2.0
"""Of the process's own time that one case may take."""
PATIENCE = 20.0
"""Seconds on the clock: for a case that waits, on a machine that may be busy."""
MEBIBYTES = 500
"""That the process may grow by in one case."""

_EXECUTES = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn"})


@dataclass(frozen=True)
class Target:
    """Something that reads: ``make`` a case from random numbers, ``run`` it. ``run`` returns a result of any kind;
    errors for the user are answers, too."""

    name: str
    make: Callable[[Random], Any]
    run: Callable[[Any], object]
    shown: Callable[[Any], str] = repr
    """A case as a reader of a report should see it."""


@dataclass
class Figures:
    """What the cases of one target came to."""

    cases: int = 0
    refused: int = 0
    why: Counter[str] = field(default_factory=Counter)
    """How often a case was refused with these words."""
    slowest: float = 0.0
    slowest_case: int = 0
    rss: int = 0
    """MiB that the process had at most, so far."""
    failures: list[str] = field(default_factory=list)


class TooLongError(BaseException):
    """The case is stopped; no ``except Exception`` on the way may keep it."""


def cases(target: Target, seed: int, first: int = 0) -> Iterator[tuple[int, Any]]:
    """The cases of ``target`` by number. Each has random numbers of its own, so that one can be run again alone."""
    number = first
    while True:
        yield number, target.make(Random(f"{seed} {target.name} {number}"))
        number += 1


def fuzz(target: Target, seed: int, seconds: float, figures: Figures | None = None, most_failures: int = 5) -> Figures:
    """Runs cases of ``target`` for ``seconds``; goes on from where ``figures`` end."""
    figures = figures if figures is not None else Figures()
    end = time.monotonic() + seconds
    for number, case in cases(target, seed, figures.cases):
        if time.monotonic() > end or len(figures.failures) >= most_failures:
            break
        try_one(target, seed, number, case, figures)
    return figures


def try_one(target: Target, seed: int, number: int, case: Any, figures: Figures) -> None:
    """Runs one case and adds what it came to."""
    before, began = _rss(), time.process_time()
    problem = _problem(target, case, figures)
    spent = time.process_time() - began
    figures.cases += 1
    figures.rss = _rss()
    if spent > figures.slowest:
        figures.slowest, figures.slowest_case = spent, number
    if problem is None and spent > SECONDS:
        problem = f"takes {spent:.1f} s"
    if problem is None and figures.rss - before > MEBIBYTES:
        problem = f"takes {figures.rss - before} MiB"
    if problem is not None:
        replay = f"python -m tests.fuzz {target.name} --seed {seed} --case {number}"
        figures.failures.append(f"{replay}\n    {problem}\n    {target.shown(case)[:400]}")


def _problem(target: Target, case: Any, figures: Figures) -> str | None:
    try:
        with _stopped_in_time(), _nothing_executed():
            target.run(case)
    except (PlanError, LackingError) as error:
        figures.refused += 1
        line = str(error)
        figures.why[getattr(error, "problem", line)[:40]] += 1
        return f"is refused in more than a line: {line!r}" if len(line.splitlines()) != 1 else None
    except TooLongError as error:
        where = traceback.extract_tb(error.__traceback__)[-3:]
        return "does not end: " + " < ".join(f"{one.filename}:{one.lineno}" for one in reversed(where))
    except Exception as error:
        return "".join(traceback.format_exception(error)[-3:]).replace("\n", "\n    ")
    return None


@contextmanager
def _stopped_in_time() -> Iterator[None]:
    began, spent = time.monotonic(), time.process_time()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        if time.process_time() - spent > SECONDS or time.monotonic() - began > PATIENCE:
            raise TooLongError
        signal.setitimer(signal.ITIMER_REAL, 0.5)

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_watching: list[bool] = []


def _audit(event: str, _arguments: tuple[Any, ...]) -> None:
    if _watching and event in _EXECUTES:
        raise AssertionError(f"runs something: {event}")


@contextmanager
def _nothing_executed() -> Iterator[None]:
    if _audit not in _hooks:
        _hooks.append(_audit)
        sys.addaudithook(_audit)
    _watching.append(True)
    try:
        yield
    finally:
        _watching.pop()


_hooks: list[Callable[[str, tuple[Any, ...]], None]] = []
"""Audit hooks that were added: they stay for the process."""


def _rss() -> int:
    """The most MiB that the process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def table(figures: dict[str, Figures]) -> str:
    """Figures by target, and their sums."""
    lines = [f"{'target':<22}{'cases':>9}{'refused':>9}{'failures':>9}{'slowest s':>11}{'rss MiB':>9}"]
    rows: Sequence[tuple[str, Figures]] = [*figures.items(), ("all", _sum(figures.values()))]
    for name, one in rows:
        failures = len(one.failures)
        lines.append(f"{name:<22}{one.cases:>9}{one.refused:>9}{failures:>9}{one.slowest:>11.2f}{one.rss:>9}")
    return "\n".join(lines)


def _sum(all_of_them: Any) -> Figures:
    total = Figures()
    for one in all_of_them:
        total.cases += one.cases
        total.refused += one.refused
        total.failures += one.failures
        total.slowest, total.rss = max(total.slowest, one.slowest), max(total.rss, one.rss)
    return total
