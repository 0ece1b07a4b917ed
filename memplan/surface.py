"""What ``import memplan`` offers: the command line's answers as values.

Functions here read what commands read, by the same code, and refuse what commands refuse (``PlanError``,
``LackingError``). A plan is given as a path, a built-in example's name, a mapping, a ``Plan``, or by fields alone::

    estimate("plan.yaml", mbs=2)
    estimate({"model": "llama-3-8b", "gpus": 8, "gpu": "h100", "framework": "fsdp"})
    estimate(model="llama-3-8b", gpus=8, gpu="h100", framework="fsdp")

Fields are named as the command line's flags are, with ``_`` for ``-``, and stand over what the plan says, as flags do.
An answer has ``to_dict()``, which is the command's JSON; it prints with rich, and shows as HTML in a notebook.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr

from . import result
from .device.measured import NOTHING, Measured
from .explain import result as explanations
from .plan.errors import ABSENT, Origin, PlanError
from .plan.fields import by_flag, plan_fields
from .plan.node import Node, scalar
from .plan.notes import notes_of
from .plan.plan import Plan as _Plan
from .plan.read import Flags, ReadPlan, Source, build_plan
from .records import record as records
from .report.suggestion import Answer
from .values import dataclass

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.terminal_theme import TerminalTheme
    from typing_extensions import Self

    from .records.readings import Code
    from .search.answer import Objective

Given: TypeAlias = "str | os.PathLike[str] | Mapping[str, object] | _Plan | None"
"""Where a plan is: a path or a built-in example's name; its fields; a plan; or nothing, where fields say it all."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a plan was read from."""

    place: str | Source | None
    from_: str | None
    flags: Flags

    def read(self, *, traced: bool) -> ReadPlan:
        from .commands.launched import LaunchFlags, read_given

        if isinstance(self.place, Source):
            return build_plan(self.place, self.flags, traced=traced)
        return read_given(self.place, LaunchFlags(self.from_, (), False, None), self.flags, traced=traced)


class Plan(_Plan):
    """A training job, as it was read: before defaults are filled in. Immutable; ``read_plan`` makes it, and another
    with other fields: ``read_plan(plan, mbs=2)``."""

    model_config = ConfigDict(defer_build=True)
    _asked: _Asked | None = PrivateAttr(None)

    @classmethod
    def _of(cls, plan: _Plan, asked: _Asked | None = None) -> Self:
        made = _constructed(cls, plan)
        made._asked = asked
        return made

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        if update:
            copied._asked = None  # it is no longer what was read
        return copied


def read_plan(plan: Given = None, /, *, from_: str | None = None, **fields: object) -> Plan:
    """The plan at a path, of a built-in example's name, in a mapping, or another plan, with ``fields`` over it.

    A mapping has sections as a plan's file has them (``{"layout": {"tp": 4}}``), flags' names (``{"tp": 4}``), or both.
    ``from_`` is the command line's ``--from``: ``read_plan("train.sh", from_="megatron", gpus=64)``.
    """
    with _as_arguments():
        asked = _asked(plan, from_, _flags(fields))
        return Plan._of(asked.read(traced=True).plan, asked)


def estimate(plan: Given = None, /, *, records: bool = True, **fields: object) -> Estimate:
    """The memory of every stage, with what and when. ``records``: with what your own runs measured of GPUs, as the
    command has it without ``--no-records``."""
    from .commands.estimate import estimated
    from .commands.recorded import measured_of, warned

    with _as_arguments():
        read, known, problem = _read(plan, _flags(fields), traced=True), *measured_of(no_records=not records)
        found = estimated(warned(read, problem), known)
    return _shown(Estimate(**{field.name: getattr(found, field.name) for field in fields_of(found)}), known)


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
    from .commands.fixed import fixes_of, with_fixes
    from .commands.recorded import measured_of, warned
    from .commands.suggest_partition import answered, check_search

    with _as_arguments():
        check_search(top, objective)
        flags, fixes = _flags(fields), fixes_of([fix] if isinstance(fix, str) else tuple(fix))
        read, known, problem = _read(plan, with_fixes(flags, fixes)), *measured_of(no_records=not records)
        answer = answered(warned(read, problem), flags, fixes, objective, top, quiet=True, known=known)
    return _shown(Suggestion(**{field.name: getattr(answer, field.name) for field in fields_of(answer)}), known)


def explain(message: str, plan: Given = None, /, *, records: bool = True, **fields: object) -> Explanation:
    """What the out-of-memory ``message`` was about: a line, a traceback or a log's text. With a plan it names the
    tensor that asked, what else was in memory then, and the smallest changes that end it."""
    from .commands.recorded import measured_of
    from .explain import explain as explained

    with _as_arguments():
        known, _ = measured_of(no_records=not records)
        flags = _flags(fields)
        read = _read(plan, flags) if plan is not None or flags else None
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
    from .commands.validate import kept, recorded, run_quietly
    from .validate.run import Where, prepared

    with _as_arguments():
        read = _read(plan, _flags(fields))
        if read.plan.hardware.gpus is None and gpus is not None:
            read = _read(plan, _flags({**fields, "gpus": gpus}))
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
    return _constructed(Record, made)


# -- answers ------------------------------------------------------------------------------------------------


class _Shown:
    """How an answer looks in a terminal, in a notebook and as a page."""

    _known: ClassVar[Measured] = NOTHING
    """What was known of the user's GPUs; each estimate and search has its own."""

    def _report(self, console: Console) -> Iterator[RenderableType]:
        """The command's report, part by part."""
        raise NotImplementedError

    def to_html(self) -> str:
        """The page that the command writes with ``--html``."""
        from .report.html.page import page
        from .report.html.reports import converted, wide_console

        return page(repr(self).strip("<>"), *converted(self._report(wide_console())), data={}).decode()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from .report.printing import tidy

        yield from map(tidy, self._report(console))

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


class Estimate(_Shown, result.Estimate):
    """The answer of ``estimate``: ``fits``, ``peak`` and ``capacity`` in bytes, ``stages`` with their ``breakdown``,
    ``warnings``, ``assumptions``; ``plan`` has every default filled in."""

    @property
    def verdict(self) -> str:
        """``fits``, ``fits-with-retries``, ``tight``, ``does-not-fit`` or ``unknown``."""
        return self.judged.verdict.value

    def to_dict(self) -> dict[str, Any]:
        """What ``memplan estimate --json`` prints."""
        from .report.json import to_json

        return to_json(self)

    def to_html(self) -> str:
        from .estimate import timelines
        from .report.html.estimate import estimate_page

        return estimate_page(self, tuple(timelines(self, known=self._known))).decode()

    def _report(self, console: Console) -> Iterator[RenderableType]:
        from .estimate import timelines
        from .report.estimate import estimate_report

        return estimate_report(self, console, lines=tuple(timelines(self, (self.peak_stage,), self._known)))

    def __repr__(self) -> str:
        from .report.estimate import verdict

        return f"<{verdict(self).plain}>"


class Suggestion(_Shown, Answer):
    """The answer of ``suggest``: ``found.best`` are the recommended layout and the alternatives, ``found.front`` those
    of which none needs less memory and less time."""

    @property
    def plan(self) -> Plan | None:
        """The recommended layout, to estimate or to run; ``None`` where nothing fits."""
        return Plan._of(self.found.best[0].plan) if self.found.best else None

    def to_dict(self) -> dict[str, Any]:
        """What ``memplan suggest-partition --json`` prints."""
        from .report.suggestion_json import suggestion_to_json

        return suggestion_to_json(self)

    def to_html(self) -> str:
        from .commands.suggest_partition import page_of

        return page_of(self, self._known).decode()

    def _report(self, console: Console) -> Iterator[RenderableType]:
        from .report.suggestion import suggestion_report

        return suggestion_report(self, console)

    def __repr__(self) -> str:
        from .report.suggestion_words import layout_words

        return f"<Recommended: {layout_words(self.found.best[0])}>" if self.found.best else "<Nothing fits>"


class Explanation(_Shown, explanations.Explanation):
    """The answer of ``explain``: ``candidates`` for the tensor that asked, the likeliest first, ``causes`` with what
    helps, ``estimate.ways_out`` that end it, ``guesses`` where there is no plan."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """What ``memplan explain --json`` prints."""
        from .report.explanation import explanation_to_json

        return explanation_to_json(self)

    def _report(self, console: Console) -> Iterator[RenderableType]:
        from .report.explanation import explanation_report

        return explanation_report(self)

    def __repr__(self) -> str:
        from .report.explanation import verdict

        return f"<{verdict(self).plain}>"


class Record(_Shown, records.Record):
    """A validated run: ``verdict``, ``estimate`` and what every rank of ``run`` measured."""

    def to_dict(self) -> dict[str, Any]:
        """What ``memplan validate --json`` prints."""
        return records.to_json(self)

    def to_html(self) -> str:
        from .report.html.runs import run_page

        return run_page(self).decode()

    def _report(self, console: Console) -> Iterator[RenderableType]:
        from .report.runs import run_report

        return run_report(self)

    def __repr__(self) -> str:
        return f"<Run {self.id}: {self.verdict}>"


Answered = TypeVar("Answered", bound=_Shown)


def _shown(answer: Answered, known: Measured) -> Answered:
    object.__setattr__(answer, "_known", known)  # beside the fields, which say what the answer is
    return answer


# -- reading ------------------------------------------------------------------------------------------------


def _read(plan: Given, flags: Flags, *, traced: bool = False) -> ReadPlan:
    if isinstance(plan, _Plan) and not flags and getattr(plan, "_asked", None) is None:
        own = _constructed(_Plan, plan)
        return ReadPlan(own, {}, notes_of(own))
    return _asked(plan, None, flags).read(traced=traced)


Data = TypeVar("Data", bound=BaseModel)


def _constructed(kind: type[Data], value: BaseModel) -> Data:
    """``value``, which was checked when it was made, as one of ``kind``."""
    return kind.model_construct(value.model_fields_set, **{name: getattr(value, name) for name in kind.model_fields})


def _asked(plan: Given, from_: str | None, flags: Flags) -> _Asked:
    if isinstance(plan, Mapping):
        document, own = _mapping(plan)
        return _Asked(Source(document, Path()), None, {**own, **flags})
    if isinstance(plan, _Plan):
        before = getattr(plan, "_asked", None) or _Asked(_source(plan), None, {})
        return replace(before, flags={**before.flags, **flags})
    return _Asked(None if plan is None else os.fspath(plan), from_, flags)


def _source(plan: _Plan) -> Source:
    """A plan that was made by itself, as written."""
    from .plan.normalise import normalised
    from .plan.write import plan_yaml
    from .plan.yaml_nodes import parse_yaml

    return Source(normalised(parse_yaml(plan_yaml(plan), "the plan", line=False)), Path())


def _mapping(plan: Mapping[str, object]) -> tuple[Node, Flags]:
    """The fields and sections of a plan's file, and the rest as flags."""
    from .plan.normalise import normalised

    own = {path.partition(".")[0] for path in plan_fields()} | {"$schema"}
    for name in plan:
        if not isinstance(name, str):
            raise PlanError("", ABSENT, f"{name!r} is no name of a field", origin=Origin("plan"))
    document = {name: _node(value, Origin(_argument(name))) for name, value in plan.items() if name in own}
    flags = _flags({name: value for name, value in plan.items() if name not in own})
    return normalised(Node(document, Origin("plan"))), flags


def _node(value: object, origin: Origin) -> Node:
    if isinstance(value, Mapping):
        return Node({str(key): _node(item, origin) for key, item in value.items()}, origin)
    if isinstance(value, list | tuple):
        return Node([_node(item, origin) for item in value], origin)
    if value is None or isinstance(value, bool | int | float):
        return Node(value, origin)
    return scalar(os.fspath(value) if isinstance(value, os.PathLike) else str(value), origin)


def _flags(fields: Mapping[str, object]) -> dict[str, str | tuple[str, ...]]:
    """``fields`` as the command line has them."""
    flags: dict[str, str | tuple[str, ...]] = {}
    for name, value in fields.items():
        flag = name.replace("_", "-")
        if flag not in by_flag():
            known = [known.replace("-", "_") for known in by_flag()]
            raise PlanError(name, ABSENT, "is not a field of a plan", origin=Origin("argument"), known=known)
        if value is not None:
            flags[flag] = _text(value)
    return flags


def _text(value: object) -> str | tuple[str, ...]:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        if all(isinstance(item, str) for item in value.values()):
            return tuple(f"{key}={item}" for key, item in value.items())  # variables
        return json.dumps({str(key): item for key, item in value.items()})  # a device map
    if isinstance(value, list | tuple):
        return tuple(map(str, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _argument(name: str) -> str:
    return f"argument {name.replace('-', '_')}"


@contextmanager
def _as_arguments() -> Iterator[None]:
    """Errors that name a flag name the argument."""
    try:
        yield
    except PlanError as error:
        source = error.origin.source if error.origin is not None else ""
        if not source.startswith("--"):
            raise
        origin = Origin(_argument(source[2:]))
        raise PlanError(error.field, error.value, error.problem, origin=origin, known=error.known) from None
