"""What every section of a plan is, and the types that several of them use."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ..values import dataclass
from .errors import PlanError

Dtype = Literal["fp32", "fp16", "bf16"]

Degree = Annotated[int, Field(ge=1, le=1_048_576)]
MOST_STAGES = 128
"""Stages of a pipeline, each of which is estimated: twice as many as the longest that is known to have been used."""
MOST_CHUNKS = 256
"""Virtual stages on all of them together: twice as many as a layer each of the deepest such models makes."""
Stages = Annotated[int, Field(ge=1, le=MOST_STAGES)]
Count = Annotated[int, Field(ge=1, le=2**31)]
Elements = Annotated[int, Field(ge=0, le=2**63 - 1)]


@dataclass(frozen=True, slots=True)
class OneOf:
    """A field that holds one of ``names``, a table that is read whenever a plan is."""

    names: Collection[str]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.names), "type": "string"}

    def _known(self, name: str) -> str:
        if name not in self.names:
            raise PydanticCustomError("literal_error", "Input should be a name that is known")
        return name


class Terse(BaseModel):
    """JSON has the fields in ``unsaid`` only where they differ from their defaults: those that few plans have."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    unsaid: ClassVar[frozenset[str]] = frozenset()

    def said(self) -> Iterator[tuple[str, Any]]:
        """The fields that JSON has, with their values."""
        fields = type(self).model_fields
        for name, value in self:
            if name not in self.unsaid or value != fields[name].get_default(call_default_factory=True):
                yield name, value

    def wrong(self, path: str, problem: str) -> PlanError:
        """What is wrong with the value of the field with the dotted ``path``."""
        raise NotImplementedError

    def refuse(self, *rules: tuple[str, object, str]) -> None:
        """Raises ``PlanError`` for the first of ``rules`` that is broken. A rule is the dotted path of a field, whether
        it is broken, and what the field must be; all of them are evaluated first."""
        for path, broken, problem in rules:
            if broken:
                raise self.wrong(path, problem)

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = handler(self)
        return {name: written[name] for name, _ in self.said() if name in written}


class Section(Terse):
    shorthand: ClassVar[str | None] = None
    """The field that a plain value in place of the whole section sets: ``optimizer: adam8bit``."""

    def changed(self) -> Iterator[tuple[str, Any]]:
        """Fields that differ from their defaults, with their values; lists, not tuples, as errors show them."""
        given = self.model_fields_set
        for name, value in self if given else ():
            if name in given and value != type(self).model_fields[name].default:
                yield name, list(value) if isinstance(value, tuple) else value


class FrameworkSection(Section):
    """A section that only frameworks read which name it (``Supports.sections``), but for fields of ``everywhere``."""

    everywhere: ClassVar[frozenset[str]] = frozenset()

    def changed_here(self) -> Iterator[tuple[str, Any]]:
        """``changed``, without what every framework reads."""
        return ((name, value) for name, value in self.changed() if name not in self.everywhere)


def _written(section: Section, asked: SerializationInfo) -> dict[str, Any]:
    """The fields of ``section`` that JSON has, and of these what ``model_dump`` was ``asked`` for."""
    return {
        name: value
        for name, value in section.said()
        if (asked.include is None or name in asked.include)
        and (asked.exclude is None or name not in asked.exclude)
        and not (asked.exclude_none and value is None)
        and not (asked.exclude_unset and name not in section.model_fields_set)
        and not (asked.exclude_defaults and value == type(section).model_fields[name].get_default())
    }


if TYPE_CHECKING:
    Value = TypeVar("Value", bound=Section)
    Later = Annotated[Value, ...]
else:

    class Later:
        """``Later[Layout]`` is a field with a ``Layout`` in it, whose validator is made when one is read: a plan has a
        few of its sections, and to make the validators of all takes a tenth of a start. Fields of a section are plain
        values, which need no serializer."""

        def __class_getitem__(cls, section: type[Section]) -> Any:
            return Annotated[section, cls()]

        def __get_pydantic_core_schema__(self, source: type[Section], handler: GetCoreSchemaHandler) -> CoreSchema:
            def read(value: Any, info: ValidationInfo) -> Section:
                if info.mode == "json":  # a list is a tuple there, and strictness is asked for
                    return source.model_validate_json(json.dumps(value), strict=True)
                return source.model_validate(value)

            return core_schema.with_info_plain_validator_function(
                read, serialization=core_schema.plain_serializer_function_ser_schema(_written, info_arg=True)
            )

        def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
            return {}  # memplan/plan/schema.py writes it
