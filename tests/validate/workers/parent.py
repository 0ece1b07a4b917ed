"""A program that launches ranks, to be interrupted from outside, or to be a rank of somebody else's launcher itself:
``python -m … WAY TASK [WORLD]``."""

from __future__ import annotations

import os
import sys

from memplan.validate.cluster import Elastic, InTurn, Joined, Way, membership
from memplan.validate.launch import launched

WAYS: dict[str, Way] = {"in turn": InTurn((0,)), "elastic": Elastic(2)}


def main() -> int:
    way, task, *world = sys.argv[1:]
    try:
        if world:
            place = membership(os.environ, int(world[0]))
            assert place is not None
            outcome = launched(Joined(place), task.encode(), worker="tests.validate.workers.together")
            print(f"{[reading.rank for reading in outcome.readings]} {[one.message for one in outcome.failures]}")
        else:
            launched(WAYS[way], task.encode(), worker="tests.validate.workers.plain")
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
