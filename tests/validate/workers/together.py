"""With torch: ranks of a gloo process group, one of which does what the task says while the others wait for it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from memplan.validate.run_files import Telling
from tests.validate.workers.plain import reading


def imported(telling: Telling) -> Any:
    """torch, telling all the while that it is being imported, which takes many seconds on a busy machine."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(0.2):
            telling.says(f"importing, {time.monotonic()}")

    teller = threading.Thread(target=tell)
    teller.start()
    import torch.distributed

    done.set()
    teller.join()
    return torch


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    task = json.loads((folder / "task.json").read_bytes())
    telling = Telling(folder, rank)
    torch = imported(telling)
    torch.distributed.init_process_group("gloo")
    world = torch.distributed.get_world_size()
    short = torch.distributed.new_group(timeout=timedelta(seconds=task.get("timeout", 60)))
    total = torch.tensor([rank])
    torch.distributed.all_reduce(total)
    assert total.item() == world * (world - 1) // 2
    (folder.parent / f"port-{rank}").write_text(os.environ["MASTER_PORT"], encoding="utf-8")
    telling.says("together")
    if rank == task.get("rank"):
        match task["does"]:
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raises":
                raise ValueError("of its own")
            case "sleeps":
                time.sleep(60)
    torch.distributed.barrier(short)
    telling.result(reading(rank))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
