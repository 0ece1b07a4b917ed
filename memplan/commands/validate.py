"""``memplan validate``: the plan, run for real and briefly, measured beside estimated."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from ..plan.errors import PlanError, check_choice, wrong_at
from ..plan.read import Flags, ReadPlan
from ..report.progress import progress
from ..streams import tell
from .launched import Place, flags_of_launch, placed, read_given
from .output import (
    OUTPUT,
    Html,
    Json,
    NoColor,
    NoRecords,
    PlanOrLaunchFiles,
    Quiet,
    check_files,
    console,
    print_json,
    print_text,
    printing,
    write_whole,
)

if TYPE_CHECKING:
    from ..records.readings import Code, Run
    from ..records.record import Record
    from ..validate.run import Prepared

_RUN = "Run"
_MACHINES = "Several machines (or start it by torchrun or srun)"
DIFFERS = 1
DEVICES = ("cuda", "cpu", "fake")
CODES = ("torch", "megatron", "deepspeed")
MOST = 1000
"""Iterations."""


def validate(
    plan: PlanOrLaunchFiles = None,
    from_: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="FRAMEWORK", help="PLAN is a launch file (see estimate --help)"),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="NAME",
            help="where it runs: cuda; cpu: real processes with gloo; fake: fake tensors without computation",
            rich_help_panel=_RUN,
        ),
    ] = "cuda",
    emulate: Annotated[
        bool,
        typer.Option(
            "--emulate",
            help="run one rank of each stage, one after another, alone on one GPU, whatever --gpus says",
            rich_help_panel=_RUN,
        ),
    ] = False,
    stage: Annotated[
        str,
        typer.Option(
            "--stage",
            metavar="N[,N…]",
            help="run these stages only, one after another, alone on one GPU (with --emulate)",
            rich_help_panel=_RUN,
        ),
    ] = "",
    with_: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="CODE",
            help="library to run: torch, megatron (Megatron-Core) or deepspeed (DeepSpeed's engine)",
            rich_help_panel=_RUN,
        ),
    ] = "torch",
    warmup: Annotated[
        int, typer.Option("--warmup", metavar="N", help="iterations before the measured ones", rich_help_panel=_RUN)
    ] = 2,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="measured iterations", rich_help_panel=_RUN)] = 3,
    tolerance: Annotated[
        str,
        typer.Option(
            "--tolerance",
            metavar="PERCENT",
            help="allowed difference, measured against estimated",
            rich_help_panel=_RUN,
        ),
    ] = "3%",
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            help="seconds without progress before the run counts as hung",
            rich_help_panel=_RUN,
        ),
    ] = 600.0,
    share_gpu: Annotated[
        bool, typer.Option("--share-gpu", help="run on GPUs even if other processes use them", rich_help_panel=_RUN)
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="run even if the estimate says that the plan does not fit", rich_help_panel=_RUN),
    ] = False,
    nnodes: Annotated[
        int,
        typer.Option(
            "--nnodes", metavar="N", help="number of machines that run the plan together", rich_help_panel=_MACHINES
        ),
    ] = 1,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            "--rdzv-endpoint", metavar="HOST:PORT", help="rendezvous address of the machines", rich_help_panel=_MACHINES
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            "--node-rank",
            metavar="N",
            help="number of this machine, if machines must have fixed ranks",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(
            "--record", metavar="FILE.json", help="write the run's record to a file for sharing", rich_help_panel=OUTPUT
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace existing files", rich_help_panel=OUTPUT)
    ] = False,
    html: Html = None,
    no_records: NoRecords = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="print progress even when output is piped", rich_help_panel=OUTPUT)
    ] = False,
    no_color: NoColor = False,
    flags: Flags = {},  # noqa: B006 (replaced by a flag for every field)
) -> int:
    """Runs a few training steps of exactly this layout and prints what they needed beside the estimate.

    --gpus is how many GPUs there are for it: as many as the plan has ranks, or fewer, and then one rank of each stage
    runs alone on one of them. Exit code 0: measured and estimated agree. 1: they differ by more than --tolerance, or a
    rank failed. 2: the plan is wrong. 3: no CUDA, no torch, or a GPU in use.
    """
    from ..validate.run import Where, prepared

    part = _part(tolerance)
    check_choice("--device", device, DEVICES)
    check_choice("--with", with_, CODES)
    for name, value, least in (("--warmup", warmup, 1), ("--steps", steps, 1), ("--nnodes", nnodes, 1)):
        if not least <= value <= MOST:
            raise wrong_at(name, f"{value} must be from {least} to {MOST}")
    if not 0 < timeout < float("inf"):
        raise wrong_at("--timeout", f"{timeout:g} must be more than 0")
    _check_machines(nnodes, rdzv_endpoint, node_rank)
    check_files({"--record": record, "--html": html}, force=overwrite)
    read, gpus = _read(placed(plan), from_, flags)
    where = Where(
        gpus=gpus,
        code=cast("Code", with_),
        device=cast(Literal["cuda", "cpu", "fake"], device),
        emulates=emulate,
        nodes=nnodes,
        endpoint=rdzv_endpoint,
        node_rank=node_rank,
        warmup=warmup,
        steps=steps,
        patience=timeout,
        shares=share_gpu,
        forces=force,
        stages=_stages(stage),
    )
    try:
        asked = prepared(read.plan, where)
    except PlanError as error:
        raise read.located(error) from None
    if not quiet and not json and asked.answers and (verbose or sys.stderr.isatty()):
        _announce(asked)
    command = shlex.join(["memplan", *sys.argv[1:]])
    made = recorded(asked, read, _run(asked, quiet, verbose), part, command)
    if not asked.answers:
        return _silent(made)
    if made is None:
        tell("memplan: the machine of the first rank tells how it went")
        return 0
    if json:
        from ..records.record import to_json

        print_json(to_json(made))
    else:
        from ..report.runs import print_run

        with printing():
            if asked.native.differs and not quiet:
                print_text(f"{asked.native.differs}\n\n")
            print_run(made, console(no_color), quiet=quiet)
    if not no_records:  # last: where it cannot be kept the run was not for nothing
        kept(made)
    if record is not None:
        from .runs import write_record

        write_record(made, record, force=overwrite)
    if html is not None:
        from ..report.html.page import run_page

        write_whole(html, run_page(made), force=overwrite)
    return 0 if made.verdict == "agrees" else DIFFERS


def _stages(text: str) -> tuple[int, ...]:
    """``0,31`` as (0, 31)."""
    numbers = [part.strip() for part in text.split(",")] if text else []
    if not all(re.fullmatch(r"\d{1,6}", number) for number in numbers):
        raise wrong_at("--stage", f"{text} must be numbers of stages with commas between them, as 0,3")
    return tuple(map(int, numbers))


def _announce(asked: Prepared) -> None:
    from ..validate.run import announced

    line = announced(asked)
    if line:
        tell(f"memplan {line}")


def _part(text: str) -> float:
    """``3%`` as 0.03."""
    try:
        part = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        part = 0.0
    if not 0.0 < part < 1.0:
        raise wrong_at("--tolerance", f"{text} must be a percentage above 0 and below 100, as 3%")
    return part


def _check_machines(nodes: int, endpoint: str | None, node_rank: int | None) -> None:
    place = "the host and port of the rendezvous, as node1:29500"
    if nodes > 1 and endpoint is None:
        raise wrong_at("--rdzv-endpoint", f"is needed with --nnodes: {place}")
    if endpoint is not None and not re.fullmatch(r".+:\d{1,5}", endpoint):
        raise wrong_at("--rdzv-endpoint", f"{endpoint} must be {place}")
    if node_rank is not None and (endpoint is None or not 0 <= node_rank < nodes):
        raise wrong_at("--node-rank", f"{node_rank} must be from 0 to {nodes - 1}, with --nnodes and --rdzv-endpoint")


def _read(place: Place, from_: Sequence[str] | None, flags: Flags) -> tuple[ReadPlan, int]:
    """The plan, and how many GPUs there are to run it: ``--gpus`` is the plan's own number only where it says none."""
    rest = {name: value for name, value in flags.items() if name != "gpus"}
    launch = flags_of_launch(place, from_)
    read = read_given(place, launch, rest if place is not None else flags)
    stated = read.plan.hardware.gpus
    if "gpus" not in flags:
        return read, stated or 1
    both = read_given(place, launch, flags)
    gpus = both.plan.hardware.gpus
    assert gpus is not None
    return (both if stated is None else read), gpus


def run_quietly(asked: Prepared) -> Run:
    return _run(asked, True, False)


def _run(asked: Prepared, quiet: bool, verbose: bool) -> Run:
    from ..validate.progress import shown
    from ..validate.run import run

    if asked.world == "fake":
        with progress(f"tracing {asked.native.runs.model.name}", quiet=quiet) as says:
            return run(asked, lambda progress: None, says)
    with shown("quiet" if quiet else "verbose" if verbose else "normal", asked.stages) as display:
        return run(asked, display, lambda what, done, of: None)


def recorded(asked: Prepared, read: ReadPlan, run: Run, tolerance: float, command: str) -> Record | None:
    """The record of a run. ``None`` where this machine has nothing to tell: another one has the first rank."""
    from ..records.record import new_record
    from ..report.json import to_json

    is_first = run.world != "real" or any(rank.rank == 0 for rank in run.ranks)
    if not is_first and not run.failures:
        return None
    return new_record(
        read.plan.model_dump(mode="json"),
        to_json(asked.estimate),
        run,
        command=command,
        tolerance=tolerance,
    )


def _silent(made: Record | None) -> int:
    """Of a process that joined a run as another rank than the first, which does not hear how this one failed."""
    if made is None or not made.run.failures:
        return 0
    from ..records.record import differences
    from ..report.runs import verdict_words

    tell(f"memplan: {verdict_words(made, differences(made.estimate, made.run))}")
    return DIFFERS


def kept(made: Record) -> None:
    """Adds a record to the user's."""
    from ..records.database import open_database

    with open_database() as database:
        database.add(made)
