"""Runs cases one after another, each in a process of its own, and writes down what came of each before the next begins.

A case that fails, hangs or kills its process is one line of the file; the campaign goes on. It ends in time by itself:
a case begins only if the time that it should take is left, and is ended when none is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import journal
from .cases import Case
from .validations import readings_of

ROOT = Path(__file__).resolve().parents[2]
CLOSING = 6.0
"""Seconds kept for the summary and the archive."""
GRACE = 12.0
"""Seconds between SIGTERM and SIGKILL: a validation ends its own processes in that time."""
SETTLING = 15.0
"""Seconds in which a device is free again when the process that used it has ended."""
TAIL = 4000
"""Characters of what a case printed that its line keeps."""
PATIENCE = "90"
"""Seconds of a validation without any progress."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a campaign runs."""

    device: str
    """``cuda`` or ``cpu``."""
    out: Path
    deadline: float
    """On ``time.monotonic()``; infinite where nothing says."""
    logs: Path
    """A folder for what cases print."""
    busy: Callable[[], bool]
    """Whether somebody computes on the device."""
    says: Callable[[str], None]


class StoppedError(Exception):
    """SIGINT or SIGTERM."""


def command_of(case: Case, device: str) -> list[str] | None:
    """What runs ``case``; ``None`` where the device cannot."""
    words = case.command if device == "cuda" else case.small
    if words is None:
        return None
    if case.kind == "probe":
        return [sys.executable, "-m", f"benchmarks.campaign.{words[0]}", *words[1:]]
    fixed = ("--device", device, "--json", "--no-records", "--timeout", PATIENCE)
    return [sys.executable, "cli.py", "validate", *words, *fixed]


def campaign(cases: Iterable[Case], way: Way) -> None:
    """Runs ``cases`` while time is left. ``StoppedError`` when asked to stop; what was measured is in the file."""
    for case in cases:
        left = way.deadline - time.monotonic() - CLOSING
        if case.seconds > left:
            way.says(
                f"{case.name:32s} not begun: it should take {case.seconds:.0f} s, and {max(left, 0):.0f} s are left"
            )
            continue
        line = run(case, way, left)
        journal.append(way.out, line)
        way.says(shown(line))


def run(case: Case, way: Way, left: float) -> dict[str, Any]:
    """One case to its line."""
    began, at = time.monotonic(), datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    line: dict[str, Any] = {"case": case.name, "began": at, "device": way.device}
    command = command_of(case, way.device)
    if command is None:
        return {**line, "status": "refused", "error": "needs a GPU", "seconds": 0.0, "readings": []}
    limit = min(case.limit, left)
    code, out, errors = _ended(command, limit, way.logs / case.name)
    taken = round(time.monotonic() - began, 2)
    if way.device == "cuda":
        _settle(way.busy)
    line |= {"seconds": taken, "command": " ".join(command[1:])}
    if code is None:
        status = "unfinished" if limit < case.limit else "failed"
        return {**line, "status": status, "error": f"ended after {limit:.0f} s", "readings": [], "tail": errors[-TAIL:]}
    return {**line, **_answer(case, code, out, errors)}


def _answer(case: Case, code: int, out: str, errors: str) -> dict[str, Any]:
    """What a process said that ended by itself."""
    try:
        found = json.loads(out)
        if case.kind == "validate":
            readings, error = readings_of(found)
            status = "failed" if error else "measured"
            return {"status": status, "error": error, "readings": [asdict(one) for one in readings], "record": found}
        readings_found: list[dict[str, Any]] = found["readings"]
        return {
            "status": "measured" if readings_found else "failed",
            "error": found.get("error", ""),
            "readings": readings_found,
            "note": found["note"],
        }
    except Exception as error:  # whatever a process printed, the campaign goes on
        last = next((text for text in reversed(errors.splitlines()) if text.strip()), "")
        what = last if code else f"{type(error).__name__}: {error}"
        status = {2: "refused", 3: "lacking"}.get(code, "failed")
        return {"status": status, "error": what or f"exit code {code}", "readings": [], "tail": errors[-TAIL:]}


def _ended(command: Sequence[str], limit: float, log: Path) -> tuple[int | None, str, str]:
    """Exit code (``None``: it was ended), standard output and standard error."""
    out, errors = log.with_suffix(".out"), log.with_suffix(".err")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    with out.open("wb") as to_out, errors.open("wb") as to_errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=to_out,
            stderr=to_errors,
            env=environment,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    return code, *(path.read_text(encoding="utf-8", errors="replace") for path in (out, errors))  # type: ignore[return-value]


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and all of its group."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _settle(busy: Callable[[], bool]) -> None:
    """Waits until nobody uses the device."""
    until = time.monotonic() + SETTLING
    while busy() and time.monotonic() < until:
        time.sleep(0.2)


def shown(line: journal.Line) -> str:
    """What is printed when a case has ended."""
    parts = [one for one in line["readings"] if one["estimated"] is not None and one["unit"] == "bytes"]
    text = f"{line['case']:32s} {line['status']:10s} {line['seconds']:6.1f} s"
    if line["error"]:
        return f"{text}  {line['error'][:160]}"
    if not parts:
        return text
    first = parts[0]
    return f"{text}  {first['name']}: measured {first['measured']:,.0f}, estimated {first['estimated']:,.0f}"


def archive(folder: Path, path: Path) -> None:
    """What cases printed, in one file."""
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, arcname="logs")


def stops() -> None:
    """SIGINT and SIGTERM raise ``StoppedError``, so that the case at work is ended and the summary is printed."""

    def stop(number: int, frame: object) -> None:
        raise StoppedError

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="memplan-campaign-"))
