"""From a command line to digests of its complete answer. Only public entry points are called: the command in this
process, and ``memplan.estimate.detail`` for the tapes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DIGITS = 10
"""Significant digits of predicted times."""
READINGS = ("requested", "allocated", "reserved", "device", "static", "host")
SEARCH, EXPORT = "suggest-partition", "export"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command line answered. Digests are hexadecimal; ``figures`` is everything but sentences."""

    command: str
    code: int
    figures: str
    texts: str
    tapes: str
    """Of every stage's tape; empty where there is none."""
    summary: dict[str, Any]
    """A few figures for people; ``lines`` of texts are digests of each, so that a difference can be located."""

    def line(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def of_line(cls, line: str) -> Answer:
        return cls(**json.loads(line))


def answer(command: str) -> Answer:
    """Runs ``memplan <command>`` in this process, from the repository's root."""
    arguments = shlex.split(command)
    asks_json = arguments[0] in ("estimate", SEARCH) and "--text" not in arguments
    given = [argument for argument in arguments if argument != "--text"]
    more = ["--json", "--no-records"] if asks_json else ["--no-records"] if arguments[0] == "estimate" else []
    code, out, error = _run([*given, *more])
    texts, figures, summary, tapes = [error.strip()] if error else [], {}, {}, []
    if out and asks_json:
        found = json.loads(out)
        figures, said = split(found)
        texts += said
        if arguments[0] == SEARCH:
            summary = _summary_of_search(found)
        elif "stages" in found:
            summary = _summary(found)
            if "--from" not in arguments:
                tapes = [tape_of(given[1:], stage) for stage in range(len(found["stages"]))]
        else:
            summary = {one["name"]: one["peak_bytes"] for one in found["variants"]}
    elif out:
        texts += [line.rstrip() for line in out.splitlines()]
    if error:
        summary["error"] = error.strip()
    summary["lines"] = [digest(text, 4) for text in texts]
    return Answer(command, code, digest([code, figures]), digest(texts), digest(tapes) if any(tapes) else "", summary)


def _run(arguments: list[str]) -> tuple[int, str, str]:
    from memplan.cli import main

    out, error = io.StringIO(), io.StringIO()
    before, environment = Path.cwd(), dict(os.environ)
    os.chdir(ROOT)
    os.environ.update(COLUMNS="120", NO_COLOR="1")
    try:
        with redirect_stdout(out), redirect_stderr(error):
            code = main(arguments)
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)
    return code, out.getvalue(), error.getvalue()


def digest(value: object, length: int = 20) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


# -- figures and texts apart --------------------------------------------------------------------------------

DROPPED = ("memplan", "seconds of search")
FOLLOWS = ("device_reading_range_bytes",)
"""Keys of figures that others make."""
SENTENCES = ("message", "problem", "change", "assumptions")
"""Keys of sentences."""


def split(found: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Figures of an answer as JSON, and its sentences in their order."""
    texts: list[str] = []

    def figures(value: Any, key: str = "") -> Any:
        if isinstance(value, float):
            return float(f"{value:.{DIGITS}g}")
        if key == "refused" and isinstance(value, dict):
            texts.extend(value)
            return sorted((_field(rule), count) for rule, count in value.items())
        if isinstance(value, dict):
            return {name: figures(item, name) for name, item in value.items() if counts(name, item)}
        return [figures(item) for item in value] if isinstance(value, list) else value

    def counts(name: str, item: Any) -> bool:
        return name not in FOLLOWS and (name not in SENTENCES or gone(item))

    def gone(value: Any) -> bool:
        if value is None:
            return True
        texts.extend(value if isinstance(value, list) else [value])
        return False

    rest = {name: value for name, value in found.items() if name != "memplan"}
    if "plan" in rest:
        rest["plan"] = without_unsaid(rest["plan"])
    if "search" in rest:
        rest["search"] = {name: value for name, value in rest["search"].items() if name != "seconds"}
    return figures(rest), texts


def without_unsaid(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan without what is null, false or empty, so that a field that is new, and left out, changes no digest."""
    found = ((name, without_unsaid(one) if isinstance(one, dict) else one) for name, one in plan.items())
    return {name: one for name, one in found if one not in (None, {}, []) and one is not False}


def _field(rule: str) -> str:
    """A refusal is ``field: problem`` or a sentence."""
    field, _, problem = rule.partition(": ")
    return field if problem else ""


def _summary(found: Mapping[str, Any]) -> dict[str, Any]:
    stages = [[stage[f"{name}_bytes"] for name in READINGS] for stage in found["stages"]]
    return {
        "fits": found["fits"],
        "peak": found["peak_bytes"],
        "peaks": _at_most([" ".join(str(part) for part in stage["peak"].values()) for stage in found["stages"]]),
        "stages": _at_most(stages),
        "codes": [notice["code"] for notice in found["warnings"]],
    }


def _at_most(items: list[Any]) -> list[Any]:
    """All of a few; of many the first three and the last."""
    return items if len(items) <= 5 else [*items[:3], items[-1]]


def _summary_of_search(found: Mapping[str, Any]) -> dict[str, Any]:
    shown = [found["recommended"], *found["alternatives"]] if found["recommended"] else [found["closest"]]
    layouts = [
        [" ".join(f"{name}{one['layout'][name]}" for name in ("tp", "cp", "pp", "vpp", "dp", "zero", "mbs")),
         one["layout"]["recompute"], one["requested_bytes"], one["device_bytes"], one["seconds"]]
        for one in shown
        if one is not None
    ]  # fmt: skip
    counts = {name: value for name, value in found["search"].items() if name not in ("refused", "seconds")}
    return {"fits": found["fits"], "layouts": layouts, "counts": counts, "front": len(found["front"])}


# -- tapes --------------------------------------------------------------------------------------------------


def tape_of(arguments: list[str], stage: int) -> str:
    """The digest of a stage's tape: module, phase, bytes, category and name of every tensor in order. The numbers that
    identify tensors are left out, and so are the names of those that are dropped and seams: they change nothing. Drops
    that follow each other are sorted: 3.14 lets go of a function's variables in another order than 3.13."""
    from memplan.estimate import detail
    from memplan.plan.read import read_plan

    here = Path.cwd()
    os.chdir(ROOT)
    try:
        source, flags = flags_of(arguments)
        tapes = detail(read_plan(source, flags, traced=True).plan, stage)
    finally:
        os.chdir(here)
    return digest([[tape.module, tape.phase, *_events(tape.events)] for tape in tapes])


def _events(events: Any) -> Iterator[list[Any]]:
    held = [event for event in events if hasattr(event, "bytes")]
    for drops, together in groupby(held, key=lambda event: not hasattr(event, "name")):
        rows = [
            [event.bytes, event.category.key, getattr(event, "name", None), list(getattr(event, "shape", ()))]
            for event in together
        ]
        yield from sorted(rows, key=lambda row: row[:2]) if drops else rows


def flags_of(arguments: list[str]) -> tuple[str | None, dict[str, str | tuple[str, ...]]]:
    """A plan's name and flags of ``memplan.plan.read``, from the arguments of a command."""
    source, flags = None, dict[str, "str | tuple[str, ...]"]()
    left = list(arguments)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            source = word
        elif left and not left[0].startswith("--"):
            value, name = left.pop(0), word[2:]
            flags[name] = (*flags.get(name, ()), value) if name == "env" else value
        elif word.startswith("--no-"):
            flags[word[5:]] = "false"
        else:
            flags[word[2:]] = "true"
    return source, flags
