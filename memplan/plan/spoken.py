"""What a launch file calls a plan's fields: an error names what its reader has written."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..values import NamedTuple, dataclass, pattern
from .errors import ABSENT, Origin, PlanError

_FIELD = pattern(r"\b[a-z]\w*\.[a-z]\w*\b")
"""A dotted path within a text."""


class Written(NamedTuple):
    """A setting that has become a field."""

    name: str
    value: object
    origin: Origin


@dataclass(frozen=True, slots=True)
class Spoken:
    """A launch file's own words."""

    written: Mapping[str, tuple[Written, ...]]
    """Settings of the file that a field is made of, by its path."""
    names: Mapping[str, str]
    """What the format calls a field, whether the file has it or not."""

    def called(self, name_of: Callable[[str], str]) -> Spoken:
        """The same with other names."""
        written = {path: tuple(one._replace(name=name_of(one.name)) for one in of) for path, of in self.written.items()}
        return Spoken(written, {path: name_of(name) for path, name in self.names.items()})

    def of(self, error: PlanError) -> PlanError:
        """``error`` of a plan that has been read from the file, as the file calls its field and those that it names.
        A field that a flag has changed keeps its name."""
        return error.each(self._named)

    def _named(self, error: PlanError) -> PlanError:
        problem = _FIELD.sub(lambda found: self.names.get(found[0], found[0]), error.problem)
        here = [one for one in self.written.get(error.field, ()) if error.origin in (None, one.origin)]
        if not here:
            return error.but(problem=problem)
        said = [one for one in here if one.value is not ABSENT]
        one = next((one for one in said if one.value == str(error.value)), next(iter(said), here[0]))
        return PlanError(one.name, one.value, problem, origin=one.origin, known=error.known)
