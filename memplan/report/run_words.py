"""A recorded run in few words: what ran, on what, and how far it was from its estimate."""

from __future__ import annotations

from ..measured import code_of
from ..plan.errors import one_line
from ..records.differences import Difference, judged
from ..records.record import Record
from .units import MINUS

DEGREES = ("tp", "pp", "dp", "cp", "ep", "vpp")


def model_words(record: Record) -> str:
    return one_line(record.ran.model.name)


def framework_words(record: Record) -> str:
    """``fsdp``; ``megatron by torch`` where another's code ran than the plan's framework has."""
    framework, code = record.ran.framework, record.run.code
    return one_line(framework if code_of(framework) == code else f"{framework} by {code}")


def layout_pieces(record: Record) -> list[str]:
    """``tp 2``, ``pp 4``: what is not 1."""
    layout = record.ran.layout
    pieces = [f"{name} {layout[name]}" for name in DEGREES if layout.get(name) not in (None, 1)]
    return pieces + ([f"zero {layout['zero']}"] if layout.get("zero") else [])


def batch_pieces(record: Record) -> list[str]:
    """The batch, the dtype and the optimizer."""
    ran = record.ran
    sizes = [(name, getattr(ran.batch, name)) for name in ("mbs", "gbs", "seq")]
    named = (one_line(ran.precision.dtype), one_line(ran.optimizer.name))
    return [*(f"{name} {size}" for name, size in sizes if size is not None), *named]


def device_words(record: Record) -> str:
    """``4 × h100-80gb``, ``h100-80gb, emulated``, ``4 × cpu``, ``fake tensors``."""
    run, hardware = record.run, record.hardware
    if run.device == "fake" or run.world == "fake":
        return "fake tensors"
    name = one_line(run.gpu or hardware.gpu or "cpu")
    if run.world == "emulated":
        return f"{name}, emulated"
    count = record.ran.hardware.gpus or len(run.ranks)  # of a run that failed not all have a reading
    return name if count == 1 else f"{count} × {name}"


def part_words(difference: Difference | None) -> str:
    """``+1.2 %``: how much more was estimated than measured; nothing where that is not known."""
    if difference is None or difference.part is None:
        return ""
    figure = f"{100 * abs(difference.part):.1f}"
    if not figure.strip("0."):
        return "0.0 %"
    return f"{MINUS if difference.part < 0 else '+'}{figure} %"


def percent_words(part: float) -> str:
    """A tolerance: ``3 %``, ``0.5 %``."""
    return f"{100 * part:.4g} %"


def verdict_words(record: Record, found: tuple[Difference, ...]) -> str:
    """What follows the verdict."""
    tolerance = percent_words(record.tolerance)
    failures = record.run.failures
    if record.verdict == "failed" and failures:
        first, more = failures[0], len(failures) - 1
        who = "the run" if first.rank is None else f"rank {first.rank}"
        when = f" in {first.when}" if first.when else ""
        others = f"; {more} more failed" if more else ""
        return f"{who}, {first.kind.replace('-', ' ')}{one_line(when)}: {one_line(first.message)}{others}"
    if record.verdict == "failed":
        return "it did not run to its end"
    all_judged = judged(found)
    if record.verdict == "nothing measured" or not all_judged:
        return "there is no reading that the estimate has, too"
    furthest = max(all_judged, key=lambda one: abs(one.part or 0.0))
    where = f" on stage {furthest.stage}" if len(all_judged) > 1 else ""
    return f"{furthest.reading} {part_words(furthest)} from measured{where}, tolerance {tolerance}{_in_place(record)}"


def _in_place(record: Record) -> str:
    """Which framework it says nothing about, where another one's shape ran."""
    given, ran = record.plan.get("framework"), record.ran.framework
    return "" if given in (None, ran) else one_line(f"; of {ran}, which ran in place of {given}")
