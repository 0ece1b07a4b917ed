"""Schedules that are compared with Megatron-Core's own, and what its functions did when they were run.

``megatron_events.json`` has a fingerprint of the events that ``test_megatron_core_schedules`` recorded
from Megatron-LM's development branch of August 2026, so that they are compared without it, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

from memplan.pipeline.megatron_schedule import Change, Event, Schedule, schedule
from memplan.plan.errors import PlanError

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


def runs(stages: int, many: int, chunks: int, group: int | None, overlap: bool) -> bool:
    """Megatron-Core accepts it."""
    try:
        schedule(0, stages, many, chunks, group, overlap)
    except PlanError:
        return False
    return True


def comparable(events: Sequence[Event]) -> list[str]:
    """Events as text. Tensors are numbered from 0 by kind, those of the iteration before are ``old``,
    and deaths in a row, which have no order, are sorted."""
    low: dict[str, int] = {}
    for event in events:
        if isinstance(event, Change) and event.sign > 0:
            low.setdefault(event.kind, event.number)
    lines: list[str] = []
    dying: list[str] = []
    for event in events:
        text = str(tuple(event)) if not isinstance(event, Change) else _tensor(event, low.get(event.kind))
        if isinstance(event, Change) and event.sign < 0:
            dying.append(text)
        else:
            lines += [*sorted(dying), text]
            dying.clear()
    return lines + sorted(dying)


def _tensor(event: Change, low: int | None) -> str:
    number = "old" if low is None or event.number < low else event.number - low
    return f"{'+' if event.sign > 0 else '-'}{event.kind} {number}"


def fingerprint(events: Sequence[Event]) -> str:
    return sha256("\n".join(comparable(events)).encode()).hexdigest()[:16]


@cache
def recorded() -> dict[str, str]:
    """Fingerprints of Megatron-Core's events, by ``str`` of the schedule."""
    result: dict[str, str] = json.loads(FILE.read_text())
    return result
