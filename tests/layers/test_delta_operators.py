"""Gated delta nets by transformers' own operators: what they keep, by hand, and what is refused without packages."""

from __future__ import annotations

import pytest

from memplan.estimate import estimate
from memplan.layers import delta_operators
from memplan.layers.autograd import Recorder
from memplan.layers.gated_delta import Sizes
from memplan.plan.errors import PlanError
from memplan.plan.read import read_plan
from memplan.tape.events import Category, Drop, Hold

AT = Sizes(b=2, s=128, k=2, v=4, d=16, e=24, kernel=4)


def test_five_squares_of_every_chunk_are_kept() -> None:
    """``pairwise_decay``, both products of tokens, and each of these times the first: 2 sequences x 4 heads x 2 chunks
    of 64 x 64 numbers in fp32, 262,144 bytes each."""
    r = Recorder()
    shapes = ((AT.groups, "bf16"), (AT.groups, "bf16"), (AT.values, "bf16"), (AT.heads, "fp32"), (AT.heads, "bf16"))
    read = [r.leaf(r.outside(shape, dtype))[0] for shape, dtype in shapes]
    out = delta_operators.rule(r, read, AT)
    ended = {event.tensor for event in r.events if isinstance(event, Drop)}
    kept = [event.bytes for event in r.events if isinstance(event, Hold) and event.tensor not in ended]
    assert kept.count(2 * 4 * 2 * 64 * 64 * 4) == 5
    assert out.shape == (2, 128, 4, 24)


def test_what_cuda_takes_inside() -> None:
    """A copy of the convolution's input in each direction: 2 x 160 channels x 128 tokens of 2 bytes."""
    r = Recorder(kernel_workspaces=True)
    x = r.leaf(r.outside(AT.channels, "bf16"))[0]
    weight = r.parameter("convolution.weight", (AT.m, 1, AT.kernel), "bf16")
    made = [delta_operators.convolution(r, x, weight, AT)]
    r.backward(made, [r.outside(AT.channels, "bf16")])
    inside = [e.bytes for e in r.events if isinstance(e, Hold) and e.category is Category.WORKSPACES]
    assert inside == [2 * 160 * 128 * 2] * 2


FLAGS = {"model": "qwen3.5-9b", "layers": "4", "seq": "256", "framework": "single"}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"dtype": "fp16"}, r"kernels\.delta = null: must be fla .*in fp16, where cuDNN runs the convolution"),
        ({"dtype": "fp32"}, r"must be fla .*in fp32 without autocast"),
        ({"seq": "262144", "mbs": "1"}, r"must be fla .*with 2,147,483,648 elements under the convolution"),
        ({"model": "qwen3-8b", "delta-kernel": "fla"}, r"kernels\.delta = fla: must be left out"),
        ({"zero": "3", "framework": "deepspeed", "gpus": "2"}, r"layout\.zero = 3: must be 0, 1 or 2"),
    ],
)
def test_refused(flags: dict[str, str], line: str) -> None:
    with pytest.raises(PlanError, match=line):
        estimate(read_plan(None, FLAGS | flags).plan)


def test_a_notice_says_which_operators_run() -> None:
    """Three of four layers keep five squares of 4 chunks for 32 heads: 3 x 5 x 4 x 32 x 64 x 64 x 4 bytes, 0.03 GiB."""
    own, packages = (estimate(read_plan(None, FLAGS | more).plan) for more in ({}, {"delta-kernel": "fla"}))
    (notice,) = [one for one in own.warnings if one.code == "delta-operators"]
    assert "nets of 3 layers run transformers' own operators" in notice.message
    assert "0.03 GiB" in notice.message
    assert "delta-operators" not in {one.code for one in packages.warnings}
    assert own.peak > packages.peak
