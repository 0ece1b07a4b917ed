"""The repository's tests that need a GPU, which are skipped everywhere else.

python -m benchmarks.campaign.marked FILE…
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from .readings import Reading, answer

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ("-q", "-m", "gpu", "-o", "addopts=", "-o", "filterwarnings=ignore", "-p", "no:cacheprovider")


def outcome(report: str) -> tuple[list[Reading], str]:
    """Of a report as JUnit writes them: how many passed of those that ran, and which did not."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    ran = [case for case in cases if case.find("skipped") is None]
    wrong = {case.get("name"): problem for case in ran for problem in [*case.iter("failure"), *case.iter("error")]}
    said = [f"{name}: {(problem.get('message') or '').partition(chr(10))[0]}" for name, problem in wrong.items()]
    note = "; ".join([f"{len(cases) - len(ran)} skipped", *said])
    return [Reading("tests that pass", "count", len(ran) - len(wrong), len(ran))], note


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        command = [sys.executable, "-m", "pytest", *OPTIONS, f"--junitxml={report}", *sys.argv[1:]]
        done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
        if not report.exists():
            return done.returncode or 1
        print(json.dumps(answer(*outcome(report.read_text(encoding="utf-8")))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
