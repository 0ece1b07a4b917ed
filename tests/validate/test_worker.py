"""Where a rank was when it failed."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memplan.validate.worker import _where


class Failing(torch.nn.Module):
    """Fails when it is called the ``last``-th time."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.left = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise RuntimeError("CUDA error: out of memory")
        return x.sin()


class Block(torch.nn.Module):
    def __init__(self, last: int) -> None:
        super().__init__()
        self.mlp = Failing(last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


@pytest.mark.parametrize(("last", "where"), [(1, "forward, mlp"), (2, "recompute in backward, mlp")])
def test_modules_that_are_recomputed_fail_in_backward(last: int, where: str) -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError) as caught:
        checkpoint(Block(last), x, use_reentrant=False).sum().backward()
    assert _where(caught.value) == where


def test_backward_itself_has_no_module() -> None:
    x = torch.ones(2, requires_grad=True)

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: out of memory")

    x.register_hook(fail)
    with pytest.raises(RuntimeError) as caught:
        x.sin().sum().backward()
    assert _where(caught.value) is None
