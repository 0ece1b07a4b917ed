"""One command line in this process, and what every one must keep to, whatever it is given."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from memplan.cli import main
from memplan.plan.errors import ABSENT, PlanError

CODES = (0, 1, 2, 3)
"""Exit codes that the README lists, but for a fault in memplan and an interrupt."""


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def ended(*arguments: str, codes: tuple[int, ...] = CODES) -> Ended:
    """Runs the command, and checks its code, that an error is one line, and that nothing printed steers a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    done = Ended(code, out.getvalue(), err.getvalue())
    assert code in codes, f"exit code {code}, not one of {codes}: {arguments} {done.err}"
    if code > 1:
        assert not done.out, f"an error, and yet: {done.out[:200]}"
        assert len(done.err.splitlines()) == 1, f"more than a line: {done.err}"
    for stream in (done.out, done.err):
        odd = next((c for c in stream if not c.isprintable() and c != "\n"), None)
        assert odd is None, f"{odd!r} is printed: {stream[max(0, stream.index(odd) - 60) :][:120]!r}"
    return done


def refused(done: Ended) -> PlanError:
    """The line with which a command refused, as the driver counts it."""
    return PlanError("", ABSENT, done.err.rstrip("\n"))


@contextlib.contextmanager
def own_records() -> Iterator[Path]:
    """A folder that is gone afterwards, whose ``data`` has the records of commands meanwhile."""
    before = os.environ.get("MEMPLAN_DATA")
    with TemporaryDirectory(prefix="memplan-fuzz-") as name:
        os.environ["MEMPLAN_DATA"] = str(Path(name) / "data")
        try:
            yield Path(name)
        finally:
            if before is None:
                del os.environ["MEMPLAN_DATA"]
            else:
                os.environ["MEMPLAN_DATA"] = before
