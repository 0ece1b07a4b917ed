"""The accuracy that the project promises, on the measured runs where they are at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import pytest

from benchmarks import accuracy, fms, measured, megatron
from benchmarks.comparison import GIB, Comparison, Table, near
from benchmarks.markdown import document
from benchmarks.stories import growth_of_gpt2, memory_of_104b


def table_of(name: str) -> Table:
    path = accuracy.MEASURED / name
    if not path.exists():
        pytest.skip(f"no measured runs: {path.parent.name}/{name} is not beside the repository")
    return measured.table_of(path)


def test_traced_rows_are_within_two_thousandths_at_every_point() -> None:
    table = table_of("traced_transformers_5_23.jsonl")
    assert len({row.id for row in table.rows}) == 9
    assert len(table.rows) == 4 * 9
    assert all(abs(row.error) <= 0.002 * row.measured for row in table.rows)


def test_what_is_left_of_traced_rows_after_named_causes_is_a_few_scalars() -> None:
    table = table_of("traced_transformers_5_23.jsonl")
    rest = [
        int(row.cause.split("not explained ")[1].split()[0].replace(",", ""))
        for row in table.rows
        if "not" in row.cause
    ]
    assert all(abs(size) <= 8192 for size in rest)
    assert sum(abs(size) > 1024 for size in rest) == 2


def test_formulas_of_the_paper_are_exact() -> None:
    table = table_of("korthikanti_2022.jsonl")
    assert len(table.rows) == 6
    assert [row.error for row in table.rows] == [0] * 6


def test_trials_on_a100_are_within_6_percent_or_2_gb() -> None:
    """And seven of ten in their range, which is narrower than 4 GB."""
    table = table_of("bigscience_a100.jsonl")
    assert len(table.rows) == 10
    gb = measured.THOUSAND_MIB
    assert sum(abs(row.error) <= max(0.06 * row.measured, 2 * gb) for row in table.rows) == 10
    assert sum("within the range" in row.cause for row in table.rows) >= 7
    for row in table.rows:
        least, most = (float(size) for size in row.cause.replace(",", "").split(":")[0].split(" to "))
        assert most - least < 4_000


def rows_of(name: str) -> list[measured.Row]:
    path = accuracy.MEASURED / name
    if not path.exists():
        pytest.skip(f"no measured runs: {path.parent.name}/{name} is not beside the repository")
    return measured.read_rows(path)


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_fine_tuning_runs_of_mistral_are_within_a_thousandth(every: int) -> None:
    """Peak and what is left after training, on one to four A100s: LoRA, 4-bit LoRA, GPTQ, fused kernels, FSDP1."""
    given = [row for row in rows_of(fms.NAME) if "Mistral-7B" in row["model"] and not row.get("outcome")]
    assert len(given) == 109
    chosen = given[::every]
    rows = fms.table(chosen).rows
    assert len(rows) == 2 * len(chosen)
    assert all(abs(row.percent) < 0.1 for row in rows)
    assert median(abs(row.percent) for row in rows) < 0.01


def test_devices_show_as_much_above_what_is_reserved_whatever_the_micro_batch() -> None:
    """LoRA with Liger's loss on one GPU, 4, 8 and 16 sequences: 18 GiB more from the first to the last, and the same
    CUDA context; so with Unsloth's, whose gradient goes through two slices before torch 2.9, and with transformers'
    own. GPTQ's, too, whose kernels were tuned beside 256 MB, and Unsloth's functions on bitsandbytes' weights, but for
    64 MiB with 4 sequences. Where cached memory was given back the reading is what is kept then: 1.8 GiB, not 9
    less."""
    alone = [
        ("_liger/Mistral-7B-v0.1-lora-foak-fast-kernels", 6, 4),
        ("80gb/Mistral-7B-v0.1-lora-none", 2, 4),
        ("_liger/Mistral-7B-v0.1-GPTQ-lora", 6, 4),
        ("_liger/Mistral-7B-v0.1-lora-accelerated-peft-bnb-foak", 6, 64),
    ]
    full = "fms/a100_80gb/Mistral-7B-v0.1-full-foak-fast-kernels-gpus1-mbs8"
    wanted = (full, *(runs for runs, *_ in alone))
    given = [row for row in rows_of(fms.NAME) if "gpus1" in row["id"] and any(runs in row["id"] for runs in wanted)]
    above = {row.id: int(row.cause.split("; ")[1].split()[0].replace(",", "")) for row in fms.devices(given).rows}
    for runs, of, apart in alone:
        sizes = [size for name, size in above.items() if runs in name]
        assert len(sizes) == of
        assert max(sizes) - min(sizes) <= apart
    assert 1_600 < above[full] < 1_900


def test_torchtitan_is_within_2_percent_compiled_or_not() -> None:
    table = table_of("torchtitan_h100.jsonl")
    assert [abs(row.percent) <= 2 for row in table.rows] == [True, True]
    assert not table.not_modelled


def test_functional_tests_of_megatron_lm_are_within_the_limits() -> None:
    """95 % of the dense rows between iterations; 90 % at the peak, with a median below 0.7 %."""
    table = table_of("megatron_lm_ci.jsonl")
    assert len(table.rows) >= 2 * 99
    assert sum(int(text.split()[0]) for text in table.not_modelled) == 111 - len(table.rows) // 2
    dense = [row for row in table.rows if megatron.family_of(row.id) != megatron.EXPERTS]
    for reading, share in ((megatron.STATIC, 0.95), (megatron.PEAK, 0.9)):
        rows = [row for row in dense if row.reading == reading]
        assert sum(bool(row.within) for row in rows) >= share * len(rows)
    assert median(abs(row.percent) for row in dense if row.reading == megatron.PEAK) < 0.7


def test_experts_of_megatron_lm_are_within_the_limits() -> None:
    """90 % between iterations; at the peak those whose tokens sinkhorn balances, and three of four of all. Where the
    tokens of others went is not recorded; of 32 sequences at once (the proxy of DeepSeek in fp8 on 8 GB200) that counts
    more than of a few. Two rows of Megatron-FSDP were within the limits while it was assumed to gather the output layer
    ahead in every micro-batch, as the real class does in the first one alone."""
    table = table_of("megatron_lm_ci.jsonl")
    rows = [row for row in table.rows if megatron.family_of(row.id) == megatron.EXPERTS]
    static = [row for row in rows if row.reading == megatron.STATIC]
    assert sum(bool(row.within) for row in static) >= 0.9 * len(static)
    others = ("ep8", "ep4", "ep2_fsdp2@", "top2router")
    balanced = [row for row in rows if row.reading == megatron.PEAK and not any(one in row.id for one in others)]
    assert all(row.within for row in balanced)
    peaks = [row for row in rows if row.reading == megatron.PEAK]
    assert sum(bool(row.within) for row in peaks) >= 0.75 * len(peaks)


def test_every_row_of_megatron_lm_beyond_the_limits_has_a_cause() -> None:
    assert all(row.cause for row in table_of("megatron_lm_ci.jsonl").rows if not row.within)


def test_every_rank_on_eight_b200_is_within_four_thousandths() -> None:
    rows = [row for row in table_of("megatron_b200.jsonl").rows if row.reading.startswith("allocated")]
    assert len(rows) == (4 + 2 + 2) * 8
    errors = [abs(row.percent) for row in rows]
    assert max(errors) < 0.4
    assert sum(errors) / len(errors) < 0.25
    assert max(abs(row.percent) for row in rows if "deepseek" in row.id) < 0.1
    assert max(abs(row.percent) for row in rows if "cp" in row.id) < 0.01


def test_the_tensor_of_the_traceback_is_exact() -> None:
    upcast = memory_of_104b().rows[0]
    assert upcast.estimated == 4_102_029_312
    assert round(upcast.estimated / GIB, 2) == 3.82


@pytest.mark.parametrize("gpus", [4, 8])
def test_growth_of_a_block_is_within_the_limit_requested_and_exact_in_blocks(gpus: int) -> None:
    rows = {(row.id, row.reading): row for row in growth_of_gpt2().rows}
    later = f"later blocks, {gpus} GPUs"
    assert abs(rows[later, "requested"].percent) <= 1.5
    assert rows[later, "allocated"].error == 0


def test_without_measured_runs_the_script_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert accuracy.main(["--measured", str(tmp_path / "absent")]) == 0
    output = capsys.readouterr().out
    assert output.startswith("skipped: no measured runs")
    assert output.count("\n") == 1


def test_a_file_that_nobody_reads_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "new.jsonl"
    path.write_text('{"id": "a"}\n\n{"id": "b"}\n')
    assert measured.table_of(path).not_modelled == ("2 rows of a file that has no reader",)


ROWS = (Comparison("a", "allocated", 100, 103, True, "x"), Comparison("b", "allocated", 200, 180, False, "y"))


def test_summary_names_the_worst_row_and_counts_those_within() -> None:
    summary = Table("t", "what", "where", "5 %", ROWS).summary()
    assert summary == "t: 2 figures, median |error| 6.500 %, worst -10.000 % (b, allocated), 1 of 2 within 5 %"


def test_page_has_every_row_with_its_cause() -> None:
    page = document([Table("t", "what", "where", "5 %", ROWS, notes=("a note",))])
    assert "| b | allocated | 0.00 | 0.00 | -10.000 | -0.00 | no | y |" in page
    assert "a note" in page


@pytest.mark.parametrize(
    ("measured_bytes", "estimated", "expected"), [(100, 106, True), (100, 93, False), (10, 12, True), (10, 13, False)]
)
def test_near_takes_the_larger_of_both_allowances(measured_bytes: int, estimated: int, expected: bool) -> None:
    assert near(measured_bytes, estimated, 0.06, 2) is expected


def test_every_reader_has_a_table_of_its_own() -> None:
    readers: Sequence[Callable[..., Table]] = list(measured.READERS.values())
    assert len(set(readers)) == len(readers)
