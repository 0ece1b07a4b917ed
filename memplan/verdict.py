"""Whether a rank fits into its device: the one place that decides, for estimates, searches, validation and records.

PyTorch's allocator gives cached memory back before a request fails, so what it reserves where memory never ends is not
what it needs. Where it would reserve more than there is, the rank is replayed once more within the device's memory
(``allocator.limited``), and the verdict is what becomes of its requests. Every moment that a plan includes decides.
Construction and iterations are replayed; of evaluation, of a checkpoint, and of what a framework holds only while it
initialises, the sum of live tensors is compared with the device's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .allocator.caching import AllocatorSettings
from .allocator.limited import Within, replay_within
from .allocator.memory import DeviceMemory
from .allocator.replay import Replayed
from .result import Failure, Judged, Verdict
from .tape.events import Category, Hold
from .tape.program import Program, evaluation_beyond, fold_evaluation


def judge(
    program: Program,
    replayed: Replayed,
    evaluated: Program | None,
    outside: tuple[int, int],
    *,
    all_known: bool,
    capacity: int,
    headroom: int,
    settings: AllocatorSettings,
    workspaces: Sequence[Hold],
    tells_tight: bool = True,
) -> Judged:
    """The verdict on a rank that runs ``program``, of which ``replayed`` is the replay without a limit.

    ``evaluated`` is what evaluation runs, if there is one; ``outside`` the least and the most bytes outside PyTorch's
    allocator; ``all_known`` says that they leave nothing out. ``capacity`` and ``headroom`` in bytes. Without
    ``tells_tight`` what fits beside the least alone does not fit, which takes half the time.
    """
    room = capacity - headroom
    least, most = room - outside[1], room - outside[0]

    def within(limit: int) -> Judged:
        summed = (
            _initialisation(program, limit),
            _evaluation(evaluated, limit),
            _checkpoint(program, replayed.static, limit),
        )
        failures = [one for one in summed if one is not None]
        memory = DeviceMemory(max(limit, 0), capacity)
        short = replayed.reserved > _most(memory, settings)
        found = replay_within(program, settings, workspaces, memory) if short else SUFFICES
        if found.failure is not None:
            failures.append(found.failure)
        if failures:
            failures.sort(key=lambda one: IN_ORDER.index(one.moment))
            return Judged(Verdict.DOES_NOT_FIT, found.retries, failures=tuple(failures))
        verdict = Verdict.RETRIES if found.retries else Verdict.FITS
        return Judged(verdict, found.retries, found.retries_in_iteration, found.partial)

    found = within(least)
    if tells_tight and found.failures and least < most:
        loosest = within(most)
        found = loosest if loosest.failures else replace(loosest, verdict=Verdict.TIGHT)
    return found if found.failures or all_known else replace(found, verdict=Verdict.UNKNOWN)


IN_ORDER = ("initialisation", "steady", "evaluation", "checkpoint")
"""Moments that can fail, as they come in a run."""
NOT_JUDGED = Judged()
SUFFICES = Within(None)


def _most(memory: DeviceMemory, settings: AllocatorSettings) -> int:
    """Bytes up to which the allocator never has to give anything back."""
    fraction = settings.memory_fraction
    return memory.limit if fraction is None else min(memory.limit, int(fraction * memory.total))


def _initialisation(program: Program, limit: int) -> Failure | None:
    """Where more is live while the optimizer is built than there is."""
    needed = program.initialisation
    if needed is None or needed <= limit:
        return None
    return Failure("initialisation", "", "", "", None, 0, 0, needed, needed)


def _evaluation(program: Program | None, limit: int) -> Failure | None:
    """Where more is live in a forward pass without a graph than there is."""
    needed = fold_evaluation(program) if program is not None else None
    if program is None or needed is None or needed <= limit:
        return None
    module, hold = evaluation_beyond(program, limit) or ("", Hold(0, 0, Category.LOGITS, "gathered_outputs"))
    return Failure("evaluation", "forward", module, hold.name, None, hold.bytes, hold.bytes, needed, needed)


def _checkpoint(program: Program, static: int, limit: int) -> Failure | None:
    """Where a checkpoint takes more than there is beside what is held between iterations."""
    needed = static + program.saving
    if not program.saving or needed <= limit:
        return None
    return Failure("checkpoint", "", "", "", None, 0, 0, needed, needed)
