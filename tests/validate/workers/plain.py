"""Without torch: does what the task says its rank is to do."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from memplan.records.readings import RankReading
from memplan.validate.run_files import Telling

RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def reading(rank: int, host: str = "here") -> RankReading:
    return RankReading(
        rank=rank,
        stage=0,
        host=host,
        device="cpu",
        parameters=1,
        requested=2,
        allocated=None,
        reserved=None,
        device_bytes=None,
        static=None,
    )


def process_group() -> str:
    rank, world, local, host, port = map(os.environ.get, RENDEZVOUS)
    return f"{rank} of {world}, {local} here, {host}:{port}"


@dataclass
class Mapped:
    """A file in shared memory; nobody keeps account of it, unlike of those of ``multiprocessing``."""

    name: str
    memory: mmap.mmap


def shared_memory(name: str) -> Mapped:
    with Path("/dev/shm", name).open("w+b") as file:
        file.truncate(4096)
        return Mapped(name, mmap.mmap(file.fileno(), 4096))


def does(what: str, telling: Telling, folder: Path) -> None:
    match what:
        case "works":
            telling.says("counting", 1 << 20, 4 << 20)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "is broken":
            ctypes.string_at(0)
        case "exits":
            print("no luck today", file=sys.stderr)
            sys.exit(3)
        case "raises":
            raise ValueError("of its own\nin two lines")
        case "prints a traceback":
            subprocess.run([sys.executable, "-c", "raise KeyError('gone')"])
            time.sleep(60)
        case "runs out of memory":
            telling.says("step 1: forward")
            telling.failed("out-of-memory", "40 GiB asked for\nof 2", allocated=1, reserved=2, failing=40 << 30)
            time.sleep(60)
        case "sleeps":
            time.sleep(60)
        case "is stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            telling.says("being stubborn")
            time.sleep(60)
        case "has children":
            orphan = "import os, time; os.setsid(); os.fork() and os._exit(0); time.sleep(60)"
            subprocess.Popen([sys.executable, "-c", orphan, str(folder)], env={})
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(folder)])
        case "has a child and sleeps":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(folder)])
            time.sleep(60)
        case "leaves shared memory":
            mapped = [shared_memory(f"torch_{os.getpid()}_1_0"), shared_memory(f"nccl-{folder.name[-6:]}")]
            telling.says(" ".join(one.name for one in mapped))
            time.sleep(1.5)
            os.kill(os.getpid(), signal.SIGKILL)
        case "has no result":
            sys.exit(0)
        case "fills the disk":
            with (folder / "tmp" / "all").open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
        case "fills the folder":
            (folder / "tmp" / "much").write_bytes(b"x" * 4096)
            Path(os.environ["TMPDIR"], "more").write_text("x")


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    task = json.loads((folder / "task.json").read_bytes())
    telling = Telling(folder, rank)
    telling.says("starting")
    does(task[rank], telling, folder)
    telling.result(reading(rank, process_group() if task[rank] == "tells" else "here"))


if __name__ == "__main__":
    main()
