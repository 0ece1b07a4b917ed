"""``python -m tests.fuzz --minutes 60 --seed N``: every target in turn, and a table of figures."""

from __future__ import annotations

import argparse
import sys
import time
from random import SystemRandom

from . import __doc__ as about
from .driver import Figures, Target, cases, fuzz, table, try_one
from .targets import TARGETS

TURN = 5.0
"""Seconds of one target before the next."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=about)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)} (all of them)")
    parser.add_argument("--minutes", type=float, default=1.0, help="in all (1)")
    parser.add_argument("--seed", type=int, help="of the random numbers (a new one)")
    parser.add_argument("--why", action="store_true", help="say which refusals were the most frequent")
    parser.add_argument("--case", type=int, help="only run the case of this number, and show it")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.targets if name not in TARGETS]
    if unknown:
        parser.error(f"no target is called {unknown[0]}; there are {', '.join(TARGETS)}")
    targets = [TARGETS[name] for name in chosen.targets or TARGETS]
    seed = chosen.seed if chosen.seed is not None else SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    if chosen.case is not None:
        return _one(targets[0], seed, chosen.case)
    end = time.monotonic() + 60 * chosen.minutes
    figures = {target.name: Figures() for target in targets}
    while (left := end - time.monotonic()) > 0:
        for target in targets:
            known = len(figures[target.name].failures)
            fuzz(target, seed, min(TURN, left / len(targets)), figures[target.name], most_failures=20)
            for failure in figures[target.name].failures[known:]:
                print(failure, flush=True)
    print(table(figures))
    for name, one in figures.items() if chosen.why else ():
        print(name, *(f"{times:>9} {words}" for words, times in one.why.most_common(8)), sep="\n")
    return 1 if any(one.failures for one in figures.values()) else 0


def _one(target: Target, seed: int, number: int) -> int:
    number, case = next(cases(target, seed, number))
    figures = Figures()
    print(target.shown(case))
    try_one(target, seed, number, case, figures)
    print(*figures.failures or ["ends well"], sep="\n")
    return 1 if figures.failures else 0


if __name__ == "__main__":
    sys.exit(main())
