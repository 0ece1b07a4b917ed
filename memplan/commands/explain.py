"""``memplan explain``: what ran out of memory, from a log, a traceback, a pasted line, or a run's memory snapshot."""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from ..plan.errors import PlanError, wrong_at
from ..plan.library import examples
from ..plan.read import Flags, ReadPlan
from ..plan.text import STANDARD_INPUT, is_there, path_of, pieces_of
from .launched import From, Set, Strict, VocabSize, flags_of_launch, placed, read_given
from .output import (
    Json,
    NoColor,
    NoRecords,
    Quiet,
    beginning,
    console,
    measured_of,
    print_either,
    print_json,
    printing,
    without_collection,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..device.measured import Measured


def explain(
    log: Annotated[
        str | None,
        typer.Argument(metavar="[LOG|-|SNAPSHOT]", help="a log, its last lines, the message itself, or a snapshot"),
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLAN]", help="the job's plan, or its launch files", autocompletion=beginning(examples)
        ),
    ] = None,
    from_: From = None,
    set_: Set = None,
    vocab_size: VocabSize = None,
    strict: Strict = False,
    stage: Annotated[
        int | None, typer.Option("--stage", metavar="N", help="of a snapshot: the plan's stage that the GPU ran")
    ] = None,
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
    from ..explain import explained
    from ..explain.log import reports
    from ..explain.snapshot import is_snapshot
    from ..report.progress import progress

    launch = flags_of_launch(placed(plan), from_, set_, strict=strict, vocab_size=vocab_size)
    planned = bool(plan or from_ or flags)
    if log == "-" and plan == ["-"]:
        raise wrong_at(STANDARD_INPUT, "can be read only once, as the log or as the plan")
    read = read_given(placed(plan), launch, flags) if planned else None
    known, _ = measured_of(no_records=no_records)
    pieces, name = _content(log)
    first, pieces = _begun(pieces, name, given=log is not None)
    if is_snapshot(first):
        return _snapshot(pieces, name, read, stage, known, console=None if json else console(no_color), quiet=quiet)
    if stage is not None:
        raise wrong_at("--stage", "belongs to a memory snapshot; a message names its rank")
    for magic, shown_by in COMPRESSED.items():
        if first.startswith(magic):
            raise wrong_at(name, f"is compressed; {shown_by} {name} | memplan explain - reads it")
    if b"\0" in first[:SNIFFED]:
        raise wrong_at(name, "is a binary file: neither a log nor a memory snapshot (torch.cuda.memory._dump_snapshot)")
    with _located(name, read):
        with progress(f"reading {name}") as says:
            found = reports(_told(pieces, name, says))
        named = read is None or not read.chosen_framework
        told = explained(found, read.plan if read is not None else None, known, named=named)
    from ..report.explanation import explanation_to_json, print_explanation

    print_either(
        json, lambda: explanation_to_json(told), lambda: print_explanation(told, console(no_color), quiet=quiet)
    )
    return 0


def _snapshot(
    pieces: Iterator[bytes],
    name: str,
    read: ReadPlan | None,
    stage: int | None,
    known: Measured,
    *,
    console: Console | None,
    quiet: bool,
) -> int:
    """As JSON where there is no ``console``."""
    from ..explain import compare_snapshot
    from ..explain.snapshot import LARGEST
    from ..report.explanation import print_snapshot, snapshot_to_json

    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > LARGEST:
            raise wrong_at(
                name,
                f"is larger than a snapshot that is read ({LARGEST >> 30} GiB); record fewer entries (max_entries)",
            )
    with _located(name, read):
        told, failed = compare_snapshot(bytes(data), read.plan if read is not None else None, stage, known)
    if console is None:
        print_json(snapshot_to_json(told, failed))
    else:
        with printing():
            print_snapshot(told, failed, console, quiet=quiet)
    return 0


MARKS = ("memory", "allocate", "OutOfMemory", "ALLOC_FAILED", "illed", "oom", "SIGKILL", "-9", "137")
"""Words of a message that is given itself, in place of a file."""


def _content(log: str | None) -> tuple[Iterator[bytes], str]:
    """What ``log`` stands for, piece by piece, and what errors call it."""
    if log is None or log == "-":
        nobody = log is None and sys.stdin is not None and sys.stdin.isatty()
        return (iter(()) if nobody else pieces_of("-")), STANDARD_INPUT
    if not is_there(path_of(log)) and any(mark in log for mark in MARKS) and not _FILE.fullmatch(log):
        return iter([log.encode("utf-8", "replace")]), "the message"
    if not is_there(path_of(log)) and (size := _SIZE.fullmatch(log)) is not None:
        return iter([f"CUDA out of memory. Tried to allocate {size[1]} {size[2]}iB".encode()]), "the size"
    if not is_there(path_of(log)) and (" " in log.strip() or "\n" in log):
        return iter([log.encode("utf-8", "replace")]), "the message"
    return pieces_of(log), log


_FILE = re.compile(r"[\w./~-]+\.(?:log|out|err|txt|pickle|pkl)")
"""A name of a log or a snapshot."""
_SIZE = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([KMG])i?B\s*", re.IGNORECASE)
"""What a message says that was asked for, alone."""


@contextmanager
def _located(name: str, read: ReadPlan | None) -> Iterator[None]:
    """Errors of what is explained name it; those of the plan say where their field came from."""
    try:
        with without_collection():
            yield
    except PlanError as error:
        if not error.field and error.origin is None:
            raise wrong_at(name, error.problem) from None
        raise (read.located(error) if read is not None else error) from None


COMPRESSED = {b"\x1f\x8b": "zcat", b"\x28\xb5\x2f\xfd": "zstdcat", b"\xfd7zXZ": "xzcat", b"BZh": "bzcat"}
"""How a compressed log begins, and what shows it."""
SNIFFED = 4096
"""Bytes of a file's beginning that tell what it is."""


USAGE = (
    "name a log: memplan explain train.log [PLAN]; or give the message in quotes, or pipe a log: kubectl logs job | "
    "memplan explain"
)


def _begun(pieces: Iterator[bytes], name: str, *, given: bool) -> tuple[bytes, Iterator[bytes]]:
    """The first piece, and all, in UTF-8 where PowerShell's ``>`` wrote UTF-16. ``PlanError`` where there is none."""
    first = next(pieces, b"")
    if first[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        pieces = (text.encode() for text in codecs.iterdecode(chain([first], pieces), "utf-16", "replace"))
        first = next(pieces, b"")
    if not first:
        raise wrong_at(name, "is empty" if given else f"is empty; {USAGE}")
    return first, chain([first], pieces)


def _told(pieces: Iterator[bytes], name: str, says: Callable[[str, int, int], None]) -> Iterator[bytes]:
    """``pieces``, and how far the log is read, in MB."""
    path = path_of(name)
    whole = path.stat().st_size if is_there(path) else 0
    done = 0
    for piece in pieces:
        done += len(piece)
        says(f"reading {name}, MB", done // 10**6, max(whole // 10**6, 1) if whole else 0)
        yield piece
