"""With torch: ranks of a gloo process group, one of which does what the task says while the others wait for it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

from memplan.validate.telling import Telling
from tests.validate.workers.plain import reading


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    task = json.loads((folder / "task.json").read_bytes())
    telling = Telling(folder, rank)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=task.get("timeout", 60)))
    world = torch.distributed.get_world_size()
    total = torch.tensor([rank])
    torch.distributed.all_reduce(total)
    assert total.item() == world * (world - 1) // 2
    telling.says(f"port {os.environ['MASTER_PORT']}")
    if rank == task.get("rank"):
        match task["does"]:
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raises":
                raise ValueError("of its own")
            case "sleeps":
                time.sleep(60)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    telling.result(reading(rank))


if __name__ == "__main__":
    main()
