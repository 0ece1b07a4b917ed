"""The estimate within a record: what of its JSON is read back, and everything else as it was written."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Part(BaseModel):
    """Fields that are read here are checked; others are kept as they are."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Model(_Part):
    name: str


class Hardware(_Part):
    gpu: str | None = None
    gpus: int | None = Field(None, ge=1)
    gpus_per_node: int = Field(8, ge=1)


class Batch(_Part):
    mbs: int = Field(1, ge=1)
    gbs: int | None = None
    seq: int | None = None


class Precision(_Part):
    dtype: str = "bf16"


class Optimizer(_Part):
    name: str = "adamw"


class Plan(_Part):
    """A plan of whatever memplan wrote it: today's may know other fields and refuse it."""

    model: Model
    framework: str
    hardware: Hardware = Hardware()
    layout: dict[str, int | bool | None] = {}
    batch: Batch = Batch()
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    environment: dict[str, str] = {}


class Stage(_Part):
    """One of ``stages``; sizes in bytes."""

    stage: int = Field(ge=0)
    requested_bytes: int = Field(ge=0)
    allocated_bytes: int | None = Field(None, ge=0)
    reserved_bytes: int | None = Field(None, ge=0)
    device_bytes: int | None = Field(None, ge=0)
    breakdown: dict[str, int] = {}
    beyond_allocated: dict[str, int | None] = {}


class Estimated(_Part):
    """What ``memplan estimate --json`` prints of the code that ran."""

    schema_: Literal[1] = Field(alias="schema")
    memplan: str
    plan: Plan
    stages: tuple[Stage, ...] = Field(min_length=1)

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def of(self, stage: int) -> Stage | None:
        return next((one for one in self.stages if one.stage == stage), None)
