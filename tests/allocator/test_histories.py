"""Whole histories of PyTorch's allocator on an H200 (torch 2.11, driver 580.159), request by request, beside its model.

Each file of ``histories/`` is what ``torch.cuda.memory._record_memory_history`` recorded of a rank that ``memplan
validate`` ran: first the MiB that were reserved in the end, then a line for each event up to the last new segment.
``s576`` is the address of the segment that the next request takes, in MiB; ``98304`` a request's units of 512 B, with
``/1`` on another stream; ``-3`` gives back the block of the third request from behind.
"""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memplan
from memplan.allocator.blocks import LARGEST_SMALL, MIB, SHIFT, SegmentPool
from memplan.allocator.caching import AllocatorSettings

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.gz"))
BESIDE = {"mistral-7b-l8": 112, "megatron-stage1": 16}
"""MiB by which falling addresses are off: segments that lie in gaps between others."""


def events(path: Path) -> Iterator[str]:
    return iter(gzip.decompress(path.read_bytes()).decode().split())


def replayed(history: Iterator[str], settings: AllocatorSettings, *, addresses: bool) -> int:
    """MiB that are reserved in the end, with the segments' own ``addresses`` or those that the pools give."""
    pools: dict[tuple[str, bool], SegmentPool] = {}
    blocks: list[tuple[SegmentPool, int]] = []
    address = None
    for event in history:
        if event.startswith("s"):
            address = int(event[1:])
        elif event.startswith("-"):
            pool, code = blocks[int(event)]
            pool.give(code)
        else:
            size, _, stream = event.partition("/")
            key = stream, int(size) <= LARGEST_SMALL
            pool = pools.setdefault(key, settings.pool(key[1]))
            before = pool.reserved
            if addresses and address is not None:
                pool.top = address * (MIB + 1)  # a gap, however close the next one lies
            blocks.append((pool, pool.take(int(size))))
            assert not addresses or (pool.reserved > before) is (address is not None)
            address = None
    assert all(code >> SHIFT for _, code in blocks)
    return sum(pool.reserved for pool in pools.values()) // MIB


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_a_history_is_replayed_segment_by_segment_with_its_addresses(path: Path) -> None:
    history = events(path)
    measured = int(next(history))
    assert replayed(history, AllocatorSettings(), addresses=True) == measured


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
def test_segments_fall_before_torch_2_13(path: Path) -> None:
    history = events(path)
    measured = int(next(history))
    found = replayed(history, AllocatorSettings(oldest_first=False), addresses=False)
    assert found == measured + BESIDE.get(path.stem, 0)


def test_the_order_of_equal_blocks_matters() -> None:
    history = events(next(one for one in HISTORIES if one.stem == "gpt2-xl-recompute"))
    measured = int(next(history))
    assert replayed(history, AllocatorSettings(), addresses=False) < 0.97 * measured


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("logits-256k", {"model": "gpt2", "vocab": 256_000, "seq": 1024, "mbs": 8, "dtype": "bf16"}),
        ("gpt2-sgd", {"model": "gpt2", "seq": 1024, "mbs": 8, "dtype": "fp32", "optimizer": "sgd"}),
        ("llama-3-8b-l8", {"model": "llama-3-8b", "layers": 8, "seq": 4096, "mbs": 2, "dtype": "bf16"}),
    ],
)
def test_estimates_reserve_what_was_reserved(name: str, plan: dict[str, Any]) -> None:
    """Of whole runs, not of their requests: within 0.1 %, since validate makes a tied head's weight and ends it."""
    measured = int(next(events(next(one for one in HISTORIES if one.stem == name))))
    found = memplan.estimate(**plan, gpu="h200", torch="2.11", records=False)
    assert found.stages[0].reserved / (1 << 20) == pytest.approx(measured, rel=0.001)
