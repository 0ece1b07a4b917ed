"""What memplan estimates, measured on a GPU: the whole campaign in one command.

    python benchmarks/gpu.py bundle FOLDER          # where there is a package index: wheels that a GPU's machine lacks
    python benchmarks/gpu.py --bundle FOLDER --minutes 9 --out FILE                 # there; needs no network
    python benchmarks/gpu.py --bundle FOLDER --minutes 9 --out FILE --resume FILE   # what was not reached
    python benchmarks/gpu.py report FILE… [--write] # back: a section of docs/accuracy.md, and the records

See docs/gpu.md. Until the bundle is unpacked nothing is imported but Python's own modules.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.campaign import journal  # noqa: E402
from benchmarks.campaign.bundle import bundled, unpacked  # noqa: E402
from benchmarks.campaign.cases import Case, cases  # noqa: E402

UNPACKED = "MEMPLAN_CAMPAIGN"
"""Is set in the process that has the bundle on its path."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="measures on a GPU what memplan estimates; also: bundle, report")
    made.add_argument("--list", action="store_true", help="print the cases, in order, and end")
    made.add_argument("--only", nargs="+", metavar="NAME", help="run these cases, whether they are done or not")
    made.add_argument("--minutes", type=float, metavar="N", help="end in so many minutes, with the summary")
    made.add_argument("--out", type=Path, metavar="FILE", default=Path("campaign.jsonl"), help="one line for each case")
    made.add_argument("--resume", nargs="+", type=Path, metavar="FILE", default=[], help="leave out what is done there")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, with small shapes")
    made.add_argument("--bundle", type=Path, metavar="FOLDER", help="wheels that this machine lacks")
    return made


def chosen(names: Sequence[str] | None, finished: set[str]) -> list[Case]:
    """Those to run. ``ValueError`` of a name that no case has."""
    known = {case.name: case for case in cases()}
    if names is None:
        return [case for case in known.values() if case.name not in finished]
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ValueError(f"no case is called {wrong[0]} (--list prints all)")
    return [known[name] for name in names]


def listed() -> None:
    total = 0.0
    for case in cases():
        total += case.seconds
        on_a_cpu = "" if case.small is not None else "  GPU only"
        print(f"{case.name:30s} {case.seconds:4.0f} s  {total / 60:5.1f} min  {case.asks}{on_a_cpu}")


def begin_again(bundle: Path) -> None:
    """This program once more, in a process that finds what the bundle has."""
    site = unpacked(bundle)
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, UNPACKED: str(time.time())}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["bundle"]:
        return bundled(words[1:])
    if words[:1] == ["report"]:
        from benchmarks.campaign.page import reported

        return reported(words[1:])
    began = time.monotonic()
    given = parser().parse_args(words)
    if given.list:
        listed()
        return 0
    try:
        if given.bundle is not None and UNPACKED not in os.environ:
            begin_again(given.bundle)
        earlier = [line for line in journal.read(given.resume) if line.get("device", given.device) == given.device]
        wanted = chosen(given.only, journal.done(earlier))
    except (OSError, ValueError) as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    since = time.time() - float(os.environ.get(UNPACKED, time.time()))
    deadline = math.inf if given.minutes is None else began - since + 60 * given.minutes
    return conducted(given, wanted, earlier, deadline)


def conducted(
    given: argparse.Namespace, wanted: Sequence[Case], earlier: Sequence[journal.Line], deadline: float
) -> int:
    """The campaign and its summary. Exit code 0: everything that ran was measured. 1: something failed. 3: no GPU."""
    from benchmarks.campaign import machine, running, summary
    from memplan.plan.errors import LackingError

    try:
        described = machine.described(given.device)
    except LackingError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 3
    for line in earlier if given.out not in given.resume else ():
        journal.append(given.out, line)
    journal.append(given.out, {"machine": described})
    logs = running.new_folder()
    busy = machine.busy if given.device == "cuda" else _never
    way = running.Way(given.device, given.out, deadline, logs, busy, printed)
    print(f"{len(wanted)} cases, {sum(case.seconds for case in wanted) / 60:.0f} minutes on an H200", flush=True)
    running.stops()
    stopped = False
    try:
        running.campaign(wanted, way)
    except running.StoppedError:
        stopped = True
    lines = journal.read([given.out])
    running.archive(logs, given.out.with_suffix(".tar.gz"))
    print("\n".join(summary.summary(lines)), flush=True)
    if stopped:
        return 130
    failed = [name for name, line in journal.last_of_each(lines).items() if line["status"] == "failed"]
    return 1 if failed else 0


def printed(text: str) -> None:
    print(text, flush=True)


def _never() -> bool:
    return False


if __name__ == "__main__":
    raise SystemExit(main())
