"""Runs one rank's worker and tells how it ended: ``python -m memplan.validate.guard DIRECTORY MODULE [RANK]``.

It stands between the elastic launcher and the worker because the launcher keeps to itself when, and of what, which rank
died. It imports nothing that takes time or memory. Without ``RANK`` it is the environment's.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from .processes import die_with_parent
from .rank_files import RankFiles, write_json, write_whole


def main(arguments: list[str]) -> int:
    directory, module, *rest = arguments
    rank = int(rest[0] if rest else os.environ["RANK"])
    files = RankFiles(Path(directory), rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with files.log.open("ab") as log:
        worker = subprocess.Popen(
            [sys.executable, "-u", "-m", module, directory, str(rank)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_prepare,
        )

    def terminate(number: int, frame: FrameType | None) -> None:
        worker.terminate()

    signal.signal(signal.SIGTERM, terminate)
    write_whole(files.pid, str(worker.pid).encode())
    code = worker.wait()
    write_json(files.end, {"code": code, "at": time.monotonic()})
    return code if code >= 0 else 128 - code


def _prepare() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of a training process fills a disk


if __name__ == "__main__":
    die_with_parent()
    raise SystemExit(main(sys.argv[1:]))
