"""What functions answer: the values that reports print, with the command's JSON, as text, in a notebook, as a page.

The functions: each reads what its command reads, by the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from .. import result
from ..device.measured import NOTHING, Measured
from ..explain import requests as explanations
from ..plan.errors import ABSENT, Origin, PlanError
from ..records import record as records
from ..records.readings import Code
from ..report.suggestion import Answer
from .plans import Given, Plan, as_arguments, constructed, flags_of, read_any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.terminal_theme import TerminalTheme

    from ..search.answer import Objective


class Shown:
    """How an answer looks in a terminal, in a notebook and as a page."""

    _known: ClassVar[Measured] = NOTHING
    """What was known of the user's GPUs; each estimate and search has its own."""

    def _report(self, console: Console) -> Iterator[RenderableType]:
        """The command's report, part by part."""
        raise NotImplementedError

    def to_html(self) -> str:
        """The page that the command writes with ``--html``."""
        from ..report.html.page import converted, page, wide_console

        return page(repr(self).strip("<>"), *converted(self._report(wide_console())), data={}).decode()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from ..report.printing import Tidy

        yield from map(Tidy, self._report(console))

    def __str__(self) -> str:
        """The command's report, without colours."""
        return self._printed("text")

    def _repr_html_(self) -> str:
        return self._printed("html")

    def _printed(self, form: Literal["text", "html"]) -> str:
        import io

        from rich.console import Console

        console = Console(
            file=io.StringIO(), record=True, width=_WIDTH, highlight=False, markup=False, emoji=False,
            force_terminal=form == "html", color_system="truecolor" if form == "html" else None,
        )  # fmt: skip
        console.print(self, end="")
        if form == "text":
            return console.export_text()
        return console.export_html(inline_styles=True, code_format=_HTML, theme=_theme())


def _theme() -> TerminalTheme:
    """Colours that can be read on light and on dark ground."""
    from rich.terminal_theme import TerminalTheme

    grey, red, green, yellow = (128, 128, 128), (214, 72, 60), (46, 145, 92), (176, 124, 20)
    return TerminalTheme((255, 255, 255), (0, 0, 0), [grey, red, green, yellow, grey, grey, grey, grey])


_WIDTH = 120
_HTML = '<pre style="line-height:1.3;white-space:pre;overflow-x:auto;font-family:monospace">{code}</pre>'


class Estimate(Shown, result.Estimate):
    """The answer of ``estimate``: ``fits``, ``peak`` and ``capacity`` in bytes, ``stages`` with their ``breakdown``,
    ``warnings``, ``assumptions``; ``plan`` has every default filled in."""

    @property
    def verdict(self) -> str:
        """``fits``, ``fits-with-retries``, ``tight``, ``does-not-fit`` or ``unknown``."""
        return self.judged.verdict.value

    def to_dict(self) -> dict[str, Any]:
        """What ``memplan estimate --json`` prints."""
        from ..report.json import to_json

        return to_json(self)

    def to_html(self) -> str:
        from ..estimate import timelines
        from ..report.html.estimate import estimate_page

        return estimate_page(self, tuple(timelines(self, known=self._known))).decode()

    def _report(self, console: Console) -> Iterator[RenderableType]:
        from ..estimate import lines
        from ..report.estimate import estimate_report

        return estimate_report(self, console, lines=tuple(lines(self, (self.peak_stage,), self._known)))

    def __repr__(self) -> str:
        from ..report.estimate import verdict

        return f"<{verdict(self).plain}>"


class Suggestion(Shown, Answer):
    """The answer of ``suggest``: ``found.best`` has the recommended layout first, then the alternatives; in
    ``found.front`` no layout needs both more memory and more time than another."""

    @property
    def plan(self) -> Plan | None:
        """The recommended layout, to estimate or to run; ``None`` where nothing fits."""
        return Plan._of(self.found.best[0].plan) if self.found.best else None

    def to_dict(self) -> dict[str, Any]:
        """What ``memplan suggest-partition --json`` prints."""
        from ..report.suggestion_json import suggestion_to_json

        return suggestion_to_json(self)

    def to_html(self) -> str:
        from ..commands.suggest_partition import page_of

        return page_of(self, self._known).decode()

    def _report(self, console: Console) -> Iterator[RenderableType]:
        from ..report.suggestion import suggestion_report

        return suggestion_report(self, console)

    def __repr__(self) -> str:
        from ..report.suggestion_words import layout_words

        return f"<Recommended: {layout_words(self.found.best[0])}>" if self.found.best else "<Nothing fits>"


class Explanation(Shown, explanations.Explanation):
    """The answer of ``explain``: ``candidates`` for the tensor that asked, the likeliest first, ``causes`` with what
    helps, ``estimate.ways_out`` with changes of the plan that help, ``guesses`` where there is no plan."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """What ``memplan explain --json`` prints."""
        from ..report.explanation import explanation_to_json

        return explanation_to_json(self)

    def _report(self, console: Console) -> Iterator[RenderableType]:
        from ..report.explanation import explanation_report

        return explanation_report(self)

    def __repr__(self) -> str:
        from ..report.explanation import verdict

        return f"<{verdict(self).plain}>"


class Record(Shown, records.Record):
    """A validated run: ``verdict``, ``estimate`` and what every rank of ``run`` measured."""

    def to_dict(self) -> dict[str, Any]:
        """What ``memplan validate --json`` prints."""
        return records.to_json(self)

    def to_html(self) -> str:
        from ..report.html.page import run_page

        return run_page(self).decode()

    def _report(self, console: Console) -> Iterator[RenderableType]:
        from ..report.runs import run_report

        return run_report(self)

    def __repr__(self) -> str:
        return f"<Run {self.id}: {self.verdict}>"


Answered = TypeVar("Answered", bound=Shown)


def shown(answer: Answered, known: Measured) -> Answered:
    object.__setattr__(answer, "_known", known)  # beside the fields, which say what the answer is
    return answer


def estimate(plan: Given = None, /, *, records: bool = True, **fields: object) -> Estimate:
    """The memory of every stage: how much, for what, and when. Sizes are in bytes, and ``None`` where not known.

    ``plan`` and ``fields`` are those of ``read_plan``. ``records=False`` leaves out what your own runs measured, as
    ``--no-records`` does. Raises ``PlanError`` where the plan is wrong or not modelled.
    """
    from ..commands.estimate import estimated
    from ..commands.output import measured_of, warned

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
    """The fastest layout that fits, and ``top`` layouts in all to compare.

    ``objective="memory"`` asks for the least memory, ``"gpus"`` for the fewest GPUs. Raises ``PlanError`` where the
    plan is wrong or names no GPU or global batch.

    The search keeps those fields that ``fix`` names: ``fix=["tp", "mbs=2"]``. What else ``fields`` and the plan say of
    its layout is where the search starts, as on the command line.
    """
    from ..commands.fixed import fixes_of, with_fixes, without_open
    from ..commands.output import measured_of, warned
    from ..commands.suggest_partition import answered, check_search

    with as_arguments():
        check_search(top, objective)
        flags, fixes = without_open(flags_of(fields)), fixes_of(_names(fix))
        read, known, problem = (
            read_any(plan, with_fixes(flags, fixes), traced=True),
            *measured_of(no_records=not records),
        )
        answer = answered(warned(read, problem), flags, fixes, objective, top, quiet=True, known=known)
    return shown(Suggestion(**{field.name: getattr(answer, field.name) for field in fields_of(answer)}), known)


def _names(fix: object) -> tuple[str, ...]:
    given = tuple(fix) if isinstance(fix, Iterable) and not isinstance(fix, str) else (fix,)
    for one in given:
        if not isinstance(one, str):
            problem = "must be names of fields, with values or without: ['tp', 'mbs=2']"
            raise PlanError("fix", str(one), problem, origin=Origin("argument"))
    return tuple(map(str, given))


def explain(message: str, plan: Given = None, /, *, records: bool = True, **fields: object) -> Explanation:
    """Why a job ran out of memory. ``message`` is a line, a traceback or a log's text.

    With a plan the answer names the tensor that asked, what else was in memory, and the smallest changes that help.
    Raises ``PlanError`` where the message is about no memory, or the plan is wrong.
    """
    from ..commands.output import measured_of
    from ..explain import explain as explained

    with as_arguments():
        if not isinstance(message, str):
            raise PlanError(
                "message",
                ABSENT,
                f"is the text of a message or a log, as Path(…).read_text(), not {message!r:.60}",
                origin=Origin("argument"),
            )
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
    """Runs a few training steps of exactly this layout here, and compares what they needed with the estimate.

    ``gpus`` is the number of GPUs to use (default: the plan's), ``tolerance`` a part of the measured bytes, ``timeout``
    seconds without progress. ``records=False`` does not keep the run among yours (``memplan runs``). Raises
    ``PlanError`` where the plan is wrong or does not run here, ``LackingError`` where CUDA or a package is missing.
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
