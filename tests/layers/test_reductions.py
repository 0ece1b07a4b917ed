"""Against what PyTorch 2.11 allocated on an H200 (``tests/allocator/histories``)."""

import pytest

from memplan.device.gpus import threads_of
from memplan.layers.autograd import Recorder
from memplan.layers.reductions import partial_sums, sum_inside, table_gradient
from memplan.tape.events import Hold

H200 = threads_of("h200")


@pytest.mark.parametrize(
    ("outputs", "rows", "size"),
    [
        (3072, 8192, 138_412_032),  # logits-256k, gpt2-sgd: biases of up, qkv, and both ends of the residual stream
        (2304, 8192, 139_198_464),
        (768, 8192, 50_331_648),
        (3072, 4096, 100_663_296),  # zero1-8
        (2304, 4096, 75_497_472),
        (30_522, 4096, 23_440_896),  # bert-large: the decoder's bias
        (6400, 8192, 140_902_400),  # gpt2-xl-recompute
        (4800, 8192, 137_625_600),
        (6400, 2048, 104_857_600),  # gpt2-xl-fp32-eager
        (4800, 2048, 78_643_200),
        (1600, 2048, 26_214_400),
        (4096, 2048, 67_108_864),  # mistral-7b-l8: a norm's weight
        (4096, 8192, 138_412_032),  # llama-3-8b-l8
        (
            768,
            1024,
            6_291_456,
        ),  # by hand: 256 values a thread, 16 each, so 16 blocks of 32 * 4 columns: 4 * 768 * 16 * 128
        (768, 1020, 0),
        (3072, 8, 0),
    ],
)
def test_sums_over_rows_share_blocks(outputs: int, rows: int, size: int) -> None:
    assert partial_sums(outputs, rows, H200)[0] == size


def test_a_sum_of_more_than_2_gib_is_halved_and_kept_in_fp32() -> None:
    r = Recorder(threads=H200, kernel_workspaces=True)
    sum_inside(r, (1 << 18, 8192), (8192,), "bf16")
    holds = [(one.name, one.bytes) for one in r.events if isinstance(one, Hold)]
    assert holds[0] == ("sums_so_far", 4 * 8192)
    assert [name for name, _ in holds[1:]] == ["partial_sums", "semaphores"] * 4


@pytest.mark.parametrize(("n", "h", "size"), [(8192, 768, 27_681_792), (4096, 1024, 18_452_480), (3072, 768, 0)])
def test_a_tables_gradient_sums_ten_rows_at_a_time(n: int, h: int, size: int) -> None:
    r = Recorder(kernel_workspaces=True)
    table_gradient(r, (50_000, h), "bf16", n, "word")
    assert sum(one.bytes for one in r.events if isinstance(one, Hold) and one.name == "grad_weight_per_segment") == size


def test_threads() -> None:
    assert (H200, threads_of("t4"), threads_of("rtx-4090"), threads_of("mi300x")) == (
        132 * 2048,
        40 * 1024,
        128 * 1536,
        0,
    )
