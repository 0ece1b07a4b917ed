"""``memplan explain``: which tensor asked, what else was in memory, why there was no room, and what ends it; of a
memory snapshot the run's peak beside the plan's, and what only one of them holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..explain.compared import Compared, Parting, Same
from ..explain.message import OutOfMemory
from ..explain.requests import Candidate, Explanation, is_then
from ..plan.plan import Plan
from ..tape.events import Category
from .json import way_out_to_json
from .names import exact, in_order, modules_text, numbers_text, percent, plan_text, size, stage_word, unit_for
from .printing import (
    BAD,
    CAUTION,
    COLOURS,
    FAINT,
    SWATCH,
    Breakable,
    WholeTable,
    entries,
    folded,
    label,
    left,
    plain_table,
    put_report,
    right,
    spaced,
    titled,
)
from .suggestion_words import ways_table

SCHEMA = 1
_WHEN = {
    "step": "the optimizer's step",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "checkpoint": "saving a checkpoint",
}
MOST_ALIKE = 3
"""Tensors that are as likely as the first one that the first sentence names."""


def verdict(told: Explanation) -> Text:
    """One sentence: ``Out of memory: logits_fp32 in head, forward, stage 31: asked for 3.82 GiB …``."""
    message = told.reported.message
    if message.who == "killed":
        return Text.assemble(("Killed", f"bold {BAD}"), ": by signal 9, most often because the host has no memory left")
    if message.who == "handle":
        return Text.assemble(("Most likely out of memory", f"bold {BAD}"), ": a CUDA library got no handle")
    return Text.assemble(("Out of memory", f"bold {BAD}"), f": {_what(told)}{_asked(message)}")


def _what(told: Explanation) -> str:
    """A tensor as a fact only where no other of the plan has the size then; else those that are as likely."""
    about = told.clues.about[0].name if told.clues.about else None
    phase = f" in {_WHEN.get(told.clues.phase, told.clues.phase)}" if told.clues.phase else ""
    if any(cause.code == "another-moment" for cause in told.causes) and about is not None:
        return f"what the traceback names, {about}{phase}, which the plan does not have in this size,"
    if told.candidates:
        first, *others = told.candidates
        sure = told.clues.about or not any(cause.code == "far-apart" for cause in told.causes)
        if not others and sure and is_then(first.phase, told.clues.phase or first.phase):
            return _place(told, first)
        alike = [one for one in told.candidates if one.score == first.score][:MOST_ALIKE]
        places: dict[str, list[str]] = {}
        for one in alike:
            places.setdefault(_place(told, one).removeprefix(one.tensor), []).append(one.tensor)
        likely = ", or ".join(f"{' or '.join(dict.fromkeys(names))}{place}" for place, names in places.items())
        rest = len(told.candidates) - len(alike)
        more = f" ({rest} more in the plan {'have' if rest > 1 else 'has'} this size)" if rest else ""
        return f"most likely {likely}{more},"
    if about is not None:
        return f"what the traceback names, {about}{phase},"
    if told.reported.message.who != "pytorch":
        return {"nccl": "NCCL", "cublas": "a library of CUDA", "host": "the host", "shared": "/dev/shm"}.get(
            told.reported.message.who, "the driver"
        )
    without = told.plan is None or told.clues.phase == "checkpoint"
    return f"a request{phase}" if without else f"a request{phase} that the plan does not have"


def _place(told: Explanation, one: Candidate) -> str:
    """``logits_fp32 in head, forward, stage 31``."""
    modules = f" in {modules_text(in_order(one.modules))}" if one.modules[0] else ""
    stages = (
        f", {stage_word(told.plan)} {numbers_text(one.stages)}" if told.plan is not None and _has_stages(told) else ""
    )
    phase = "while loading" if one.phase == "loading" else one.phase
    return f"{one.tensor}{modules}, {phase}{stages}"


def _has_stages(told: Explanation) -> bool:
    return told.plan is not None and told.plan.layout.pp > 1


def _asked(message: OutOfMemory) -> str:
    if message.tried is None:
        return " found no memory"
    text = f" asked for {message.tried.text}"
    if message.free is not None and message.capacity is not None:
        text += f", {size(message.free)} free of {size(message.capacity)}"
    return text


def print_explanation(told: Explanation, console: Console, *, quiet: bool = False) -> None:
    """Prints ``told``; ``quiet`` only its first sentence."""
    put_report(console, verdict(told), explanation_report(told), quiet=quiet)


def explanation_report(told: Explanation) -> Iterator[RenderableType]:
    """All of it, part by part."""
    yield verdict(told)
    if told.plan is not None:
        yield Text(plan_text(told.plan), FAINT)
    facts = _facts(told)
    yield from [Text(facts, FAINT)] if facts else []
    apart = [cause for cause in told.causes if cause.code == "far-apart"]
    if apart:
        yield from spaced(entries([(cause.code, cause.message) for cause in apart], CAUTION))
    if told.candidates:
        yield from _candidates(told)
        yield from _memory(told, told.candidates[0])
    elif told.nearest:
        yield from titled(
            f"No request of the plan prints as {told.reported.message.tried.text}; the nearest are"
            if told.reported.message.tried
            else "",
            _table(told, told.nearest),
        )
    if told.guesses:
        yield from _guesses(told)
    others = [(cause.code, cause.message) for cause in told.causes if cause not in apart]
    if others:
        yield from spaced(entries(others, CAUTION))
    yield from _ways_out(told)
    if told.wanted:
        yield from spaced(Text(f"For more: {'; '.join(told.wanted)}.", FAINT))


def _facts(told: Explanation) -> str:
    """The message's own figures, and where in the log it was."""
    message, reported = told.reported.message, told.reported
    parts = [f"on GPU {message.gpu}"] if message.gpu is not None else []
    parts += [f"of rank {reported.rank}"] if reported.rank is not None else []
    named = (("allocated", message.allocated), ("reserved", message.reserved), ("this process", message.in_process))
    parts += [f"{name} {size(figure)}" for name, figure in named if figure is not None]
    if told.messages > 1:
        ranks = f" from ranks {numbers_text(told.ranks)}" if told.ranks else ""
        parts.append(f"the first of {told.messages} messages{ranks}")
    parts += [f"after {reported.steps:,} steps"] if reported.steps else []
    frame = told.clues.frame or next(reversed(reported.frames), None)
    parts += [frame.place] if frame is not None else []
    return " · ".join(parts)


def _candidates(told: Explanation) -> Iterator[RenderableType]:
    yield Text()
    several = len(told.candidates) > 1
    yield Text("Which tensor asked, the likeliest first" if several else "Which tensor asked", "bold")
    yield _table(told, told.candidates)
    reasons = dict.fromkeys(told.candidates[0].reasons)
    if reasons:
        yield Padding(Text(f"Why the first one: {'; '.join(reasons)}.", FAINT), (0, 0, 0, 2))


def _table(told: Explanation, shown: tuple[Candidate, ...]) -> Table:
    stages = [stage_word(told.plan)] if told.plan is not None and _has_stages(told) else []
    table = plain_table(
        folded("tensor"), folded("in"), left("phase"), *map(left, stages), folded("shape"), left("dtype"), right("asks")
    )
    for at, one in enumerate(shown):
        row: list[RenderableType] = [Breakable(one.tensor), Text(modules_text(in_order(one.modules))), Text(one.phase)]
        row += [Text(numbers_text(one.stages))] if stages else []
        shape = Breakable("×".join(map(str, one.shape)))
        style = "" if at == 0 and shown is told.candidates else FAINT
        table.add_row(*row, shape, Text(one.dtype), Text(size(one.tried)), style=style)
    return table


def _memory(told: Explanation, one: Candidate) -> Iterator[RenderableType]:
    """What the plan has in memory when the likeliest one asks."""
    total = min(one.allocated, key=lambda allocated: abs(allocated - sum(one.held)))
    if not total or not sum(one.held):
        return
    unit = unit_for(total)
    yield from titled("In memory at that moment, as the plan says")
    table = WholeTable.grid(left(), right(), right(), padding=(0, 2, 0, 0))
    table.add_row(Text("  for", FAINT), Text(unit.name, FAINT), Text("%", FAINT))
    for category in Category:
        held = one.held[category]
        if unit.prints(held):
            name = Text.assemble((SWATCH, COLOURS[category]), f" {label(category.key)}")
            table.add_row(name, unit.figure(held), percent(held, total))
    table.add_row("= allocated", unit.figure(total), "", style="bold")
    said = told.reported.message.allocated
    if said is not None:
        table.add_row("  the message says", unit.figure(said), "", style=FAINT)
    yield table


def _guesses(told: Explanation) -> Iterator[RenderableType]:
    yield from titled("Likely by its size")
    table = plain_table(folded("tensor"), folded("factors"), folded("of"))
    for guess in told.guesses:
        table.add_row(guess.what, guess.factors, Text(guess.of, FAINT))
    yield table


def _ways_out(told: Explanation) -> Iterator[RenderableType]:
    if told.estimate is None or told.reported.message.of_host:
        return
    if told.estimate.fits:
        yield from spaced(
            Text.assemble(
                ("The estimate says that the plan fits", "bold"),
                ", and the run died: the run differs from the plan, or something else took memory (see above).",
                " The changes below free as much memory as the run lacked." if told.estimate.ways_out else "",
            )
        )
    yield from ways_table(told.estimate, unit_for(told.estimate.peak))


def explanation_to_json(told: Explanation) -> dict[str, Any]:
    """What ``memplan explain --json`` prints of a message: sizes in bytes, ``null`` for what it does not say."""
    message = told.reported.message
    return {
        "schema": SCHEMA,
        "memplan": __version__,
        "message": {
            "who": message.who,
            "tried": message.tried.text if message.tried is not None else None,
            "tried_bytes": message.request,
            "gpu": message.gpu,
            "rank": told.reported.rank,
            "capacity_bytes": message.capacity,
            "free_bytes": message.free,
            "allocated_bytes": message.allocated,
            "reserved_bytes": message.reserved,
            "process_bytes": message.in_process,
            "private_pools_bytes": message.private,
            "processes": [{"pid": one.pid, "bytes": one.size} for one in message.others],
        },
        "messages": told.messages,
        "ranks": list(told.ranks),
        "steps": told.reported.steps,
        "traceback": {
            "phase": told.clues.phase or None,
            "about": [one.name for one in told.clues.about],
            "frames": [str(frame) for frame in told.reported.frames],
        },
        "asked": [_candidate_to_json(one) for one in told.candidates],
        "nearest": [_candidate_to_json(one) for one in told.nearest],
        "guesses": [{"what": one.what, "factors": one.factors, "of": one.of} for one in told.guesses],
        "causes": [{"code": one.code, "message": one.message} for one in told.causes],
        "fits": told.estimate.fits if told.estimate is not None else None,
        "ways_out": [way_out_to_json(way) for way in told.estimate.ways_out] if told.estimate is not None else [],
        "plan": None if told.plan is None else Plan.__pydantic_serializer__.to_python(told.plan, mode="json"),
        "wanted": list(told.wanted),
    }


def _candidate_to_json(one: Candidate) -> dict[str, Any]:
    return {
        "tensor": one.tensor,
        "modules": list(one.modules),
        "phase": one.phase,
        "stages": list(one.stages),
        "category": one.category,
        "shape": list(one.shape),
        "dtype": one.dtype,
        "request_bytes": one.size,
        "tried_bytes": one.tried,
        "allocated_bytes": list(one.allocated),
        "held": {category.key: one.held[category] for category in Category} if one.held else None,
        "score": one.score,
        "reasons": list(one.reasons),
    }


# -- a memory snapshot -----------------------------------------------------------------------------------


def peak_verdict(told: Compared, failed: Explanation | None) -> Text:
    """One sentence: the run's peak, and how far the plan is from it."""
    run = told.run
    text = Text(f"GPU {run.device} held {size(run.peak)} of tensors at its peak", "bold")
    if told.stage is not None:
        off = percent(told.planned - run.peak, run.peak)
        text += Text(
            f"; the plan {size(told.planned)} ({'+' if told.planned > run.peak else ''}{off} %)".replace("-", "−")
        )
    if failed is not None:
        text += Text("; a request failed")
    return text


def print_snapshot(told: Compared, failed: Explanation | None, console: Console, *, quiet: bool = False) -> None:
    """Prints ``told``, and what ``failed`` in the trace; ``quiet`` only the first sentence."""
    put_report(console, peak_verdict(told, failed), _beside(told, failed), quiet=quiet)


def _beside(told: Compared, failed: Explanation | None) -> Iterator[RenderableType]:
    yield peak_verdict(told, failed)
    yield Text(_of_run(told), FAINT)
    if told.stage is not None:
        yield from spaced(_categories(told))
        if told.only_planned:
            yield from titled("Only in the plan", _same_table(told.only_planned, planned=True))
    if told.only_ran:
        yield from titled(
            "Only in the run" if told.stage is not None else "At the peak", _same_table(told.only_ran, planned=False)
        )
    if told.parting is not None:
        yield from spaced(Text.assemble(("Where they part", "bold"), f": {_parting(told.parting)}"))
    if failed is not None:
        yield from spaced(*explanation_report(failed))


def _of_run(told: Compared) -> str:
    run = told.run
    parts = [f"{run.entries:,} entries", f"{exact(run.peak)} bytes", f"{size(run.reserved)} reserved at the end"]
    parts += [f"{size(run.unknown)} there before the trace"] if run.unknown else []
    parts += [f"beside stage {told.stage}"] if told.stage is not None else []
    return " · ".join(parts)


def _categories(told: Compared) -> Table:
    unit = unit_for(max(told.planned, told.run.peak))
    table = WholeTable.grid(left(), right(), right(), padding=(0, 2, 0, 0))
    table.add_row(Text("  for", FAINT), Text(f"plan {unit.name}", FAINT), Text("in the run, too", FAINT))
    for category in Category:
        if unit.prints(told.by[category]):
            name = Text.assemble((SWATCH, COLOURS[category]), f" {label(category.key)}")
            table.add_row(name, unit.figure(told.by[category]), unit.figure(told.matched[category]))
    table.add_row("= requested", unit.figure(told.planned), unit.figure(sum(told.matched)), style="bold")
    table.add_row("  the run", "", unit.figure(told.run.peak))
    return table


def _same_table(shown: Sequence[Same], *, planned: bool) -> Table:
    kinds = [left("for")] if planned else []
    table = plain_table(folded("what"), *kinds, *map(right, ("each", "count", "together")))
    for one in shown:
        row: list[RenderableType] = [Breakable(one.what)]
        row += [Text(label(one.category))] if planned else []
        table.add_row(*row, Text(size(one.size)), Text(f"{one.times:,}"), Text(size(one.total)))
    return table


def _parting(parting: Parting) -> str:
    """``behind 12 requests of the iteration that are the same the plan has …, the run …``."""
    planned, ran = parting.planned, parting.ran
    if planned is None:
        return f"nowhere: all {parting.same:,} requests of 1 MiB or more of forward and backward are the same."
    tensor = planned.tensor
    shape = f" {'×'.join(map(str, tensor.shape))} {tensor.dtype}".rstrip() if tensor.shape else ""
    text = (
        f"behind {parting.same:,} requests of 1 MiB or more that are the same, the plan has {tensor.name}{shape} in "
        f"{tensor.module or tensor.phase}, {tensor.phase} ({size(planned.size)}), and the run "
    )
    if ran is None:
        return f"{text}no more."
    frame = parting.frame
    where = f" at {frame.file.rpartition('/')[2]}:{frame.line} in {frame.function}" if frame is not None else ""
    return f"{text}{size(ran.size)}{where}."


def snapshot_to_json(told: Compared, failed: Explanation | None) -> dict[str, Any]:
    """What ``memplan explain SNAPSHOT --json`` prints: bytes as asked for, each tensor rounded up to 512."""
    parting, planned = told.parting, told.stage is not None
    return {
        "schema": SCHEMA,
        "memplan": __version__,
        "device": told.run.device,
        "entries": told.run.entries,
        "run_peak_bytes": told.run.peak,
        "run_unknown_bytes": told.run.unknown,
        "run_reserved_bytes": told.run.reserved,
        "stage": told.stage,
        "plan_peak_bytes": told.planned if planned else None,
        "plan": {category.key: told.by[category] for category in Category} if planned else None,
        "matched": {category.key: told.matched[category] for category in Category} if planned else None,
        "only_in_plan": [_same_to_json(one) for one in told.only_planned],
        "only_in_run": [_same_to_json(one) for one in told.only_ran],
        "parting": None if parting is None else _parting_to_json(parting),
        "failed": None if failed is None else explanation_to_json(failed),
    }


def _same_to_json(one: Same) -> dict[str, Any]:
    return {"what": one.what, "category": one.category or None, "bytes": one.size, "count": one.times}


def _parting_to_json(parting: Parting) -> dict[str, Any]:
    planned, ran = parting.planned, parting.ran
    tensor = planned.tensor if planned is not None else None
    return {
        "same_requests": parting.same,
        "plan": None
        if planned is None or tensor is None
        else {"tensor": tensor.name, "module": tensor.module, "phase": tensor.phase, "bytes": planned.size},
        "run": None
        if ran is None
        else {"bytes": ran.size, "frame": str(parting.frame) if parting.frame is not None else None},
    }
