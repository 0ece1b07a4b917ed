"""A launch file as a plan before flags, and what the command line says of how to read it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import field

from ..plan.errors import Node, Origin, PlanError, one_line, wrong_at
from ..plan.notes import Note, limited
from ..plan.read import Flags, ReadPlan, Source, build_plan
from ..plan.spoken import Spoken
from ..values import dataclass
from .settings import Table

PUSHES = {"more": "pushes memory up", "less": "pushes memory down", "either": "may push memory either way"}


@dataclass(frozen=True, slots=True)
class Explained:
    """One argument as it was given, and what became of it."""

    name: str
    value: str
    origin: Origin
    became: str
    table: Table | None
    """Nothing for an argument that the parser does not have."""


def as_it_is(read: ReadPlan) -> ReadPlan:
    """Nothing follows from fields that flags may have changed."""
    return read


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch file as a plan before flags, what to tell its reader, and each argument explained."""

    source: Source
    notes: tuple[Note, ...]
    explained: tuple[Explained, ...] = ()
    finish: Callable[[ReadPlan], ReadPlan] = as_it_is
    """Fills in fields that depend on others which flags may have changed: batch sizes, stages."""
    assumptions: tuple[str, ...] = ()
    spoken: Spoken | None = None
    """What the file calls a plan's fields."""
    read: frozenset[str] = frozenset()
    """Flags that its plan has taken in already, and that would replace more of it than they say."""

    def flags_over(self, flags: Flags) -> Flags:
        """Those of ``flags`` that go over its plan."""
        return {name: value for name, value in flags.items() if name not in self.read}


@dataclass(frozen=True, slots=True)
class Asked:
    """The flags of the command line that say how to read the file."""

    format: str = ""
    """``--from``."""
    flags: Flags = field(default_factory=dict)
    varied: Collection[str] = ()
    """Names of flags that take several values."""
    assignments: Sequence[str] = ()
    """``--set NAME=value``."""
    strict: bool = False
    vocab_size: int | None = None
    overrides: Sequence[str] = ()
    """``model.tensor_model_parallel_size=4`` and the like of the command line."""

    @property
    def names(self) -> frozenset[str]:
        """Flags that are given, with one value or several."""
        return frozenset({*self.flags, *self.varied})

    @property
    def gpus(self) -> Node | None:
        return self.whole("gpus")

    @property
    def tokens(self) -> Node | None:
        """``--vocab-size``."""
        return Node(self.vocab_size, Origin("--vocab-size")) if self.vocab_size is not None else None

    @property
    def vocabulary(self) -> Node | None:
        """``--vocab-size`` or ``--vocab``."""
        return self.tokens or self.whole("vocab")

    def whole(self, name: str) -> Node | None:
        """The number that the flag ``name`` says, where it is one."""
        value = self.flags.get(name)
        is_whole = isinstance(value, str) and value.isascii() and value.isdigit() and 0 < len(value) < 10
        return Node(int(value), Origin(f"--{name}")) if isinstance(value, str) and is_whole and int(value) else None

    def variables(self) -> dict[str, str]:
        """Variables of a script by name."""
        found: dict[str, str] = {}
        for assignment in self.assignments:
            name, equals, value = assignment.partition("=")
            if not equals or not (name.isidentifier() or name.isdigit()) or not name.isascii():
                raise wrong_at("--set", f"{assignment} must be NAME=value")
            found[name] = value
        return found


def launched_plan(launch: Launch, flags: Flags, *, traced: bool = False) -> ReadPlan:
    """The plan of ``launch`` with ``flags`` over it; ``traced`` where a model may be known from traces alone."""
    try:
        return completed(launch, build_plan(launch.source, launch.flags_over(flags), traced=traced))
    except PlanError as error:
        raise (launch.spoken.of(error) if launch.spoken is not None else error) from None


def completed(launch: Launch, read: ReadPlan) -> ReadPlan:
    """``read``, with what follows from flags, and what there is to say about the file that it was made from."""
    read = launch.finish(read)
    warnings = (*limited(launch.notes), *read.warnings)
    return ReadPlan(read.plan, read.origins, warnings, launch.assumptions, launch.spoken)


def with_sizes(read: ReadPlan, **sizes: int) -> ReadPlan:
    """``read`` with other ``sizes`` of its batch."""
    plan = read.plan
    plan = plan.model_copy(update={"batch": plan.batch.model_copy(update=sizes)})
    return ReadPlan(plan, read.origins, read.warnings, read.assumptions)


def data_parallel(read: ReadPlan) -> int:
    """Data-parallel ranks of a plan that may not say them."""
    layout, gpus = read.plan.layout, read.plan.hardware.gpus or 1
    return layout.dp or max(gpus // (layout.tp * layout.pp * layout.cp), 1)


def left_out(
    code: str, name: str, value: object, problem: str, origin: Origin, *, strict: bool, told: str = ""
) -> Note:
    """That a setting is unknown or not modelled: a note that calls it ``told``, or an error if ``strict``."""
    if strict:
        raise PlanError(name, value, f"{problem} (--strict)", origin=origin)
    return Note(code, one_line(f"{told or name} ({origin}) {problem}"))
