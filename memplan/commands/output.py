"""What commands print and to whom, and the flags that say how."""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..plan.errors import lines, one_line
from ..plan.library import examples
from ..streams import silence

if TYPE_CHECKING:
    from rich.console import Console

    from ..plan.plan import Plan


def beginning(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Those of ``names`` that begin with what is typed so far."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete.lower())]

    return complete


OUTPUT = "Output"
"""The panel of ``--help`` for flags of output."""
PlanOrLaunchFile = Annotated[
    str | None,
    typer.Argument(
        help="plan or launch file, name of a built-in example, or - for standard input",
        autocompletion=beginning(examples),
    ),
]
PlanOrLaunchFiles = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PLAN]",
        help="plan or launch file, name of a built-in example, - for standard input; or several files of one job",
        autocompletion=beginning(examples),
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON only", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="print only the verdict", rich_help_panel=OUTPUT)]
NoColor = Annotated[
    bool, typer.Option("--no-color", help="print without colours (as NO_COLOR=1)", rich_help_panel=OUTPUT)
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", "--force", help="replace existing files", rich_help_panel=OUTPUT),
]
Verbose = Annotated[
    bool,
    typer.Option("-v", "--verbose", help="print every stage, reading, rule and assumption", rich_help_panel=OUTPUT),
]
PRINTED = "-"
"""The file of ``--csv`` that stands for standard output, on which nothing else is printed then."""
Csv = Annotated[
    str | None,
    typer.Option(
        "--csv",
        metavar="[FILE.csv]",
        help="print CSV only, a row per stage or layout; with a file, write it there beside the report",
        rich_help_panel=OUTPUT,
    ),
]
Plot = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE.svg|png",
        help="draw it: stages and an iteration, or memory against time",
        rich_help_panel=OUTPUT,
    ),
]
Html = Annotated[
    str | None,
    typer.Option(
        "--html", metavar="FILE.html", help="write the answer as one page for a browser, too", rich_help_panel=OUTPUT
    ),
]


def file_of(csv: str | None) -> str | None:
    """The file that ``--csv`` writes, if any."""
    return None if csv == PRINTED else csv


@contextmanager
def printing() -> Iterator[None]:
    """Around all printing: a reader that has seen enough (``| head``) ends it, and changes no exit code."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)


@contextmanager
def without_collection() -> Iterator[None]:
    """Estimates and searches make hundreds of thousands of values that live to their end, and hardly one that refers to
    itself: looking for such takes an eighth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.freeze()
            gc.enable()


def print_json(value: Any) -> None:
    """``value`` as the only thing on standard output."""
    with printing():
        print(json.dumps(value, indent=1).replace("\x7f", "\\u007f"))  # the one control character that JSON leaves


def print_either(json: bool, content: Callable[[], Any], show: Callable[[], None]) -> None:
    """``content()`` as JSON, or what ``show`` prints in its place."""
    if json:
        print_json(content())
    else:
        with printing():
            show()


def print_text(text: str) -> None:
    """``text``, whose lines all end, as the only thing on standard output, without control characters."""
    with printing():
        print(lines(text), end="")


def print_file(text: str) -> None:
    """``text`` as a file would have it; on a terminal without control characters, which that would obey."""
    with printing():
        print(lines(text) if sys.stdout.isatty() else text, end="")


def tell_of_shell(plan: Plan) -> None:
    """A word on standard error of this shell's settings of PyTorch's allocator, which are no part of ``plan``."""
    from ..plan.environment import OF_ALLOCATOR

    if any(name in plan.environment for name in OF_ALLOCATOR):
        return
    for name in OF_ALLOCATOR:
        if os.environ.get(name):
            given = one_line(f"{name}={os.environ[name]}")
            print(f"memplan: {given} of this shell is not in the plan: --env {shlex.quote(given)}", file=sys.stderr)


def console(no_color: bool) -> Console:
    """Standard output for tables, in colour where it is a terminal that wants it."""
    from rich.console import Console

    class QuietConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return QuietConsole(no_color=True if no_color else None, highlight=False, markup=False, emoji=False)
