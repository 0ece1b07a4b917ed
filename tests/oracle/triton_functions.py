"""Liger's and fms-acceleration's functions on fake tensors: their own Python code, with Triton kernels that do nothing.

Their packages need not run here: only their files are read, and what they import of Triton and bitsandbytes is made up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from itertools import accumulate
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .optimizer_step import on_no_device
from .tracer import Change, Follow, Trace, cuda_behaviour

PROCESSORS = 108
"""Multiprocessors of the GPU that code takes itself to run on."""

Like = tuple[tuple[int, ...], torch.dtype]


class Excursions(NamedTuple):
    """Net change and peak of forward, and of backward."""

    forward: tuple[int, int]
    backward: tuple[int, int]


def excursion(changes: Sequence[Change]) -> tuple[int, int]:
    levels = list(accumulate((change.sign * change.bytes for change in changes), initial=0))
    return levels[-1], max(levels)


def traced(function: Callable[..., Any], likes: Sequence[Like], autocast: torch.dtype | None = None) -> Excursions:
    return Excursions(*map(excursion, followed(function, likes, autocast)))


def followed(
    function: Callable[..., Any], likes: Sequence[Like], autocast: torch.dtype | None = None
) -> tuple[list[Change], list[Change]]:
    """``function`` of tensors that are the caller's and require a gradient, forward and backward; the caller keeps the
    outputs and their gradients, too."""
    trace = Trace()
    with ExitStack() as stack:
        device = SimpleNamespace(multi_processor_count=PROCESSORS)
        for one in (
            on_no_device(),
            cuda_behaviour(),
            patch.object(torch.Tensor, "data_ptr", lambda tensor: 0),
            patch.object(torch.cuda, "get_device_properties", lambda at: device),
        ):
            stack.enter_context(one)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Follow(trace))
        leaves = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape, dtype in likes]
        start = len(trace.changes)
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        middle = len(trace.changes)
        gradients = [torch.zeros_like(output) for output in outputs]
        began = len(trace.changes)
        torch.autograd.backward(outputs, gradients)
        return trace.changes[start:middle], trace.changes[began:]


# -- their code -------------------------------------------------------------------------------------


class _Anything:
    """Whatever a module imports of Triton: a decorator, a kernel, a type."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __getitem__(self, key: object) -> _Anything:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (object,)


class _Triton(ModuleType):
    """``triton``, without a compiler."""

    __path__: list[str] = []  # noqa: RUF012 - of a package
    __version__ = "3.2.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    @staticmethod
    def cdiv(x: int, y: int) -> int:
        return -(-x // y)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << (n - 1).bit_length()


class _OnCpu(SourceFileLoader):
    """Code that takes the CPU for CUDA: fake CUDA tensors have no autograd in a build without it."""

    def get_data(self, path: str) -> bytes:
        return super().get_data(path).replace(b'"cuda"', b'"cpu"').replace(b"'cuda'", b"'cpu'")

    def path_stats(self, path: str) -> Any:
        raise OSError  # no bytecode of the file as it stands


class _Filled(_OnCpu):
    """Zeros where kernels would write."""

    def get_data(self, path: str) -> bytes:
        return super().get_data(path).replace(b"torch.empty", b"torch.zeros")


class _Finder:
    """Finds ``on_cpu.PACKAGE`` where PACKAGE is, without running what its ``__init__`` runs; and ``whole``, a package,
    by its own name."""

    def __init__(self, whole: str = "") -> None:
        self.whole = whole

    def find_spec(self, name: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        if name == "triton" or name.startswith("triton."):
            return ModuleSpec(name, _Made())
        if name.split(".")[0] == self.whole:
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.origin is not None:
                spec.loader = _Filled(name, spec.origin)
            return spec
        if not name.startswith("on_cpu."):
            return None
        package, *parts = name.split(".")[1:]
        found = find_spec(package)
        assert found is not None
        assert found.submodule_search_locations is not None
        where = Path(found.submodule_search_locations[0]).joinpath(*parts)
        if where.is_dir():
            spec = ModuleSpec(name, _Made(), is_package=True)
            spec.submodule_search_locations = [str(where)]
            return spec
        file = where.with_suffix(".py")
        return spec_from_file_location(name, file, loader=_OnCpu(name, str(file)))


class _Made:
    """Loads modules that have no file."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return _Triton(spec.name) if spec.name.startswith("triton") else None

    def exec_module(self, module: ModuleType) -> None:
        return


@contextmanager
def _stand_ins() -> Iterator[None]:
    finder = _Finder()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    package = sys.modules.setdefault("on_cpu", ModuleType("on_cpu"))
    package.__path__ = []
    before = _taken()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        _taken()
        sys.modules.update(before)


def _taken() -> dict[str, ModuleType]:
    """Modules that the stand-ins replace, or that import them, out of ``sys.modules``."""
    found = [name for name in sys.modules if name.split(".")[0] in ("triton", "liger_kernel")]
    return {name: sys.modules.pop(name) for name in found}


def loaded(package: str, module: str) -> Any:
    """``module`` of an installed ``package``, on the CPU."""
    with _stand_ins():
        return import_module(f"on_cpu.{package}.{module}")


def kept(package: str, module: str) -> Any:
    """``module`` of a whole ``package``, on the CPU for an A100, for the rest of a process of its own: what it imports
    later is found so, too. What torch itself imports of Triton comes first."""
    import_module("torch._functorch.aot_autograd")
    sys.meta_path.insert(0, _Finder(package))  # type: ignore[arg-type]
    device = SimpleNamespace(multi_processor_count=PROCESSORS)
    torch.cuda.get_device_properties = lambda at=None: device
    torch.cuda.get_device_capability = lambda at=None: (8, 0)
    return import_module(f"{package}.{module}")
