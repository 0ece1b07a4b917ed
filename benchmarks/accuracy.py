"""Estimated beside measured, row by row.

    python benchmarks/accuracy.py [--measured DIR] [--markdown docs/accuracy.md]

DIR holds JSON Lines files of measured runs, ``../shared/measured`` beside the repository unless said;
where it is absent one line says so. Nothing here is fitted: the estimates are what ``memplan estimate`` gives.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import fms  # noqa: E402
from benchmarks.comparison import Table, mib  # noqa: E402
from benchmarks.markdown import document  # noqa: E402
from benchmarks.measured import READERS, read_rows, table_of  # noqa: E402
from benchmarks.stories import STORIES  # noqa: E402

MEASURED = ROOT.parent / "shared" / "measured"


def tables(folder: Path) -> list[Table]:
    """A table for every file that is there, for what devices showed of one, and for both stories."""
    known = [folder / name for name in READERS]
    others = sorted(path for path in folder.glob("*.jsonl") if path.name not in READERS)
    files = [table_of(path) for path in (*known, *others) if path.exists()]
    readings = [fms.devices(read_rows(path)) for path in known if path.name == fms.NAME and path.exists()]
    return [*files, *readings, *(story() for story in STORIES)]


def lines(table: Table) -> list[str]:
    """One line for each row; sizes in MiB."""
    marks = {True: "ok", False: "BEYOND", None: ""}
    result = [
        f"{row.id}  {row.reading}  measured {mib(row.measured)}  estimated {mib(row.estimated)}  "
        f"{row.percent:+.3f} %  {row.error / 2**20:+,.2f} MiB  {marks[row.within]}"
        for row in table.rows
    ]
    return result + [f"{name}  not modelled yet" for name in table.not_modelled]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="estimated beside measured memory")
    parser.add_argument("--measured", type=Path, default=MEASURED, metavar="DIR", help="folder of measured runs")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to this file")
    chosen = parser.parse_args(arguments)
    if not chosen.measured.is_dir():
        print(f"skipped: no measured runs in {chosen.measured} (--measured DIR names their folder)")
        return 0
    found = tables(chosen.measured)
    for table in found:
        print(f"\n{table.name}", *lines(table), sep="\n  ")
    print("\nSummary", *(table.summary() for table in found), sep="\n  ")
    if chosen.markdown is not None:
        chosen.markdown.parent.mkdir(parents=True, exist_ok=True)
        chosen.markdown.write_text(document(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
