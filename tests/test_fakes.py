"""The shorter way to fake tensors against PyTorch's own, event by event."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode

from .conftest import SHORTER_WAY
from .oracle import training_step

if torch.__version__.partition("+")[0] != SHORTER_WAY:
    pytest.skip(f"the shorter way is that of torch {SHORTER_WAY}", allow_module_level=True)

from . import fakes  # names of that release

SIZES = {"vocab_size": 211, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 24}


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_is_the_same(recompute: bool) -> None:
    """Of a model with experts, forward, backward and optimizer: what is kept then, and what is made of it later."""

    def traced(way: object) -> training_step.Step:
        training_step._updates.clear()
        with patch.object(FakeTensorMode, "__torch_dispatch__", way):
            config = transformers.MixtralConfig(**SIZES, num_key_value_heads=1, intermediate_size=40)
            return training_step.traced_step(config, 2, 19, "bf16", flash=not recompute, recompute=recompute)

    theirs, kept = traced(fakes._slow), traced(fakes._fast)
    entries = len(fakes._entries)
    assert entries > 100
    assert theirs == kept == traced(fakes._fast)
    assert len(fakes._entries) == entries


def facts(one: torch.Tensor, low: torch.Tensor) -> tuple[object, ...]:
    """``low``: a tensor whose storage others share."""
    storage = one.untyped_storage()
    sizes = (
        one.shape,
        one.stride(),
        one.storage_offset(),
        storage.nbytes(),
        storage._cdata == low.untyped_storage()._cdata,
    )
    kind = type(one), one.dtype, one.device, one.requires_grad, torch._C._dispatch_keys(one).raw_repr()
    return *sizes, *kind, sorted(vars(one))


def test_tensors_are_as_pytorch_makes_them() -> None:
    """Views, in-place results, several at once, numbers: sizes, storage, dtype, device, and their own attributes."""

    def made(way: object) -> list[tuple[object, ...]]:
        with patch.object(FakeTensorMode, "__torch_dispatch__", way), FakeTensorMode() as mode:
            x = torch.empty(4, 6, requires_grad=True) * 2
            whole, (low, high) = x.detach().clone(), x.chunk(2, 1)
            mean = torch.var_mean(x, 1)
            out = [x, whole, whole.add_(1), whole.mul_(2.0), whole.mul_(2), low, high.t(), *mean, (x @ x.t()).half()]
            assert all(one.fake_mode is mode for one in out)  # type: ignore[attr-defined]
            return [facts(one, low) for one in out]

    theirs = made(fakes._slow)
    assert theirs == made(fakes._fast) == made(fakes._fast)


def test_what_takes_no_way_through_python_is_the_same() -> None:
    """Operators element by element, conversions and views, of tensors that are alike, in order, cut, turned and
    repeated; lists in place return nothing."""
    aten = torch.ops.aten

    def made(way: object) -> list[object]:
        found: list[object] = []
        with patch.object(FakeTensorMode, "__torch_dispatch__", way), FakeTensorMode():
            for dtype in (torch.bfloat16,):
                x, y, wide = torch.empty(4, 6, dtype=dtype), torch.empty(4, 6, dtype=dtype), torch.empty(4, 6)
                many = [x, wide, x.t(), x.narrow(1, 1, 2), torch.empty(4, 1, dtype=dtype).expand(4, 6)]
                calls = [
                    (func, (one, *others, *([0] if func._schema.name.endswith("threshold_backward") else [])))
                    for func in sorted(fakes._ALIKE, key=str)
                    for one in many
                    for others in ([(y,), (one,), (wide,), (2,), (0.5,)] if len(needed(func)) > 1 else [()])
                ]
                shapes = ([-1], [4, 6, 1], [24, 1], [2, 12], [2, 2, 6])
                calls += [(func, (one, shape)) for func in fakes._VIEWS for one in many for shape in shapes]
                found += [outcome(func, args, {}) for func, args in calls]
                casts = (torch.float32, torch.bfloat16, torch.int64)
                found += [outcome(aten._to_copy.default, (one,), {"dtype": to}) for one in many for to in casts]
                found += [aten._foreach_mul_.Scalar([x.float(), wide], 2.0), aten._foreach_add_.List([x], [y])]
        return found

    assert made(fakes._slow) == made(fakes._fast) == made(fakes._fast)


def needed(func: torch._ops.OpOverload) -> list[object]:
    return [one for one in func._schema.arguments if not one.kwarg_only and not one.has_default_value()]


def outcome(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The facts of what ``func`` returns, or that it refuses."""
    try:
        return str(func), facts(func(*args, **kwargs), next(one for one in args if isinstance(one, torch.Tensor)))
    except (RuntimeError, ValueError):
        return str(func), "refused"
