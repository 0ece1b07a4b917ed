"""``memplan models``, ``gpus`` and ``schema``: what is built in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from .output import console, print_json, printing

AsJson = Annotated[bool, typer.Option("--json", help="JSON, and nothing else")]
NoColor = Annotated[bool, typer.Option("--no-color", help="no colours (as NO_COLOR=1)")]


def models(json: AsJson = False, no_color: NoColor = False) -> int:
    """Models that are built in, with their sizes."""
    from ..plan.count import parameters
    from ..plan.library import model_specs
    from ..plan.models import load_spec

    specs = [load_spec(name) for name in model_specs()]
    if json:
        print_json([{**spec.model_dump(mode="json"), "parameters": parameters(spec)} for spec in specs])
        return 0
    from ..report.units import elements

    rows = [
        (
            spec.name,
            elements(parameters(spec)),
            str(spec.layers),
            str(spec.hidden),
            str(spec.heads) if spec.heads == spec.kv_heads else f"{spec.heads}/{spec.kv_heads}",
            str(spec.vocab),
            str(spec.positions_max),
        )
        for spec in specs
    ]
    headings = ("model", "parameters", "layers", "hidden", "heads", "vocab", "longest")
    _print_table(headings, rows, no_color, left=(0,))
    return 0


def gpus(json: AsJson = False, no_color: NoColor = False) -> int:
    """GPUs that are built in, with the memory that their drivers show."""
    from dataclasses import asdict

    from ..gpus import GPUS

    if json:
        print_json([asdict(gpu) for gpu in GPUS.values()])
        return 0
    rows = [
        (
            gpu.name,
            f"{gpu.capacity_bytes / 2**20:,.0f}",
            ".".join(map(str, gpu.compute_capability or ())),
            "" if gpu.context_bytes is None else f"{gpu.context_bytes / 2**20:,.0f}",
        )
        for gpu in GPUS.values()
    ]
    _print_table(("GPU", "memory MiB", "compute capability", "CUDA context MiB"), rows, no_color, left=(0,))
    return 0


def schema() -> int:
    """The JSON Schema of a plan, for editors."""
    from ..plan.schema import plan_schema

    print_json(plan_schema())
    return 0


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], no_color: bool, left: Sequence[int]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from ..report.output import put

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    with printing():
        put(console(no_color), table)
