"""Schedules that are compared with Megatron-Core's own, and what its functions did when they were run.

``megatron_events.json`` has a fingerprint of the events that ``test_megatron_core_schedules`` recorded
from Megatron-LM's development branch of August 2026, so that they are compared without it, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

from memplan.plan.errors import PlanError
from memplan.schedules.megatron_schedule import Schedule, schedule, trace
from memplan.tape.program import Action

FILE = Path(__file__).with_suffix(".json")


def configurations() -> list[Schedule]:
    """Every stage of small pipelines, with 1F1B and with interleaving."""
    plain = ((1, 1), (1, 3), (2, 1), (2, 2), (2, 5), (4, 2), (4, 4), (4, 9))
    result = [schedule(stage, stages, many) for stages, many in plain for stage in range(stages)]
    interleaved = (
        (2, 2, 2, None),
        (2, 2, 6, None),
        (2, 3, 8, 4),
        (2, 2, 7, 5),
        (3, 2, 3, None),
        (3, 2, 9, None),
        (4, 3, 12, None),
        (4, 2, 16, 6),
        (4, 2, 14, 5),
        (4, 2, 4, None),
        (4, 4, 16, None),
    )
    for stages, chunks, many, group in interleaved:
        for overlap, warmup in ((True, False), (True, True), (False, False)):
            result += [
                schedule(stage, stages, many, chunks, group, overlap, warmup)
                for stage in range(stages)
                if runs(stages, many, chunks, group, overlap)
            ]
    return result


STANDALONE = "with multi-token prediction before the last chunk"


def standalone() -> list[Schedule]:
    """Every stage of pipelines whose chunk before the last predicts further tokens."""
    found = [schedule(stage, 3, 5) for stage in range(3)]
    for stages, chunks, many, group in ((2, 2, 6, None), (3, 2, 9, None), (3, 3, 8, 5)):
        for overlap, warmup in ((True, False), (True, True), (False, False)):
            if runs(stages, many, chunks, group, overlap):
                found += [schedule(at, stages, many, chunks, group, overlap, warmup) for at in range(stages)]
    return found


def is_further(plan: Schedule, chunk: int) -> bool:
    """The chunk before the model's last."""
    return (plan.stage, chunk) == (plan.stages - 2, plan.chunks - 1)


def runs(stages: int, many: int, chunks: int, group: int | None, overlap: bool) -> bool:
    """Megatron-Core accepts it."""
    try:
        schedule(0, stages, many, chunks, group, overlap)
    except PlanError:
        return False
    return True


def comparable(events: Sequence[Action], sized: bool = False) -> list[str]:
    """Events as text. Tensors are numbered from 0 by kind, those of the iteration before are ``old``,
    and deaths in a row, which have no order, are sorted. ``sized``: what begins has its size in place of a chunk."""
    low: dict[str, int] = {}
    for event in events:
        if event.what == "begin" and event.tensor is not None:
            low.setdefault(event.tensor, event.microbatch)
    lines: list[str] = []
    dying: list[str] = []
    for event in events:
        text = PASSES[event.what](event) if event.tensor is None else _tensor(event, low.get(event.tensor))
        if sized and event.what == "begin" and event.tensor not in ("stub", "report"):
            text += f" of {event.chunk}"
        if event.what == "end":
            dying.append(text)
        else:
            lines += [*sorted(dying), text]
            dying.clear()
    return lines + sorted(dying)


PASSES: dict[str, Callable[[Action], str]] = {
    "forward": lambda event: str(("F", event.chunk, event.microbatch)),
    "backward": lambda event: str(("B", event.chunk, event.microbatch)),
    "reduce": lambda event: "()",
}
"""As they were recorded."""


def _tensor(event: Action, low: int | None) -> str:
    number = "old" if low is None or event.microbatch < low else event.microbatch - low
    return f"{'+' if event.what == 'begin' else '-'}{event.tensor} {number}"


def calls(plan: Schedule) -> tuple[Action, ...]:
    """Forward and backward passes of one iteration, in order."""
    return tuple(event for event in trace(plan) if event.what in ("forward", "backward"))


def in_flight(plan: Schedule) -> tuple[int, ...]:
    """Micro-batches whose activations each chunk holds at once, at most."""
    held, most = [0] * plan.chunks, [0] * plan.chunks
    for call in calls(plan):
        held[call.chunk] += 1 if call.what == "forward" else -1
        most[call.chunk] = max(most[call.chunk], held[call.chunk])
    return tuple(most)


def fingerprint(events: Sequence[Action], sized: bool = False) -> str:
    return sha256("\n".join(comparable(events, sized)).encode()).hexdigest()[:16]


@cache
def recorded() -> dict[str, str]:
    """Fingerprints of Megatron-Core's events, by ``str`` of the schedule."""
    result: dict[str, str] = json.loads(FILE.read_text())
    return result
