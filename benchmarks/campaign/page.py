"""The way back: a campaign's file as a section of docs/accuracy.md, and its validations as records.

    python benchmarks/gpu.py report FILE… [--write]

``--write`` keeps what was measured in ``benchmarks/measured_on_gpu.jsonl``, from which the page is made, and every
validation that ended as a record in ``benchmarks/records``. What a CPU rehearsed is never kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from memplan.plan.errors import PlanError
from memplan.records.record import Record, from_json
from memplan.records.sharing import shared_text

from . import journal
from .summary import Row, compared, failures, figure, medians, rows_of, summary

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "benchmarks" / "measured_on_gpu.jsonl"
RECORDS = ROOT / "benchmarks" / "records"
PAGE = ROOT / "docs" / "accuracy.md"
BEGIN, END = "<!-- campaign: python benchmarks/gpu.py report -->", "<!-- end of campaign -->"
NONE = (
    "None has been run yet: no figure on this page was measured on a GPU of this project's own. The campaign that "
    "would do so is [ready](gpu.md)."
)
NOT_KEPT = ("record", "tail", "command")
"""Of a line: the record has a file of its own, and logs stay where they are."""


def reported(arguments: Sequence[str]) -> int:
    """``gpu.py report``. Exit code 2: a file cannot be read, or nothing in it was measured on a GPU."""
    parser = argparse.ArgumentParser(prog="gpu.py report", description="prints what a campaign measured")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="keep the figures and records, and write docs/accuracy.md")
    given = parser.parse_args(arguments)
    try:
        lines = journal.read(given.files)
    except OSError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    if not given.write:
        print("\n".join(summary(lines)))
        return 0
    kept = on_gpu(lines)
    if not rows_of(kept):
        print("gpu.py: nothing in these files was measured on a GPU, so nothing is written", file=sys.stderr)
        return 2
    for record in records_of(lines):
        path = RECORDS / f"{record.ran.model.name}_{record.run.gpu or 'cuda'}_{record.id}.json"
        path.write_text(shared_text(record), encoding="utf-8")
    KEPT.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), kept), encoding="utf-8")
    print(f"wrote {KEPT.relative_to(ROOT)}, {PAGE.relative_to(ROOT)} and {len(list(records_of(lines)))} records")
    return 0


def on_gpu(lines: Iterable[journal.Line]) -> list[dict[str, Any]]:
    """Lines of a GPU, the last of each case, without what is kept elsewhere."""
    whole = list(lines)
    machines = [line for line in journal.machines(whole) if line["machine"]["device"] == "cuda"]
    found = journal.last_of_each(line for line in whole if line.get("device") == "cuda").values()
    return [{name: value for name, value in line.items() if name not in NOT_KEPT} for line in (*machines, *found)]


def records_of(lines: Iterable[journal.Line]) -> Iterator[Record]:
    """Of validations on a GPU, whatever their verdict. A record that cannot be read back is left out."""
    for line in journal.last_of_each(line for line in lines if line.get("device") == "cuda").values():
        if line.get("record") is None:
            continue
        try:
            yield from_json(line["record"], line["case"])
        except PlanError as error:
            print(f"gpu.py: {error}", file=sys.stderr)


# -- the page -----------------------------------------------------------------------------------------------


def kept() -> list[dict[str, Any]]:
    """What the repository has of a campaign; nothing where none has been run."""
    return journal.read([KEPT]) if KEPT.exists() else []


def page(text: str, lines: Sequence[journal.Line]) -> str:
    """``text`` of the page with the section as ``lines`` have it."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + section(lines) + after


def section(lines: Sequence[journal.Line]) -> str:
    """With its marks."""
    return "\n".join([BEGIN, "", "## On a GPU of our own", "", *_body(lines), "", END])


def _body(lines: Sequence[journal.Line]) -> Iterator[str]:
    rows = rows_of(lines)
    if not rows:
        yield NONE
        return
    for line in journal.machines(lines):
        yield f"- {hardware(line['machine'])}"
    yield ""
    yield from (f"- {text}" for text in medians(rows))
    yield ""
    yield "| case | reading | measured | estimated | difference |"
    yield "| --- | --- | ---: | ---: | ---: |"
    yield from map(cells, compared(rows))
    wrong = list(failures(lines))
    if wrong:
        yield from ("", "Not measured:", "", *(f"- {text}" for text in wrong))


def cells(row: Row) -> str:
    reading = row.reading
    part = "" if reading.part is None else f"{reading.part:+.3%}"
    figures = figure(reading.measured, reading.unit), figure(reading.estimated, reading.unit)
    return f"| {row.case} | {reading.name} | {' | '.join(figures)} | {part} |"


def hardware(machine: dict[str, Any]) -> str:
    """GPU, versions and date, in one line."""
    named = [("torch", machine["torch"]), ("CUDA", machine["cuda"]), ("driver", machine["driver"])]
    pieces = [machine.get("name") or "GPU", *(f"{name} {value}" for name, value in named if value)]
    pieces += [f"{name} {value}" for name, value in sorted(machine["packages"].items())]
    return ", ".join([*pieces, f"memplan {machine['memplan']}", machine["began"][:10]])
