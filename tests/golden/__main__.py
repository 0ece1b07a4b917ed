"""Checks or records the safety net: ``python -m tests.golden --help``."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from time import perf_counter

from . import __doc__ as about
from .cases import commands, fast, smoke
from .comparing import answers_of, differences, only_texts, recorded, write

MOST_LINES = 12


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pattern", nargs="*", help="only commands with this text in them (or that match *this*)")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--fast", action="store_true", help="the part that runs with every test run")
    parser.add_argument("--smoke", action="store_true", help="the smallest part")
    parser.add_argument("--list", action="store_true", help="only print the commands")
    parser.add_argument("--record", action="store_true", help="record texts that changed, and new cases")
    parser.add_argument("--record-figures", action="store_true", help="record whatever changed")
    parser.add_argument("--lines", type=int, default=MOST_LINES, help=f"of each difference ({MOST_LINES})")
    chosen = parser.parse_args()
    all_of_them = commands()
    selected = smoke() if chosen.smoke else fast() if chosen.fast else all_of_them
    selected = [one for one in selected if all(_matches(one, pattern) for pattern in chosen.pattern)]
    if chosen.list:
        print(*selected, sep="\n")
        return 0
    began, known = perf_counter(), recorded()
    figures = texts = 0
    for now in answers_of(selected, chosen.j):
        before = known.get(now.command)
        lines = ["is not recorded (--record)"] if before is None else differences(before, now)
        if lines:
            print(f"memplan {now.command}", *(f"    {line}" for line in lines[: chosen.lines]), sep="\n", flush=True)
            sentences = before is None or only_texts(before, now)
            texts, figures = texts + sentences, figures + (not sentences)
            if chosen.record_figures or (chosen.record and sentences):
                known[now.command] = now
    if chosen.record or chosen.record_figures:
        write(known[command] for command in all_of_them if command in known)
    spent = perf_counter() - began
    print(f"{len(selected)} answers in {spent:.0f} s: figures of {figures} differ, texts alone of {texts}")
    return (
        1 if (figures and not chosen.record_figures) or (texts and not (chosen.record or chosen.record_figures)) else 0
    )


def _matches(command: str, pattern: str) -> bool:
    return fnmatch.fnmatch(command, pattern) if "*" in pattern else pattern in command


if __name__ == "__main__":
    sys.exit(main())
