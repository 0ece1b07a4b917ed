"""Where readings of ``nvidia-smi`` should lie, and what of it ranks and the allocator's replay make."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import MEASURED
from benchmarks.measured import read_rows, table_of
from memplan.estimate import REPLAYED, estimate
from memplan.plan.plan import Plan
from memplan.plan.read import read_plan

GIB = 1 << 30


FLAGS = {"model": "mistral-7b", "gpu": "a100-80gb", "gpus": "2", "framework": "fsdp", "seq": "4096", "dtype": "bf16"}
LORA = {"lora-rank": "16", "fsdp-version": "1", "recompute": "full", "attention": "flash_attention_2"}


def plan(**flags: str) -> Plan:
    return read_plan(None, {**FLAGS, **LORA, "trainer": "transformers", **flags}).plan


def test_95_percent_of_published_readings_of_reserved_memory_lie_in_the_range() -> None:
    """Recomputed from the runs that ``REPLAYED`` names, by a quantile of each side."""
    name = "megatron_b200.jsonl"
    if not (MEASURED / name).exists():
        pytest.skip(f"no measured runs in {MEASURED}")
    rows = [row for row in table_of(MEASURED / name).rows if row.reading.startswith("reserved")]
    beside = sorted(row.measured / row.estimated - 1 for row in rows)
    assert len(beside) == len(read_rows(MEASURED / name)) * 8 == 64
    assert [beside[1], beside[-2]] == pytest.approx(REPLAYED, abs=1e-4)


def test_ranks_that_run_ahead_take_more_than_the_mean() -> None:
    (stage,) = estimate(plan(quantisation="nf4")).stages
    (plain,) = estimate(plan(versions="transformers=5.22.0")).stages
    assert stage.device_range is not None
    assert stage.reading_range is not None
    assert stage.reading_range[0] < stage.device_range[0]
    assert 0.5 * GIB < stage.device_range[1] - stage.reading_range[1] < 2 * GIB
    assert plain.device_range is not None
    assert plain.reading_range is not None
    assert plain.reserved is not None
    wider = [one - own for one, own in zip(plain.reading_range, plain.device_range, strict=True)]
    assert wider == [pytest.approx(plain.reserved * part, abs=1) for part in REPLAYED]


def test_weights_in_16_bits_are_on_meta_since_transformers_5_23() -> None:
    """``_move_missing_keys_from_meta_to_device``: with 5.22 every rank has its own on the CPU, and all do the same.
    What is kept are buckets, at most all weights at once: 7.24 B of 2 bytes."""
    since, before = (
        estimate(plan(versions=f"transformers={release}")).stages[0].device_range for release in ("5.23.0", "5.22.0")
    )
    assert since is not None
    assert before is not None
    weights = 7_241_732_096 * 2
    assert GIB < since[0] - before[0] <= since[1] - before[1] < weights


def test_processes_that_load_gptq_have_a_context_on_every_gpu() -> None:
    outside = {
        kind: sum(one.least for one in estimate(plan(quantisation=kind, dtype="fp16")).stages[0].outside)
        for kind in ("nf4", "gptq")
    }
    assert outside["gptq"] - outside["nf4"] == 483 << 20
