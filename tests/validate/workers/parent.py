"""A program that launches ranks, to be interrupted from outside: ``python -m … WAY TASK``."""

from __future__ import annotations

import sys

from memplan.validate.launch import launched
from memplan.validate.ways import Elastic, InTurn

WAYS = {"in turn": InTurn((0,)), "elastic": Elastic(2)}


def main() -> int:
    try:
        launched(WAYS[sys.argv[1]], sys.argv[2].encode(), worker="tests.validate.workers.plain")
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
