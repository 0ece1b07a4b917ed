"""``memplan runs``: the records of ``memplan validate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..plan.errors import wrong_at
from ..plan.text import path_of
from .output import (
    Html,
    Json,
    NoColor,
    Overwrite,
    Quiet,
    check_files,
    console,
    print_json,
    print_text,
    printing,
    write_whole,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ..records.record import Record

_FILES = "Records of others, and for them"


def runs(
    run: Annotated[str | None, typer.Argument(metavar="ID", help="a run's id or its beginning")] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="TEXT", help="only runs on GPUs whose name contains TEXT")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="TEXT", help="only runs of models whose name contains TEXT")
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(
            "--export",
            metavar="FILE.json",
            help="write the run to a file for sharing, without host names and without the ranks' output",
            rich_help_panel=_FILES,
        ),
    ] = None,
    import_: Annotated[
        list[str] | None,
        typer.Option(
            "--import", metavar="FILE.json …", help="add the runs in these files to yours", rich_help_panel=_FILES
        ),
    ] = None,
    html: Html = None,
    force: Overwrite = False,
    delete: Annotated[bool, typer.Option("--delete", help="remove the run and its measurements")] = False,
    json: Json = False,
    quiet: Quiet = False,
    no_color: NoColor = False,
) -> int:
    """Runs that were validated: all of them, or one, measured beside estimated.

    Exit code 0: done. 2: there is no such run, or its record cannot be read.
    """
    _check(run, [gpu is not None or model is not None, export is not None, bool(import_), delete], bool(import_))
    if html is not None and (export is not None or import_ or delete):
        raise typer.BadParameter("--html shows runs; leave out --export, --import and --delete")
    check_files({"--export": export, "--html": html}, force=force)
    if import_:
        return _import(import_)
    if run is None:
        return _list(gpu, model, json, no_color, html, force)
    if delete:
        return _delete(run)
    record = _find(run)
    if export is not None:
        if write_record(record, export, force=force):
            print_text(f"{export}: run {record.id}, to share\n")
        return 0
    if html is not None:
        from ..report.html.page import run_page

        write_whole(html, run_page(record), force=force)
    if json:
        from ..records.record import to_json

        print_json(to_json(record))
    else:
        from ..report.runs import print_run

        with printing():
            print_run(record, console(no_color), quiet=quiet)
    return 0


def write_record(record: Record, file: str, *, force: bool = False) -> bool:
    """Writes ``record`` to be shared (``records.sharing``) as ``write_whole`` does."""
    from ..records.sharing import shared_text

    return write_whole(file, shared_text(record).encode(), force=force)


def _check(run: str | None, given: Sequence[bool], imports: bool) -> None:
    filtered, exports, _, deletes = given
    if sum(given) > 1:
        raise typer.BadParameter("--gpu and --model, --export, --import and --delete exclude one another")
    if run is not None and (filtered or imports):
        raise typer.BadParameter("ID names one run; leave out --gpu, --model and --import")
    if run is None and (exports or deletes):
        raise typer.BadParameter(f"{'--export' if exports else '--delete'} needs a run: memplan runs ID")


def _find(run: str) -> Record:
    from ..records.database import open_database

    _check_any(run)
    with open_database() as database:
        return database.find(run)


def _check_any(run: str) -> None:
    """``PlanError`` where there is no record at all; nothing is made then."""
    from ..records.place import exists, path_of_records

    if not exists(path_of_records()):
        raise wrong_at("memplan runs", f"{run} is the id of no run; no run is recorded in {path_of_records()}")


def _delete(run: str) -> int:
    from ..records.database import open_database

    _check_any(run)
    with open_database() as database:
        print_text(f"removed run {database.delete(run)}\n")
    return 0


def _import(files: Sequence[str]) -> int:
    """Reads all of ``files`` before any is kept."""
    from ..records.database import open_database
    from ..records.record import read_record

    found = [read_record(path_of(file)) for file in files]
    with open_database() as database:
        lines = [
            f"{file}: run {record.id} " + ("is kept" if database.add(record, imported=True) else "was there already")
            for file, record in zip(files, found, strict=True)
        ]
    print_text("".join(f"{line}\n" for line in lines))
    return 0


def _list(gpu: str | None, model: str | None, json: bool, no_color: bool, html: str | None, force: bool) -> int:
    from ..records.place import exists, path_of_records
    from ..report.runs import Row, print_runs, runs_to_json

    rows: list[Row] = []
    ids: list[str] = []
    if exists(path_of_records()):
        from ..records.database import open_database

        with open_database() as database:
            rows, ids = list(database.records(gpu, model)), database.ids()
    if html is not None:
        from ..report.html.page import runs_page

        write_whole(html, runs_page(rows, ids), force=force)
    if json:
        print_json(runs_to_json(rows))
    elif rows:
        with printing():
            print_runs(rows, ids, console(no_color))
    else:
        print_text(_nothing(len(ids), path_of_records()))
    return 0


def _nothing(others: int, path: Path) -> str:
    if others:
        runs = "the 1 run is" if others == 1 else f"the {others:,} runs are"
        return f"No run is of that GPU and model; {runs} listed by: memplan runs\n"
    return (
        f"No runs yet in {path}.\n"
        "memplan validate PLAN --gpus N makes the first; memplan validate PLAN --device fake needs no GPU.\n"
        "memplan runs --import FILE.json keeps one that somebody else has exported.\n"
    )
