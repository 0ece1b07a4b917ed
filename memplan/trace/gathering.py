"""A model's step as ZeRO-3 has it run, but for what is gathered: its linear function, and marks where its hooks run.

DeepSpeed 0.19, ``runtime/zero/parameter_offload.py`` (``_register_deepspeed_module``): every module has hooks before
and behind its forward; nodes of autograd at its outputs run one before its backward, each of them, and nodes at its
positional inputs one behind it, the last of them. ``runtime/zero/linear.py`` (``LinearFunctionForZeroStage3``): a
product keeps its input and the parameter itself, also where the weight is frozen; it is torch's for all code.

Parameters stay whole here. Who reads one outside its module's forward has DeepSpeed gather it for another module
(``ZeROOrderedDict.__getitem__``), which is refused; but for peft's wrappers, which ask adapters for their dtype: these
gather a little earlier what comes anyway (its engine measured as many bytes, ``tests/frameworks/test_deepspeed.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

from ..tape.events import Hook
from . import step
from .marks import DTYPE, Mark
from .models import outline_of
from .places import HookedPlaces, UntraceableError
from .recording import Outline
from .rows import _entry as entry_of

MATRIX = 2
"""Dimensions of a parameter that is cut; those of fewer are small, and persist."""


class Linear(torch.autograd.Function):
    """ZeRO-3's product with a weight (n, k) and a bias (n), of inputs (…, k)."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is not None and x.dim() == MATRIX:
            return torch.addmm(bias, x, weight.t())
        product = x.matmul(weight.t())
        return product if bias is None else product.add_(bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (x, weight, bias) = gradients, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        found: list[torch.Tensor | None] = [gradient.matmul(weight) if of_x else None]
        rows = gradient.reshape(-1, gradient.shape[-1]) if of_weight else gradient
        found.append(rows.t().matmul(x.reshape(-1, x.shape[-1])) if of_weight else None)
        found.append(gradient.sum(list(range(gradient.dim() - 1))) if of_bias and bias is not None else None)
        return tuple(found)


Run = tuple[str, int, int]
"""Parameters that follow one another: the entry that owns them, the first one's number there, how many."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """In place of ``torch.nn.functional.linear``."""
    return Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]


class _Announce(torch.autograd.Function):
    """A view whose backward calls ``called`` before it hands its gradient on."""

    @staticmethod
    def forward(tensor: torch.Tensor, called: Callable[[], None]) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.called = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.called()
        return (*gradients, None)


def _announced(tensor: torch.Tensor, called: Callable[[], None]) -> Any:
    return _Announce.apply(tensor, called)  # type: ignore[no-untyped-call]


def _applied(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with ``function`` of every tensor in it (``apply_to_tensors_only``)."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)([_applied(function, one) for one in value])
    if isinstance(value, dict):
        for key, one in value.items():
            value[key] = _applied(function, one)
    return value


def _made(mark: Mark) -> None:
    torch.empty_strided(mark.shape, (0,) * len(mark), dtype=getattr(torch, DTYPE))


class _Hooks:
    """Those of one module."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.remaining = 0
        """Inputs whose gradient has not arrived."""

    def mark(self, hook: Hook) -> None:
        """Of a module without parameters a hook that releases does nothing."""
        if not self.runs and hook in (Hook.BEFORE_FORWARD, Hook.BEFORE_BACKWARD):
            _made(Mark(hook, "", 0, 0))
        for at, (entry, first, count) in enumerate(self.runs, 1):
            _made(Mark(hook, entry, first, count, at < len(self.runs)))

    def put_on(self, module: torch.nn.Module) -> None:
        module.register_forward_pre_hook(lambda *_: self.mark(Hook.BEFORE_FORWARD))
        module.register_forward_pre_hook(self._inputs)
        module.register_forward_hook(lambda *_: self.mark(Hook.AFTER_FORWARD))
        module.register_forward_hook(self._outputs)

    def _outputs(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return _applied(lambda one: _announced(one, lambda: self.mark(Hook.BEFORE_BACKWARD)), output)

    def _inputs(self, module: torch.nn.Module, inputs: Any) -> Any:
        self.remaining = 0
        return _applied(self._input, inputs)

    def _input(self, tensor: torch.Tensor) -> Any:
        self.remaining += tensor.requires_grad
        return _announced(tensor, self._arrived)

    def _arrived(self) -> None:
        self.remaining -= 1
        if not self.remaining:
            self.mark(Hook.AFTER_BACKWARD)


class _Watched(dict[str, Any]):
    """A module's parameters, which are read while it runs."""

    def __init__(self, given: dict[str, Any], is_running: Callable[[], bool], name: str) -> None:
        super().__init__(given)
        self.is_running, self.name = is_running, name

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        if found is not None and found.dim() >= MATRIX and not self.is_running():
            problem = "is read by another module, for which ZeRO-3 gathers it, which is not modelled"
            raise UntraceableError(f"{self.name}.{key} {problem}")
        return found


class GatheringPlaces(HookedPlaces):
    """Where a model's operators run, with hooks on all of its modules."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__([model])
        outline = outline_of(model)
        numbers: dict[str, int] = {}
        counted: dict[str, int] = {}
        for one in outline.tensors:
            entry = entry_of(outline, one.path)
            numbers[one.path] = counted.get(entry, 0)
            counted[entry] = numbers[one.path] + 1
        self.wrappers = {name for name, one in model.named_modules() if hasattr(one, "lora_A")}
        """peft's, around layers with an adapter."""
        paths = {id(one): path for path, one in model.named_parameters()}
        for name, module in model.named_modules():
            own = [paths[id(one)] for one in module.parameters(recurse=False)]
            _Hooks(_runs(outline, own, numbers)).put_on(module)
            module._parameters = _Watched(module._parameters, partial(self._is_running, name), name)

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if id(module) in self.names:  # and none that forward makes, as a loss, whose end nobody notices
            super()._enter(module, args)

    def _is_running(self, name: str) -> bool:
        return not self.stack or name in self.stack or self.stack[-1] in self.wrappers


def _runs(outline: Outline, own: Sequence[str], numbers: dict[str, int]) -> list[Run]:
    """The parameters at the paths ``own``, as marks have them."""
    found: list[Run] = []
    for path in own:
        entry, number = "" if outline.layer_of(path) else entry_of(outline, path), numbers[path]
        if found and found[-1][0] == entry and number == sum(found[-1][1:]):
            found[-1] = (entry, found[-1][1], found[-1][2] + 1)
        else:
            found.append((entry, number, 1))
    return found


@contextmanager
def gathering() -> Iterator[None]:
    """While steps are traced as ZeRO-3 has them run."""
    with patch.object(step, "Places", GatheringPlaces), patch.object(functional, "linear", linear):
        yield
