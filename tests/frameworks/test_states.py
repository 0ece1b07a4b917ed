"""What an optimizer's step adds, beside the same step of real PyTorch on fake tensors."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.frameworks.states import step_temporaries
from memplan.layers.module import Parameter
from memplan.plan.plan import Optimizer, OptimizerImplementation, OptimizerName
from tests.oracle.tracer import Change, Follow, Trace, run

ROWS = st.lists(st.integers(1, 40).map(lambda n: 256 * n), min_size=1, max_size=5)


def traced(sizes: list[int], name: OptimizerName, implementation: OptimizerImplementation) -> int:
    """Bytes by which the second step of a real optimizer rises above where it began."""
    second: list[Change] = []

    def body(trace: Trace, follow: Follow) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
        optimizer = kind(parameters, lr=1e-3, foreach=implementation == "foreach")
        optimizer.step()
        trace.changes.clear()
        optimizer.step()
        second.extend(trace.changes)

    run(body)
    return max(accumulate(change.sign * change.bytes for change in second))


@settings(max_examples=20, deadline=None)
@given(ROWS)
@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_temporaries_equal_those_of_a_real_step(
    name: OptimizerName, implementation: OptimizerImplementation, sizes: list[int]
) -> None:
    """But for scalars of 512 B, of which a step makes a few."""
    optimizer = Optimizer(name=name, implementation=implementation)
    held = step_temporaries(optimizer, [Parameter(f"p{i}", (size,)) for i, size in enumerate(sizes)], "fp32")
    assert abs(sum(hold.bytes for hold in held) - traced(sizes, name, implementation)) <= 4 * 512
