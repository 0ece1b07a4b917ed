"""One validated run: what was asked for, what ran, what it was estimated to need and what it needed.

Measured beside estimated, stage by stage.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..device.measured import holds_workspaces
from ..plan.errors import ABSENT, Origin, PlanError, wrong_at
from ..plan.text import checksum, read_bytes
from ..values import dataclass
from .readings import Count, Estimated, Plan, Positive, Run, Stage

Verdict = Literal["agrees", "differs", "failed", "nothing measured"]
READINGS = ("requested", "allocated", "reserved", "device")
JUDGED = ("allocated", "requested")
"""The first of them that was measured decides: requested bytes where a device has no allocator's statistics."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One reading of one stage, in bytes; measured on its most loaded rank."""

    stage: int
    reading: str
    measured: int
    estimated: int | None
    """``None`` where it could not be derived."""

    @property
    def bytes(self) -> int | None:
        """Estimated less measured."""
        return None if self.estimated is None else self.estimated - self.measured

    @property
    def part(self) -> float | None:
        """``bytes`` as a part of what was measured."""
        if self.bytes is None or not self.measured:
            return None
        return self.bytes / self.measured


def differences(estimate: Estimated, run: Run) -> tuple[Difference, ...]:
    """Of every stage and reading that was measured, by stage."""
    return tuple(one for stage in sorted({rank.stage for rank in run.ranks}) for one in _of_stage(estimate, stage, run))


def _of_stage(estimate: Estimated, stage: int, run: Run) -> Iterable[Difference]:
    estimated = estimate.of(stage)
    for reading in READINGS:
        name = "device_bytes" if reading == "device" else reading
        found = [size for rank in run.ranks if rank.stage == stage and (size := getattr(rank, name)) is not None]
        if found:
            known = None if estimated is None else getattr(estimated, f"{reading}_bytes")
            if estimated is not None and known is not None:
                known -= _not_measured(estimated, reading, estimate.plan.framework, run)
            yield Difference(stage, reading, max(found), known)


def _not_measured(estimated: Stage, reading: str, framework: str, run: Run) -> int:
    """Bytes of an estimated reading that a run's has not: cuBLAS's workspaces, which are no tensors of the program,
    where recipes hold them; NCCL's, in a process group that is played."""
    if reading == "requested" and holds_workspaces(framework):
        return max((rank.workspaces or 0 for rank in run.ranks if rank.stage == estimated.stage), default=0)
    return int(estimated.beyond_allocated.get("nccl") or 0) if reading == "device" and run.world == "emulated" else 0


def judged(found: Sequence[Difference]) -> tuple[Difference, ...]:
    """One of each stage: the reading that the verdict is about."""
    chosen: dict[int, Difference] = {}
    for reading in JUDGED:
        for one in found:
            if one.reading == reading and one.part is not None:
                chosen.setdefault(one.stage, one)
    return tuple(chosen[stage] for stage in sorted(chosen))


def worst(found: Sequence[Difference]) -> Difference | None:
    """Of those that are judged the one that is furthest from its estimate; of several the first."""
    return max(judged(found), key=lambda one: abs(one.part or 0.0), default=None)


def verdict_of(run: Run, found: Sequence[Difference], tolerance: float) -> Verdict:
    """What ``found`` says of ``run``."""
    if run.failures:
        return "failed"
    furthest = worst(found)
    if furthest is None or furthest.part is None:
        return "nothing measured"
    return "agrees" if abs(furthest.part) <= tolerance else "differs"


SCHEMA = 1
"""Of a record's JSON; one that is larger was written by a newer memplan."""
LARGEST = 1 << 23
"""Bytes of a file with a record at most: a rank takes about two kilobytes."""
MOST_PARTS = 100_000
"""Objects and lists in such a file at most, each of which takes more memory than its bytes; a rank has about ten."""
TOLERANCE = 0.03
"""By which part of what was measured an estimate may differ from it."""
CHECKSUM = "sha256"
TIME = "%Y-%m-%dT%H:%M:%SZ"

"""``agrees``: no stage is further from its estimate than the tolerance. ``failed``: a rank ended early."""


def _is_time(text: str) -> str:
    if datetime.strptime(text, TIME).strftime(TIME) != text:
        raise ValueError("must be as 2026-11-21T20:15:03Z")
    return text


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Hardware(_Data):
    """What it ran on."""

    gpu: str | None
    """As the driver names it; ``None`` of a CPU."""
    gpus: Count
    """Devices that took part; one where a device played the ranks in turn."""
    nodes: Positive
    driver: str | None


class Record(_Data):
    """A run. Immutable: its id names this content for good."""

    id: str = Field(pattern=r"^[0-9a-f]{12}$")
    time: Annotated[str, AfterValidator(_is_time)]
    """When it ended, UTC, as 2026-11-21T20:15:03Z."""
    command: str
    """As typed, for a shell."""
    plan: dict[str, Any]
    """As given, before defaults were filled in and before it was turned into that of the code that ran."""
    estimate: Estimated
    """Of the code that ran."""
    run: Run
    hardware: Hardware
    tolerance: float = Field(gt=0.0, lt=1.0)
    verdict: Verdict

    @property
    def ran(self) -> Plan:
        """The plan as it ran, every default filled in."""
        return self.estimate.plan


def new_record(
    plan: Mapping[str, Any],
    estimate: Mapping[str, Any],
    run: Run,
    *,
    command: str,
    tolerance: float = TOLERANCE,
    time: datetime | None = None,
) -> Record:
    """A record of now. ``plan`` as given, ``estimate`` the JSON of the estimate for the code that ran.
    The verdict follows from measured, estimated and ``tolerance`` (``differences.verdict_of``)."""
    estimated = Estimated.model_validate(estimate)
    return Record(
        id=secrets.token_hex(6),
        time=(time or datetime.now(timezone.utc)).astimezone(timezone.utc).strftime(TIME),
        command=command,
        plan=dict(plan),
        estimate=estimated,
        run=run,
        hardware=hardware_of(run),
        tolerance=tolerance,
        verdict=verdict_of(run, differences(estimated, run), tolerance),
    )


def hardware_of(run: Run) -> Hardware:
    """What ``run`` says of its machines."""
    names = [rank.device for rank in run.ranks if rank.device != "cpu"] if run.device == "cuda" else []
    devices = (len(run.ranks) if run.world == "real" else 1) if names else 0
    hosts = len({rank.host for rank in run.ranks})
    return Hardware(gpu=names[0] if names else None, gpus=devices, nodes=max(1, hosts), driver=run.versions.driver)


# -- JSON ---------------------------------------------------------------------------------------------------


def to_json(record: Record) -> dict[str, Any]:
    """``record`` with a checksum, which tells a changed or damaged file from a whole one."""
    content = {"schema": SCHEMA, **record.model_dump(mode="json", by_alias=True, exclude={"estimate"})}
    content = _without_infinities({**content, "estimate": record.estimate.to_json()})
    return {**content, CHECKSUM: checksum(content)}


def to_text(record: Record) -> str:
    return json.dumps(to_json(record), indent=1, allow_nan=False) + "\n"


def _without_infinities(value: Any) -> Any:
    """What JSON has no numbers for as text: a loss can be NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    return [_without_infinities(item) for item in value] if isinstance(value, list) else value


def from_text(text: str, source: str) -> Record:
    """The record in ``text``. ``PlanError`` where it is damaged, another program's, or of a newer memplan."""
    return from_json(_parsed(text, source), source)


def from_json(data: Any, source: str) -> Record:
    """The record in ``data``, as ``to_json`` wrote it into ``source``."""
    origin = Origin(source)
    if not isinstance(data, dict) or "schema" not in data or "run" not in data:
        raise wrong_at(origin, "is not a record of memplan validate (memplan runs ID --export)")
    schema = data["schema"]
    if isinstance(schema, int) and not isinstance(schema, bool) and schema > SCHEMA:
        raise PlanError(
            "schema",
            schema,
            f"was written by a newer memplan: this one reads records up to schema {SCHEMA}; upgrade it",
            origin=origin,
        )
    if schema != SCHEMA or isinstance(schema, bool):
        raise PlanError("schema", schema, f"must be {SCHEMA}", origin=origin)
    content = {key: value for key, value in data.items() if key != CHECKSUM}
    record = _validated({key: value for key, value in content.items() if key != "schema"}, origin)
    if data.get(CHECKSUM) != checksum(content):
        raise PlanError(
            CHECKSUM,
            data.get(CHECKSUM, ABSENT),
            "does not fit the content: the file was damaged, or changed since it was written",
            origin=origin,
        )
    return record


def _parsed(text: str, source: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a number of JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise wrong_at(Origin(source, error.lineno), f"is not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise wrong_at(source, f"is not JSON: {error}") from None


def _validated(data: Mapping[str, Any], origin: Origin) -> Record:
    try:
        # JSON mode is strict about types, and still takes a list for a tuple.
        return Record.model_validate_json(json.dumps(_with_infinities(data)), strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        raise _translated(found["loc"], found["type"], found["input"], found["msg"], origin) from None
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise wrong_at(origin, f"is not a record: {error}") from None


_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _with_infinities(data: Mapping[str, Any]) -> dict[str, Any]:
    """Losses as numbers again."""
    run = data["run"]
    if not isinstance(run, dict) or not isinstance(run.get("ranks"), list):
        return dict(data)
    ranks = [
        {**rank, "losses": [_NUMBERS.get(loss, loss) if isinstance(loss, str) else loss for loss in rank["losses"]]}
        if isinstance(rank, dict) and isinstance(rank.get("losses"), list)
        else rank
        for rank in run["ranks"]
    ]
    return {**data, "run": {**run, "ranks": ranks}}


def _translated(location: Sequence[str | int], kind: str, value: object, message: str, origin: Origin) -> PlanError:
    field = ".".join(map(str, location))
    if kind == "missing":
        return PlanError(field, ABSENT, "is missing", origin=origin)
    if kind == "extra_forbidden":
        return PlanError(field, ABSENT, "is not a field of a record", origin=origin)
    words = {"int_type": "must be a whole number", "float_type": "must be a number", "string_type": "must be text"}
    changed = message.replace("Input should", "must").replace("Value error, ", "")
    return PlanError(field, value, words.get(kind, changed[:1].lower() + changed[1:]), origin=origin)


# -- files --------------------------------------------------------------------------------------------------


def read_record(path: Path) -> Record:
    """The record in a file."""
    origin = Origin(str(path))
    content = read_bytes(path, largest=LARGEST, what="a record")
    if content.count(b"{") + content.count(b"[") > MOST_PARTS:
        raise wrong_at(origin, f"has more parts than a record can have ({MOST_PARTS:,})")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise wrong_at(origin, "is not a record of memplan validate: not UTF-8 text") from None
    return from_text(text, str(path))
