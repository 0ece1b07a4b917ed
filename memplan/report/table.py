"""``memplan estimate``: the verdict, the stages, the worst stage in detail, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..result import Estimate
from .breakdown import READINGS, stage_breakdown
from .names import plan_text, stage_word
from .output import put, put_line
from .palette import CAUTION, FAINT
from .stages import plain_table, stage_tables, unit_of
from .verdict import reading_of, verdict

_UNITS = {"GiB": "GiB (2^30 bytes)", "MiB": "MiB (2^20 bytes)"}
SHORT_LIST = 3
"""Assumptions that are printed without ``-v``."""


def print_estimate(estimate: Estimate, console: Console, verbose: bool = False, quiet: bool = False) -> None:
    """Prints ``estimate``; ``quiet`` only the verdict, ``verbose`` every stage, reading and assumption."""
    if quiet:
        put_line(console, verdict(estimate))
    else:
        put(console, verdict(estimate), *_body(estimate, console, verbose))


def _body(estimate: Estimate, console: Console, verbose: bool) -> Iterator[RenderableType]:
    worst = estimate.stages[estimate.peak_stage]
    yield Text(plan_text(estimate.plan), FAINT)
    yield Text()
    for table in stage_tables(estimate, console, folded=not verbose):
        yield table
        yield Text()
    yield Text(_caption(estimate), FAINT)
    yield Text()
    yield stage_breakdown(estimate, worst, console)
    if verbose:
        yield Text()
        yield _every_reading(estimate)
    if estimate.warnings:
        yield Text()
        yield named_list([(notice.code, notice.message) for notice in estimate.warnings], CAUTION)
    if estimate.assumptions:
        yield Text()
        yield from _assumptions(estimate, verbose)


def _caption(estimate: Estimate) -> str:
    meaning = {
        "device": "what nvidia-smi shows: reserved, CUDA context, NCCL",
        "reserved": "segments that PyTorch's allocator took",
        "allocated": "torch.cuda.max_memory_allocated",
        "requested": "sum of live tensors",
    }
    worst = estimate.stages[estimate.peak_stage]
    reading = reading_of(worst)
    return f"{_UNITS[unit_of(estimate).name]}, most loaded rank, steady state; {reading}: {meaning[reading]}."


def _every_reading(estimate: Estimate) -> Table:
    """The four readings of every stage, and how many micro-batches it keeps alive."""
    table = plain_table()
    for name in (stage_word(estimate.plan), *READINGS, "in flight"):
        table.add_column(name, justify="right", no_wrap=True)
    unit = unit_of(estimate)
    for stage in estimate.stages:
        table.add_row(str(stage.stage), *(unit.figure(getattr(stage, name)) for name in READINGS), str(stage.in_flight))
    return table


def named_list(entries: list[tuple[str, str]], style: str) -> Table:
    """Named entries, each with its text beside it."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style=style, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    for name, text in entries:
        table.add_row(Text(name), Text(text))
    return table


def _assumptions(estimate: Estimate, verbose: bool) -> Iterator[RenderableType]:
    shown = estimate.assumptions if verbose else estimate.assumptions[:SHORT_LIST]
    more = len(estimate.assumptions) - len(shown)
    yield Text.assemble(("Assumed", "bold"), (f" ({more} more with -v)" if more else "", FAINT))
    for assumption in shown:
        yield Padding(Text(assumption), (0, 0, 0, 2))
