"""The answer in a sentence: does it fit, and if not, which stage fails and on what."""

from __future__ import annotations

from rich.text import Text

from ..result import Estimate, StageEstimate
from .names import stage_word
from .palette import BAD, CAUTION, GOOD
from .rows import free_on, limit_of
from .units import size


def reading_of(stage: StageEstimate) -> str:
    """The furthest reading that is known of the stage, which is its headline."""
    known = (("device", stage.device), ("reserved", stage.reserved), ("allocated", stage.allocated))
    return next((name for name, count in known if count is not None), "requested")


def verdict(estimate: Estimate) -> Text:
    """One sentence: ``Does not fit: stage 31 needs 33.08 GiB of 31.75 GiB on v100-32gb …``."""
    worst = estimate.stages[estimate.peak_stage]
    who = _who(estimate, worst)
    need = f"{size(worst.headline)}"
    if reading_of(worst) != "device":
        need = f"at least {need} ({reading_of(worst)})"
    free = free_on(worst, limit_of(estimate))
    if free is None:
        return Text.assemble(("No GPU named", f"bold {CAUTION}"), f": {who} needs {need} — {_cause(worst)}")
    if free >= 0 and estimate.fits is None:
        return Text.assemble(
            ("May fit", f"bold {CAUTION}"),
            f": {who} needs {need} of {_limit(estimate)}; what the driver adds to that is not known",
        )
    if free >= 0:
        most = "most, " if len(estimate.stages) > 1 else ""
        return Text.assemble(
            ("Fits", f"bold {GOOD}"), f": {who} needs {most}{need} of {_limit(estimate)}; {size(free)} free"
        )
    return Text.assemble(
        ("Does not fit", f"bold {BAD}"),
        f": {who} needs {need} of {_limit(estimate)}, {size(-free)} too much — {_cause(worst)}{_others(estimate)}",
    )


def _who(estimate: Estimate, stage: StageEstimate) -> str:
    """``stage 31``; without a pipeline, ``the GPU`` or ``each GPU``."""
    if len(estimate.stages) > 1:
        return f"{stage_word(estimate.plan)} {stage.stage}"
    return "each GPU" if len(stage.ranks) > 1 else "the GPU"


def _limit(estimate: Estimate) -> str:
    """The capacity, less the headroom where there is one, and whose it is."""
    text = size(estimate.capacity or 0)
    if estimate.headroom:
        text += f" less {size(estimate.headroom)} headroom"
    gpu = estimate.plan.hardware.gpu
    return f"{text} on {gpu}" if gpu else text


def _cause(stage: StageEstimate) -> str:
    peak = stage.peak
    tensor = f"{peak.tensor} in " if peak.tensor else ""
    return f"{tensor}{peak.module}, {peak.phase}"


def _others(estimate: Estimate) -> str:
    """How many more stages do not fit."""
    limit = limit_of(estimate)
    over = sum((free_on(stage, limit) or 0) < 0 for stage in estimate.stages)
    return f"; {over} of {len(estimate.stages)} {stage_word(estimate.plan)}s are over" if over > 1 else ""
