"""``memplan explain``: what ran out of memory, from a log, a traceback, a pasted line, or a run's memory snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from ..plan.errors import ABSENT, Origin, PlanError
from ..plan.read import Flags, ReadPlan
from ..plan.text import STANDARD_INPUT, is_there, path_of, pieces_of
from .launched import From, LaunchFlags, Set, Strict, VocabSize, read_given
from .output import Json, NoColor, Quiet, console, print_json, printing, without_collection
from .recorded import NoRecords, measured_of

if TYPE_CHECKING:
    from ..device.measured import Measured
    from ..explain import Explanation


def explain(
    log: Annotated[
        str | None,
        typer.Argument(metavar="[LOG|-|SNAPSHOT]", help="a log, its last lines, the message itself, or a snapshot"),
    ] = None,
    plan: Annotated[str | None, typer.Argument(help="the job's plan, or with --from its launch file")] = None,
    from_: From = None,
    set_: Set = None,
    vocab_size: VocabSize = None,
    strict: Strict = False,
    no_records: NoRecords = False,
    json: Json = False,
    quiet: Quiet = False,
    no_color: NoColor = False,
    flags: Flags = {},  # noqa: B006 (replaced by a flag for every field)
) -> int:
    """What ran out of memory: which tensor asked, what else was in memory, why, and what ends it.

    LOG is a file, - for standard input, or the message in quotes; a snapshot is PyTorch's own
    (torch.cuda.memory._dump_snapshot). With a plan, a launch file or flags of a plan it names the tensor.

    Exit code 0: explained. 2: there is nothing to explain, or the plan is wrong.
    """
    launch = LaunchFlags(from_, set_ or (), strict, vocab_size)
    launch.check_alone(explain=False)
    planned = plan is not None or from_ is not None or bool(flags)
    if log == "-" and plan == "-":
        raise PlanError("", ABSENT, "can be read only once, as the log or as the plan", origin=Origin(STANDARD_INPUT))
    read = read_given(plan, launch, flags) if planned else None
    known, _ = measured_of(no_records=no_records)
    pieces, name = _content(log)
    told = _explained(pieces, name, read, known)
    if json:
        from ..report.explanation import explanation_to_json

        print_json(explanation_to_json(told))
    else:
        from ..report.explanation import print_explanation

        with printing():
            print_explanation(told, console(no_color), quiet=quiet)
    return 0


MARKS = ("memory", "allocate", "OutOfMemory", "ALLOC_FAILED")
"""Words of a message that is given itself, in place of a file."""


def _content(log: str | None) -> tuple[Iterator[bytes], str]:
    """What ``log`` stands for, piece by piece, and what errors call it."""
    if log is None or log == "-":
        return pieces_of("-"), STANDARD_INPUT
    if not is_there(path_of(log)) and any(mark in log for mark in MARKS):
        return iter([log.encode("utf-8", "replace")]), "the message"
    return pieces_of(log), log


def _explained(pieces: Iterator[bytes], name: str, read: ReadPlan | None, known: Measured) -> Explanation:
    from ..explain import explained
    from ..explain.log import reports

    try:
        with without_collection():
            return explained(reports(_text(pieces, name)), read.plan if read is not None else None, known)
    except PlanError as error:
        if not error.field and error.origin is None:
            raise PlanError("", ABSENT, error.problem, origin=Origin(name)) from None
        raise (read.located(error) if read is not None else error) from None


SNIFFED = 4096
"""Bytes of a file's beginning that tell what it is."""


def _text(pieces: Iterator[bytes], name: str) -> Iterator[bytes]:
    """``pieces`` of a text. ``PlanError`` where it is none."""
    first = next(pieces, b"")
    if not first:
        raise PlanError("", ABSENT, "is empty", origin=Origin(name))
    if b"\0" in first[:SNIFFED]:
        problem = "is a binary file: neither a log nor a memory snapshot (torch.cuda.memory._dump_snapshot)"
        raise PlanError("", ABSENT, problem, origin=Origin(name))
    return chain([first], pieces)
