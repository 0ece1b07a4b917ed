"""What every section of a plan is, and the types that several of them use."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["fp32", "fp16", "bf16"]

Degree = Annotated[int, Field(ge=1, le=1_048_576)]
Count = Annotated[int, Field(ge=1, le=2**31)]
Elements = Annotated[int, Field(ge=0, le=2**63 - 1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    shorthand: ClassVar[str | None] = None
    """The field that a plain value in place of the whole section sets: ``optimizer: adam8bit``."""
