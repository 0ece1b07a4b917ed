"""``memplan suggest-partition``: the fastest layout that fits, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ..frameworks import ROOMS, framework
from ..plan.errors import ABSENT, PlanError, check_choice, one_line, together, wrong_at
from ..plan.fields import flags_between, plan_fields
from ..plan.implied import IMPLIED
from ..plan.notes import Note, says_choice
from ..plan.read import Flags, ReadPlan
from ..report.progress import Report, progress
from ..values import NamedTuple, replace
from .fixed import fixed_values, fixes_of, kept_beside, located, starts, with_fixes, without_open
from .launched import (
    From,
    LaunchFlags,
    Place,
    Set,
    Strict,
    VocabSize,
    flags_of_launch,
    placed,
    read_given,
    with_gpu_said,
)
from .output import (
    OUTPUT,
    PRINTED,
    Csv,
    Files,
    Html,
    Json,
    NoColor,
    NoRecords,
    Overwrite,
    PlanOrLaunchFiles,
    Plot,
    Verbose,
    console,
    file_of,
    measured_of,
    print_json,
    print_text,
    printing,
    tell_of_shell,
    warned,
    without_collection,
)

if TYPE_CHECKING:
    from ..device.measured import Measured
    from ..plan.plan import Plan
    from ..report.suggestion import Answer
    from ..search.answer import Objective, Sought
    from ..search.result import Found, Offer

_SEARCH = "Search"

OBJECTIVES = ("time", "memory", "gpus")
_ALSO_CALLED = {
    **dict.fromkeys(("speed", "fast", "fastest", "throughput", "latency", "mfu", "tokens"), "time"),
    **dict.fromkeys(("mem", "vram", "smallest", "peak"), "memory"),
    **dict.fromkeys(("gpu", "fewest", "fewest-gpus", "num-gpus"), "gpus"),
}
"""Other words for them."""
MOST = 50
"""Layouts that a list can hold."""
NOTHING_FITS = 1

MEANINGS = {
    "--fix": "a field to keep fixed: --fix tp=4, or --fix tp for the plan's value",
    "--objective": "time, memory or gpus",
    "--plot": "a file that ends in .svg or .png",
    "--top": f"how many layouts to show, from 1 to {MOST}",
    "--write": "the file for the recommended plan",
}
"""What to write behind a flag that was given without a value."""


def suggest_partition(
    plan: PlanOrLaunchFiles = None,
    from_: From = None,
    set_: Set = None,
    vocab_size: VocabSize = None,
    strict: Strict = False,
    top: Annotated[
        int, typer.Option("--top", metavar="N", help="number of layouts to show, best first", rich_help_panel=_SEARCH)
    ] = 4,
    objective: Annotated[
        str,
        typer.Option(
            "--objective", metavar="NAME", help="quantity to minimise: time, memory or gpus", rich_help_panel=_SEARCH
        ),
    ] = "time",
    fix: Annotated[
        list[str] | None,
        typer.Option(
            "--fix",
            metavar="NAME=VALUE",
            help="keep this field fixed: tp=4, or tp for the plan's value; separate several with commas. What the plan "
            "and its fields' flags (--tp 4) say only starts the search",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    no_records: NoRecords = False,
    write: Annotated[
        str | None,
        typer.Option(
            "--write", metavar="FILE.yaml", help="write the recommended layout as a plan", rich_help_panel=OUTPUT
        ),
    ] = None,
    plot: Plot = None,
    html: Html = None,
    force: Overwrite = False,
    json: Json = False,
    csv: Csv = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="print only the layout", rich_help_panel=OUTPUT)] = False,
    verbose: Verbose = False,
    no_color: NoColor = False,
    flags: Flags = {},  # noqa: B006 (replaced by a flag for every field)
) -> int:
    """The fastest layout that fits: parallel sizes, micro-batch, recompute, and what each stage holds.

    Exit code 0: something fits. 1: nothing does. 2: the plan is wrong.
    """
    if json and csv == PRINTED:
        raise typer.BadParameter("--json and --csv exclude each other")
    objective = _ALSO_CALLED.get(objective.lower().replace("_", "-"), objective.lower())
    check_search(top, objective)
    files = Files({"--write": write, "--csv": file_of(csv), "--plot": plot, "--html": html}, force)
    files.check()
    plan, flags = with_gpu_said(plan, flags)
    launch_flags = flags_of_launch(placed(plan), from_, set_, strict=strict, vocab_size=vocab_size)
    fixes, flags = fixes_of(fix or ()), without_open(flags)
    read = _read(placed(plan), launch_flags, with_fixes(flags, fixes), fixes)
    if not (json or csv == PRINTED or quiet):
        tell_of_shell(read.plan)
    known, problem = measured_of(no_records=no_records)
    read = warned(read, problem)
    with without_collection():
        answer = answered(read, flags, fixes, cast("Objective", objective), top, quiet=quiet, known=known)
        found = answer.found
        answer = replace(answer, written=tuple(_written(found, files)))
        answer = replace(answer, written=(*answer.written, *files.write("--html", lambda _: page_of(answer, known))))
    if json:
        from ..report.suggestion_json import suggestion_to_json

        print_json(suggestion_to_json(answer))
    elif csv == PRINTED:
        print_text(_rows(found))
    else:
        from ..report.suggestion import print_suggestion

        with printing():
            print_suggestion(answer, console(no_color), verbose=verbose, quiet=quiet)
    return 0 if found.best else NOTHING_FITS


def check_search(top: int, objective: str) -> None:
    """``PlanError`` where a search is asked for what there is not."""
    if not 1 <= top <= MOST:
        raise wrong_at("--top", f"{top} must be from 1 to {MOST}")
    check_choice("--objective", objective, OBJECTIVES)


def _read(place: Place, launch_flags: LaunchFlags, flags: Flags, fixes: Mapping[str, str | None]) -> ReadPlan:
    try:
        return read_given(place, launch_flags, flags, traced=True)
    except PlanError as error:
        if place is None:
            lacking = _lacking(gpu="gpu" in flags, batch=bool({"gbs", "accumulation"} & flags.keys()))
            error = together([error, *lacking])
        raise located(error, fixes) from None


def answered(
    read: ReadPlan,
    flags: Flags,
    fixes: Mapping[str, str | None],
    objective: Objective,
    top: int,
    *,
    quiet: bool,
    known: Measured,
) -> Answer:
    """The answer of a search, in all frameworks where the plan names none."""
    from ..report.suggestion import Answer
    from ..result import Notice
    from ..search.changes import methods_of

    typed = read.plan
    read = _with_own_gpus(_with_own_batch(read))
    offers: tuple[Offer, ...] = ()
    with progress(f"searching layouts of {read.plan.model.name}", quiet=quiet) as report:
        asked = _Asked(fixes, objective, top, known, report)
        found = _found(read, asked, _sought(read, asked)) if read.names_framework else None
        if found is None or (not found.best and _is_implied(read)):
            read, found, offers = _of_all(_with_own_batch(read, is_needed=found is not None), asked)
    methods = methods_of(found.best[0]) if found.best else ()
    notes = tuple(Notice(note.code, note.message) for note in read.warnings)
    unsaid = {*kept_beside(flags, fixes), *(("framework",) if offers else ())}
    if read.spoken is not None:  # a launcher may choose the batch by the sizes
        unsaid.add("batch.gbs")
    added = flags_between(typed, found.best[0].plan, unsaid) if found.best else ""
    return Answer(
        found,
        methods,
        notes,
        tuple(read.assumptions),
        offers=offers,
        started=starts(flags, fixes, found.chosen_beside_layout),
        flags=added,
    )


def _with_own_batch(read: ReadPlan, *, is_needed: bool = False) -> ReadPlan:
    """``read`` with the global batch that its micro-batches make on its GPUs, as an estimate takes it, where it says
    their size and no global batch; ``is_needed`` where it does not, too, as one process has searched without."""
    from ..plan.resolve import resolve

    batch, replicates = read.plan.batch, "dp" in framework(read.plan.framework).supports.sizes
    named = batch.gbs is not None or batch.accumulation is not None
    if named or not (is_needed or (replicates and "mbs" in batch.model_fields_set)):
        return read
    try:
        gbs = resolve(read.plan).batch.gbs
    except PlanError:
        return read
    told = Note("own-batch", f"no global batch was named: {gbs}, which micro-batches of {batch.mbs} make")
    plan = read.plan.model_copy(update={"batch": batch.model_copy(update={"gbs": gbs})})
    return replace(read, plan=plan, warnings=(*read.warnings, told))


def _with_own_gpus(read: ReadPlan) -> ReadPlan:
    """``read``, which says so where it is on one GPU because it says nothing else."""
    plan = read.plan
    named = plan.hardware.gpus is not None or plan.layout.model_fields_set or plan.device_map is not None
    if named or not (_is_implied(read) or not read.names_framework):
        return read
    told = Note("one-gpu", "no number of GPUs was named: one is searched; --gpus 8 names another")
    return replace(read, warnings=(*read.warnings, told))


def _is_implied(read: ReadPlan) -> bool:
    """Whether nobody named the framework, and one process on one GPU is meant."""
    return read.origins.get("framework") == IMPLIED and read.names_framework


class _Asked(NamedTuple):
    """What is asked of every search."""

    fixes: Mapping[str, str | None]
    objective: Objective
    top: int
    known: Measured
    report: Report


def _sought(read: ReadPlan, asked: _Asked, where: str = "") -> Sought:
    """A search that has not begun; ``where``: what is told of it while it goes on."""
    from ..search.answer import Sought

    _check_needed(read.plan)
    fixed = fixed_values(read.plan, asked.fixes)
    said = f" ({where})" if where else ""
    with _located(read, asked):
        return Sought(
            read.plan,
            fixed,
            asked.objective,
            asked.top,
            lambda what, done, of: asked.report(what + said, done, of),
            asked.known,
        )


@contextmanager
def _located(read: ReadPlan, asked: _Asked) -> Iterator[None]:
    try:
        yield
    except PlanError as error:
        raise located(error if error.value is ABSENT else read.located(error), asked.fixes) from None


def _found(read: ReadPlan, asked: _Asked, sought: Sought) -> Found:
    with _located(read, asked):
        found = sought.found()
        if not found.best and found.closest is None:
            raise _no_layout(found)
        return found


def _of_all(read: ReadPlan, asked: _Asked) -> tuple[ReadPlan, Found, tuple[Offer, ...]]:
    """The answer in the best of all frameworks for a plan that names none, and what each of them offers.

    One process with layers on several GPUs, of which one works at a time, is the best only where nothing else fits.
    A framework that keeps no fp32 copy of the parameters trains with other numbers than the rest: it is the best only
    where the rest has nothing.
    """
    from ..search.result import Offer

    _check_needed(read.plan)
    named = replace(read, warnings=tuple(note for note in read.warnings if not says_choice(note.code)))
    begun: dict[str, tuple[ReadPlan, Sought]] = {}

    def offered(name: str, at: int) -> Offer:
        own = replace(named, plan=read.plan.model_copy(update={"framework": name}))
        try:
            sought = _sought(own, asked, f"{name}, framework {at} of {len(ROOMS)}")
            with _located(own, asked):
                offer = sought.offer()
            if offer.best is None and offer.closest is None:
                _found(own, asked, sought)  # says why there is none
            begun[name] = own, sought
            return offer
        except PlanError as error:
            return Offer(name, asked.objective, refused=error)

    offers = tuple(offered(name, at) for at, name in enumerate(ROOMS, 1))
    searched = [offer for offer in offers if offer.refused is None]
    parallel = [one for one in searched if not framework(one.framework).supports.several_gpus_of_a_process]
    refused = {one.framework: one.refused for one in offers}.get(read.plan.framework)
    if not parallel and refused is not None:
        raise read.located(refused)
    fitting = [one for one in parallel if one.best is not None]
    best = min(fitting or searched, key=lambda offer: offer.rank)
    own, sought = begun[best.framework]
    others = " and ".join(filter(None, [", ".join(one.framework for one in searched[:-1]), searched[-1].framework]))
    said = f"no framework was named: {others} were searched, and {best.framework} is the best"
    if len(searched) == 1:
        said = f"no framework was named: {others} is the only one that takes this plan"
    if refused is not None:
        said += f"; {read.plan.framework} {refused.problem}"
    return read.choosing(best.framework, said), _found(own, asked, sought), offers


def _no_layout(found: Found) -> PlanError:
    """The rule that refused most layouts, where every layout that a framework's rules of division leave was refused."""
    rules = found.counts.refused
    checks = [rule for rule in rules if rule.partition(": ")[0] in plan_fields()] or list(rules)
    worst = max(checks, key=lambda rule: (rules[rule], rule), default="none is left")
    field, _, problem = worst.partition(": ")
    if not problem:
        return PlanError("", ABSENT, f"no layout runs: {worst}")
    section, _, name = field.rpartition(".")
    value = getattr(getattr(found.base, section) if section else found.base, name, ABSENT)
    if problem.startswith(f"must be {value} "):  # a layout's, which the plan does not say
        return PlanError("hardware.gpus", found.base.hardware.gpus, f"{field} {problem}; no layout runs")
    return PlanError(field, value, f"{problem}; no layout runs")


def _lacking(*, gpu: bool, batch: bool) -> Iterator[PlanError]:
    """What a search needs, of which the job has no ``gpu`` or no global ``batch`` that does not follow from the
    layout."""
    if not gpu:
        problem = "is missing: a search needs the GPU's memory and speed (--gpu h100-80gb)"
        yield PlanError("hardware.gpu", ABSENT, problem)
    if not batch:
        problem = "is missing: a search keeps the global batch, whatever the layout (--gbs 512)"
        yield PlanError("batch.gbs", ABSENT, problem)


def _check_needed(plan: Plan) -> None:
    batch, replicates = plan.batch, "dp" in framework(plan.framework).supports.sizes
    keeps = batch.gbs is not None or batch.accumulation is not None or not replicates
    lacking = list(_lacking(gpu=plan.hardware.gpu is not None, batch=keeps))
    if lacking:
        raise together(lacking)


# -- files --------------------------------------------------------------------------------------------------


def _written(found: Found, files: Files) -> Iterator[str]:
    """Files that were written. Without a layout that fits there is no plan to write."""
    if found.best:
        yield from files.write("--write", lambda file: _plan_text(found, one_line(Path(file).name)).encode())
    yield from files.write("--csv", lambda _: _rows(found).encode())
    if found.front or found.closest:
        yield from files.write("--plot", lambda file: _picture(found, Path(file)))


def _rows(found: Found) -> str:
    from ..report.suggestion_json import suggestion_to_csv

    return suggestion_to_csv(found)


def _picture(found: Found, file: Path) -> bytes:
    from ..report.plot import format_of, front_picture

    return front_picture(found, format_of(file))


def page_of(answer: Answer, known: Measured) -> bytes:
    """The page of ``--html``."""
    from ..estimate import estimate, timelines
    from ..report.html.estimate import suggestion_page

    return suggestion_page(
        answer, lambda one: estimate(one.plan, known, one.fullest), lambda own: tuple(timelines(own, known=known))
    )


def _plan_text(found: Found, name: str) -> str:
    from ..plan.write import plan_yaml
    from ..report.names import size
    from ..report.suggestion_words import layout_words, time_unit

    best = found.best[0]
    step = time_unit(best.seconds).text(best.seconds)
    head = [
        f"A plan by memplan suggest-partition. Estimate it with: memplan estimate {name}",
        layout_words(best),
        f"The fullest stage needs {size(best.needs)}; a step takes about {step}.",
    ]
    return plan_yaml(best.plan, head)
