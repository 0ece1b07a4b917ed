"""Seconds of a step, and nothing else, for a search: in microseconds, from groups of equal stages."""

from __future__ import annotations

from collections.abc import Sequence

from .ends import EntryTimes
from .stages import StageWork


def step_seconds(
    times: EntryTimes,
    groups: Sequence[tuple[int, Sequence[StageWork]]],
    microbatches: int,
    once: float = 0.0,
    overlapped_sends: bool = False,
) -> float:
    """``assemble(...).total`` of 1F1B, plain or interleaved, and nothing else. Equal neighbours are one group:
    how many stages, and their chunks; ``once`` is added."""
    send = 0.0 if overlapped_sends else times.send
    final, stages, whole, slowest, at = len(groups) - 1, 0, 0.0, 0.0, 0
    known: dict[StageWork, float] = {}
    parts: list[list[float]] = []
    for number, (equal, chunks) in enumerate(groups):
        sums = []
        for chunk in chunks:
            one = known.get(chunk)
            if one is None:
                one = known[chunk] = _chunk_seconds(times, chunk) + 2 * send
            sums.append(one)
        if number == 0:
            sums[0] -= send
        if number == final:
            sums[-1] -= send
        total = sum(sums)
        if total > slowest:
            slowest, at = total, number
        stages += equal
        whole += equal * total
        parts.append(sums)
    extra = once + (2 * (stages - 1) * times.send if overlapped_sends else 0.0)
    if len(parts[0]) == 1:
        return whole + (microbatches - 1) * slowest + extra
    return microbatches * slowest + extra + _interleaved(times, groups, parts, at, stages, send)


def _interleaved(
    times: EntryTimes,
    groups: Sequence[tuple[int, Sequence[StageWork]]],
    parts: Sequence[Sequence[float]],
    at: int,
    stages: int,
    send: float,
) -> float:
    """What ``pipeline.seconds`` adds to the slowest stage's passes, the first stage of group ``at``."""
    ways, forward, backward, last = (groups[at][0] - 1) * parts[at][-1], 0.0, 0.0, 0.0
    if at:
        own = _first_forward(times, groups[at][1][0], send)
        for number in range(at):
            first, sums = _first_forward(times, groups[number][1][0], send), parts[number]
            ways += groups[number][0] * sums[0]
            forward = max(forward, first - own)
            backward = max(backward, sums[0] - first - parts[at][0] + own)
    for number in range(at + 1, len(groups)):
        ways += groups[number][0] * parts[number][-1]
        last = max(last, parts[number][-1] - parts[at][-1])
    return ways + (stages - 1) * (forward + backward + last)


def _chunk_seconds(times: EntryTimes, chunk: StageWork) -> float:
    """Forward and backward of a chunk, without sends."""
    layer = times.layer
    total = chunk.layers * (layer.forward + layer.backward) + chunk.recomputed * layer.recompute
    if chunk.embedding:
        total += times.embedding.forward + times.embedding.backward
    if chunk.final_norm:
        total += times.final_norm.forward + times.final_norm.backward
    if chunk.head:
        total += times.head.forward + times.head.backward
    return total


def _first_forward(times: EntryTimes, chunk: StageWork, send: float) -> float:
    """Of a stage's first chunk, which is not the model's last."""
    return chunk.layers * times.layer.forward + (times.embedding.forward if chunk.embedding else 0.0) + send
