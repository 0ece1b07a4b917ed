"""How a run failed: which rank first, with its last lines; what a request for memory was for."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from ..estimate import detail
from ..plan.plan import ResolvedPlan
from ..records.readings import Failure
from ..report.names import MIB, size
from ..tape.events import Hold
from ..values import dataclass
from .guards import LONGEST_DEATH
from .run_files import KEEPER_LOG, LAUNCHER_LOG, Progress, RankFiles, end_of, last_said, ranks_in, read_json

# -- out of memory ---------------------------------------------------------------------------------------

_FULL = re.compile(r"out of memory|STATUS_ALLOC_FAILED|DefaultCPUAllocator", re.IGNORECASE)
"""The caching allocator's, CUDA's and NCCL's words, those of cuBLAS and cuDNN, and of PyTorch's CPU allocator."""


def is_full(message: str) -> bool:
    return _FULL.search(message) is not None


NEAR = 0.005
"""A request is known to two decimals of its unit, as PyTorch prints it."""
EXACT, ROUND = 10 * MIB, 2 * MIB
"""What PyTorch prints is the segment that it could not get: of requests from ``EXACT`` bytes on the next multiple of
``ROUND``. Smaller ones share segments, whose size says nothing (``CUDACachingAllocator.cpp``,
``get_allocation_size``)."""


class Tensor(NamedTuple):
    module: str
    phase: str
    hold: Hold

    def __str__(self) -> str:
        shape = " x ".join(f"{length:,}" for length in self.hold.shape)
        return f"{self.hold.name} of {self.module} in {self.phase} ({shape} in {self.hold.dtype})"


def explained(failure: Failure, plan: ResolvedPlan, stages: Mapping[int, int]) -> Failure:
    """``failure`` with the tensor of its size, where the estimate has one for the stage of its rank; ``stages`` are
    those of the run's ranks."""
    stage = None if failure.rank is None else stages.get(failure.rank)
    if failure.kind != "out-of-memory" or failure.failing is None or stage is None:
        return failure
    found = next(_of_size(plan, stage, failure.failing), None)
    if found is None:
        return failure
    return failure.model_copy(update={"message": f"{failure.message} {size(failure.failing)} is {found}."})


def _of_size(plan: ResolvedPlan, stage: int, bytes_: int) -> Iterator[Tensor]:
    """Tensors of one micro-batch whose size, or else whose segment's, is printed like ``bytes_``."""
    unit = next(unit for unit in (2**30, 2**20, 2**10, 1) if bytes_ >= unit)
    tensors = [
        Tensor(tape.module, tape.phase, event)
        for tape in detail(plan, stage)
        for event in tape.events
        if isinstance(event, Hold)
    ]
    for size_of in (_exact, _segment):
        yield from (one for one in tensors if abs(size_of(one.hold) - bytes_) <= NEAR * unit)


def _exact(hold: Hold) -> int:
    return hold.bytes


def _segment(hold: Hold) -> int:
    return -(-hold.bytes // ROUND) * ROUND if hold.bytes >= EXACT else hold.bytes


# -- failing ---------------------------------------------------------------------------------------------

LINES = 20
"""That a failure repeats of what its rank printed last."""
TAIL = 1 << 16
"""Bytes of a log in which they are looked for."""
LEAST_ROOM = 1 << 16
"""Bytes free, below which a disk is full."""
CONSEQUENCES = re.compile(
    r"Connection (closed by|reset by|refused|was likely closed)|Broken pipe|(Read|Write) error \[|remote worker"
    r"|Remote peer closed|Socket unexpectedly closed|connectFullMesh failed|Application timeout caused pair closure"
    r"|failed to (recv|send), (got|sent) 0 bytes|(sendBytes|recvValue\w*) failed|DistNetworkError|wait timeout after"
    r"|client socket has timed out|Timed out waiting \d+ms for"
    r"|remote process exit|ncclRemoteError|collective operation timeout|NCCL communicator was aborted",
    re.IGNORECASE,
)
"""What ranks that lost another one say: gloo's (``transport/tcp/pair.cc``, ``unbound_buffer.cc``), c10d's store's
(``TCPStore.cpp``, ``socket.cpp``), and NCCL's (``nccl.h``; the watchdog of ``ProcessGroupNCCL.cpp``)."""
TIMED_OUT = re.compile(r"Timed out waiting|collective operation timeout|wait timeout after", re.IGNORECASE)
OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory")
_RANK = re.compile(r"^\[rank\d+\]: ?")
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
_STACK = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+")
_COLLECTIVE = re.compile(r'File ".*torch/distributed/(distributed_c10d|c10d_logger|_functional_collectives)\.py"')


@dataclass(frozen=True, slots=True)
class Sign:
    """That a rank failed."""

    failure: Failure
    at: float
    consequence: bool
    """Whether it is because of another rank."""
    terminated: bool
    """Whether it said nothing, and was told to end: as the launcher does to the rest."""


def failures_of(folder: Path, before: float, tracebacks: Mapping[int, float]) -> tuple[Failure, ...]:
    """The ranks that failed by themselves, first one first, and at least one if any failed; from what was written
    ``before`` the ranks were told to end. ``tracebacks``: when one was seen, by rank."""
    found = {files.rank: _sign(files, before, tracebacks.get(files.rank)) for files in ranks_in(folder)}
    signs = sorted((sign for sign in found.values() if sign), key=lambda sign: (sign.consequence, sign.at))
    own = tuple(sign.failure for sign in signs if not sign.consequence)
    if own or not signs:
        return own
    quiet = [RankFiles(folder, rank) for rank, sign in found.items() if sign is None or sign.terminated]
    absent = [files for files in quiet if not files.result.exists()]
    waited = signs[0].failure
    return (_absent(absent, waited) if absent and TIMED_OUT.search(waited.message) else waited,)


def _absent(absent: list[RankFiles], waited: Failure) -> Failure:
    """Others waited in a collective until its own timeout, which is shorter than the run's."""
    ranks = {files.rank for files in absent}
    return Failure(
        rank=min(ranks),
        kind="timeout",
        message=f"{_ranks(ranks)} did not come to the collective in which rank {waited.rank} waited: {waited.message}",
        when=doing(absent[0]),
        lines=last_lines(absent[0].log) or waited.lines,
    )


def _sign(files: RankFiles, before: float, traceback_at: float | None) -> Sign | None:
    end, told, printed = end_of(files), read_json(files.failure), _read(files.log)
    if end is not None and end.at > before:
        end = None
    error, lines = raised(printed), printed[-LINES:]
    times = [] if traceback_at is None else [traceback_at]
    if end is not None and end.code:
        times.append(end.at)
    if told is not None and told["at"] <= before:
        times.append(told.pop("at"))
        failure = Failure(**told, lines=lines)
    elif not times or (end is not None and end.code == 0):  # a traceback that did not matter
        return None
    # one that raised may be aborted on its way out, by threads of gloo's that still run: what it raised is why
    elif end is not None and end.code < 0 and not (error is not None and end.code == -signal.SIGABRT):
        error = thrown(printed)
        why = "" if error is None else f": {error}"
        failure = Failure(rank=files.rank, kind="died", message=f"{signalled(-end.code)}{why}", lines=lines)
    elif end is not None and error is None:
        said = f": {printed[-1].strip()}" if printed else ", and printed nothing"
        failure = Failure(rank=files.rank, kind="died", message=f"ended with {end.code}{said}", lines=lines)
    else:
        failure = _raised(files.rank, error or "printed a traceback", lines)
    by_another = CONSEQUENCES.search(f"{failure.message}\n{error or ''}") is not None
    terminated = told is None and end is not None and end.code == -signal.SIGTERM
    failure = failure.model_copy(update={"when": failure.when or doing(files)})
    return Sign(failure, min(times), by_another or terminated, terminated)


def _raised(rank: int, error: str, lines: tuple[str, ...]) -> Failure:
    if OUT_OF_MEMORY.search(error):
        return Failure(rank=rank, kind="out-of-memory", message=error, lines=lines)
    return Failure(rank=rank, kind="error", message=error, lines=lines)


def signalled(number: int) -> str:
    """What a signal did to a process, in words."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"ended by {name}{', which Linux sends where memory runs out' if name == 'SIGKILL' else ''}"


def silent_ranks(folder: Path) -> tuple[Failure, ...]:
    """Ranks that ended well, without a result."""
    return tuple(
        Failure(
            rank=files.rank,
            kind="died",
            message="ended without a result",
            when=doing(files),
            lines=last_lines(files.log),
        )
        for files in ranks_in(folder)
        if not files.result.exists() and (end := end_of(files)) is not None and end.code == 0
    )


def hung(folder: Path, progress: tuple[Progress, ...], seconds: float) -> Failure:
    """No rank did anything for ``seconds``, and each printed where it stood (``faulthandler``). The one that the others
    wait for is outside of a collective while they are in one, or else the one that was the first to fall silent."""
    if not progress:
        message = f"no rank began anything in {seconds:g} s"
        return Failure(rank=None, kind="timeout", message=message, lines=last_lines(folder / LAUNCHER_LOG))
    stacks = {one.rank: stack(RankFiles(folder, one.rank).log) for one in progress if not one.done}
    waiting = {rank for rank, lines in stacks.items() if any(_COLLECTIVE.search(line) for line in lines)}
    suspects = [one for one in progress if not one.done] or list(progress)
    outside = [one for one in suspects if one.rank not in waiting]
    first = min(outside or suspects, key=lambda one: one.at)
    where = "in a collective" if first.rank in waiting else "outside of any collective"
    others = f", while {_ranks(waiting)} waited in one" if waiting - {first.rank} and first.rank not in waiting else ""
    message = f"nothing happened for {seconds:g} s; it stood {where}{others}"
    lines = stacks.get(first.rank) or last_lines(RankFiles(folder, first.rank).log)
    return Failure(rank=first.rank, kind="timeout", message=message, when=first.what, lines=lines)


def late(progress: tuple[Progress, ...], seconds: float) -> Failure:
    """All of ``seconds`` are over. The rank that began what it does first is the one to look at."""
    message = f"the run took longer than {seconds:g} s"
    slowest = min((one for one in progress if not one.done), key=lambda one: one.at, default=None)
    if slowest is None:
        return Failure(rank=None, kind="timeout", message=message)
    return Failure(rank=slowest.rank, kind="timeout", message=message, when=slowest.what)


def _ranks(ranks: set[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def unable_to_die(pids: tuple[int, ...]) -> Failure:
    """Processes that survived SIGKILL: something in the kernel holds them, most often a driver."""
    message = f"processes {', '.join(map(str, pids))} did not end within {LONGEST_DEATH:g} s of SIGKILL"
    return Failure(rank=None, kind="died", message=message)


def launcher_failed(folder: Path, keeper: int) -> Failure:
    """No rank failed, but PyTorch's launcher or the keeper did; ``keeper``: the latter's exit code."""
    if keeper < 0:
        message = f"the process that keeps the run's others was {signalled(-keeper)}"
        return Failure(rank=None, kind="died", message=message)
    log = next((log for log in (folder / LAUNCHER_LOG, folder / KEEPER_LOG) if last_lines(log)), folder / LAUNCHER_LOG)
    lines = last_lines(log)
    message = raised(_read(log)) or (lines[-1].strip() if lines else "printed nothing")
    if shutil.disk_usage(folder).free < LEAST_ROOM:
        message += f"; there is no room left in {folder.parent}, where the run keeps its files (TMPDIR)"
    who = "PyTorch's launcher" if log.name == LAUNCHER_LOG else "what starts the ranks"
    return Failure(rank=None, kind="died", message=f"{who} failed: {message}", lines=lines)


def doing(files: RankFiles) -> str:
    """What it last said that it does."""
    try:
        said = last_said(files.progress.read_bytes())
    except FileNotFoundError:
        return ""
    return "" if said is None else str(said["what"])


def last_lines(log: Path) -> tuple[str, ...]:
    """The last ``LINES`` that are not blank."""
    return _read(log)[-LINES:]


def _read(log: Path) -> tuple[str, ...]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ()
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())


def raised(printed: tuple[str, ...]) -> str | None:
    """The line that says what was raised: after the frames of the last traceback. PyTorch's own prefix is left out."""
    plain = [_RANK.sub("", line) for line in printed]
    starts = [number for number, line in enumerate(plain) if line.startswith(_TRACEBACK)]
    if not starts:
        return None
    after = [line for line in plain[starts[-1] + 1 :] if not line.startswith(" ")]
    return next((line for line in after if _ERROR.match(line)), after[0] if after else None)


def thrown(printed: tuple[str, ...]) -> str | None:
    """What a C++ exception said that nobody caught, as where NCCL's watchdog takes the whole process down."""
    return next((line.partition("what():")[2].strip() for line in reversed(printed) if "what():" in line), None)


def stack(log: Path) -> tuple[str, ...]:
    """The main thread's, innermost call first, as ``faulthandler`` printed it last."""
    lines = _read(log)
    starts = [number for number, line in enumerate(lines) if _STACK.match(line)]
    if not starts:
        return ()
    first = next((number for number in reversed(starts) if lines[number].startswith("Current")), starts[-1])
    length = sum(1 for _ in takewhile(lambda line: line.startswith("  File"), lines[first + 1 :]))
    return lines[first : first + 1 + min(length, LINES)]
