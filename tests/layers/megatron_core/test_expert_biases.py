"""Kernels of experts' biases: by hand, and as many as Megatron-Core's own code calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.layers.megatron_core.grouped import _of_biases
from memplan.layers.work import MIXED, STRIDED, SUM_OF_ROWS, WIDENED, Stream, Work

with catch_warnings():
    simplefilter("ignore")
    pytest.importorskip("megatron.core.transformer.moe.experts", exc_type=ImportError)
    from megatron.core.transformer.moe.experts import TEGroupedMLP

COMPUTES = ("mul", "add", "sum", "cat", "_to_copy")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Called(TorchDispatchMode):
    """Operators that a device runs kernels for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := function.overloadpacket.__name__) in COMPUTES:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def called(run: Callable[[], Any]) -> int:
    with Called() as mode:
        run()
    return len(mode.names)


def launches(work: Work | None) -> int:
    return sum(one.launches for one in work or () if isinstance(one, Stream))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("count", [1, 3])
def test_as_many_kernels_as_megatron_calls(count: int, kind: str) -> None:
    def leaf(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.ones(size, dtype=dtype, requires_grad=True)

    rows, biases, scales = leaf(count * 4, 8), [leaf(8) for _ in range(count)], leaf(count * 4, 1, dtype=DTYPES[kind])
    made: list[torch.Tensor] = []
    forward = called(lambda: made.append(TEGroupedMLP._apply_bias(rows, biases, [4] * count, scales)))
    gradient = torch.ones_like(made[0])
    backward = called(lambda: made[0].backward(gradient))
    work = _of_biases((count * 4, 8), "bf16", kind, count)
    assert (launches(work.forward), launches(work.backward)) == (forward, backward)


def test_bytes_and_instructions_by_hand() -> None:
    """Two experts of three rows of eight features each, 48 elements in bf16, probabilities in fp32."""
    n, work = 48, _of_biases((6, 8), "bf16", "fp32", 2)
    assert work.forward == [
        Stream(4 * n, 2, issue=MIXED.of(n)),
        Stream(10 * n, 2, issue=MIXED.of(n)),
        Stream(8 * n),
        Stream(6 * n),
    ]
    assert work.backward == [
        Stream(6 * n, issue=WIDENED.of(n)),
        Stream(6 * n, 2),
        Stream(8 * n, 2, issue=STRIDED.of(n)),
        Stream(4 * n, 4),
        Stream(8 * n, 2, issue=MIXED.of(n)),
        Stream(4 * n, 2, issue=SUM_OF_ROWS.of(n, 6)),
        Stream(4 * n),
        Stream(8 * 6),
    ]


def test_of_one_dtype_nothing_is_cast() -> None:
    n, work = 48, _of_biases((6, 8), "bf16", "bf16", 2)
    assert work.forward == [Stream(2 * n, 2, issue=STRIDED.of(n)), Stream(6 * n, 2), Stream(4 * n)]
    assert sum(one.bytes for one in work.backward or () if isinstance(one, Stream)) == 16 * n + 4 * 6
