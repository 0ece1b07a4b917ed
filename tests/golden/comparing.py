"""Answers of now beside the recorded ones, and what a difference looks like to people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from .answers import Answer, answer

RECORDED = Path(__file__).with_name("recorded.jsonl")


def recorded() -> dict[str, Answer]:
    """What is on file, by command."""
    if not RECORDED.exists():
        return {}
    answers = map(Answer.of_line, RECORDED.read_text(encoding="utf-8").splitlines())
    return {one.command: one for one in answers}


def write(answers: Iterable[Answer]) -> None:
    RECORDED.write_text("".join(f"{one.line()}\n" for one in answers), encoding="utf-8")


def answers_of(commands: Sequence[str], processes: int) -> Iterator[Answer]:
    """In the order of ``commands``."""
    if processes == 1 or len(commands) == 1:
        yield from map(answer, commands)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        yield from pool.map(answer, commands, chunksize=4)


def differences(before: Answer, now: Answer) -> list[str]:
    """A line for each figure of the summary that changed; what changed beside them is said, too."""
    lines = [] if before.code == now.code else [f"exit code {before.code} -> {now.code}"]
    if before.figures != now.figures:
        changed = list(_changed("", _figures(before), _figures(now)))
        lines += changed or ["figures differ, none of them in the summary"]
    if before.tapes != now.tapes:
        lines.append("tapes differ")
    if before.texts != now.texts:
        same = "" if lines else "figures are equal, "
        lines += [f"{same}texts differ: {_texts(before, now)}"]
    return lines


def only_texts(before: Answer, now: Answer) -> bool:
    return (before.code, before.figures, before.tapes) == (now.code, now.figures, now.tapes)


def _figures(one: Answer) -> dict[str, object]:
    return {name: value for name, value in one.summary.items() if name not in ("lines", "error")}


def _texts(before: Answer, now: Answer) -> str:
    was, said = before.summary.get("error", ""), now.summary.get("error", "")
    if was != said:
        return f"{was!r} -> {said!r}"
    old, new = before.summary["lines"], now.summary["lines"]
    gone, come = [one for one in old if one not in new], [at for at, one in enumerate(new) if one not in old]
    return f"{len(gone)} of {len(old)} sentences are gone, new ones at {come}"


def _changed(path: str, before: object, now: object) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for name in [*before, *(name for name in now if name not in before)]:
            yield from _changed(f"{path}.{name}" if path else name, before.get(name), now.get(name))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for at, (was, is_) in enumerate(zip(before, now, strict=True)):
            yield from _changed(f"{path}[{at}]", was, is_)
    elif json.dumps(before) != json.dumps(now):
        by = f" ({now - before:+,})" if isinstance(before, int) and isinstance(now, int) else ""
        yield f"{path}: {before} -> {now}{by}"
