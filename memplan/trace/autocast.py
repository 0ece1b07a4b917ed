"""CUDA's autocast on CPU tensors, so that fake tensors can be followed through it, and fp16's ``GradScaler``.

PyTorch's own kernels of CPU autocast cast the inputs of products and keep the cache of cast weights, as on CUDA
(``aten/src/ATen/autocast_mode.cpp``). The lists of operators differ: those that CUDA alone runs in fp32 are read from
PyTorch's header and registered for the CPU, and operators that the CPU alone casts are left to their kernels.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

LISTS = {
    "lower": "AT_FORALL_LOWER_PRECISION_FP",
    "fp32": "AT_FORALL_FP32",
    "fp32-output": "AT_FORALL_FP32_SET_OPT_DTYPE",
    "promote": "AT_FORALL_PROMOTE",
}
"""Macros of ``ATen/autocast_mode.h`` by the policy that they stand for."""

KEY = "AutocastCPU"

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@cache
def policies() -> Mapping[str, frozenset[str]]:
    """Names of CUDA's operators by policy, each ``name`` or ``name.overload``."""
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    found = {}
    for policy, macro in LISTS.items():
        (body,) = re.findall(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", header)
        entries = re.findall(r"_\((\w+)(?:, (\w+))?\)", body)
        found[policy] = frozenset(f"{name}.{overload}" if overload else name for name, overload in entries)
    return found


@contextmanager
def cuda_autocast(dtype: str | None, device: str = "cpu") -> Iterator[None]:
    """``torch.autocast`` in ``dtype`` (``bf16`` or ``fp16``), to be used under ``cuda_lists`` on a CPU; ``None`` is
    none."""
    if dtype is None:
        yield
        return
    with torch.autocast(device, DTYPES[dtype]):
        yield


@contextmanager
def cuda_lists() -> Iterator[None]:
    """CPU autocast treats operators as CUDA's does."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels are overridden, and mean to be
        for policy, kernel in KERNELS.items():
            for name in policies()[policy] - _registered(KEY):
                library.impl(name, kernel(_overload(name)), KEY)
        for name in _registered(KEY) - _registered("AutocastCUDA"):
            library.impl(name, torch.library.fallthrough_kernel, KEY)
    try:
        yield
    finally:
        library._destroy()


@cache
def _registered(key: str) -> frozenset[str]:
    """Operators with a kernel of their own for a dispatch key."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return frozenset(name.removeprefix("aten::") for name in names)


def _overload(name: str) -> Any:
    operator, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, operator), overload or "default")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    eligible = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(dtype) if eligible else value


def cast_by_autocast(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``inputs``, in autocast's dtype where it is on. None of them is a leaf, so the cache has no part in it."""
    if not torch.is_autocast_enabled("cpu"):
        return inputs
    lower = torch.get_autocast_dtype("cpu")
    return tuple([_cast(x, lower) for x in inputs[::-1]][::-1])


def _below() -> Any:
    """Calls that autocast does not see."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def in_fp32(operator: Any) -> Callable[..., Any]:
    """Floating-point inputs are cast to fp32, the last one first, as arguments in C++ are."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below():
            return operator(*[_cast(arg, torch.float32) for arg in args[::-1]][::-1], **kwargs)

    return kernel


def with_fp32_output(operator: Any) -> Callable[..., Any]:
    """``dtype=torch.float32`` unless the caller asks for another. Half-precision softmax converts in its kernel."""
    softmax = operator.name() in ("aten::softmax.int", "aten::log_softmax.int")

    def kernel(x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        with _below():
            if not x.is_floating_point():
                return operator(x, *args, dtype=dtype, **kwargs)
            if softmax:
                dim, *rest = args
                dtype = rest[0] if rest and rest[0] is not None else dtype
                return _softmax(operator, x, dim, dtype or torch.float32)
            return operator(x, *args, dtype=dtype or torch.float32, **kwargs)

    return kernel


def _softmax(operator: Any, x: torch.Tensor, dim: int, dtype: torch.dtype) -> Any:
    if x.dtype != torch.float16 or dtype != torch.float32:
        return operator(x, dim, dtype)
    log = operator.name() == "aten::log_softmax.int"
    return (torch.ops.aten._log_softmax if log else torch.ops.aten._softmax)(x, dim, True)


KERNELS = {"fp32": in_fp32, "fp32-output": with_fp32_output}


# -- fp16 -------------------------------------------------------------------------------------------


class Scaler(torch.amp.GradScaler):
    """``GradScaler`` as if no gradient were infinite: every step is applied."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)

    def _maybe_opt_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        return optimizer.step()


def scaler_of(autocast: str | None, device: str = "cpu") -> Scaler | None:
    """The one that fp16 comes with."""
    return Scaler(device) if autocast == "fp16" else None


def scaler_states(scaler: Scaler | None) -> tuple[torch.Tensor, ...]:
    """What it keeps, once it has scaled a loss."""
    if scaler is None:
        return ()
    kept: Any = scaler
    return kept._scale, kept._growth_tracker
