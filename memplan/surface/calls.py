"""The functions: each reads what its command reads, by the same code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Literal

from ..plan.errors import PlanError
from .answers import Estimate, Explanation, Record, Suggestion, shown
from .plans import Given, as_arguments, constructed, flags_of, read_any

if TYPE_CHECKING:
    from ..records.readings import Code
    from ..search.answer import Objective


def estimate(plan: Given = None, /, *, records: bool = True, **fields: object) -> Estimate:
    """The memory of every stage, with what and when. ``records``: with what your own runs measured of GPUs, as the
    command has it without ``--no-records``."""
    from ..commands.estimate import estimated
    from ..commands.recorded import measured_of, warned

    with as_arguments():
        read, known, problem = read_any(plan, flags_of(fields), traced=True), *measured_of(no_records=not records)
        found = estimated(warned(read, problem), known)
    return shown(Estimate(**{field.name: getattr(found, field.name) for field in fields_of(found)}), known)


def suggest(
    plan: Given = None,
    /,
    *,
    objective: Objective = "time",
    top: int = 4,
    fix: Iterable[str] = (),
    records: bool = True,
    **fields: object,
) -> Suggestion:
    """The fastest layout that fits (or the ``objective`` ``"memory"`` or ``"gpus"``), and ``top`` to compare with it.

    The search keeps those fields that ``fix`` names: ``fix=["tp", "mbs=2"]``. What else ``fields`` and the plan say of
    its layout is where the search starts, as on the command line.
    """
    from ..commands.fixed import fixes_of, with_fixes
    from ..commands.recorded import measured_of, warned
    from ..commands.suggest_partition import answered, check_search

    with as_arguments():
        check_search(top, objective)
        flags, fixes = flags_of(fields), fixes_of([fix] if isinstance(fix, str) else tuple(fix))
        read, known, problem = read_any(plan, with_fixes(flags, fixes)), *measured_of(no_records=not records)
        answer = answered(warned(read, problem), flags, fixes, objective, top, quiet=True, known=known)
    return shown(Suggestion(**{field.name: getattr(answer, field.name) for field in fields_of(answer)}), known)


def explain(message: str, plan: Given = None, /, *, records: bool = True, **fields: object) -> Explanation:
    """What the out-of-memory ``message`` was about: a line, a traceback or a log's text. With a plan it names the
    tensor that asked, what else was in memory then, and the smallest changes that end it."""
    from ..commands.recorded import measured_of
    from ..explain import explain as explained

    with as_arguments():
        known, _ = measured_of(no_records=not records)
        flags = flags_of(fields)
        read = read_any(plan, flags) if plan is not None or flags else None
        try:
            told = explained(message, read.plan if read is not None else None, known)
        except PlanError as error:
            raise (read.located(error) if read is not None else error) from None
    return Explanation(**{field.name: getattr(told, field.name) for field in fields_of(told)})


def validate(
    plan: Given = None,
    /,
    *,
    gpus: int | None = None,
    device: Literal["cuda", "cpu", "fake"] = "cuda",
    emulate: bool = False,
    stages: Iterable[int] = (),
    code: Code = "torch",
    warmup: int = 2,
    steps: int = 3,
    tolerance: float = 0.03,
    timeout: float = 600.0,
    share_gpu: bool = False,
    force: bool = False,
    records: bool = True,
    **fields: object,
) -> Record:
    """Runs a few training steps of exactly this layout on this machine; what they needed, beside the estimate.

    ``gpus`` is how many there are for it (the plan's number, if not given), ``tolerance`` a part of what was measured,
    ``timeout`` seconds without progress. ``records``: the run is kept among yours (``memplan runs``).
    """
    from ..commands.validate import kept, recorded, run_quietly
    from ..validate.run import Where, prepared

    with as_arguments():
        read = read_any(plan, flags_of(fields))
        if read.plan.hardware.gpus is None and gpus is not None:
            read = read_any(plan, flags_of({**fields, "gpus": gpus}))
        where = Where(
            gpus=gpus or read.plan.hardware.gpus or 1,
            code=code,
            device=device,
            emulates=emulate,
            warmup=warmup,
            steps=steps,
            patience=timeout,
            shares=share_gpu,
            forces=force,
            stages=tuple(stages),
        )
        try:
            asked = prepared(read.plan, where)
        except PlanError as error:
            raise read.located(error) from None
        made = recorded(asked, read, run_quietly(asked), tolerance, "memplan.validate(…)")
    assert made is not None  # one machine has the first rank
    if records:
        kept(made)
    return constructed(Record, made)
