"""Whether a rank fits into its device: the one place that decides, for estimates, searches, validation and records.

PyTorch's allocator gives cached memory back before a request fails, so what it reserves where memory never ends is not
what it needs. Where it would reserve more than there is, the rank is replayed once more within the device's memory
(``allocator.limited``), and the verdict is what becomes of its requests. Every moment that a plan includes decides.
Construction and iterations are replayed; of evaluation, of a checkpoint, and of what a framework holds only while it
initialises, the sum of live tensors is compared with the device's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from .allocator.caching import AllocatorSettings
from .allocator.limited import Within, replay_within
from .allocator.memory import DeviceMemory
from .allocator.replay import Replayed, replay
from .result import Failure, Judged, Verdict
from .tape.events import Category, Hold
from .tape.program import Program, evaluation_beyond, fold_evaluation, static
from .values import dataclass, replace


@dataclass(frozen=True, slots=True)
class Replays:
    """Replayed stages of one ``plan``, and of others that do the same. Whoever replays further ones adds them."""

    endless: dict[object, Replayed] = field(default_factory=dict)
    """Where memory never ends;"""
    within: dict[tuple[object, int], Within] = field(default_factory=dict)
    """and within so many bytes."""
    plan: object = None

    def key(self, program: Program, settings: AllocatorSettings) -> object:
        """What a replay of ``program`` depends on, if its plan keeps all that in one place; else which one it is."""
        if program.kept is None:
            return self.plan, program.stage
        step = program.clipping, program.gradients_kept, program.late_step, program.empties
        return settings, program.order, program.kept, program.set_aside, *step

    def replayed(
        self, programs: Sequence[Program], settings: AllocatorSettings, workspaces: Sequence[Hold]
    ) -> tuple[Replayed, ...]:
        """Replays the stages that are not here, and adds them."""
        keys = [self.key(program, settings) for program in programs]
        left = {key: program for key, program in zip(keys, programs, strict=True) if key not in self.endless}
        self.endless.update(zip(left, replay([*left.values()], settings, workspaces), strict=True))
        return tuple(self.endless[key] for key in keys)


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
    tells_retries: bool = True,
    replays: Replays | None = None,
) -> Judged:
    """The verdict on a rank that runs ``program``, of which ``replayed`` is the replay without a limit; ``replays``
    keeps those with one.

    ``evaluated`` is what evaluation runs, if there is one; ``outside`` the least and the most bytes outside PyTorch's
    allocator; ``all_known`` says that they leave nothing out. ``capacity`` and ``headroom`` in bytes. Without
    ``tells_tight`` what fits beside the least alone does not fit, which takes half the time. Without ``tells_retries``
    nor does what fits with retries alone: what would reserve more than there is gives back or fails, so that nothing is
    replayed within the device's memory.
    """
    room = capacity - headroom
    least, most = room - outside[1], room - outside[0]
    replays = Replays() if replays is None else replays

    def is_short(limit: int) -> bool:
        memory = DeviceMemory(max(limit - program.set_aside, 0), capacity)
        return replayed.reserved - program.set_aside > _most(memory, settings)

    if not (tells_retries or settings.gives_back_early) and is_short(least):
        return Judged(Verdict.DOES_NOT_FIT)

    def within(limit: int) -> Judged:
        left = limit - program.set_aside
        summed = (
            _initialisation(program, limit),
            _evaluation(evaluated, replayed, left),
            _checkpoint(program, replayed.static, left),
        )
        failures = [one for one in summed if one is not None]
        found = SUFFICES
        if is_short(limit):
            key, memory = (replays.key(program, settings), limit), DeviceMemory(max(left, 0), capacity)
            found = replays.within.get(key) or replay_within(program, settings, workspaces, memory)
            replays.within[key] = found
        if found.failure is not None:
            failures.append(found.failure)
        if failures:
            failures.sort(key=lambda one: IN_ORDER.index(one.moment))
            return Judged(Verdict.DOES_NOT_FIT, found.retries, failures=tuple(failures))
        verdict = Verdict.RETRIES if found.retries else Verdict.FITS
        kept = found.reserved if found.retries and not found.retries_in_iteration else 0
        return Judged(verdict, found.retries, found.retries_in_iteration, found.partial, reserved=kept)

    found = within(least)
    if tells_tight and found.failures and least < most:
        loosest = within(most)
        found = loosest if loosest.failures else replace(loosest, verdict=Verdict.TIGHT)
    return found if found.failures or all_known else replace(found, verdict=Verdict.UNKNOWN)


IN_ORDER = ("initialisation", "steady", "evaluation", "checkpoint")
"""Moments that can fail, as they come in a run."""
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


def evaluation_peak(program: Program, replayed: Replayed) -> int | None:
    """Bytes: blocks that are held between iterations, cuBLAS's workspaces among them, and a forward pass's tensors."""
    needed = fold_evaluation(program)
    return None if needed is None else needed + _beside_tensors(program, replayed)


def _beside_tensors(program: Program, replayed: Replayed) -> int:
    """Bytes that blocks take between iterations beyond the tensors in them."""
    return replayed.static - static(program).net


def _evaluation(program: Program | None, replayed: Replayed, limit: int) -> Failure | None:
    """Where a forward pass without a graph needs more than there is."""
    needed = evaluation_peak(program, replayed) if program is not None else None
    if program is None or needed is None or needed <= limit:
        return None
    beyond = evaluation_beyond(program, limit - _beside_tensors(program, replayed))
    module, hold = beyond or ("", Hold(0, 0, Category.LOGITS, "gathered_outputs"))
    return Failure("evaluation", "forward", module, hold.name, None, hold.bytes, hold.bytes, needed, needed)


def _checkpoint(program: Program, static: int, limit: int) -> Failure | None:
    """Where a checkpoint takes more than there is beside what is held between iterations."""
    needed = static + program.saving
    if not program.saving or needed <= limit:
        return None
    return Failure("checkpoint", "", "", "", None, 0, 0, needed, needed)
