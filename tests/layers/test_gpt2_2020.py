"""The readings of "Almost Have Model Parallelism Working on GPT2 Fine-Tuning" (huggingface/transformers, October 2020).

GPT-2 XL with 1024 tokens; the Trainer's batch of 1 was multiplied by the number of visible GPUs. The
thread prints ``memory_allocated`` at the top of each block, so the differences from block 1 on are what
one block's forward leaves behind.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from memplan.frameworks.plain import programs as plain
from memplan.layers.module import Module, Options
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Drop, Hold
from tests.oracle.caching_allocator import block_size

READINGS = {
    4: (3604413952, 5803867648, 8003321344, 10202775040, 12402228736, 14601682432),
    8: (5847236096, 10226220544, 14605204992),
}
"""``memory_allocated`` in bytes at the top of blocks 1, 2, …, by the number of GPUs."""


def block(gpus: int) -> Module:
    flags = {
        "model": "gpt2-xl",
        "framework": "device-map",
        "code": "2020",
        "gpus": str(gpus),
        "multiply-by-visible-gpus": "true",
        "mbs": "1",
        "seq": "1024",
        "dtype": "fp32",
        "attention": "eager",
        "optimizer": "adamw",
    }
    programs = plain.programs(resolve(read_plan(None, flags).plan), Options())
    return next(span.module for span in programs[1].spans if span.module.name == "layer")


def left(module: Module) -> list[Hold]:
    """Tensors that the forward pass of ``module`` leaves behind."""
    ended = {event.tensor for event in module.steady.forward if isinstance(event, Drop)}
    return [event for event in module.steady.forward if isinstance(event, Hold) and event.tensor not in ended]


@pytest.mark.parametrize(("gpus", "growth"), [(4, 2_199_453_696), (8, 4_378_984_448)])
def test_growth_of_one_block(gpus: int, growth: int) -> None:
    """Every block grows memory by the same bytes: exactly what it leaves, each tensor in its block."""
    readings = READINGS[gpus]
    assert {after - before for before, after in pairwise(readings)} == {growth}
    module = block(gpus)
    assert sum(block_size(hold.bytes) for hold in left(module)) == growth
    assert module.steady.forward_fold.net == pytest.approx(growth, rel=0.015)


def test_twice_the_gpus_nearly_double_a_block() -> None:
    """The batch doubles; the mask's bool copy, (1, 1, 1024, 1024), does not."""
    four, eight = block(4).steady.forward_fold.net, block(8).steady.forward_fold.net
    assert 2 * four - eight == 1024 * 1024
