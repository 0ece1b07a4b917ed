"""Operators on fake tensors in half the time: PyTorch's own cache of what they return, with a shorter way to it.

``FakeTensorMode`` keeps what operators return for arguments of the same sizes, and decides which calls can be kept; the
way to an entry (its key, guards, the new tensor) takes most of a trace's time. Entries here are PyTorch's, under keys
that hold the same facts of the arguments (``_cache_key``, ``extract_tensor_metadata``), and become tensors as
``_get_output_tensor_from_cache_entry`` and ``FakeTensor.__new__`` make them (``torch/_subclasses/fake_tensor.py``).
An entry that is not there yet comes of PyTorch's own way, but for what takes most of it: views (the kernel of meta
tensors, not the same in Python), operators element by element whose tensors are alike, and lists of tensors in place.
Calls with symbolic sizes, real or sparse tensors, constants, other subclasses or a proxy take PyTorch's way, as
everything does in another release than the one that this was read in.

Modes are wrapped so that Dynamo does not look into them (``torch/_compile.py``, ``_disable_dynamo``): where Dynamo sees
nothing anyway, they run without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
import torch._dynamo.eval_frame
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

_C: Any = torch._C
_slow: Any = FakeTensorMode.__torch_dispatch__
_dispatch: Any = FakeTensorMode._dispatch_impl
_disable_dynamo: Any = torch._disable_dynamo
_callback: Any = _C._dynamo.eval_frame.get_eval_frame_callback
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_OTHERWISE = {*fake_tensor._DISPATCH_META_HANDLERS, *fake_tensor._DISPATCH_HANDLE_DIRECTLY}
_PROXY = _C._TorchDispatchModeKey.PROXY
_FAKE = _C._TorchDispatchModeKey.FAKE
_entries: dict[tuple[Any, ...], Any] = {}
_Valid: Any = fake_tensor._DispatchCacheValidEntry
_Output: Any = fake_tensor._DispatchCacheEntryOutputInfo
_NO_KEY: Any = None
_STATE = fake_tensor._CacheKeyState(None)
_NEVER = object()
"""In the place of an entry: PyTorch keeps none."""
_aten: Any = torch.ops.aten
_VIEWS = frozenset({_aten.view.default, _aten._unsafe_view.default})
_ALIKE = frozenset(
    getattr(getattr(_aten, name), overload)
    for overload, names in {
        "default": "neg exp sqrt rsqrt reciprocal sigmoid tanh silu gelu relu sin cos abs log clone "
        "silu_backward gelu_backward tanh_backward sigmoid_backward threshold_backward",
        "Tensor": "add sub mul div",
        "Tensor_Scalar": "pow",
        "Scalar": "add sub mul div",
    }.items()
    for name in names.split()
)
"""Of floating-point tensors that are alike, dense and in order, a further one that is."""


def _add(key: list[Any], values: Any, mode: FakeTensorMode) -> bool:
    """Whether ``values`` are plain ones, which are now in ``key``."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.fake_mode is not mode or value.constant is not None or value.layout is not torch.strided:
                return False
            key += (
                value.dtype,
                value.shape,
                value.stride(),
                value._fake_device,
                value.storage_offset(),
                value.untyped_storage().nbytes(),
                value.requires_grad,
                value.is_conj(),
                value.is_neg(),
                value.is_inference(),
            )
        elif kind in _PLAIN:
            key += (kind, value)
        elif kind is list or kind is tuple:
            key += (kind, len(value))
            if not _add(key, value, mode):
                return False
        else:
            return False
    return True


def _key(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """The facts of a call that decide what it returns; None where the call is not a plain one."""
    if mode.shape_env is not None or not mode.cache_enabled or func in _OTHERWISE:
        return None
    if type(func) is not torch._ops.OpOverload or _C._get_dispatch_mode(_PROXY) is not None:
        return None
    key = [
        func,
        torch.get_default_dtype(),
        _C._get_default_device(),
        torch.is_inference_mode_enabled(),
        mode.allow_meta,
    ]
    if not _add(key, args, mode):
        return None
    for name, value in kwargs.items():
        key.append(name)
        if not _add(key, (value,), mode):
            return None
    return tuple(key)


def _made(mode: FakeTensorMode, info: Any, func: Any, args: Any) -> Any:
    """The output that ``info`` describes (``_get_output_tensor_from_cache_entry``)."""
    if info.inplace_idx is not None:
        return args[info.inplace_idx]
    data = info.metadata
    if data is None:
        return info.constant_value
    before = mode.in_kernel_invocation
    with _C._DisableTorchDispatch():
        mode.in_kernel_invocation = True
        with _C._PreserveDispatchKeyGuard():
            _C._set_meta_in_tls_dispatch_include(True)
            try:
                made = torch.empty_strided(
                    data.shape, data.stride, dtype=data.dtype, device="meta", requires_grad=data.requires_grad
                )
                if info.view_idx is not None:
                    storage = args[info.view_idx].untyped_storage()
                    made.set_(storage, data.storage_offset, data.shape, data.stride)
            finally:
                mode.in_kernel_invocation = before
    if data.is_conj:
        _C._set_conj(made, True)
    if data.is_neg:
        _C._set_neg(made, True)
    return _fake(mode, made, data.device)


def _fake(mode: FakeTensorMode, made: torch.Tensor, device: torch.device) -> FakeTensor:
    """``FakeTensor.__new__`` where its arguments are these."""
    fake: Any = torch.Tensor._make_subclass(
        FakeTensor, made, made.requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    if mode._allow_unsafe_data_ptr_access:
        _C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        _C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(_NOTHING, _fake_device=device, fake_mode=mode)
    return fake


_MEMOS = [name for name, value in vars(FakeTensor).items() if isinstance(value, fake_tensor.SymNumberMemoDescriptor)]
_NOTHING: dict[str, None] = dict.fromkeys(
    ["constant", "pytype", "dispatch_keys", "real_tensor"]
    + [f"_{name}{what}" for name in _MEMOS for what in ("", "_vc", "_epoch")]
)


def _is_in_order(one: FakeTensor) -> bool:
    """Whether ``one`` is contiguous, and its strides are those that a new tensor has."""
    step = 1
    for size, stride in zip(reversed(one.shape), reversed(one.stride()), strict=True):
        if stride != step or not size:
            return False
        step *= size
    return True


def _like(one: FakeTensor, dtype: torch.dtype | None = None) -> Any:
    """A new tensor of the same sizes."""
    data = fake_tensor.extract_tensor_metadata(one)
    dtype = data.dtype if dtype is None else dtype
    whole = one.numel() * dtype.itemsize
    return replace(data, dtype=dtype, storage_offset=0, requires_grad=False, storage_bytes=whole)


def _short(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """An entry without PyTorch's own way, or None."""
    if torch.is_inference_mode_enabled():
        return None
    if func.name().startswith("aten::_foreach_") and not func._schema.returns:
        return _Valid((_Output(None, None, None, None),), False)
    first = args[0] if args else None
    if type(first) is not FakeTensor:
        return None
    if func in _VIEWS and _is_in_order(first):
        try:
            with fake_tensor.in_kernel_invocation_manager(mode):
                seen = func(*args)
        except RuntimeError:  # PyTorch's own way says why
            return None
        data = fake_tensor.extract_tensor_metadata(_fake(mode, seen, first._fake_device))
        return _Valid((_Output(None, data, 0),), False)
    if not first.dtype.is_floating_point or not _is_in_order(first) or first.is_conj() or first.is_neg():
        return None
    if func is _aten._to_copy.default and kwargs.keys() == {"dtype"}:
        return _Valid((_Output(None, _like(first, kwargs["dtype"]), None),), False)
    if func in _ALIKE and kwargs.keys() <= {"alpha", "approximate"} and all(_is_alike(one, first) for one in args[1:]):
        return _Valid((_Output(None, _like(first), None),), False)
    return None


def _is_alike(one: Any, first: FakeTensor) -> bool:
    if type(one) is not FakeTensor:
        return type(one) in (int, float, bool, str)
    return (one.shape, one.stride(), one.dtype, one._fake_device) == (
        first.shape,
        first.stride(),
        first.dtype,
        first._fake_device,
    )


def _kept(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """What is kept of a call that returned ``out``: as PyTorch decides, and ``_unsafe_view`` as the view that it is."""
    if func is torch.ops.aten._unsafe_view.default:
        return _Valid((_Output(None, fake_tensor.extract_tensor_metadata(out), 0),), False)
    try:
        return mode._make_cache_entry(_STATE, _NO_KEY, func, args, kwargs, out)
    except fake_tensor._BypassDispatchCache:
        return _NEVER


def _fast(self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    key = _key(self, func, args, kwargs)
    if key is None:
        return _slow(self, func, types, args, kwargs)
    entry = _entries.get(key)
    if entry is None:
        entry = _short(self, func, args, kwargs)
        if entry is not None:
            _entries[key] = entry
    if entry is None:
        out = _dispatch(self, func, types, args, kwargs)
        _entries[key] = _kept(self, func, args, kwargs, out)
        return out
    if entry is _NEVER:
        return _dispatch(self, func, types, args, kwargs)
    if entry.is_output_tuple:
        return tuple(_made(self, info, func, args) for info in entry.output_infos)
    return _made(self, entry.output_infos[0], func, args)


def _unseen(dispatch: Any, wrapped: Any) -> Any:
    """``dispatch`` of a mode, ``wrapped`` so that Dynamo does not look into it: as it is where Dynamo sees nothing."""

    @wraps(dispatch)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return (dispatch if _callback() is None else wrapped)(*args, **kwargs)

    torch._dynamo.eval_frame.skip_code(inner.__code__)
    return inner


def _disable(fn: Any = None, recursive: bool = True) -> Any:
    wrapped = _disable_dynamo(fn, recursive)
    return _unseen(fn, wrapped) if getattr(fn, "__name__", "") == "__torch_dispatch__" else wrapped


def _modes(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from _modes(one)


def shorten() -> None:
    """From here on, modes of this process take the shorter way."""
    for function in (_fast, _key, _add, _kept, _made, _fake, _short, _like, _is_alike, _is_in_order):
        torch._dynamo.eval_frame.skip_code(function.__code__)
    FakeTensorMode.__torch_dispatch__ = _fast  # type: ignore[method-assign]
    for mode in _modes(TorchDispatchMode):
        wrapped = vars(mode).get("__torch_dispatch__")
        if hasattr(wrapped, "__wrapped__"):
            mode.__torch_dispatch__ = _unseen(wrapped.__wrapped__, wrapped)  # type: ignore[attr-defined]
    torch._disable_dynamo = _disable
