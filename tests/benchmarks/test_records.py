"""The records in ``benchmarks/records`` read back, and say nothing that a shared file must not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.plan.errors import PlanError
from memplan.records.record import Record, read_record, to_text
from memplan.records.sharing import shareable, shared_text
from tests.records.made import TWO_STAGES, record_of

FOLDER = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "records"


def checked(path: Path) -> Record:
    """The record of a file that belongs there."""
    record = read_record(path)
    device = record.run.gpu or record.run.device
    assert path.name == f"{record.ran.model.name}_{device}_{record.id}.json"
    assert to_text(shareable(record)) == to_text(record), "written by --export"
    assert all(rank.host.startswith("node-") for rank in record.run.ranks)
    return record


def test_each_file_reads_back() -> None:
    """In one test: there may be no file yet."""
    ids = [checked(path).id for path in sorted(FOLDER.glob("*.json"))]
    assert len(ids) == len(set(ids))
    assert {path.suffix for path in FOLDER.iterdir()} <= {".json", ".md"}


def test_what_does_not_belong_there_is_found(tmp_path: Path) -> None:
    record = record_of(TWO_STAGES, code="megatron", hosts=("alpha", "beta"))
    file = tmp_path / f"gpt2_h100-80gb_{record.id}.json"
    file.write_text(shared_text(record))
    assert checked(file).id == record.id
    file.write_text(to_text(record))
    with pytest.raises(AssertionError, match="written by --export"):
        checked(file)
    file.write_text(shared_text(record).replace('"allocated": ', '"allocated": 1'))
    with pytest.raises(PlanError, match="sha256"):
        checked(file)
