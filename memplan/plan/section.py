"""What every section of a plan is, and the types that several of them use."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ..values import dataclass

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

    unsaid: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = handler(self)
        fields = type(self).model_fields
        for name in self.unsaid:
            if getattr(self, name) == fields[name].get_default(call_default_factory=True):
                written.pop(name, None)
        return written


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    """Most runs validate whole plans alone, whose validator has those of its sections inside."""

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
