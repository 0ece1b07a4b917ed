"""The way back: a campaign's file as a section of docs/accuracy.md and as docs/gpu-results.md, its runs as records.

    python benchmarks/gpu.py report [FILE…] [--write]

``--write`` keeps what was measured in ``benchmarks/measured_on_GPU.jsonl``, a file for each kind of GPU, from which
both pages are made, and every validation that ended as a record in ``benchmarks/records``. What a CPU rehearsed is
never kept. Without a file it is what is kept. Beside what was measured stands what today's code estimates of the runs,
from the plans in their records; of libraries and the allocator's programs what was estimated when they ran; of single
kernels nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memplan.plan.errors import PlanError
from memplan.records.record import Record, from_json, read_record
from memplan.records.sharing import shared_text

from . import journal, results
from .summary import failures, rows_of, summary
from .validations import readings_today

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "benchmarks"
NAMED = "measured_on_{}.jsonl"
"""Of a GPU, in ``KEPT``."""
RECORDS = ROOT / "benchmarks" / "records"
PAGE = ROOT / "docs" / "accuracy.md"
RESULTS = ROOT / "docs" / "gpu-results.md"
HEAD = """# Results on a GPU

Written by `python benchmarks/gpu.py report --write`; do not edit by hand. How it was measured: [on a GPU](gpu.md). In
short: [accuracy](accuracy.md#on-a-gpu-of-our-own).
"""
BEGIN, END = "<!-- campaign: python benchmarks/gpu.py report -->", "<!-- end of campaign -->"
NONE = (
    "None has been run yet: no figure on this page was measured on a GPU of this project's own. The campaign that "
    "would do so is [ready](gpu.md)."
)
NOT_KEPT = ("tail", "command")
"""Of a line: logs stay where they are, and of a record, which has a file of its own, its name is kept."""


def reported(arguments: Sequence[str]) -> int:
    """``gpu.py report``. Exit code 2: a file cannot be read, or nothing in it was measured on a GPU."""
    parser = argparse.ArgumentParser(prog="gpu.py report", description="prints what a campaign measured")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="of one kind of GPU; else all that is kept")
    parser.add_argument("--write", action="store_true", help="keep the figures and records, and write both pages")
    given = parser.parse_args(arguments)
    try:
        campaigns = [journal.read(given.files)] if given.files else kept()
    except OSError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    if not given.write:
        for lines in campaigns:
            print("\n".join(summary(lines)))
        return 0
    records = [record for lines in campaigns for record in records_of(lines)]
    measured = [found for found in map(on_gpu, campaigns) if rows_of(found)]
    if not measured:
        print("gpu.py: nothing in these files was measured on a GPU, so nothing is written", file=sys.stderr)
        return 2
    for record in records:
        path = RECORDS / f"{record.ran.model.name}_{record.run.gpu or 'cuda'}_{record.id}.json"
        path.write_text(shared_text(record), encoding="utf-8")
    for found in measured:
        text = "".join(json.dumps(today(line)) + "\n" for line in found)
        (KEPT / NAMED.format(gpu_of(found))).write_text(text, encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), kept()), encoding="utf-8")
    RESULTS.write_text(whole(kept()), encoding="utf-8")
    print(f"wrote {len(measured)} files of measurements, two pages, and {len(records)} records")
    return 0


def gpu_of(lines: Sequence[journal.Line]) -> str:
    """Its name in memplan's table."""
    return next((line["machine"]["gpu"] for line in journal.machines(lines)), "gpu")  # type: ignore[no-any-return]


def on_gpu(lines: Iterable[journal.Line]) -> list[dict[str, Any]]:
    """Lines of a GPU, the last of each case, without what is kept elsewhere."""
    whole = list(lines)
    machines = [line for line in journal.machines(whole) if line["machine"]["device"] == "cuda"]
    found = journal.last_of_each(line for line in whole if line.get("device") == "cuda").values()
    return [
        {name: _kept(value) for name, value in line.items() if name not in NOT_KEPT} for line in (*machines, *found)
    ]


def _kept(value: Any) -> Any:
    """Of a record its name."""
    return value["id"] if isinstance(value, dict) and "sha256" in value else value


def today(line: journal.Line) -> dict[str, Any]:
    """With what is estimated now, where the line is of a run whose record is kept."""
    found = sorted(RECORDS.glob(f"*_{line['record']}.json")) if line.get("record") else []
    readings = [asdict(one) for one in readings_today(read_record(found[0]))] if found else line.get("readings")
    return {**line, "readings": readings} if readings is not None else dict(line)


def records_of(lines: Iterable[journal.Line]) -> Iterator[Record]:
    """Of validations on a GPU, whatever their verdict. A record that cannot be read back is left out."""
    for line in journal.last_of_each(line for line in lines if line.get("device") == "cuda").values():
        if not isinstance(line.get("record"), dict):
            continue
        try:
            yield from_json(line["record"], line["case"])
        except PlanError as error:
            print(f"gpu.py: {error}", file=sys.stderr)


# -- the page -----------------------------------------------------------------------------------------------


Campaigns = Sequence[Sequence[journal.Line]]
"""Each of one kind of GPU."""


def kept() -> list[list[dict[str, Any]]]:
    """What the repository has of campaigns; nothing where none has been run. The one with most cases is first."""
    return sorted((journal.read([path]) for path in sorted(KEPT.glob(NAMED.format("*")))), key=len, reverse=True)


def page(text: str, campaigns: Campaigns) -> str:
    """``text`` of the page with the section as ``campaigns`` have it."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + section(campaigns) + after


def section(campaigns: Campaigns) -> str:
    """With its marks."""
    found = [lines for lines in campaigns if rows_of(lines)]
    bodies = [line for lines in found for line in ("", *_body(lines))] or ["", NONE]
    return "\n".join([BEGIN, "", "## On a GPU of our own", *bodies, "", END])


def _body(lines: Sequence[journal.Line]) -> Iterator[str]:
    yield from _machines(lines)
    yield ""
    yield from results.short(rows_of(lines), gpu_of(lines))
    yield from _wrong(lines)


def _machines(lines: Sequence[journal.Line]) -> Iterator[str]:
    yield from dict.fromkeys(f"- {hardware(line['machine'])}" for line in journal.machines(lines))


def _wrong(lines: Sequence[journal.Line]) -> Iterator[str]:
    wrong = list(failures(lines))
    if wrong:
        yield from ("", "Not measured:", "", *(f"- {text}" for text in wrong))


def whole(campaigns: Campaigns) -> str:
    """The page of all results."""
    shown = [line for lines in campaigns for line in ("", *_whole(lines))]
    return "\n".join([HEAD.rstrip("\n"), *shown, ""])


def _whole(lines: Sequence[journal.Line]) -> Iterator[str]:
    yield from _machines(lines)
    yield from results.whole(rows_of(lines), next(iter(journal.machines(lines)))["machine"]["name"])
    yield from _wrong(lines)


def hardware(machine: dict[str, Any]) -> str:
    """GPU, versions and date, in one line."""
    named = [("torch", machine["torch"]), ("CUDA", machine["cuda"]), ("driver", machine["driver"])]
    pieces = [machine.get("name") or "GPU", *(f"{name} {value}" for name, value in named if value)]
    pieces += [f"{name} {value}" for name, value in sorted(machine["packages"].items())]
    return ", ".join([*pieces, f"memplan {machine['memplan']}", machine["began"][:10]])
