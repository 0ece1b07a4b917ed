"""The estimate within a record: what of its JSON is read back, and everything else as it was written."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .readings import Count, Number, Positive


class _Part(BaseModel):
    """Fields that are read here are checked; others are kept as they are."""

    model_config = ConfigDict(frozen=True, extra="allow")


class Model(_Part):
    name: str


class Hardware(_Part):
    gpu: str | None = None
    gpus: Positive | None = None
    gpus_per_node: Positive = 8


class Batch(_Part):
    mbs: Positive = 1
    gbs: Number | None = None
    seq: Number | None = None


class Precision(_Part):
    dtype: str = "bf16"


class Optimizer(_Part):
    name: str = "adamw"


class Plan(_Part):
    """A plan of whatever memplan wrote it: today's may know other fields and refuse it."""

    model: Model
    framework: str
    hardware: Hardware = Hardware()
    layout: dict[str, Number | bool | None] = {}
    batch: Batch = Batch()
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    environment: dict[str, str] = {}


class Stage(_Part):
    """One of ``stages``; sizes in bytes."""

    stage: Count
    requested_bytes: Count
    allocated_bytes: Count | None = None
    reserved_bytes: Count | None = None
    device_bytes: Count | None = None
    breakdown: dict[str, Number] = {}
    beyond_allocated: dict[str, Number | None] = {}


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
