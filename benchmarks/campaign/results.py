"""What a campaign measured, as Markdown: in short for ``docs/accuracy.md``, whole for ``docs/gpu-results.md``."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from statistics import median

from .causes import BLIND, CAUSES, EDGES, LEFT_OUT, RESERVED, SHARED
from .readings import Reading
from .summary import MIB, Row, compared, figure, kind

KIB = 1 << 10
MEMORY = ("requested", "allocated", "reserved", "device", "context", "static", "evaluation", "initialisation")
"""Readings of a run of ``memplan validate``, as its columns."""
EDGE, PROGRAM = "out of memory at mbs ", ", program "
LIMITS = (("1 KiB", KIB), ("1 MiB", MIB))


def short(rows: Sequence[Row], gpu: str) -> Iterator[str]:
    """What was measured on ``gpu``, and how far estimates are off; with the causes that are known."""
    runs = _runs(rows)
    found = [row for row in compared(rows) if _key(row) not in LEFT_OUT]
    programs = [row for row in found if PROGRAM in row.reading.name]
    edges = [row for row in found if row.reading.name.startswith(EDGE)]
    if runs:
        yield (
            f"{len(runs)} training runs (one rank each, of a played group where there are more), each in "
            f"[detail](gpu-results.md). {BLIND} {_program_words(programs)} {_edge_words(edges, gpu)}"
        )
        yield from _of_runs(found, runs, rows)
    else:
        yield f"{_program_words(programs)} {_edge_words(edges, gpu)} All in [detail](gpu-results.md)."


def _of_runs(found: Sequence[Row], runs: Container[str], rows: Sequence[Row]) -> Iterator[str]:
    """The table of readings, and each reading of reserved memory that is far off."""
    yield ""
    yield "| reading | figures | within 1 KiB | within 1 MiB | within 1 % | median | worst | of | why |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |"
    of_runs = [row for row in found if row.case in runs]
    for name in (*MEMORY, "workspaces"):
        own = [row for row in of_runs if kind(row.reading.name) == name]
        if own:
            yield _memory_row(name, own, CAUSES.get(name, ""))
    steps = [row for row in of_runs if row.reading.unit == "seconds"]
    if steps:
        yield _seconds_row("seconds of a step", steps)
    counted = {_key(row) for row in compared(rows)}
    for key, why in LEFT_OUT.items():
        if key in counted:
            yield from ("", why)
    yield from _far([row for row in of_runs if kind(row.reading.name) == "reserved"])


def _key(row: Row) -> tuple[str, str]:
    return row.case, kind(row.reading.name)


def _far(rows: Sequence[Row]) -> Iterator[str]:
    """Those that are more than 1 % off, each with its cause."""
    far = sorted((row for row in rows if row.size > 0.01), key=lambda row: -row.size)
    if not far:
        return
    yield from ("", "Reserved memory, each reading that is more than 1 % off:", "")
    yield from ("| run | measured | estimated | difference | why |", "| --- | ---: | ---: | ---: | --- |")
    for row in far:
        reading = row.reading
        figures = figure(reading.measured, reading.unit), figure(reading.estimated, reading.unit)
        why = RESERVED.get(_where(row), "not explained")
        yield f"| {_where(row)} | {' | '.join(figures)} | {reading.part:+.2%} | {why} |"


def _program_words(programs: Sequence[Row]) -> str:
    if not programs:
        return ""
    count = len({(row.case, row.reading.name.partition(PROGRAM)[2]) for row in programs})
    same = sum(row.reading.exact for row in programs)
    most = max(abs((row.reading.estimated or 0) - row.reading.measured) for row in programs if _is_bytes(row))
    return (
        f"{count} random programs of 1,500 requests on PyTorch's allocator: {same} of {len(programs)} readings equal, "
        f"the others at most {most / MIB:,.0f} MiB off."
    )


def _edge_words(edges: Sequence[Row], gpu: str) -> str:
    if not edges:
        return ""
    right = sum(row.reading.exact for row in edges)
    return (
        f"Verdicts at the edge of the GPU's memory, the largest micro-batch that fits and the next: {right} of "
        f"{len(edges)} right{EDGES[gpu]}"
    )


def _is_bytes(row: Row) -> bool:
    return row.reading.unit == "bytes"


def _memory_row(name: str, own: Sequence[Row], cause: str) -> str:
    worst = max(own, key=lambda row: row.size)
    cells = [f"{sum(_off(row.reading) <= limit for row in own)}" for _, limit in LIMITS]
    cells += [f"{sum(row.size <= 0.01 for row in own)}", f"{median(row.size for row in own):.3%}"]
    cells += [f"{worst.reading.part:+.2%}", _where(worst), cause]
    return f"| {name} | {len(own)} | {' | '.join(cells)} |"


def _seconds_row(name: str, own: Sequence[Row]) -> str:
    worst = max(own, key=lambda row: row.size)
    near = sum(row.size <= 0.01 for row in own)
    half = f"{median(row.size for row in own):.1%}"
    return f"| {name} | {len(own)} | – | – | {near} | {half} | {worst.reading.part:+.0%} | {_where(worst)} |  |"


def _where(row: Row) -> str:
    """The case, and its stage if it has several."""
    name, _, rest = row.reading.name.partition(", ")
    whole = row.reading.name if name not in MEMORY and row.reading.unit == "seconds" else rest
    return ", ".join(filter(None, (row.case, whole if whole != "seconds of a step" else "")))


def _off(reading: Reading) -> float:
    return abs((reading.estimated or 0) - reading.measured)


def _runs(rows: Iterable[Row]) -> set[str]:
    return {row.case for row in rows if kind(row.reading.name) == "static"}


# -- whole --------------------------------------------------------------------------------------------------


def whole(rows: Sequence[Row], gpu: str) -> Iterator[str]:
    """Every run in a row, verdicts, kernels; then each reading. ``gpu``: its name, which ends headings."""
    runs = _runs(rows)
    if runs:
        yield from _run_table(rows, runs, gpu)
    yield from _edges([row for row in rows if " at mbs " in row.reading.name], gpu)
    yield from _times([row for row in rows if row.case not in runs and row.reading.unit == "seconds"], gpu)
    yield from _others([row for row in rows if row.case not in runs and row.reading.unit != "seconds"], gpu)


def _run_table(rows: Sequence[Row], runs: Container[str], gpu: str) -> Iterator[str]:
    yield from ("", f"## Runs on {gpu}")
    yield ""
    yield "MiB measured; in brackets what today's code estimates less that. –: not estimated, or not to be told apart."
    yield ""
    yield SHARED
    yield ""
    yield f"| run | {' | '.join(MEMORY)} | median step ms |"
    yield f"| --- |{' ---: |' * (len(MEMORY) + 1)}"
    for case in dict.fromkeys(row.case for row in rows if row.case in runs):
        yield from _run_rows(case, [row.reading for row in rows if row.case == case])


def _run_rows(case: str, readings: Sequence[Reading]) -> Iterator[str]:
    """One for each stage."""
    step = next((one for one in readings if one.name == "seconds of a step"), None)
    for stage in dict.fromkeys(
        one.name.partition(", stage ")[2] for one in readings if one.name != "seconds of a step"
    ):
        own = {kind(one.name): one for one in readings if one.name.partition(", stage ")[2] == stage}
        cells = [_cell(own.get(name)) for name in MEMORY]
        yield f"| {case}{f', stage {stage}' if stage else ''} | {' | '.join(cells)} | {_step(step)} |"


def _cell(reading: Reading | None) -> str:
    if reading is None:
        return "–"
    measured = f"{reading.measured / MIB:,.1f}"
    if reading.estimated is None:
        return f"{measured} (–)"
    change = (reading.estimated - reading.measured) / MIB
    return f"{measured} ({f'{change:+,.1f}' if abs(change) >= 0.05 else '0'})"


def _step(reading: Reading | None) -> str:
    if reading is None:
        return "–"
    return f"{1e3 * reading.measured:,.0f} ({f'{reading.part:+.0%}' if reading.part is not None else '–'})"


def _edges(rows: Sequence[Row], gpu: str) -> Iterator[str]:
    cases = list(dict.fromkeys(row.case for row in rows if row.reading.name.startswith(EDGE)))
    if not cases:
        return
    yield from ("", f"## Verdicts at the edge of {gpu}", "")
    yield "| case | micro-batch | said | ran | allocated | reserved |"
    yield "| --- | ---: | --- | --- | ---: | ---: |"
    for case in cases:
        own = {row.reading.name: row.reading for row in rows if row.case == case}
        for name, reading in own.items():
            if name.startswith(EDGE):
                size = name.removeprefix(EDGE)
                said, ran = ("does not fit" if full else "fits" for full in (reading.estimated, reading.measured))
                cells = [_cell(own.get(f"{one} at mbs {size}")) for one in ("allocated", "reserved")]
                yield f"| {case} | {size} | {said} | {ran} | {' | '.join(cells)} |"


def _times(rows: Sequence[Row], gpu: str) -> Iterator[str]:
    if not rows:
        return
    yield from ("", f"## Kernels on {gpu}", "")
    yield "Each alone, the median of calls. What is estimated of kernels is in [times](timing.md)."
    yield ""
    yield "| kernel | measured |"
    yield "| --- | ---: |"
    yield from (f"| {row.reading.name} | {figure(row.reading.measured, row.reading.unit)} |" for row in rows)


def _others(rows: Sequence[Row], gpu: str) -> Iterator[str]:
    """What the libraries take, and the allocator's programs, folded away."""
    programs = [row for row in rows if PROGRAM in row.reading.name]
    rest = [row for row in rows if row not in programs and " at mbs " not in row.reading.name]
    for title, own in (("The context and libraries", rest), ("The allocator's programs", programs)):
        if own:
            yield from ("", f"## {title} on {gpu}", "", "<details markdown>", "<summary>Every reading</summary>", "")
            yield "| case | reading | measured | estimated | difference |"
            yield "| --- | --- | ---: | ---: | ---: |"
            yield from map(_line, own)
            yield from ("", "</details>")


def _line(row: Row) -> str:
    reading = row.reading
    part = "" if reading.part is None else f"{reading.part:+.3%}"
    figures = figure(reading.measured, reading.unit), figure(reading.estimated, reading.unit)
    return f"| {row.case} | {reading.name} | {' | '.join(figures)} | {part} |"
